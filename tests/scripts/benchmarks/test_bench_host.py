"""bench_host.py: host time per GPU message, without a GPU."""

from __future__ import annotations

import cProfile
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from benchmarks import bench_host as bench
from hybridcomp.codecs import make_codec

CODEC = make_codec("blockint", bits=4)
KINDS = ["all_reduce", "all_reduce feedback", "all_gather", "reduce_scatter", "all_to_all"]
KINDS.append("all_to_all uneven")
OF_GROUPS = ["all_to_all new splits", "all_gather cuts"]
OF_GROUPS += [f"{kind} levels" for kind in ("all_reduce", "all_gather", "reduce_scatter")]
OF_GROUPS += ["low rank", "guard"]
BUCKETS = ["to owners", "to owners feedback", "to all as owners"]


@pytest.mark.parametrize("kind", ["all_to_all uneven", "all_gather cuts", "all_gather levels"])
def test_what_moves_takes_as_many_launches_among_many_ranks(kind: str) -> None:
    counts = []
    for ranks in (8, 160):  # more rows than a by-value table has
        with mock.patch.object(bench.Nowhere, "launch") as launch, bench.as_on_a_gpu(ranks):
            run = bench.kinds_of(CODEC, torch.randn(1 << 14), ranks)[kind]
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
def test_shards_stay_one_tensor_among_many_ranks(kind: str) -> None:
    """Groups of 8 and of 160 take as many Python and C calls: nothing iterates over shards."""
    counts = []
    for ranks in (8, 160):
        with bench.as_on_a_gpu(ranks):
            run = bench.kinds_of(CODEC, torch.randn(1 << 14), ranks)[kind]
            run()
            # the garbage collector calls functions
            counts.append(min((calls_of(run) for _ in range(5)), key=Counter.total))
    assert counts[0].total() > 50
    assert counts[0] == counts[1], (counts[0] - counts[1], counts[1] - counts[0])


def test_figures_by_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "CALLS", 2)
    assert bench.main(["--ranks", "8", "16", "--megabytes", "0.25"]) == 0
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("blockint(bits=4), 0.25 MB of bf16") and head.split() == ["8", "16"]
    assert [line[:22].strip() for line in lines] == [*KINDS, *OF_GROUPS, *BUCKETS]
    for ranks in (0, 1):
        cells = [line[22 + 24 * ranks :][:24] for line in lines]
        assert all(float(cell[:10].replace(",", "")) > 0 for cell in cells)
        launches = {line[:22].strip(): int(c[-4:-1]) for line, c in zip(lines, cells, strict=True)}
        # in two levels a CPU adds the values of each of the node's three other ranks by a kernel
        assert [launches[name] for name in OF_GROUPS] == [2, 2, 3 + 3, 2, 2 + 3, 0, 0]
        assert [launches[name] for name in KINDS] == [3, 3, 2, 2, 2, 2]
        assert all(1 < launches[name] <= 3 for name in BUCKETS), "however many ranks"
    with pytest.raises(SystemExit):
        bench.main(["--ranks", "4"])
    assert "expected 8 or more" in capsys.readouterr().err
