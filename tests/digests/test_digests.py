"""Payloads, results of collectives, their bytes and blocks' digests equal the committed ones.

After an intended change run ``python -m tests.digests.test_digests`` with scripts/ in PYTHONPATH,
and say in the commit why bytes that others may have stored change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from doc_pages import json_rows
from tests.digests.made import BLOCKS, blocks, collectives, payloads
from tests.ranks import RankPool

FILE = Path(__file__).with_name("digests.json")
#: ranks, and ranks per node (0: one level)
LAYOUTS = ((2, 0), (4, 0), (4, 2))
DTYPES = (torch.float32, torch.bfloat16)


def every(ranks: int, pool: RankPool) -> Iterator[tuple[str, Any]]:
    """Return the digests of all collectives on ``ranks`` ranks, by block, dtype and layout."""
    for size, per_node in LAYOUTS:
        if size != ranks:
            continue
        for name, block in BLOCKS.items():
            for dtype in DTYPES:
                yield (
                    f"{name} {dtype} {size}/{per_node}",
                    pool.run(collectives, block, dtype, per_node),
                )


def made() -> dict[str, Any]:
    """Return all digests of the current code."""
    found: dict[str, Any] = {"payloads": dict(payloads()), "blocks": dict(blocks())}
    found["collectives"] = {}
    for ranks in (2, 4):
        with RankPool(ranks) as pool:
            found["collectives"] |= dict(every(ranks, pool))
    return found


KNOWN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}


def test_payloads() -> None:
    assert dict(payloads()) == KNOWN["payloads"]


def test_blocks() -> None:
    assert dict(blocks()) == KNOWN["blocks"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives(ranks: int) -> None:
    with RankPool(ranks) as pool:
        found = dict(every(ranks, pool))
    assert found
    for name, digests in found.items():
        assert digests == KNOWN["collectives"][name], name
        assert all(digest["ledger"] for digest in digests), name


if __name__ == "__main__":
    FILE.write_text(json_rows.dumps(made(), depth=2), encoding="utf-8")
