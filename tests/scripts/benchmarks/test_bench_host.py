"""bench_host.py: host time per GPU message, without a GPU."""

from __future__ import annotations

import cProfile
import importlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.paths import SCRIPTS

KINDS = ["all_reduce", "all_reduce feedback", "all_gather", "reduce_scatter", "all_to_all"]
KINDS.append("all_to_all uneven")
OF_GROUPS = ["all_to_all new splits", "all_gather cuts"]
OF_GROUPS += [f"{kind} levels" for kind in ("all_reduce", "all_gather", "reduce_scatter")]
OF_GROUPS += ["low rank", "guard"]
BUCKETS = ["to owners", "to owners feedback", "to all as owners"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("benchmarks.bench_host")
    monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setattr(module, "CALLS", 2)
    return module


def test_every_kind_of_message_is_measured(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--megabytes", "0.01", "--json", str(tmp_path / "host.json")]) == 0
    found = json.loads((tmp_path / "host.json").read_text())
    assert list(found) == KINDS
    assert all(microseconds > 0 and times > 0 for microseconds, times in found.values())
    out = capsys.readouterr().out
    assert all(kind in out for kind in KINDS)


def test_messages_take_as_many_launches_as_on_a_gpu(bench: Any) -> None:
    """Three launches for an all-reduce, two for other messages."""
    counts = {}
    for kind in KINDS:
        with mock.patch.object(bench.Nowhere, "launch") as launch:
            with bench.as_on_a_gpu():
                codec = bench.make_codec("blockint", bits=4)
                messages = bench.Messages(codec, bench.torch.randn(8192))
                messages.kinds()[kind]()
            counts[kind] = launch.call_count
    assert counts == {kind: 3 if kind.startswith("all_reduce") else 2 for kind in KINDS}


@pytest.mark.parametrize("kind", ["all_to_all uneven", "all_gather cuts", "all_gather levels"])
def test_what_moves_takes_as_many_launches_among_many_ranks(bench: Any, kind: str) -> None:
    counts = []
    for ranks in (8, 160):  # more rows than a by-value table has
        with mock.patch.object(bench.Nowhere, "launch") as launch, bench.as_on_a_gpu(ranks):
            codec = bench.make_codec("blockint", bits=4)
            run = bench.kinds_of(codec, bench.torch.randn(1 << 14), ranks)[kind]
            run()
            launch.reset_mock()
            run()
        counts.append(launch.call_count)
    assert counts == [2, 2]


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """Count the calls of each function within a call."""
    with cProfile.Profile() as found:
        run()
    counts = Counter[str]()
    for entry in found.getstats():
        counts[str(entry.code)] += entry.callcount
    return counts


@pytest.mark.parametrize("kind", ["reduce_scatter", "reduce_scatter levels"])
def test_shards_stay_one_tensor_among_many_ranks(bench: Any, kind: str) -> None:
    """Groups of 8 and of 160 take as many Python and C calls: nothing iterates over shards."""
    counts = []
    for ranks in (8, 160):
        with bench.as_on_a_gpu(ranks):
            codec = bench.make_codec("blockint", bits=4)
            run = bench.kinds_of(codec, bench.torch.randn(1 << 14), ranks)[kind]
            run()
            # the garbage collector calls functions
            counts.append(min((calls_of(run) for _ in range(5)), key=Counter.total))
    assert counts[0].total() > 50
    assert counts[0] == counts[1], (counts[0] - counts[1], counts[1] - counts[0])


def test_a_profile(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--megabytes", "0.01", "--profile", "all_gather"]) == 0
    assert "fused_all_gather" in capsys.readouterr().out


def test_growth_with_ranks(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--ranks", "8", "16", "--megabytes", "0.25", "--json", str(tmp_path / "ranks.json")]
    assert bench.main(asked) == 0
    found = json.loads((tmp_path / "ranks.json").read_text())
    assert list(found) == ["8", "16"]
    for kinds in found.values():
        assert list(kinds) == [*KINDS, *OF_GROUPS, *BUCKETS]
        assert all(us > 0 for us, _, _ in kinds.values())
        launches = {name: count for name, (_, _, count) in kinds.items()}
        # in two levels a CPU adds the values of each of the node's three other ranks by a kernel
        assert [launches[name] for name in OF_GROUPS] == [2, 2, 3 + 3, 2, 2 + 3, 0, 0]
        assert all(launches[name] > 1 for name in (*KINDS, *BUCKETS))
        assert all(launches[name] <= 3 for name in BUCKETS), "however many ranks"
    assert "to owners" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--ranks", "4"])
    assert "expected 8 or more" in capsys.readouterr().err
