"""Check GPT-NeoX's YAML files before the launch for errors that it misses or does not explain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybridcomp.config import BLOCK, load_config
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules import ds_check as ds_config
from hybridcomp.patches.rules import neox as rules
from hybridcomp.patches.rules.neox import EXTRA

#: numbers in Python's notation that YAML 1.1 reads as text
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class Problem(ValueError):
    """Error in a configuration; its message is one line with file, key and what to do."""


def find_files(arguments: Sequence[str]) -> list[Path]:
    """Return the configuration files among deepy.py's arguments, with or without ``.yml``.

    Names are relative to the folder of ``-d``, if it is given.
    """
    folder = Path()
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, joined, rest = option.partition("=")
        if option in ("-d", "--conf_dir"):
            folder = Path(value)
        elif name == "--conf_dir" and joined:
            folder = Path(rest)
    found = []
    for argument in arguments:
        for name in (argument, f"{argument}.yml"):
            file = folder / name
            if file.suffix in (".yml", ".yaml", ".json") and file.is_file():
                found.append(file)
    return found


def check(files: Sequence[Path]) -> None:
    """Check the files, merged as GPT-NeoX merges them. Raises Problem."""
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
    """Check the block against the rest of the configuration. Raises Problem."""
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
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers_as_text(item, f"{path}[{index}]")
    elif isinstance(value, str) and NUMBER.fullmatch(value):
        yield path, value


def _dotted(text: str) -> str:
    mantissa, _, exponent = text.lower().partition("e")
    sign = "" if exponent[0] in "+-" else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"
