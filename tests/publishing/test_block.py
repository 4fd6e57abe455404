"""The block's key ``publish``: accepted values, and attached engines that publish automatically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hybridcomp
from hybridcomp.config import CompressionConfig, describe, idle_notes
from hybridcomp.job import waits
from hybridcomp.publishing.receiver import WeightReceiver
from tests.patches.torch.trainer import Job as TorchJob
from tests.patches.torch.trainer import build, optimizer_of
from tests.patches.torch.trainer import train as train_torch
from tests.publishing.made import error_of, received, same
from tests.publishing.test_torch import whole
from tests.ranks import RunRanks, run_ranks
from tests.training.trainer import Job, make_engine, parameters, train, train_step

STEPS = 6


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "compression.publish.to: found nothing"),
        ({"to": "s3://bucket/x"}, 'compression.publish.to: found "s3://bucket/x"; expected a fold'),
        ({"to": "file://host/x"}, "expected a folder, file:///folder"),
        ({"to": "file:///x#1"}, "write %3F and %23"),
        ({"to": "/x", "every": 0}, "compression.publish.every: found 0"),
        ({"to": "/x", "wait": True, "limit_s": 5}, "compression.publish.limit_s: found 5"),
        ({"to": "/x", "anchor": 3}, "did you mean 'anchor_every'?"),
        ({"to": "/x", "dtype": "fp32"}, "compression.publish.dtype: found"),
    ],
)
def test_mistakes_are_one_line_with_the_key(settings: dict[str, Any], text: str) -> None:
    assert text in error_of(lambda: CompressionConfig.parse({"publish": settings}))


def test_a_block_may_only_publish() -> None:
    block = CompressionConfig.parse({"publish": {"to": "file:///weights", "every": 2}})
    assert any(line.startswith("publish") and "every 2 step(s)" in line for line in describe(block))
    assert idle_notes(block) == []
    other = CompressionConfig.parse({"publish": {"to": "file:///weights"}})
    assert block.digest() != other.digest()


def in_deepspeed(folder: Path) -> list[Any]:
    """Train stages 1 and 3 with a block that publishes every 2 steps; save in the middle."""
    found: list[Any] = []
    for stage in (1, 3):
        to, log = folder / f"to{stage}", folder / f"ledger{stage}.jsonl"
        publish = {"to": to.as_uri(), "every": 2, "anchor_every": 50, "wait": True}
        block = {"publish": publish, "ledger": {"every": 2, "jsonl": str(log)}}
        native = train(Job(stage=stage, dtype="bf16", steps=STEPS, lr=1e-3))
        job = Job(stage=stage, dtype="bf16", lr=1e-3, block=block)
        engine = make_engine(job)
        losses = [train_step(engine, job, step) for step in range(4)]
        engine.save_checkpoint(str(folder / f"checkpoint{stage}"))
        engine.destroy()
        engine = make_engine(job)
        engine.load_checkpoint(str(folder / f"checkpoint{stage}"))
        losses += [train_step(engine, job, step) for step in range(4, STEPS)]
        receiver = hybridcomp.WeightReceiver(to)
        applied = receiver.update()
        assert applied is not None
        found.append(
            (losses == native.losses, same(receiver, parameters(engine)), applied.versions,
             [json.loads(path.read_text())["parent"] for path in sorted(to.glob("v*.json"))],
             [json.loads(path.read_text())["step"] for path in sorted(to.glob("v*.json"))])
        )  # fmt: skip
        engine.destroy()
    return found


def test_deepspeed_publishes_by_itself_and_a_resumed_job_goes_on(tmp_path: Path) -> None:
    """Losses equal those of a job without a block, bit for bit."""
    expected = (True, True, 3, [None, 1, 2], [2, 4, 6])
    assert run_ranks(2, in_deepspeed, tmp_path, timeout=600.0) == [[expected] * 2] * 2
    rows = [json.loads(line) for line in (tmp_path / "ledger1.1.jsonl").read_text().splitlines()]
    first = rows[0]["publish"]
    assert (first["version"], first["versions"], first["full_versions"]) == (1, 1, 1)
    assert first["changed_share"] == 1.0 and 8 < first["bits_per_weight"] < 30
    rows = [json.loads(line) for line in (tmp_path / "ledger1.jsonl").read_text().splitlines()]
    last = rows[0]["publish"]
    assert (last["version"], last["full_versions"]) == (3, 0)
    assert 0 < last["changed_share"] < 1 and min(last[f"{n}_ms"] for n in ("encode", "wire")) > 0


def under_torch(job: TorchJob, folder: Path, wait: bool) -> list[Any]:
    """Attach a model that publishes after its steps; return two such runs, and native losses."""
    native = build(job)
    expected = train_torch(job, native, optimizer_of(job, native), 0, STEPS)
    model = build(job)
    optimizer = optimizer_of(job, model)
    block = {"publish": {"to": str(folder), "wait": wait}, "ledger": {"every": 3}}
    hybridcomp.attach(model, block)
    losses = train_torch(job, model, optimizer, 0, 3)
    hybridcomp.detach(model)
    dist.barrier()  # rank 0 has written the manifest
    attached = hybridcomp.attach(model, block)
    losses += train_torch(job, model, optimizer, 3, STEPS)
    assert attached is not None
    events = dict(attached.take_events())
    expected_weights = whole(model)
    hybridcomp.detach(model)
    dist.barrier()
    receiver = received(folder)
    told = events["train/compression/publish/version"]
    return [losses == expected, same(receiver, expected_weights), receiver.version, told]


@pytest.mark.parametrize(("engine", "wait"), [("ddp", True), ("fsdp2", False)])
def test_attached_models_publish_by_themselves(
    on_ranks: RunRanks, tmp_path: Path, engine: Any, wait: bool
) -> None:
    """The last version of a report is the one before the pending background version."""
    job = TorchJob(engine, bf16=True)
    told = float(STEPS - (not wait))
    assert on_ranks(2, under_torch, job, tmp_path, wait) == [[True, True, STEPS, told]] * 2
    full = [json.loads(path.read_text())["parent"] is None for path in tmp_path.glob("v*.json")]
    assert sum(full) == 1  # the re-attached model continues the chain


def test_a_folder_without_a_version_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "NOTICE_S", 0.0)
    receiver = WeightReceiver(tmp_path / "wieghts")
    assert receiver.update() is None and receiver.update() is None
    told = capsys.readouterr().out
    assert told.startswith("[hybridcomp] receiver: no version in ")
    assert f"{tmp_path / 'wieghts'} yet, after 0 s; the folder does not exist" in told
    (tmp_path / "there").mkdir()
    receiver = WeightReceiver(tmp_path / "there")
    receiver.update()
    assert capsys.readouterr().out.rstrip().endswith("there yet, after 0 s")
