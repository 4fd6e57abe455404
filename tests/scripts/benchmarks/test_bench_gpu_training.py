"""benchmarks/bench_gpu_training.py: turns, rows, truncated messages, groups in GPU memory."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import bench_gpu_training
from benchmarks.shared import TIME_IS_UP
from benchmarks.training_bench import (
    cells,
    empty,
    gpu_cells,
    gpu_memory,
    gpu_pairs,
    gpu_report,
    gpu_session,
)
from hybridcomp.config import load_config
from tests.ranks import run_ranks

# ---- arms and parts


@pytest.mark.parametrize("layout", bench_gpu_training.EVERY)
def test_arms_are_in_parts_with_both_references(layout: str) -> None:
    arms = gpu_cells.arms_of(layout)
    parts = bench_gpu_training.parts_of(layout, None, 5)
    for part in parts:
        assert [arm.name for arm in part[:2]] == [cells.REFERENCE, gpu_cells.COMPUTE]
        assert 2 < len(part) <= 5
    others = [arm.name for part in parts for arm in part[2:]]
    assert sorted(others) == sorted(arm.name for arm in arms[2:])
    assert others[:2] == ["recommended", "recommended when auto"]  # at once
    assert any(arm.peer for arm in arms) == (layout in ("dp2", "ddp"))
    for arm in arms:
        settings = gpu_cells.settings_of(layout, arm, "85M")
        assert settings["bf16"]["enabled"] and settings["optimizer"]["params"]["fused"]
        block = load_config(settings)
        assert (block is None) == (arm.block is None)


def test_ranks_of_one_gpu_are_hosts_of_their_own(tmp_path: Path) -> None:
    options = gpu_cells.Options("85M", tmp_path / "text", tmp_path, gpu=True)
    arm = next(a for a in gpu_cells.arms_of("asymmetric") if a.name == "recommended nodes")
    specs = gpu_cells.specs_of("asymmetric", arm, 10, 29500, options)
    assert len({spec.env["NCCL_HOSTID"] for spec in specs}) == len(specs) == 4
    assert [spec.env["CROSS_RANK"] for spec in specs] == ["0", "0", "1", "1"]
    assert {spec.env["LOCAL_RANK"] for spec in specs} == {"0"} and specs[0].patched
    config = specs[0].arguments[specs[0].arguments.index("--deepspeed_config") + 1]
    assert json.loads(Path(config).read_text())["compression"]["hierarchy"] == "auto"


# ---- rows

TURN = {
    "kind": "turn", "size": "85M", "layout": "zero1", "part": 0, "samples": 8, "loss": 2.0,
    "device": "a GPU", "session": "0",
}  # fmt: skip


def turn(arm: str, number: int, seconds: list[float], sent: float, **more: Any) -> str:
    record = {**TURN, "arm": arm, "round": number, "seconds": seconds, "sent": sent, **more}
    return json.dumps(record) + "\n"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, slower: float, rounds: int = 4) -> Path:
    """Write native steps of 300 ms, 200 of them on the wire; a quarter of the bytes in 150 ms."""
    text = "".join(
        turn(arm, number, [slower * seconds] * 2, sent, session=str(slower))
        for number in range(-1, rounds)
        for arm, seconds, sent in (
            (cells.REFERENCE, 0.3, 4e8),
            (gpu_cells.COMPUTE, 0.1, 1e3),
            ("recommended", 0.15, 1e8),
            ("recommended when auto", 0.2, 1e8),
        )
    )
    end = {**TURN, "kind": "end", "arm": "recommended", "ledger": {"dp": {}}, "auto": ["told"]}
    failed = {**TURN, "kind": "failed", "arm": "ZeRO++ qwZ", "why": "Error: a | b"}
    path.write_text(text + json.dumps(end) + "\n" + json.dumps(failed) + "\n")
    return path


def test_rows_hold_rounds_of_several_calls_against_their_own_reference(tmp_path: Path) -> None:
    every = [
        each for slower in (1.0, 2.0, 3.0) for each in records(written(tmp_path / "a", slower))
    ]
    rows = {row["arm"]: row for row in gpu_report.rows_of(every)}
    own = rows["recommended"]
    assert own["pairs"] == 3 * 4 * 2
    # for any speed of the machine, a turn is compared with one of the same round
    assert [own[name] for name in ("speed_up", "low", "high")] == pytest.approx([0.3 / 0.15] * 3)
    assert own["saving"] == 4 and own["r"] == pytest.approx(2.0)
    assert own["ideal"] == pytest.approx(3 / (1 + 2 / 4))
    assert own["share"] == pytest.approx(own["speed_up"] / 2)
    assert own["auto"] == ["told"] and own["ms"] == pytest.approx(300.0)
    assert rows["ZeRO++ qwZ"]["failed"] == "Error: a | b"
    (size, layout, share), *rest = gpu_report.auto_of(list(rows.values()))
    assert (size, layout, rest) == ("85M", "zero1", []) and share == pytest.approx(0.15 / 0.2)


def test_page_of_a_file_says_what_is_missed(tmp_path: Path) -> None:
    page = gpu_report.page(written(tmp_path / "a.jsonl", 1.0))
    assert page.startswith("On a GPU.\n") and "Compute 100.0 ms, r 2.00." in page
    assert "## 85M parameters, zero1" in page and "`recommended`: told" in page
    assert "| `recommended` | 150.0 | 54,613 | **2.00** (2.00 to 2.00) | 100.0 | 1/4.00 |" in page
    assert "| 85M | zero1 | 2.00 | 2.00 | 1.00 | 0.75 |" in page and "failed: Error: a / b" in page
    # ``recommended`` reaches its allowed speed, ``auto`` takes 0.2 s instead of 0.15
    assert [line for line in page.splitlines() if line.startswith("MISSED")] == [
        "MISSED 85M zero1: recommended when auto 0.75 of the better of native and compressed, "
        "expected 0.97"
    ]


# ---- messages without a wire


def cut() -> list[Any]:
    """Run collectives with and without ``set_empty``."""
    empty.install()
    rank = dist.get_rank()
    whole = torch.arange(64.0) + 1000 * rank
    found = []
    for on in (False, True):
        empty.set_empty(on)
        total = whole.clone()
        dist.all_reduce(tensor=total)
        gathered = torch.zeros(128)
        dist.all_gather_into_tensor(gathered, whole, async_op=True).wait()
        lists = [torch.zeros(64), torch.zeros(64)]
        dist.all_gather(lists, whole)
        part = torch.zeros(32)
        dist.reduce_scatter_tensor(part, whole.clone())
        tiny = torch.ones(4)
        dist.all_reduce(tiny)
        sent = torch.full((64,), float(rank))
        dist.send(sent, 1) if rank == 0 else dist.recv(sent, 0)
        found.append([total, gathered, torch.cat(lists), part, tiny, sent])
    return [[tensor.tolist() for tensor in tensors] for tensors in found]


def test_empty_messages_are_cut_to_a_few_elements_and_finite() -> None:
    few = empty.FEW
    for rank, (native, short) in enumerate(run_ranks(2, cut)):
        whole = [n + 1000.0 * rank for n in range(64)]
        both = [2 * n + 1000.0 for n in range(64)]
        assert native[0] == both and short[0] == [*both[:few], *whole[few:]]
        other = [n + 1000.0 * (1 - rank) for n in range(64)]
        assert native[1] == native[2] == [*range(64), *(n + 1000.0 for n in range(64))]
        # the rest is this rank's own values
        assert short[1][few * 2 :][: 64 - 2 * few] == whole[2 * few :]
        assert short[2][(1 - rank) * 64 :][:64] == [*other[:few], *whole[few:]]
        assert short[3][few:] == whole[few:32] and native[3] == both[32 * rank :][:32]
        assert native[4] == short[4] == [2.0] * 4
        assert native[5] == [0.0] * 64 and short[5] == [0.0] * few + [float(rank)] * (64 - few)


# ---- the group through the GPU's memory


def both(call: Callable[[Any, int], Any]) -> list[Any]:
    """Run ``call`` in two threads, with one store and the number of the thread."""
    store = torch._C._distributed_c10d.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(call, [store] * 2, range(2), timeout=30))


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "MIN"])
def test_reductions_through_memory(op: str) -> None:
    values = [torch.randn(7, 3).bfloat16().t() for _ in range(2)]  # noncontiguous
    options = SimpleNamespace(reduceOp=getattr(dist.ReduceOp, op))

    def call(store: Any, rank: int) -> tuple[Tensor, Tensor]:
        group: Any = gpu_memory.GpuMemory(store, rank, 2)
        own = values[rank].clone(memory_format=torch.preserve_format)
        group.allreduce([own], options)
        part = torch.zeros(6)
        whole = torch.arange(12.0) * (rank + 1)
        group.reduce_scatter_single(part, whole, options)
        with pytest.raises(NotImplementedError):
            group.allreduce([own.clone()], SimpleNamespace(reduceOp=dist.ReduceOp.PRODUCT))
        return own, part

    stacked = torch.stack(values)
    total = {"SUM": values[0] + values[1], "AVG": (values[0] + values[1]) / 2}
    expected = {**total, "MAX": stacked.amax(0), "MIN": stacked.amin(0)}[op]
    factor = {"SUM": 3, "AVG": 1.5, "MAX": 2, "MIN": 1}[op]
    for rank, (own, part) in enumerate(both(call)):
        assert own.equal(expected)
        assert part.equal(factor * torch.arange(12.0)[6 * rank :][:6])


def test_moves_through_memory() -> None:
    def call(store: Any, rank: int) -> list[Any]:
        group: Any = gpu_memory.GpuMemory(store, rank, 2)
        gathered, told = torch.zeros(8), torch.full((3,), rank)
        group.all_gather_single(gathered, torch.full((4,), rank + 1.0))
        gives, takes = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
        mine, got = torch.arange(4) + 10 * rank, torch.zeros(sum(takes), dtype=torch.int64)
        group.all_to_all_single(got, mine, takes, gives)
        even = torch.zeros(4, dtype=torch.int64)
        group.all_to_all_single(even, mine, [], [])
        group.broadcast([told], SimpleNamespace(rootRank=1))
        group.barrier()
        return [gathered.tolist(), got.tolist(), even.tolist(), told.tolist()]

    first, second = both(call)
    assert first[0] == second[0] == [1.0] * 4 + [2.0] * 4
    assert first[1] == [0, 10, 11] and second[1] == [1, 2, 3, 12, 13]
    assert first[2] == [0, 1, 10, 11] and second[2] == [2, 3, 12, 13]
    assert first[3] == second[3] == [1] * 3
    with pytest.raises(ValueError, match="at most 2 ranks, found 4"):
        gpu_memory.GpuMemory(None, 0, 4)


def test_pairs_give_up_a_kind_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(gpu_pairs.HostPair):
        def _piece(self, give: Tensor, take: Tensor) -> None:
            super()._piece(give, take)
            take.add_(1)

    monkeypatch.setattr(gpu_pairs, "KINDS", (Broken, gpu_pairs.HostPair))
    assert [type(pair) for pair in both(gpu_pairs.pair_of)] == [gpu_pairs.HostPair] * 2
    assert "Broken tried: expected" in capsys.readouterr().out


# ---- the script, on CPUs


def test_a_bench_on_cpus(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = itertools.count(0, 1000)  # the interface's real counter includes other tests' traffic
    monkeypatch.setattr(gpu_session, "sent_nbytes", lambda _: next(counter))
    out = tmp_path / "speed.jsonl"
    words = ["--cpu", "--size", "tiny", "--layouts", "zero1", "--arms", "recommended", "--rounds"]
    more = ["1", "--timed", "1", "--warm", "1", "--timeout", "250"]
    more += ["--data", str(data), "--out", str(out)]
    late = [*words, *more, "--resume", "--budget", "0"]
    assert bench_gpu_training.main(late) == TIME_IS_UP and not out.is_file()
    assert bench_gpu_training.main([*words, *more]) == 0, capsys.readouterr().out
    before = out.read_bytes()
    assert bench_gpu_training.main([*words, *more, "--resume"]) == 0  # all rounds are done
    said = capsys.readouterr().out
    assert out.read_bytes() == before and "part 0: is there" in said
    assert "| tiny | zero1 |" in said and out.with_suffix(".md").read_text() in said
    rows = {row["arm"]: row for row in gpu_report.rows_of(records(out))}
    assert set(rows) == {cells.REFERENCE, gpu_cells.COMPUTE, "recommended"}
    own = rows["recommended"]
    assert own["pairs"] == 1 and set(own["ledger"]) == {"dp", "zero"}
    assert own["ledger"]["zero"]["forward"]["ratio"] > 1.8  # 16 to 8.26 bits
    assert own["sent_MB"] == 1000 / 2 / 1e6  # two steps a turn


def test_what_a_pair_says_by_the_store_is_data() -> None:
    """Numbers and handles come from the other rank, classes from this one, code from neither."""
    own = (torch.Tensor, (4,), 3, b"mine", torch.uint8, False, 16)
    message = gpu_pairs.told((torch.Tensor, (4,), 5, b"\x00theirs", torch.uint8, True, 32))
    expected = [torch.Tensor, (4,), 5, b"\x00theirs", torch.uint8, False, 32]
    assert gpu_pairs.heard(message, own) == expected
    for message in (gpu_pairs.told(own[:3]), gpu_pairs.told((None,) * 7), pickle.dumps(own)):
        with pytest.raises(RuntimeError, match="handles of the other rank"):
            gpu_pairs.heard(message, own)
