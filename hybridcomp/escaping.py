"""Escape text from files of others for a terminal, a shell, JSON, YAML, Markdown or matplotlib.

A ``config.json``, a cluster description, a log or a path may contain any character. Escaping keeps
such text from acting as code or markup where it is printed, run, parsed or rendered. By target:

* ``one_line``: a comment, a message, a line of a table
* ``quoted_path``: a path in a message, unambiguous even with odd characters
* ``printable``: text for a terminal, with its line breaks; ``message``: an error for a terminal
* ``shell_words``: a command of a POSIX shell
* ``strict_json``: figures as JSON for any parser
* ``json_document``: settings as JSON; ``yaml_document``: settings as JSON that YAML 1.1 reads alike
* ``markdown``: a sentence or a cell of Markdown; ``fenced``: a block of code of Markdown
* ``picture``: a label of matplotlib

``parsed_json`` and ``parsed_yaml`` parse such files, ``folder_path`` parses a folder's URL; all
three raise a ValueError with a one-line message if the text cannot be parsed.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

#: first character of files that some editors of Windows write
BYTE_ORDER_MARK = "\ufeff"
#: error text for brackets nested deeper than the parser's stack
TOO_DEEP = "nested too deeply"
#: longest key, with its escapes, that YAML can parse
LONGEST_KEY = 1000
#: maximum characters shown of a name, and of a sentence
MOST, SENTENCE = 200, 2000
#: Unicode categories that no folder name may contain: controls, direction marks and other invisible
#: characters, surrogates, line and paragraph separators, except for the two joiners of letters
UNSEEN, JOINERS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"}), "\u200c\u200d"
#: characters shown of each end of a long error line
END = 600


class MissingPackage(ValueError):
    """A package that reads some kind of file is not installed; the message is its name."""


def parsed_json(text: str) -> Any:
    """Parse JSON, also behind a byte order mark. Raises ValueError in one line."""
    try:
        return json.loads(text.removeprefix(BYTE_ORDER_MARK))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def folder_path(text: str) -> Path:
    """Return the folder of a ``file://`` URL or a path, without expanding anything.

    Raises ValueError, saying what was expected, if the text names another folder than it seems to.
    """
    parts = urlsplit(text)
    path = unquote(parts.path) if "://" in text else text
    unseen = {c for c in path if unicodedata.category(c) in UNSEEN}
    if unseen - set(JOINERS) or text != text.strip():
        what = "expected no blanks around it, and no control characters or marks of direction"
        raise ValueError(f"{what}; take them out")
    if "://" in text and (parts.scheme != "file" or parts.netloc not in ("", "localhost")):
        raise ValueError(
            "expected a folder, file:///folder; sync it with the tool of your object store"
        )
    if "://" in text and (parts.query or parts.fragment):
        raise ValueError("expected a URL without ? and #; write %3F and %23 for those of a name")
    if not path or (path == text and text.startswith(("~", "file:"))):
        raise ValueError("expected a folder, file:///folder, or a path without ~; write it out")
    return Path(path)


def parsed_yaml(text: str) -> Any:
    """Parse YAML without Python tags. Raises ValueError in one line."""
    try:
        import yaml  # yaml is a dependency of GPT-NeoX, the source of these files
    except ImportError:
        raise MissingPackage("pyyaml") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # an impossible date is a ValueError
        raise ValueError(one_line(error)) from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def printable(text: object) -> str:
    r"""Escape control characters, surrogates and direction marks of ``text`` as ``\x1b``.

    Line feeds are kept.
    """
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in str(text))


def one_line(text: object, most: int = MOST) -> str:
    """Return ``text`` on one line: white space becomes single spaces, other characters are escaped.

    ``most``: most characters to keep.
    """
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= most else f"{line[:most]}..."


def quoted_path(path: str | os.PathLike[str]) -> str:
    r"""Return ``path``, quoted and escaped if it could be mistaken for another path on sight."""
    text = os.fspath(path)
    return text if text.isprintable() and text == text.strip() else repr(text)


def message(error: object) -> str:
    """Make ``error`` printable; a long line keeps its beginning and end (``END``)."""
    return "\n".join(
        line if len(line) <= 2 * END else f"{line[:END]} ... {line[-END:]}"
        for line in printable(error).split("\n")
    )


def shell_words(words: Iterable[object]) -> str:
    return " ".join(shlex.quote(str(word)) for word in words)


def strict_json(value: object, indent: int | None = None) -> str:
    """Write figures as JSON for strict parsers: a number that is not finite becomes a text.

    Python's ``float`` reads these texts: "Infinity", "-Infinity" and "NaN".
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def json_document(value: object) -> str:
    """Write settings as JSON. Raises ValueError for values that JSON lacks, like dates or sets."""
    try:
        return json.dumps(value, indent=2) + "\n"
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def yaml_document(value: object) -> str:
    """Write settings as JSON that YAML 1.1 reads back as the same values, a line for each.

    PyYAML reads ``1e-05`` as a text and a pair of escaped surrogates as two characters, and refuses
    some characters that JSON leaves unescaped. Raises ValueError for values that YAML lacks, and
    for settings that contain themselves.
    """
    try:
        return _yaml(value, "") + "\n"
    except RecursionError:
        raise ValueError("settings that contain themselves, or are nested too deeply") from None


def markdown(text: object) -> str:
    """Escape ``text`` for a sentence or table cell, so that nothing in it acts as a mark or tag."""
    shown = one_line(text, SENTENCE).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`|*\[])", r"\\\1", shown)


def fenced(text: object) -> list[str]:
    """Return the lines of a code block with ``text``, with a fence longer than any in it."""
    shown = printable(text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, shown, fence]


def picture(text: object) -> str:
    """Escape ``text`` for a label of matplotlib, keeping lines; dollar signs do not start formulas.

    Adds a space before a leading underscore, which would keep a label out of the legend.
    """
    shown = printable(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _yaml(value: object, indent: str) -> str:
    """Write one value, with ``indent`` before every line except the first."""
    inner = f"{indent}  "
    if isinstance(value, Mapping):
        parts = [f"{_key(key)}: {_yaml(item, inner)}" for key, item in value.items()]
        return _block("{}", parts, indent)
    if isinstance(value, list | tuple):
        return _block("[]", [_yaml(item, inner) for item in value], indent)
    return _scalar(value)


def _block(marks: str, parts: list[str], indent: str) -> str:
    inside = f",\n{indent}  ".join(parts)
    return f"{marks[0]}\n{indent}  {inside}\n{indent}{marks[1]}" if parts else marks


def _key(key: object) -> str:
    """Write a key: text, or a number, switch or null that YAML must not read as text."""
    if not (key is None or isinstance(key, str | bool | int | float)):
        raise ValueError(f"a key of type {type(key).__name__}")
    written = _scalar(key)
    if len(written) > LONGEST_KEY:
        raise ValueError(f"a key of {len(written)} characters")
    return written


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return f'"{"".join(map(_quoted, value))}"'
    if isinstance(value, float):
        return _number(value)
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, datetime.datetime | datetime.date):
        return str(value)
    raise ValueError(f"a value of type {type(value).__name__}")


def _quoted(character: str) -> str:
    """Escape one character between double quotes, for JSON and YAML."""
    code = ord(character)
    if code > 0xFFFF:
        return character
    if code == 0x7F:
        return "\\u007f"
    return json.dumps(character)[1:-1]


def _number(value: float) -> str:
    """Write a number with the dot that YAML 1.1 requires."""
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    digits, exponent, power = repr(value).partition("e")
    return f"{digits}{'' if '.' in digits else '.0'}{exponent}{power}"
