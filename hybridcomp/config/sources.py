"""Read a configuration from any source that DeepSpeed takes, and as DeepSpeed reads it."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridcomp.config.error_messages import Shown
from hybridcomp.config.presets import PRESETS
from hybridcomp.errors import ConfigError
from hybridcomp.escaping import BYTE_ORDER_MARK, TOO_DEEP, MissingPackage, parsed_yaml

#: the key in errors about the file or text itself
SOURCE = "ds_config"


def read_source(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Read the configuration as a mapping.

    ``source`` is a mapping (returned unchanged), the path of a JSON, Hjson or YAML file (YAML by
    its suffix), or a string of URL-safe base64 with JSON inside. Raises ConfigError when it is none
    of them, when it cannot be parsed, or when a key occurs twice.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, Path)):
        raise ConfigError(SOURCE, type(source).__name__, "expected an object, path or base64")
    try:
        is_file = Path(source).is_file()
    except OSError:  # a base64 string may be longer than a file name
        is_file = False
    if is_file:
        is_yaml = Path(source).suffix in (".yml", ".yaml")
        return _parse(_read(Path(source)), str(source), parsed_yaml if is_yaml else _as_hjson)
    if isinstance(source, Path):
        raise ConfigError(SOURCE, str(source), "no such file; name an existing one")
    try:
        text = base64.b64decode(source, altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        todo = "expected an existing file, an object or base64 of JSON"
        if source in PRESETS:
            todo = f'{todo}: write {{"preset": "{source}"}}'
        raise ConfigError(SOURCE, source[:80], todo) from None
    return _parse(text, "base64 text")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(SOURCE, str(path), f"cannot be read ({error})") from None


class _Object(dict[str, Any]):
    """A JSON object that records keys that were written more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated = {key: count for key, count in counts.items() if count > 1}


def _parse(
    text: str, where: str, otherwise: Callable[[str], Any] | None = None
) -> Mapping[str, Any]:
    """Parse JSON, falling back to ``otherwise``; return the object."""
    try:
        loaded = _loads(text, otherwise or _as_hjson)
    except ValueError as error:  # raised by json, hjson and yaml
        raise unreadable(where, error, "YAML" if otherwise is parsed_yaml else "JSON") from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(where, type(loaded).__name__, "expected a JSON object at the top level")
    try:
        json.dumps(loaded, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(where, "half a character", "expected whole pairs of surrogates") from None
    except ValueError:  # YAML's aliases
        found = Shown("settings that contain themselves")
        raise ConfigError(where, found, "expected a tree of settings") from None
    for key, count in _repeated(loaded):
        raise ConfigError(key, f"{count} times", "expected once; keep one of them")
    return loaded


def unreadable(where: str, error: ValueError, kind: str) -> ConfigError:
    """Return the error for a file that a parser of ``kind``, "YAML" or "JSON", rejects."""
    if isinstance(error, MissingPackage):
        todo = f"{error}, which reads it, is not installed; pip install {error}"
        return ConfigError(where, Shown(f"a {kind} file"), todo)
    first = (str(error).splitlines() or [""])[0]
    return ConfigError(where, first, f"expected valid {kind}, an object of settings")


def _loads(text: str, otherwise: Callable[[str], Any]) -> Any:
    text = text.removeprefix(BYTE_ORDER_MARK)  # as hjson does, by which DeepSpeed reads
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except json.JSONDecodeError:
        return otherwise(text)


def _as_hjson(text: str) -> Any:
    """Parse Hjson as DeepSpeed does. Raises ValueError, json's own if hjson is not installed."""
    try:
        import hjson  # a dependency of DeepSpeed
    except ImportError:
        return json.loads(text)
    try:
        return hjson.loads(text, object_pairs_hook=_Object)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _repeated(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, _Object):
        yield from ((f"{path}{key}", count) for key, count in value.repeated.items())
        for key, inner in value.items():
            yield from _repeated(inner, f"{path}{key}.")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _repeated(inner, f"{path}{index}.")
