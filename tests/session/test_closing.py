"""A job's last line: printed once, on rank 0, for any end, with sent, saved and lost bytes."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from hybridcomp.autotune.verdicts import Decision, Verdicts
from hybridcomp.channels import Channels
from hybridcomp.channels.accounting.ledger import Entry
from hybridcomp.channels.accounting.time_saved import TimeSaved
from hybridcomp.config import CompressionConfig
from hybridcomp.publishing.following import PublishedSteps
from hybridcomp.session import closing
from hybridcomp.session.closing import UNTIMED, Account, last_line
from tests.scripts_on_ranks import run_python
from tests.selection import by_day, by_night

#: arguments of ``train`` for every job of these tests
JOBS = {
    "go_on": "go_on",
    "leave": "leave",
    "fail": "fail",
    "late": 'go_on, {**BLOCK, "ledger": {"every": 2, "jsonl": "l.jsonl"}}, 3',
    "unreported": 'go_on, {**BLOCK, "ledger": {"every": 9}}, 3',
    "small": 'go_on, {**BLOCK, "min_bytes": 10**9}',
    "early": 'go_on, {**BLOCK, "start_step": 9}',
    "fast link": 'go_on, {**BLOCK, "when": "auto"}, 4, {"native": 0.01, "coded": 0.04}',
    "saves": 'go_on, {**BLOCK, "when": "auto"}, 2, {"native": 40.0, "coded": 10.0}',
}
DAY = ("leave", "fail", "early", "saves")
#: jobs of two ranks that ``multiprocessing`` forks one after the other after all imports
SCRIPT = """
    import hybridcomp, os, sys, torch, torch.distributed as dist
    import torch._dynamo, torch.multiprocessing as mp
    from torch.nn.parallel import DistributedDataParallel
    import hybridcomp.session.engine_session, hybridcomp.patches.torch.fsdp2.fsdp2
    BLOCK = {"dp": {"codec": "blockint", "bits": 8}, "min_bytes": 0, "ledger": {"every": 2}}

    def train(rank, store, end, block=None, steps=4, times=None):
        dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
        if times is not None:
            from hybridcomp.autotune import timing
            timing.seconds = lambda run, device: (run(), times[run.__name__])[1]
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        hybridcomp.attach(model, block or BLOCK)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        del model, optimizer
        end(rank)
        dist.barrier()

    def leave(rank): sys.exit(0)
    def fail(rank):
        if rank == 0:  # rank 1 waits: whoever fails first, the other one is ended by SIGTERM
            raise ValueError("the script's own")
    def go_on(rank): pass

    def start(name, *call):
        print("JOB", name, flush=True)
        try:
            store = os.path.abspath("store " + name)
            mp.start_processes(train, args=(store, *call), nprocs=2, start_method="fork")
        except Exception as error:
            print(type(error).__name__, file=sys.stderr)

"""

#: lines of a job that describe its end
Ends = dict[str, list[str]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ends:
    """Train the daily jobs, or all, in one script."""
    folder = tmp_path_factory.mktemp("jobs")
    names = JOBS if by_night(request.config) else DAY
    starts = "".join(f"start({name!r}, {JOBS[name]})\n" for name in names)
    (folder / "jobs.py").write_text(dedent(SCRIPT) + starts)
    done = run_python("jobs.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines_of: Ends = {}
    for job in done.stdout.split("JOB ")[1:]:
        name, *lines = job.splitlines()
        lines_of[name] = [text for text in lines if "this run " in text]
    return lines_of


@pytest.mark.parametrize("end", by_day(["go_on", "leave", "fail"], ["leave", "fail"]))
def test_one_line_however_the_job_ends(ends: Ends, end: str) -> None:
    (text,) = ends[end]
    assert text.startswith("[hybridcomp] this run sent 0.0")
    assert " MB, natively it would have been 0.1" in text
    assert UNTIMED in text and "worst error " in text and text.endswith("(dp), no report file")


@pytest.mark.nightly
def test_what_no_report_has_is_said(ends: Ends) -> None:
    (text,) = ends["late"]
    assert "until step 2, its last report, this run sent 0" in text
    assert text.endswith("report l.jsonl")
    (text,) = ends["unreported"]
    assert "in this run rank 0 sent " in text and "(the other ranks had not reported yet)" in text


@pytest.mark.parametrize(
    ("job", "why"),
    [
        pytest.param("small", "no message had min_bytes, 1000000000", marks=pytest.mark.nightly),
        ("early", "it ended at step 4, and start_step is 9"),
        pytest.param(
            "fast link",
            'link is faster than the codecs ("when": "auto"); measuring took ',
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_job_that_compressed_nothing_says_so(ends: Ends, job: str, why: str) -> None:
    (text,) = (end for end in ends[job] if "nothing is compressed" not in end)
    assert "this run compressed nothing: " in text and why in text


def test_seconds_are_those_of_the_verdicts(ends: Ends) -> None:
    (text,) = ends["saves"]
    assert "saved about " in text and "as far as measured, " in text
    saved = float(text.partition("saved about ")[2].split()[0])
    assert 40 < saved <= 60  # two steps of 30 s, minus the trial's time


def account(**given: Any) -> Account:
    gains = TimeSaved(given.pop("gains", {}), given.pop("spent_s", 0.0))
    opened = Account(gains, step=given.pop("step", 10))
    for name, value in given.items():
        setattr(opened, name, value)
    return opened


def sent(dimension: str, raw: float, wire: float, native: int = 0, error: float = 0.0) -> Any:
    entry = Entry(messages=4, native=native, raw_nbytes=raw, wire_nbytes=wire,
                  error_sq=error**2, value_sq=1.0 if error else 0.0)  # fmt: skip
    return {(dimension, "forward"): entry}


def test_models_are_added_up() -> None:
    first, second = account(gains={"dp": 12.0}, spent_s=2.0, report="a.jsonl"), account()
    first.add(sent("dp", 300e6, 40e6, error=0.1))
    second.add(sent("zero", 100e6, 60e6, error=0.02))
    second.add(sent("tp", 5e6, 5e6, native=4))
    assert last_line([first, second]) == (
        "this run sent 105 MB, natively it would have been 405 MB, saved about 10 s as far as "
        "measured (dp alone), worst error 1.0e-01 (dp), report a.jsonl"
    )
    islands = account()  # without a codec they send less by meeting seldom
    islands.add(sent("sync", 113e6, 15e6, native=4))
    assert last_line([islands]).startswith("this run sent 15 MB, natively it would have been 113")
    slower = account(gains={"dp": 1.0}, spent_s=2.5, outside=3.0)
    slower.add(sent("dp", 300e6, 40e6))
    text = last_line([slower])
    assert "lost about 1.5 s as far as measured, no error sampled, 3 sampled values OUTSIDE" in text


def test_lines_are_sentences_for_every_end() -> None:
    def line(step: int = 10, rest: float = 0.0, **more: Any) -> str:
        opened = account(step=step, **more)
        opened.add(sent("dp", 37.8e6, 18.1e6))
        opened.rest = rest
        return last_line([opened]).partition(", seconds")[0]

    natively = "18.1 MB, natively it would have been 37.8 MB"
    assert line() == f"this run sent {natively}"
    assert line(rest=3.0) == f"until step 10, its last report, this run sent {natively}"
    others = "(the other ranks had not reported yet)"
    assert line(step=0) == f"in this run rank 0 sent {natively} {others}"
    published = "published 20 versions, 21 MB in place of 76 MB"
    assert line(also=(published,)) == f"this run sent {natively}, {published}"
    idle = account(also=(published,), idle="the block names no codec for any dimension")
    assert last_line([idle]) == (
        f"this run {published}, and compressed nothing else: the block names no codec for any "
        "dimension (no report file)"
    )


def test_messages_that_were_timed_alone_are_not_called_unmeasured() -> None:
    """For tp and pp ``"when": "auto"`` times single messages, and knows no gain per step."""
    timed, verdicts = account(), Verdicts()
    verdicts.by_dimension["tp"] = Decision(True, 1000, 2.0, 1.0)
    timed.gains.count(verdicts, 5, ())
    timed.add(sent("tp", 40e6, 10e6))
    text = last_line([timed])
    assert "single messages of tp were timed, and no step: seconds are not known" in text
    timed.gains.count(Verdicts(), 6, ())
    timed.gains.by_dimension["dp"] = 3.0
    timed.add(sent("dp", 40e6, 10e6))
    assert "saved about 3.0 s as far as measured (dp alone)" in last_line([timed])


def test_versions_are_added_up() -> None:
    made = [SimpleNamespace(nbytes=nbytes, weights=10**6) for nbytes in (2_000_000, 50_000)]
    finished: list[Any] = []
    publisher: Any = SimpleNamespace(
        every=1, publish=lambda step, wait: finished.append(made[step - 1]),
        take_finished=lambda: [finished.pop()],
    )  # fmt: skip
    follower = PublishedSteps(lambda: publisher, wait=True)
    follower.before_step()
    assert follower.told() == ""
    follower.after_step(1)
    assert follower.told() == "published 1 version, 2 MB in place of 2 MB"
    follower.after_step(2)
    assert follower.told() == "published 2 versions, 2.05 MB in place of 4 MB"


def test_lines_stand_beside_progress_bars(tmp_path: Path) -> None:
    """A bar ends without a newline, so our line must begin on a new one."""
    pytest.importorskip("tqdm")
    code = """
        import sys, tqdm
        from hybridcomp.log import say
        sys.stderr = sys.stdout
        for _ in tqdm.tqdm(range(3), file=sys.stdout, mininterval=0):
            say("a line")
        say("the end")
    """
    done = run_python("-c", dedent(code), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.replace("\r", "\n").split("\n")
    assert parts.count("[hybridcomp] a line") == 3 and parts.count("[hybridcomp] the end") == 1


def test_trainings_of_a_measurement_are_no_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the measurement's small trainings would report after "wrote cluster.json"."""
    for name, value in (("_accounts", []), ("_open", []), ("_registered_in", [os.getpid()])):
        monkeypatch.setattr(closing, name, value)
    closing.open_account(TimeSaved(), "l.jsonl")
    closing.forget()
    closing._end()
    assert capsys.readouterr().out == ""


def test_why_nothing_was_compressed_depends_on_steps_and_passes() -> None:
    channels = Channels(CompressionConfig.parse({"dp": "bf16"}))
    assert channels.tuner.idle_reason(0) == "it ended before its first optimizer step"
    channels = Channels(CompressionConfig.parse({"dp": "bf16", "start_step": 5}))
    reason = "no optimizer step was counted in the last {} passes with gradients"
    for _ in range(2):
        channels.note_pass()
    assert channels.tuner.idle_reason(0) == reason.format(2)
    assert channels.tuner.idle_reason(3) == "it ended at step 3, and start_step is 5"
    for _ in range(7):
        channels.note_pass()
    assert channels.tuner.idle_reason(3) == reason.format(9)
