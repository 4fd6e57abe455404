"""Islands as jobs under DDP, compared with parts of one job; ended, hung, joining, diverged."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import io
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import hybridcomp
from hybridcomp.errors import AgreementError, CheckpointError
from hybridcomp.sync import claimed_folders
from hybridcomp.sync.claimed_folders import claim
from tests.ranks import run_ranks
from tests.sync.jobs import FED_BACK, block, rendezvous, start
from tests.sync.torch_job import Job

#: seconds that single-rank islands wait for a missing one; a busy one needs less
TIMEOUT_S = 8.0
#: jobs that live until their process ends
KEPT: list[Job] = []
#: the averaged weights, by meeting
Starts = dict[int, Tensor]


def lives(
    address: str,
    number: int,
    until: str,
    fate: str = "",
    when: int = 0,
    rule: Mapping[str, Any] = FED_BACK,
) -> Starts:
    """Train a single-rank island until ``until`` has been at 5 meetings.

    Returns the start copies after each meeting. ``fate``: its failure after meeting ``when``.
    """
    began = time.perf_counter()
    where = block(address, TIMEOUT_S, 3, f"i{number}", **rule)
    job = Job(where, first=number, seed=number).build()
    found: Starts = {}
    last, seen = -1, 0
    while seen < 5:
        job.train(1)
        of = job.job_meetings
        if of.membership.last.number != last:
            last = of.membership.last.number
            seen += until in of.membership.last.present
            found[last] = torch.cat([part.fragment.start for part in of.parts])
            if fate and last == when:
                befall(fate, job)
                fate = ""
    row = of.row()
    assert row is not None and row["islands"] == 3
    assert 0 < row["meet_wait_ms"] < 1e3 * (time.perf_counter() - began)
    hybridcomp.detach(job.model)
    return found


def befall(fate: str, job: Job) -> None:
    """End this process, hang for longer than the others wait, or spoil its weights."""
    if fate == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate == "hangs":
        time.sleep(1.5 * TIMEOUT_S)
    else:
        with torch.no_grad():
            next(iter(job.model.parameters())).mul_(1e4 if fate == "goes far" else torch.nan)


def alike(*islands: Starts) -> int:
    """Return how many meetings all have in common; their bits agree after each."""
    first, *others = islands
    shared = [number for number in first if all(number in other for other in others)]
    for number in shared:
        assert all(torch.equal(first[number], other[number]) for other in others), number
    return len(shared)


def goes_far(address: str, number: int, rule: dict[str, Any]) -> tuple[Starts, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = lives(address, number, "i0", "goes far" if number == 1 else "", 2, rule)
    return found, said.getvalue()


@pytest.mark.nightly
def test_an_outlier_does_not_count_and_goes_back() -> None:
    rule = {**FED_BACK, "outlier": 20.0}
    with rendezvous() as address, ThreadPoolExecutor(3) as pool:
        jobs = [start(pool, 1, goes_far, address, number, rule) for number in range(3)]
        ((one, said),), ((two, _),), ((three, _),) = (job.result() for job in jobs)
    assert alike(one, two, three) == len(one) == len(two)
    assert max(float(start.abs().max()) for start in one.values()) < 10
    words = r"meeting 3 of 3 island\(s\): i1 moved more than 20 times as far as the median of all"
    assert re.search(words, said) and said.count("did not count") == 1, said


@pytest.mark.nightly
def test_one_hangs_and_comes_back() -> None:
    with rendezvous() as address, ThreadPoolExecutor(3) as pool:
        one = start(pool, 1, lives, address, 0, "i1#2")
        two = start(pool, 1, lives, address, 1, "i1#2", "hangs", 2)
        three = start(pool, 1, lives, address, 2, "i1#2")
        (first,), (second,), (third,) = one.result(), two.result(), three.result()
    assert first.keys() == third.keys() and alike(first, third) == len(first)
    assert 3 not in second and alike(first, second) == len(second) > 5


def ends(address: str) -> int:
    """Train an island, and end the process as a script does; return its last meeting."""
    job = Job(block(address, at_start=1, **FED_BACK)).build().train(4)
    KEPT.append(job)
    return job.job_meetings.membership.last.number


def test_a_run_begins_where_the_islands_of_another_have_ended() -> None:
    """A script without hybridcomp calls detaches nothing: its exit announces that it left."""
    with rendezvous() as address:
        assert run_ranks(1, ends, address) == [2]
        assert run_ranks(1, ends, address) == [5]


def counted(address: str) -> None:
    """Check that the ledger counts the bytes of messages to the rendezvous."""
    job = Job(block(address, at_start=1, **FED_BACK)).build().train(1)
    sent, send = [], job.job_meetings.membership.transfer.send

    def sending(own: str, number: int, message: memoryview) -> None:
        sent.append(message.nbytes)
        send(own, number, message)

    with mock.patch.object(job.job_meetings.membership.transfer, "send", sending):
        job.train(6)
    assert job.attached is not None and len(sent) == 3
    entry = job.attached.channels.ledger.interval["sync", "forward"]
    assert (entry.messages, entry.wire_nbytes) == (3, sum(sent))
    assert entry.raw_nbytes == 0  # without islands the job is this rank alone, which sends nothing
    hybridcomp.detach(job.model)


def test_the_ledger_counts_what_is_sent() -> None:
    with rendezvous() as address:
        run_ranks(1, counted, address)


def dropped(address: str) -> list[int]:
    """Return the last meetings of two models, the first of which is dropped silently."""
    found = []
    for seed in range(2):
        job = Job(block(address, at_start=1, **FED_BACK), seed=seed).build().train(4)
        found.append(job.job_meetings.membership.last.number)
        del job
        gc.collect()
    return found


def test_a_model_that_is_dropped_leaves_the_run() -> None:
    with rendezvous() as address:
        assert run_ranks(1, dropped, address) == [[2, 5]]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "H": ({"every": 3}, r"^compression.sync.every: island x has 3, and the run .* with 2; start"),
    "codec": ({"bits": 3}, r"^compression.sync.codec: island x has 'blockint.bits=3.'"),
    "outer": ({"outer": {"lr": 0.5}}, r"^compression.sync.lr: island x has 0.5"),
}


def refused(address: str) -> None:
    """Begin a run of one island, which others cannot join."""

    def made(**sync: Any) -> Job:
        name = "x" if sync else "first"
        return Job(block(address, 8.0, 1, name, **{**FED_BACK, **sync})).build()

    job = made().train(4)
    assert job.job_meetings.membership.last.number == 2
    for sync, words in BAD.values():
        with pytest.raises(AgreementError, match=words) as error:
            made(**sync).train(1)
        assert "\n" not in str(error.value)
    wider = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert hybridcomp.attach(wider, block(address, 8.0, 1, **FED_BACK)) is not None
    with pytest.raises(AgreementError, match=r"^trained weights: island 0 has 6, and"):
        wider(torch.ones(1, 2))
    job.train(2)
    assert job.job_meetings.membership.last.number == 3


def narrower(address: str) -> None:
    job = Job(block(address, 8.0, 1, **FED_BACK)).build()
    with pytest.raises(AgreementError, match=r"^ranks of an island: island .* has 2, and"):
        job.train(1)


def test_what_does_not_fit_is_named_in_one_line() -> None:
    with rendezvous() as address:
        run_ranks(1, refused, address)
        run_ranks(2, narrower, address)


def saves(address: str, name: str, folder: Path) -> list[str]:
    """Save in another island's folder, in every way; return the errors."""
    job = Job(block(address, at_start=1, name=name, **FED_BACK)).build().train(2)
    told = []

    def kept(save: Callable[[], object]) -> None:
        try:
            save()
            told.append("")
        except (CheckpointError, dcp.api.CheckpointException) as error:
            told.append(next(line for line in str(error).splitlines() if "would" in line))

    def state() -> dict[str, Any]:
        return {"hybridcomp": hybridcomp.stateful(job.model)}

    saver: Any = dcp  # torch does not declare its functions as exported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's: the folder exists
        kept(lambda: saver.save(state(), checkpoint_id=folder / "dcp"))
        kept(lambda: saver.async_save(state(), checkpoint_id=folder / "async").result())
    kept(lambda: hybridcomp.save_state(folder / "files"))
    kept(lambda: job.job_meetings.claim("s3://bucket/checkpoints"))
    prepare = dcp.filesystem.FileSystemWriter.prepare_local_plan
    hybridcomp.detach(job.model)
    assert prepare != dcp.filesystem.FileSystemWriter.prepare_local_plan
    return told


@pytest.mark.nightly
def test_islands_do_not_save_into_one_folder(tmp_path: Path) -> None:
    with rendezvous() as address:
        for _ in range(2):  # the second save overwrites its own
            for told in run_ranks(2, saves, address, "a", tmp_path):
                assert told == [""] * 4
        told, _ = run_ranks(2, saves, address, "b", tmp_path)
    for where, text in zip(("dcp", "async", "files", "s3://.*"), told, strict=True):
        words = rf"{where} has what island a of this run has saved, and island b would overwrite"
        assert re.search(words, text), (where, text)
    with rendezvous() as address:  # another run may
        assert run_ranks(2, saves, address, "b", tmp_path) == [[""] * 4] * 2


def claims(folder: Path, name: str) -> bool:
    try:
        claim(folder, "run", name)
    except CheckpointError:
        return False
    return True


def test_of_islands_that_claim_a_folder_at_once_one_has_it(tmp_path: Path) -> None:
    for number in range(20):
        with ThreadPoolExecutor(8) as pool:
            names = list("abcdefgh")
            found = list(pool.map(functools.partial(claims, tmp_path / str(number)), names))
        assert found.count(True) == 1, found


def test_a_claim_that_was_never_written_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job ended between creating and writing the file, or the disk was full."""
    monkeypatch.setattr(claimed_folders, "WRITING_S", 0.05)
    file = tmp_path / claimed_folders.FILES.replace("*", "run")
    file.touch()
    assert claims(tmp_path, "a") and not claims(tmp_path, "b")
    file.unlink()

    class Full(io.StringIO):
        """A file on a full disk."""

        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(descriptor: int, *_: Any, **__: Any) -> Full:
        os.close(descriptor)
        return Full()

    with monkeypatch.context() as patch:
        patch.setattr("hybridcomp.sync.claimed_folders.os.fdopen", full)
        with pytest.raises(CheckpointError, match=rf"{file.name} cannot be written .*No space"):
            claim(tmp_path, "run", "a")
    assert not file.exists() and claims(tmp_path, "b")
    with pytest.raises(CheckpointError, match="cannot be written"):
        claim(file / "below", "run", "a")
