"""What ``hybridcomp measure`` found decides in the place of long trials, if short ones agree."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.autotune import measured, remembered_file
from hybridcomp.autotune.measured import MeasuredRow
from hybridcomp.channels import Channels, StepTraffic
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.measure import remembered
from tests.autotune.test_remembered import BLOCK, CLOSE, CODED, CPU, NATIVE, kept_in, said
from tests.ranks import RankPool
from tests.stand_ins.link_clock import clock
from tests.tools.plan.search.test_copies import machines

SENT: dict[Any, StepTraffic] = {
    "dp": StepTraffic((3000, 900), "own"), "zero": StepTraffic((3900,), "gather"),
}  # fmt: skip
SHORT = [1024, 1024]  # values of the trials that confirm a table
#: a trial after which steps are compared
FAST = (0.04, 0.01)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def rows(native_s: float, coded_s: float, **changed: Any) -> list[MeasuredRow]:
    """A table in which every message takes these seconds, whatever its size."""
    row = MeasuredRow("own", "blockint(bits=8)", "bf16", 1, (1, 1 << 20),
                      (native_s, native_s), (coded_s, coded_s))  # fmt: skip
    return [replace(row, **changed), replace(row, how="gather", **changed)]


def run(
    folder: str, times: tuple[float, float], table: list[MeasuredRow] | None, hosts: Any = None,
    written: float = 0.0, **block: Any,
) -> dict[str, Any]:  # fmt: skip
    """Trials that take ``times``, where rank 0 finds ``table`` written ``written`` days ago."""
    channels = Channels(CompressionConfig.parse({**BLOCK, **block}))
    with kept_in(folder), clock(*times) as sizes:
        if table is not None and dist.get_rank() == 0:
            path = measured.path_of(CPU)
            assert path is not None
            names, day = hosts or [platform.node()] * 2, time.time() - 24 * 3600 * written
            assert measured.write(path, names, table, day) == ""
        told = channels.tuner.run_autotune(None, torch.bfloat16, CPU, 3900, SENT)
    verdicts = channels.verdicts
    return {"trials": sizes, "told": told, "state": verdicts.state(),
            "compares": verdicts.may_change}  # fmt: skip


@pytest.mark.parametrize("times", [CODED, NATIVE, FAST])
def test_short_messages_confirm_the_table(
    pool: RankPool, tmp_path: Path, times: tuple[float, float]
) -> None:
    for found in pool.run(run, str(tmp_path), times, rows(*times)):
        assert found["trials"] == SHORT and not found["compares"]
        assert len(said(found, "dp, zero: by what hybridcomp measure found here on ")) == 1
        for name, count in (("dp", 2), ("zero", 1)):
            verdict = found["state"][name]
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
        (FAST, rows(*FAST), {"remember": False}),
        (FAST, None, {}),
    ],
)
def test_anything_else_is_tried_and_compared(
    pool: RankPool, tmp_path: Path, times: Any, table: Any, how: dict[str, Any]
) -> None:
    for found in pool.run(run_with, str(tmp_path), times, table, how):
        assert found["compares"] and not said(found, "hybridcomp measure")
        assert found["state"]["dp"]["pays"] and found["state"]["dp"]["native_s"] == times[0]


def run_with(folder: str, times: Any, table: Any, how: dict[str, Any]) -> dict[str, Any]:
    return run(folder, times, table, **how)


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
    found: dict[str, Any] = {"hosts": ["a"], "rows": [row], "written": 1.0}
    whole = measured.of_json(json.loads(json.dumps(found)))
    assert whole is not None
    sent = StepTraffic((2, 6, 16), "own")
    assert whole.seconds(sent, "c", "bf16", 1) == (1.0 + 1.5 + 4.0, 1.0 + 1.5 + 4.0)
    assert whole.seconds(replace(sent, how="sum"), "c", "bf16", 1) is None
    damage(row)
    assert measured.of_json(found) is None
    assert measured.of_json([]) is None


def keep(folder: str) -> tuple[str, list[str]]:
    with kept_in(folder):
        told = remembered.keep(machines(24, 2, 1), CPU)
        links = measured.recall(CPU, None)
        assert links is not None
        seconds = links.seconds(SENT["dp"], "blockint(bits=4)", "bf16", 1)
        assert seconds is not None and min(seconds) > 0
        return told, sorted(os.listdir(folder))


def test_measure_leaves_a_table(pool: RankPool, tmp_path: Path) -> None:
    (told, names), (other, _) = pool.run(keep, str(tmp_path))
    assert 'kept for runs with "when": "auto" on these machines (' in told and other == ""
    assert len(names) == 1 and names[0] in told
    several = list(remembered.table(machines(24, 2, 2)))
    assert {row.levels for row in several} == {1, 2}
    gathers = [row for row in several if row.how == "gather" and row.codec == "blockint(bits=4)"]
    one, two = (row.coded_s[-1] for row in gathers)
    assert two < one, "less crosses between nodes"
    assert list(remembered.table(machines(24, 1, 1))) == []


@pytest.mark.parametrize(
    ("numel", "seconds"),
    [(50, 1.0), (100, 1.0), (200, 1.5), (300, 2.0), (450, 4.0), (600, 6.0), (1200, 12.0)],
)
def test_between_two_sizes_seconds_lie_on_a_line(numel: int, seconds: float) -> None:
    assert measured._between((100, 300, 600), (1.0, 2.0, 6.0), numel) == pytest.approx(seconds)
