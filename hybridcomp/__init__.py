"""hybridcomp: error-bounded compression of the communication of 3D-parallel LLM training.

install()            arm the patches: they act on engines whose config has a "compression" block
uninstall()          put upstream back as it was
load_config(source)  the block of a ds_config.json (path, dict or base64), or None
CompressionConfig    the block as a model
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridcomp.config import CompressionConfig, load_config

    __version__: str

__all__ = ["CompressionConfig", "__version__", "install", "load_config", "uninstall"]


def install() -> None:
    """Arm all patches.

    Upstream packages that are imported already are patched now, others when they are imported.
    Calling it again changes nothing. Raises SeamError when an imported upstream is outside the
    supported versions or was patched by somebody else; nothing stays half-patched.
    """
    from hybridcomp import patches

    patches.arm()


def uninstall() -> None:
    """Revert all patches and disarm those that wait for an import."""
    from hybridcomp import patches

    patches.disarm()


def __getattr__(name: str) -> Any:
    # config needs pydantic and torch: `import hybridcomp` alone stays quick
    if name in ("CompressionConfig", "load_config"):
        from hybridcomp import config

        return getattr(config, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("hybridcomp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
