"""Write JSON: objects indented down to a given depth, each deeper value on one line."""

from __future__ import annotations

import json
from typing import Any


def dumps(value: Any, depth: int) -> str:
    """Return ``value`` as JSON: the first ``depth`` levels indented, deeper values one per line.

    Changing an entry then changes one line. Keeps the order of keys.
    """
    return _nested(value, depth, "") + "\n"


def _nested(value: Any, depth: int, indent: str) -> str:
    if depth == 0 or not value or not isinstance(value, dict):
        return json.dumps(value)
    deeper = indent + " "
    rows = (f"{deeper}{json.dumps(k)}: {_nested(v, depth - 1, deeper)}" for k, v in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
