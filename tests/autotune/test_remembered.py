"""Results of the last run on the same machines are reused, verified in passing, or rejected."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridcomp.autotune import recheck, remembered, remembered_file
from hybridcomp.autotune.remembered import STEPS
from hybridcomp.autotune.remembered_file import DAYS, FoundVerdicts
from hybridcomp.autotune.verdicts import WARM
from hybridcomp.channels import Channels, StepTraffic
from hybridcomp.config import CompressionConfig
from tests.ranks import RunRanks
from tests.stand_ins.link_clock import clock

EIGHT = {"codec": "blockint", "bits": 8, "when": "auto"}
BLOCK = {"dp": EIGHT, "zero": EIGHT, "min_bytes": 0, "hierarchy": "none"}
CPU = torch.device("cpu")
#: trials in which encoding wins or loses by so much that steps are not compared, and a close trial
CODED, NATIVE, CLOSE = (0.09, 0.01), (0.01, 0.09), (0.012, 0.010)
#: steps after which a run has written its results
WRITTEN = WARM + STEPS + 1


@contextmanager
def kept_in(folder: str) -> Iterator[None]:
    """Set the cache folder on rank 0; no other rank may read it."""
    named = {"HYBRIDCOMP_CACHE": folder if dist.get_rank() == 0 else "/nobody/reads/this"}
    with patch.dict(os.environ, named):
        yield


def run(folder: str, times: tuple[float, float], **how: Any) -> dict[str, Any]:
    """Run with trials that take ``times``; rank 1 is slightly slower.

    ``how`` (all optional): ``steps``; seconds per step, ``step_s``; ``costs``: added seconds of an
    encoded step; ``numel`` of a message; ``block``; ``model``: parameter sizes; ``stored`` in a
    checkpoint.
    """
    channels = Channels(CompressionConfig.parse({**BLOCK, **how.get("block", {})}))
    channels.numels.update(how.get("model", {"weight": 5000}))
    sent: dict[Any, StepTraffic] = {"dp": StepTraffic((how.get("numel", 3000), 900), "own")}
    seconds, modes = 0.0, []
    with kept_in(folder), clock(*times) as sizes, patch.object(recheck, "now", lambda: seconds):
        lines = channels.tuner.run_autotune(None, torch.bfloat16, CPU, 5000, sent)
        if "stored" in how:
            lines += channels.tuner.resume(how["stored"])
        for step in range(how.get("steps", WRITTEN)):
            channels.tuner.open_step(CPU)
            modes.append([not channels.verdicts.native(name, step) for name in ("dp", "zero")])
            seconds += how.get("step_s", 1.0) * (1 + dist.get_rank() / 100)
            seconds += how.get("costs", 0.0) * sum(modes[-1])
            channels.step = step + 1
            lines += channels.close_step(False, CPU)
            seconds += 60.0 * step  # an evaluation
    return {"trials": sizes, "lines": lines, "modes": modes, "state": channels.verdicts.state(),
            "timed": channels.tuner.open_step(CPU)}  # fmt: skip


def kept(folder: str, times: tuple[float, float], how: dict[str, Any]) -> dict[str, Any]:
    return run(folder, times, **how)


def run_elsewhere(folder: str, times: tuple[float, float]) -> dict[str, Any]:
    """Run on ranks with different host names."""
    with patch.object(platform, "node", lambda: f"host{dist.get_rank()}"):
        return run(folder, times)


def run_newer(folder: str, times: tuple[float, float]) -> dict[str, Any]:
    """Run with another version of hybridcomp on rank 1."""
    with patch.object(remembered, "versions", lambda: {"torch": f"9.{dist.get_rank()}"}):
        return run(folder, times)


def said(outcome: dict[str, Any], words: str) -> list[str]:
    return [line for line in outcome["lines"] if words in line]


@pytest.mark.parametrize("times", [CODED, NATIVE])
def test_the_next_run_sends_no_trial(
    on_ranks: RunRanks, tmp_path: Path, times: tuple[float, float]
) -> None:
    first = on_ranks(2, run, str(tmp_path), times)
    (path,) = tmp_path.iterdir()
    (line,) = said(first[0], "remembered for the next run")
    assert line.startswith("dp, zero: ") and str(path) in line
    before = path.read_bytes()
    other = NATIVE if times == CODED else CODED  # unused
    for old, result in zip(first, on_ranks(2, run, str(tmp_path), other), strict=True):
        assert old["trials"] and result["trials"] == []
        assert result["modes"] == old["modes"] == [[times == CODED] * 2] * WRITTEN
        assert len(said(result, "on the same machines")) == 2
        assert "checked in passing" in result["lines"][0] and not result["timed"]
        assert all(row["checked"] for row in result["state"].values())
    assert path.read_bytes() == before, "it was found once, and grows old"


@pytest.mark.parametrize(("step_s", "doubted"), [(1.1, False), (1.3, True), (0.7, True)])
def test_steps_of_another_length_are_compared(
    on_ranks: RunRanks, tmp_path: Path, step_s: float, doubted: bool
) -> None:
    """This also holds after a clear trial."""
    on_ranks(2, run, str(tmp_path), NATIVE)
    (path,) = tmp_path.iterdir()
    before = json.loads(path.read_text())
    how: dict[str, Any] = {"step_s": step_s, "steps": WRITTEN + 20 + STEPS, "costs": step_s / 5}
    for result in on_ranks(2, kept, str(tmp_path), CODED, how):
        assert result["trials"] == []
        assert bool(said(result, "compared anew")) == doubted
        assert ([True, True] in result["modes"]) == doubted, "natively before and after"
        assert result["modes"][:WARM] == [[False, False]] * WARM == result["modes"][-WARM:]
        assert all(row["checked"] for row in result["state"].values()) and not result["timed"]
    after = json.loads(path.read_text())
    assert before["step_s"] == pytest.approx(1.01)
    assert after["step_s"] == pytest.approx(1.01 * step_s if doubted else 1.01)
    assert (after["written"] > before["written"]) == doubted


def test_what_a_comparison_changed_is_remembered(on_ranks: RunRanks, tmp_path: Path) -> None:
    """Encoding won a close trial, and lost each pair of steps."""
    how: dict[str, Any] = {"steps": WRITTEN + 10, "costs": 0.3}
    first = on_ranks(2, kept, str(tmp_path), CLOSE, how)
    for old, result in zip(first, on_ranks(2, kept, str(tmp_path), CLOSE, how), strict=True):
        assert old["modes"][0] == [True, True] and old["modes"][-1] == [False, False]
        assert result["trials"] == [] and result["modes"] == [[False, False]] * how["steps"]


def test_a_run_that_ends_before_it_knows_leaves_nothing(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(2, kept, str(tmp_path), CLOSE, {"steps": WARM + 5})
    on_ranks(2, kept, str(tmp_path), CODED, {"steps": WRITTEN - 1})
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_is_another_one_is_measured(on_ranks: RunRanks, tmp_path: Path) -> None:
    """It uses a separate file and logs nothing."""
    on_ranks(2, run, str(tmp_path), CODED)
    for how in ({"block": {"min_bytes": 1}}, {"model": {"weight": 5001}}):
        for result in on_ranks(2, kept, str(tmp_path), NATIVE, how):
            assert result["trials"] and result["modes"][0] == [False, False]
            assert not said(result, "measured anew")
    assert len(list(tmp_path.iterdir())) == 3


def test_other_messages_machines_and_versions_are_measured_anew(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    on_ranks(2, run, str(tmp_path), CODED)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    for result in on_ranks(2, kept, str(tmp_path), NATIVE, {"numel": 3001}):
        assert result["modes"][0] == [False, True], "the gathers are the same"
        (sentence,) = said(result, "are not those of the last run")
        assert sentence.startswith("dp: measured anew")
    for function in (run_elsewhere, run_newer):
        path.write_bytes(before)
        for result in on_ranks(2, function, str(tmp_path), NATIVE):
            assert result["modes"][0] == [False, False]
            (sentence,) = said(result, "are not those of the last run")
            assert sentence.startswith("dp, zero: measured anew")


def test_a_checkpoint_counts_and_the_file_does_not(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(2, run, str(tmp_path), CODED)
    stored = {"pays": False, "nbytes": 10, "native_s": 0.1, "coded_s": 0.2, "checked": True}
    how: dict[str, Any] = {
        "stored": {"dp": stored, "zero": stored},
        "step_s": 9.0,
        "steps": WRITTEN + 5,
    }
    for result in on_ranks(2, kept, str(tmp_path), CODED, how):
        assert result["modes"] == [[False, False]] * how["steps"] and not result["timed"]
        assert len(said(result, "stays native, as in the run that is continued")) == 2


def test_it_is_switched_off(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(2, run, str(tmp_path), CODED)
    (path,) = tmp_path.iterdir()
    for result in on_ranks(2, kept, str(tmp_path), NATIVE, {"block": {"remember": False}}):
        assert result["trials"] and not result["timed"]
    for result in on_ranks(2, run, "", NATIVE):
        assert result["trials"] and not result["timed"]
    assert [path] == list(tmp_path.iterdir())


#: changes that make a file useless, and the reason that is reported
SPOILT: list[tuple[Callable[[str], str], str]] = [
    (lambda text: text[:40], "cannot be read"),
    (lambda text: "[" * 100_000, "cannot be read"),
    (lambda text: text.replace('"format": 1', '"format": 2'), "is damaged, or of another"),
    (lambda text: text.replace('"pays": true', '"pays": 3'), "is damaged"),
    (lambda text: text.replace('"native_s": 0.09', '"native_s": NaN'), "is damaged"),
    (lambda text: text.replace('"step_s": ', '"step_s": -'), "is damaged"),
    (lambda text: text.replace('"written": 1', '"written": '), f"{DAYS} days are the limit"),
    (lambda text: text.replace('"written": 1', '"written": 3'), f"{DAYS} days are the limit"),
]


def test_a_useless_file_is_reported_and_replaced(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(2, run, str(tmp_path), CODED)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    for spoil, why in SPOILT:
        path.write_text(spoil(text))
        reason = remembered_file.read(path)
        assert path.read_text() != text
        assert isinstance(reason, str) and why in reason and str(path) in reason
    for result in on_ranks(2, run, str(tmp_path), NATIVE):
        assert result["trials"] and result["modes"][0] == [False, False]
        assert said(result, f"measured anew: {reason}")
    assert isinstance(remembered_file.read(path), FoundVerdicts)


def test_a_folder_that_cannot_be_written_is_said(on_ranks: RunRanks, tmp_path: Path) -> None:
    """A file takes the folder's place, so that not even root can write."""
    (tmp_path / "file").write_text("")
    first, second = on_ranks(2, run, str(tmp_path / "file"), CODED)
    (sentence,) = said(first, "not remembered for the next run")
    assert sentence.startswith("dp, zero: ") and str(tmp_path / "file") in sentence
    assert len(said(first, "measured anew")) == 1 and not said(second, "not remembered")


def test_two_jobs_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "verdicts-x.json"
    row = {"pays": True, "nbytes": 1, "native_s": 0.2, "coded_s": 0.1}
    texts = [FoundVerdicts(float(n), {"dp": "x" * 50_000 * n}, {"dp": row}) for n in (1, 2)]
    writers = [
        threading.Thread(target=lambda text: [remembered_file.write(path, text) for _ in range(50)],
                         args=(text,)) for text in texts
    ]  # fmt: skip
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        verdicts = remembered_file.read(path)
        assert verdicts is None or isinstance(verdicts, FoundVerdicts), verdicts
        assert verdicts is None or len(verdicts.facts["dp"]) == 50_000 * verdicts.step_s
    assert list(tmp_path.iterdir()) == [path]


def test_who_writes_deletes_what_is_too_old(tmp_path: Path) -> None:
    names = {"verdicts-a.json": DAYS + 1, "verdicts-b.json": DAYS - 1, "verdicts-c.part": 2,
             "verdicts-d.part": 0, "cluster.json": 400}  # fmt: skip
    for name, days in names.items():
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (0, time.time() - days * 24 * 3600))
    assert remembered_file.write(tmp_path / "verdicts-e.json", FoundVerdicts()) == ""
    left = {"verdicts-b.json", "verdicts-d.part", "cluster.json", "verdicts-e.json"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_where_the_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDCOMP_CACHE", str(tmp_path))
    assert remembered_file.path_of("x") == tmp_path / "verdicts-x.json"
    monkeypatch.setenv("HYBRIDCOMP_CACHE", "")
    assert remembered_file.path_of("x") is None
    monkeypatch.delenv("HYBRIDCOMP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert remembered_file.folder() == tmp_path / "hybridcomp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert remembered_file.folder() == tmp_path / ".cache" / "hybridcomp"
