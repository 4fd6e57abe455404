"""Read the user's configuration of an engine, whose settings a plan then overrides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridcomp.config import BLOCK, read_source
from hybridcomp.config.sources import unreadable
from hybridcomp.errors import ConfigError
from hybridcomp.escaping import parsed_yaml
from hybridcomp.patches.rules.neox import EXTRA

Base = Mapping[str, Any]
#: sections that plans write into
SECTIONS = ("zero_optimization", "bf16", "fp16", BLOCK, EXTRA)


def base_of(path: Path | None, engine: str) -> Base:
    """Read the user's configuration. Raises ConfigError where ``engine`` cannot take it."""
    if path is None:
        return {}
    if engine == "megatron":
        raise ConfigError("--base", str(path), "Megatron takes arguments, not a file; leave it out")
    if path.suffix in (".yml", ".yaml"):
        try:
            found = parsed_yaml(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("--base", str(path), f"cannot be read ({error})") from None
        except ValueError as error:
            raise unreadable(f"--base {path}", error, "YAML") from None
        found = {} if found is None else found
        if not isinstance(found, Mapping):
            raise ConfigError("--base", type(found).__name__, f"{path} has to hold settings")
        return _sectioned({str(key).replace("-", "_"): value for key, value in found.items()})
    return _sectioned(read_source(path))


def _sectioned(base: Base) -> Base:
    """Return ``base`` if the sections that plans write into are objects; else raise ConfigError."""
    own = base.get(EXTRA)
    for name, part in (
        *((name, base.get(name)) for name in SECTIONS),
        (f"{EXTRA}.{BLOCK}", own.get(BLOCK) if isinstance(own, Mapping) else None),
    ):
        if part is not None and not isinstance(part, Mapping):
            raise ConfigError(f"--base: {name}", part, "expected an object")
    return base
