"""hybridcomp: error-bounded compression of the communication of 3D-parallel LLM training.

install(config=None) arm the patches: they act on engines whose config has a "compression" block
uninstall()          put upstream back as it was
load_config(source)  the block of a ds_config.json (path, dict or base64), or None
CompressionConfig    the block as a model
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridcomp.config import CompressionConfig, load_config

    __version__: str

__all__ = ["CompressionConfig", "__version__", "install", "load_config", "uninstall"]


def install(config: Mapping[str, Any] | str | Path | CompressionConfig | None = None) -> None:
    """Arm all patches.

    Upstream packages that are imported already are patched now, others when they are imported.
    Calling it again without a config changes nothing.

    Args:
        config: the block of this process, for jobs without a ds_config.json: a CompressionConfig, a
            block, or a dict or file that holds one under "compression". A DeepSpeed engine whose
            own configuration has a block keeps that one. The environment variable
            HYBRIDCOMP_CONFIG names such a file too.

    Raises SeamError when an imported upstream is outside the supported versions or was patched by
    somebody else (nothing stays half-patched), ConfigError on a config that cannot act.
    """
    from hybridcomp import patches

    if config is not None:
        from hybridcomp.patches import process

        process.configure(config)
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
