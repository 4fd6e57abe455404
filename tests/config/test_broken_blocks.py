"""Values that no dimension accepts raise one line each that begins with the key."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridcomp.config import load_config
from hybridcomp.dimensions import DIMENSIONS, ROWS
from hybridcomp.errors import ConfigError

#: value, and the subkey that the error must name
ANYWHERE: tuple[tuple[Any, str], ...] = (
    (5, ""), (None, ""), ([], ""), (True, ""),
    ("blokint", ".codec"), ("", ".codec"), ("BLOCKINT", ".codec"),
    ({"codec": 7}, ".codec"), ({"codec": ["radix"]}, ".codec"), ({"codec": "zstd"}, ".codec"),
    ({"codec": "blockint", "bitz": 4}, ".bitz"), ({"codec": "blockint", "bits": 9}, ".bits"),
    ({"codec": "radix"}, ".error_bound"),
    *(({"codec": "radix", "error_bound": bound}, ".error_bound")
      for bound in (math.nan, math.inf, 0, -0.1, "small", 1e-40)),
)  # fmt: skip
#: whole blocks
WHOLE: tuple[tuple[Any, str], ...] = (
    (None, ""), ([], ""), ("recommended", ""), ({"enabled": True}, ""),
    ({"dp": {"codec": "bf16", "guard": {"errors": 1}}}, ".dp.guard.errors"),
    ({"dp": {"codec": "bf16", "ramp": {"steps": 10}}}, ".dp.ramp"),
)  # fmt: skip
OF_DIRECTIONS = [
    ({name: {"codec": "bf16", **more}}, f".{name}.{key}")
    for name, row in ROWS.items() if not row.one_way
    for more, key in (
        ({row.directions[-1]: {"bits": 99}}, f"{row.directions[-1]}.bits"),
        ({"sideways": {}}, "sideways"),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("block", "key"),
    [
        *(({name: value}, f".{name}{key}") for name in DIMENSIONS for value, key in ANYWHERE),
        *OF_DIRECTIONS,
        *WHOLE,
    ],
)
def test_the_error_is_one_line_that_begins_with_the_key(block: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"compression": block})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith((f"compression{key}:", f"compression{key}."))
