"""GPT-NeoX's YAML files, read before anything starts: what it would not explain, or not notice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybridcomp.config import BLOCK, load_config
from hybridcomp.errors import ConfigError
from hybridcomp.rules import ds_check as ds_config
from hybridcomp.rules import neox as rules
from hybridcomp.rules.neox import EXTRA

#: what YAML 1.1 takes for text and Python for a number
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class Problem(ValueError):
    """A configuration that cannot run; one line with file, key and what to do."""


def find_files(arguments: Sequence[str]) -> list[Path]:
    """The configurations among deepy.py's arguments, ``.yml`` left out or not, ``-d`` in front."""
    folder = Path()
    for option, value in zip(arguments, arguments[1:], strict=False):
        if option in ("-d", "--conf_dir"):
            folder = Path(value)
    found = []
    for argument in arguments:
        for name in (argument, f"{argument}.yml"):
            file = folder / name
            if file.suffix in (".yml", ".yaml", ".json") and file.is_file():
                found.append(file)
    return found


def check(files: Sequence[Path]) -> None:
    """Look at the files as GPT-NeoX will put them together. Raises Problem."""
    whole: dict[str, Any] = {}
    for file in files:
        try:
            read = yaml.safe_load(file.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise Problem(f"{file}: no YAML: {' '.join(str(error).split())}") from None
        if not isinstance(read, Mapping):
            raise Problem(f"{file}: expected keys and values, found {type(read).__name__}")
        if BLOCK in read:
            raise Problem(
                f'{file}: found "{BLOCK}" at the top level, which GPT-NeoX does not know; put it '
                f'under "{EXTRA}": {{"{BLOCK}": {{...}}}}'
            )
        for path, text in _numbers_as_text(read):
            raise Problem(
                f"{file}: {path}: found {text}, which YAML reads as text; write it with a dot: "
                f"{_dotted(text)}"
            )
        whole.update({str(key).replace("-", "_"): value for key, value in read.items()})
    check_block(whole)


def check_block(whole: Mapping[str, Any]) -> None:
    """Hold the block against the rest of the configuration. Raises Problem."""
    settings = rules.ds_settings(whole)
    try:
        block = load_config(settings)
        if block is not None:
            ds_config.check(block, settings, **rules.facts(whole), neox=whole)
    except ConfigError as error:
        raise Problem(str(error).replace(f"{BLOCK}.", f"{EXTRA}.{BLOCK}.", 1)) from None


def _numbers_as_text(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers_as_text(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str) and NUMBER.fullmatch(value):
        yield path, value


def _dotted(text: str) -> str:
    mantissa, _, exponent = text.lower().partition("e")
    sign = "" if exponent[0] in "+-" else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"
