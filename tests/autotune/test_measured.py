"""A table of ``hybridcomp measure`` replaces long trials if short messages confirm it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.autotune import measured, remembered_file
from hybridcomp.autotune.measured import MeasuredRow
from hybridcomp.channels import Channels, StepTraffic
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.measure import remembered
from tests.autotune.test_remembered import BLOCK, CLOSE, CPU, NATIVE, kept_in, said
from tests.ranks import RunRanks
from tests.stand_ins.link_clock import clock
from tests.tools.plan.search.test_copies import machines

SENT: dict[Any, StepTraffic] = {
    "dp": StepTraffic((3000, 900), "own"), "zero": StepTraffic((3900,), "gather"),
}  # fmt: skip
SHORT = [1024, 1024]  # values of the trials that confirm a table
#: a trial after which steps are compared
FAST = (0.04, 0.01)


def rows(native_s: float, coded_s: float, **changed: Any) -> list[MeasuredRow]:
    """Return a table in which messages of any size take these seconds."""
    row = MeasuredRow("own", "blockint(bits=8)", "bf16", 1, (1, 1 << 20),
                      (native_s, native_s), (coded_s, coded_s))  # fmt: skip
    return [replace(row, **changed), replace(row, how="gather", **changed)]


def run(
    folder: str, times: tuple[float, float], table: list[MeasuredRow] | None,
    how: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Run trials that take ``times`` where rank 0 has ``table``.

    ``how``: the table's ``hosts``, the days since it was ``written``, and keys of the ``block``.
    """
    channels = Channels(CompressionConfig.parse({**BLOCK, **how.get("block", {})}))
    with kept_in(folder), clock(*times) as sizes:
        if table is not None and dist.get_rank() == 0:
            path = measured.path_of(CPU)
            assert path is not None
            hosts = how.get("hosts", [platform.node()] * 2)
            day = time.time() - 24 * 3600 * how.get("written", 0.0)
            assert measured.write(path, hosts, table, day) == ""
        lines = channels.tuner.run_autotune(None, torch.bfloat16, CPU, 3900, SENT)
    verdicts = channels.verdicts
    return {"trials": sizes, "lines": lines, "state": verdicts.state(),
            "compares": verdicts.may_change}  # fmt: skip


@pytest.mark.parametrize("times", [NATIVE, FAST])
def test_short_messages_confirm_the_table(
    on_ranks: RunRanks, tmp_path: Path, times: tuple[float, float]
) -> None:
    for result in on_ranks(2, run, str(tmp_path), times, rows(*times)):
        assert result["trials"] == SHORT and not result["compares"]
        assert len(said(result, "dp, zero: by what hybridcomp measure found here on ")) == 1
        for name, count in (("dp", 2), ("zero", 1)):
            verdict = result["state"][name]
            assert verdict["pays"] == (times != NATIVE) and verdict["checked"]
            assert verdict["native_s"] == pytest.approx(count * times[0])


@pytest.mark.parametrize(
    ("times", "table", "how"),
    [
        (FAST, rows(0.01, 0.04), {}),  # short messages take other times
        (CLOSE, rows(*CLOSE), {}),  # no clear difference
        (FAST, rows(*FAST, codec="blockint(bits=4)"), {}),
        (FAST, rows(*FAST, levels=2), {}),
        (FAST, rows(*FAST), {"hosts": ["elsewhere", "there"]}),
        (FAST, rows(*FAST), {"written": remembered_file.DAYS + 1.0}),
        (FAST, rows(*FAST), {"block": {"remember": False}}),
        (FAST, None, {}),
    ],
)
def test_anything_else_is_tried_and_compared(
    on_ranks: RunRanks, tmp_path: Path, times: Any, table: Any, how: dict[str, Any]
) -> None:
    for result in on_ranks(2, run, str(tmp_path), times, table, how):
        assert result["compares"] and not said(result, "hybridcomp measure")
        assert result["state"]["dp"]["pays"] and result["state"]["dp"]["native_s"] == times[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop("how"), lambda row: row.update(numels=[8, 4]),
        lambda row: row.update(native_s=[1.0]), lambda row: row.update(coded_s=[0.0, 1.0]),
        lambda row: row.update(native_s=[float("nan")] * 2), lambda row: row.update(numels=[]),
    ],
)  # fmt: skip
def test_a_damaged_table_counts_as_none(damage: Callable[[dict[str, Any]], Any]) -> None:
    row: dict[str, Any] = {
        "how": "own", "codec": "c", "dtype": "bf16", "levels": 1,
        "numels": [4, 8], "native_s": [1.0, 2.0], "coded_s": [1.0, 2.0],
    }  # fmt: skip
    table: dict[str, Any] = {"hosts": ["a"], "rows": [row], "written": 1.0}
    whole = measured.of_json(json.loads(json.dumps(table)))
    assert whole is not None
    sent = StepTraffic((2, 6, 16), "own")
    assert whole.seconds(sent, "c", "bf16", 1) == (1.0 + 1.5 + 4.0, 1.0 + 1.5 + 4.0)
    assert whole.seconds(replace(sent, how="sum"), "c", "bf16", 1) is None
    damage(row)
    assert measured.of_json(table) is None
    assert measured.of_json([]) is None


def keep(folder: str) -> tuple[str, list[str]]:
    with kept_in(folder):
        message = remembered.keep(machines(24, 2, 1), CPU)
        links = measured.recall(CPU, None)
        assert links is not None
        seconds = links.seconds(SENT["dp"], "blockint(bits=4)", "bf16", 1)
        assert seconds is not None and min(seconds) > 0
        return message, sorted(os.listdir(folder))


def test_measure_leaves_a_table(on_ranks: RunRanks, tmp_path: Path) -> None:
    (message, names), (other, _) = on_ranks(2, keep, str(tmp_path))
    assert 'kept for runs with "when": "auto" on these machines (' in message and other == ""
    assert len(names) == 1 and names[0] in message
    several = list(remembered.table(machines(24, 2, 2)))
    assert {row.levels for row in several} == {1, 2}
    gathers = [row for row in several if row.how == "gather" and row.codec == "blockint(bits=4)"]
    flat_s, two = (row.coded_s[-1] for row in gathers)
    assert two < flat_s, "less crosses between nodes"
    assert list(remembered.table(machines(24, 1, 1))) == []


@pytest.mark.parametrize(
    ("numel", "seconds"),
    [(50, 1.0), (200, 1.5), (300, 2.0), (450, 4.0), (600, 6.0), (1200, 12.0)],
)
def test_between_two_sizes_seconds_lie_on_a_line(numel: int, seconds: float) -> None:
    assert measured._between((100, 300, 600), (1.0, 2.0, 6.0), numel) == pytest.approx(seconds)
