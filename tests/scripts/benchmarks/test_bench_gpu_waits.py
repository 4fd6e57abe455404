"""bench_gpu_waits.py: traces with figures computed by hand, and a real CPU trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_gpu_waits
from benchmarks.training_bench.cells import REFERENCE
from benchmarks.training_bench.gpu_cells import COMPUTE
from benchmarks.waits_bench import causes, figures, intervals, lanes, report
from benchmarks.waits_bench.recorder import Recorder
from benchmarks.waits_bench.traces import TraceError, read
from tests.paths import ROOT
from tests.ranks import run_ranks
from tests.scripts.benchmarks.made_traces import MadeTrace

MESSAGE = "dp forward 1000 float32 blockint(bits=4)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::Add>(int, at::Add)"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def message(made: MadeTrace) -> None:
    """Add encoding from 60 on and a post at 75."""
    made.mark(f"send {MESSAGE}", 50, 98)
    made.mark("message 5 dp at step 3", 51, 51)
    made.mark("codec 5", 55, 74)
    made.kernel("blockint_encode_fp32", 20, (250, 400), (60, 70))
    made.mark("post 5 500", 75, 79)


def first_rank() -> MadeTrace:
    """Return a step of 1,000 us on three streams, with each kind of activity."""
    made = MadeTrace()
    made.mark("step 1", 0, 1000)
    made.kernel(ADD, 7, (100, 300), (40, 50))
    message(made)
    made.kernel(NCCL, 30, (400, 600), (80, 90), **{"Process Group Name": "0"})
    made.kernel(ADD, 7, (500, 550), (100, 110))
    made.kernel("Memcpy DtoH (Device -> Pinned)", 7, (600, 650), (120, 130), "gpu_memcpy")
    made.call("cudaStreamSynchronize", 150, 700)
    made.mark("send tp forward 8 bfloat16 bf16", 710, 730)
    made.kernel(ADD, 7, (750, 900), (720, 740))
    return made


def second_rank() -> MadeTrace:
    """Join the message 50 us later, and compute while the first rank is idle."""
    made = MadeTrace()
    made.mark("step 1", 0, 1000)
    made.kernel(NCCL, 9, (450, 600), (400, 410), **{"Process Group Name": "0"})
    made.kernel(ADD, 7, (660, 690), (640, 650))
    return made


def two_ranks(folder: Path) -> list[lanes.Lanes]:
    paths = [first_rank().write(folder / "0.json.gz"), second_rank().write(folder / "1.json")]
    return figures.recorded(paths)


def test_every_moment_of_a_step_has_one_cause(tmp_path: Path) -> None:
    found = figures.figures_of(two_ranks(tmp_path), shared=True)
    own = causes.parts_of(two_ranks(tmp_path), 0, shared=True)
    spent = {name: intervals.length(times) / 1e3 for name, times in own[0].items()}
    assert spent == {
        "computation": 200 + 50 + 150,
        "codec": 100,  # from 300, when the overlapping computation ends
        "copies": 50,
        "wire": 50 + 50,  # exposed, once both ranks are there
        causes.LATE: 50,  # from 400 to 450 it waits for the second rank
        causes.OTHERS: 30,
        causes.QUEUED: 50 + 10,  # from the end of a launch to its kernel
        causes.BLOCKED: 50 - 30,  # the blocking call, while nothing runs on the GPU
        causes.OURS: 20,
        causes.REST: 50 + 10 + 10 + 100,  # before the first launch, around a mark, at the end
    }
    assert sum(spent.values()) == 1000
    alone = causes.parts_of(two_ranks(tmp_path), 0, shared=False)
    assert intervals.length(alone[0][causes.BLOCKED]) == 50_000 and not alone[0][causes.OTHERS]
    assert found["ms"] == pytest.approx(1.0) == pytest.approx(sum(found["causes"].values()))
    assert found["causes"]["computation"] == pytest.approx((0.4 + 0.03) / 2)
    # all codec and wire time, exposed or not, as means of both ranks
    assert found["lanes"]["codec"] == pytest.approx(
        {"ms": 0.15 / 2, "beside_ms": 0.05 / 2, "exposed_ms": 0.1 / 2}
    )
    assert found["lanes"]["wire"] == pytest.approx(
        {"ms": (0.2 + 0.15) / 2, "beside_ms": 0.05 / 2, "exposed_ms": (0.15 + 0.15) / 2}
    )


def test_the_host_waits_for_events_and_unpinned_copies(tmp_path: Path) -> None:
    made = MadeTrace()
    made.mark("step 1", 0, 1000)
    made.kernel("expcode_encode_bf16", 20, (30, 90), (10, 20))
    made.call("cudaEventSynchronize", 25, 95)
    copied = {"Memcpy DtoH (Device -> Pageable)": 300, "Memcpy DtoH (Device -> Pinned)": 500}
    for name, at in copied.items():
        made.kernel(name, 7, (at + 20, at + 40), (at, at + 60), "gpu_memcpy")
    (found,) = figures.recorded([made.write(tmp_path / "0.json")])
    told = [(span.name, (span.stop - span.start) / 1e3) for span in lanes.blocking(found.trace)]
    assert told == [("cudaEventSynchronize", 70), ("cudaMemcpyAsync", 60)]
    # the rest of the pinned copy's call is host time
    (parts,) = causes.parts_of([found], 0, shared=False)
    spent = {name: intervals.length(times) / 1e3 for name, times in parts.items() if times}
    assert spent["codec"] == 60 and spent["copies"] == 40
    assert spent[causes.QUEUED] == 10  # from the launch's end to the kernel's begin
    assert spent[causes.BLOCKED] == 5 + 20 + 20  # kernel, then around the first copy


def test_messages_that_not_all_ranks_have_are_not_divided(tmp_path: Path) -> None:
    late = second_rank()
    late.kernel(NCCL, 9, (910, 920), (900, 905), **{"Process Group Name": "0"})
    ranks = figures.recorded(
        [first_rank().write(tmp_path / "0.json"), late.write(tmp_path / "1.json")]
    )
    assert causes.late_of(ranks, 0) == []


def test_messages_of_pairs_are_matched_by_their_two_ranks(tmp_path: Path) -> None:
    """Stages 0 > 1 > 2: the second message is a different one on every rank."""
    told = {"Collective name": "send", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}

    def ranks(pairs: bool) -> list[lanes.Lanes]:
        paths = []
        for rank, messages in enumerate([[(0, 1, 10)], [(0, 1, 15), (1, 2, 40)], [(1, 2, 30)]]):
            made = MadeTrace()
            made.mark("step 1", 0, 100)
            for source, to, start in messages:
                pair: dict[str, Any] = {"Src Rank": source, "Dst Rank": to} if pairs else {}
                made.kernel(NCCL, 9, (start, start + 9), (1, 2), **told, **pair)
            paths.append(made.write(tmp_path / f"{rank}.json"))
        return figures.recorded(paths)

    found = [causes.late_of(ranks(True), rank) for rank in range(3)]
    assert [intervals.length(times) / 1e3 for times in found] == [5, 0, 9]
    assert [causes.late_of(ranks(False), rank) for rank in range(3)] == [[], [], []]


def test_what_a_trace_does_not_tell_is_said(tmp_path: Path) -> None:
    made = first_rank()
    launch = next(e for e in made.events if e["name"] == "cuLaunchKernel")
    made.events.remove(launch)
    (found,) = figures.recorded([made.write(tmp_path / "0.json")], gpu=True)
    untold = "the calls that launched 1 of 6 kernels"
    assert figures.figures_of([found], shared=False)["untold"] == untold
    bare = MadeTrace()
    bare.mark("step 1", 0, 9)
    with pytest.raises(TraceError, match="expected kernels of a GPU, found none"):
        figures.recorded([bare.write(tmp_path / "1.json")], gpu=True)


def arm(ms: float, computation: float, wire: float, codec: float = 0.0) -> figures.Figures:
    spent = dict.fromkeys(causes.CAUSES, 0.0)
    spent |= {"computation": computation, "wire": wire, "codec": codec}
    spent[causes.REST] = ms - computation - wire - codec
    return {"ms": ms, "causes": spent}


def test_what_is_missing_is_divided_among_causes() -> None:
    """100 ms without a wire, 300 with it; a quarter of the bytes allows 150, and it takes 200."""
    arms = {
        REFERENCE: arm(300.0, 90.0, 195.0), COMPUTE: arm(100.0, 90.0, 3.0),
        "ours": arm(200.0, 94.0, 71.0, 20.0),
    }  # fmt: skip
    found = figures.missing(arms, (REFERENCE, COMPUTE, "ours"), 4.0)
    assert found["r"] == pytest.approx(2.0) and found["allowed"] == pytest.approx(2.0)
    assert found["speed_up"] == pytest.approx(1.5) and found["reached"] == pytest.approx(0.75)
    beyond = {name: value for name, value in found["causes_ms"].items() if value}
    assert beyond == pytest.approx({
        "computation": 4.0, "codec": 20.0,
        "wire": 71.0 - (3.0 + 192.0 / 4), causes.REST: 15.0 - (7.0 + 8.0 / 4),
    })  # fmt: skip
    assert sum(beyond.values()) == pytest.approx(found["missing_ms"]) == pytest.approx(50.0)
    assert sum(found["causes_percent"].values()) == pytest.approx(25.0)
    turns = {name: {"ms": ms} for name, ms in ((REFERENCE, 300.0), (COMPUTE, 100.0), ("ours", 160))}
    names = REFERENCE, COMPUTE, "ours"
    assert figures.reached(turns, names, 4.0) == pytest.approx(150 / 160)


@pytest.mark.parametrize("name, expected", [
    ("blockint_encode_feedback_bf16", "codec"), ("blockint_planned_sum_fp32(Plan)", "codec"),
    ("cast_fp32_bf16", "codec"), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "wire"),
    (ADD, "computation"), ("sm90_xmma_gemm_bf16bf16_f32", "computation"),
])  # fmt: skip
def test_lanes_of_kernels(name: str, expected: str, tmp_path: Path) -> None:
    made = MadeTrace()
    made.mark("step 1", 0, 9)
    made.kernel(name, 7, (3, 4), (1, 2))
    (span,) = read(made.write(tmp_path / "0.json")).device
    assert lanes.lane(span, coded=False) == expected
    assert lanes.lane(span, coded=True) == ("wire" if expected == "wire" else "codec")


def test_all_kernels_of_ours_are_known() -> None:
    """The classification knows the name of every kernel source."""
    for source in sorted((ROOT / "hybridcomp" / "kernels" / "cuda").glob("*.cu")):
        head = source.stem.removesuffix("s") if source.stem == "casts" else source.stem
        assert lanes.OURS.match(f"{head}_encode"), source.name
        assert "__global__" in source.read_text()


def damaged(name: str) -> bytes:
    event: dict[str, Any] = {"ph": "X", "cat": "user_annotation", "name": "x", "tid": 1, "ts": 0}
    texts: dict[str, bytes] = {
        "cut": first_rank().write(Path(name)).read_bytes()[:200],
        "text": b"no trace at all", "list": b"[1, 2]", "other": json.dumps({"a": 1}).encode(),
        "no step": json.dumps({"traceEvents": [{**event, "dur": 1}]}).encode(),
        "no end": json.dumps({"traceEvents": [event]}).encode(),
        "no call": json.dumps({"traceEvents": [
            {**event, "name": "hybridcomp::step 1", "dur": 9},
            {**event, "cat": "kernel", "dur": 1, "args": {"stream": 7}},
        ]}).encode(),
    }  # fmt: skip
    return texts[name.rpartition("/")[2].removesuffix(".gz")]


@pytest.mark.parametrize("name, said", [
    ("cut", "cannot be read as a trace"), ("text", "cannot be read as a trace"),
    ("list", "with 'traceEvents', found list"), ("other", r"with 'traceEvents', found \['a'\]"),
    ("no step", "found 1 events without one"), ("no end", r"event 0 is damaged \(no 'dur'\)"),
    ("no call", r"event 1 is damaged \(no 'correlation'\)"), ("absent", "cannot be read as a"),
])  # fmt: skip
def test_a_file_that_is_no_trace_is_told_in_one_line(name: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gz"
    if name != "absent":
        path.write_bytes(damaged(str(path)))
    with pytest.raises(TraceError, match=said) as caught:
        read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_ranks_of_other_steps_are_refused(tmp_path: Path) -> None:
    more = second_rank()
    more.mark("step 2", 1000, 1100)
    paths = [first_rank().write(tmp_path / "0.json"), more.write(tmp_path / "1.json")]
    with pytest.raises(TraceError, match=r"the same steps, found 0.json 1, 1.json 2"):
        figures.recorded(paths, skip=0)


def written(folder: Path) -> Path:
    """Write the traces and notes of three arms, as recording does."""
    traces, arms = folder / "traces", {}
    traces.mkdir()
    for number, name in enumerate((REFERENCE, COMPUTE, "recommended")):
        files = [f"{number}.{rank}.json.gz" for rank in range(2)]
        for file, made in zip(files, (first_rank(), second_rank()), strict=True):
            made.write(traces / file)
        arms[name] = {"traces": files, "ms": 0.9, "recorded_ms": 1.0, "sent_MB": 4.0 - number}
    head = {"size": "85M", "shared": True, "arms": arms}
    (traces / "zero1.recorded.json").write_text(json.dumps(head))
    return folder


def test_page_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu_waits.main(["--read", "--out", str(written(tmp_path))]) == 0
    page = (tmp_path / "zero1.md").read_text()
    assert "| codec | 0.05 | 0.05 | 0.05 |" in page and "by their kernels" in page
    assert "`recommended`: 1/2.00 of the bytes allows 1.00 times native (r 0.00)" in page
    assert "100% of it, others 100%. These take 0.9 ms" in page
    assert "recorded ones 1.11 times as long" in page and page in capsys.readouterr().out
    kept = json.loads((tmp_path / "zero1.json").read_text())
    assert kept["missing"]["recommended"]["reached"] == 1.0
    assert (tmp_path / "zero1.json").stat().st_size < 20_000


def test_what_was_not_recorded_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path)
    asked = ["--read", "--out", str(folder)]
    assert bench_gpu_waits.main([*asked, "--layouts", "zero2"]) == 1
    assert "has recorded of 'recommended', found [Errno 2]" in capsys.readouterr().out
    assert bench_gpu_waits.main([*asked, "--arm", "bound"]) == 1
    assert "has recorded of 'bound', found 'bound'" in capsys.readouterr().out
    (folder / "traces" / "2.1.json.gz").write_bytes(b"\x1f\x8b")
    assert bench_gpu_waits.main(asked) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(told) == 1 and "2.1.json.gz: cannot be read as a trace" in told[0]
    for words in (["--steps", "0"], ["--arm", "nobody"]):
        with pytest.raises(SystemExit):
            bench_gpu_waits.parse([*asked, *words])
        assert re.search(r"--steps|no arm 'nobody'", capsys.readouterr().err)


@pytest.mark.nightly
@pytest.mark.parametrize("layout, dimensions", [
    ("zero1", {"dp", "zero"}), ("zero3", {"dp", "zero"}), ("ddp", {"dp"}),
    ("fsdp2", {"dp", "zero"}), ("pp2", {"pp"}),
])  # fmt: skip
def test_the_command_on_cpus(
    layout: str, dimensions: set[str], data: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The ranks' traces contain messages of every dimension of a layout."""
    out = tmp_path / "waits"
    words = ["--cpu", "--size", "4M", "--data", str(data), "--out", str(out), "--timeout", "250"]
    asked = [*words, "--layouts", layout, "--steps", "1", "--warm", "1"]
    assert bench_gpu_waits.main(asked) == 0, capsys.readouterr().out
    kept = json.loads((out / f"{layout}.json").read_text())
    assert set(kept["arms"]) == {REFERENCE, COMPUTE, "recommended"}
    for name, arm in kept["arms"].items():
        assert sum(arm["causes"].values()) == pytest.approx(arm["ms"], abs=0.01)
        assert (arm["lanes"]["codec"]["ms"] > 0) == (name == "recommended")
    sent = set[str]()
    for rank in range(2):
        trace = read(out / "traces" / f"{layout}.recommended.{rank}.json.gz")
        sent |= {mark.name.split()[1] for mark in trace.marks("send")}
        sent |= {mark.name.split()[2] for mark in trace.marks("message")}
    assert sent == dimensions


def trained(folder: str) -> None:
    """Record a small compressed training under FSDP2 as one step."""
    import torch.distributed as dist

    from tests.patches.torch import trainer

    recorder = Recorder(f"{folder}/{dist.get_rank()}.json.gz")
    block = {"dp": {"codec": "blockint", "bits": 4}, "min_bytes": 0}
    with recorder.step():
        trainer.run(trainer.Job(block=block, steps=3))
    recorder.close()


@pytest.mark.nightly
def test_a_training_on_cpus(tmp_path: Path) -> None:
    run_ranks(2, trained, str(tmp_path))
    ranks = figures.recorded([tmp_path / f"{rank}.json.gz" for rank in range(2)])
    found = figures.figures_of(ranks, shared=False)
    assert not found["kernels"] and sum(found["causes"].values()) == pytest.approx(found["ms"])
    assert min(found["causes"][name] for name in ("computation", "codec", "wire")) > 0
    text = report.page({
        "layout": "fsdp2", "size": "tiny", "arms": {"recommended": found}, "turns": {},
        "missing": {},
    })  # fmt: skip
    assert "operations of the CPU" in text
