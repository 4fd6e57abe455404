"""Saved and resumed: bit-identical on as many ranks, with the sum of residuals on others."""

from __future__ import annotations

import contextlib
import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

import hybridcomp
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.ddp.layout import BucketLayout
from hybridcomp.patches.torch.state.at_checkpoint import AtCheckpoint
from tests.patches.torch.trainer import (
    Job,
    Outcome,
    build,
    forget,
    optimizer_of,
    outcome,
    sum_of_residuals,
    train,
)
from tests.ranks import RunRanks
from tests.selection import by_day

BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 3, "error_feedback": True},
    "min_bytes": 0,
    "ledger": {"every": 1_000_000},
}
JOBS = {
    "FSDP2": Job(block={**BLOCK, "zero": {"codec": "blockint", "bits": 8}}),
    "DDP": Job(engine="ddp", block=BLOCK),
}
FEW = {
    name: replace(
        job, block={**(job.block or {}), "dp": {**BLOCK["dp"], "error_feedback": {"bits": bits}}}
    )
    for (name, job), bits in zip(JOBS.items(), (4, 8), strict=True)
}
HSDP = replace(JOBS["FSDP2"], replicas=2)
CUT, LAST = 4, 8


def started(job: Job) -> tuple[Any, Any, Attached]:
    model = build(job)
    attached = hybridcomp.attach(model, job.block)
    assert attached is not None
    return model, optimizer_of(job, model), attached


def save(folder: Path, model: Any, optimizer: Any) -> None:
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "hybridcomp": hybridcomp.stateful(model)}
    save_sharded(state, checkpoint_id=folder)


def load(folder: Path, model: Any, optimizer: Any, named: bool) -> None:
    weights, states = get_state_dict(model, optimizer)
    part = hybridcomp.stateful(model, checkpoint=folder if named else None)
    state = {"model": weights, "optimizer": states, "hybridcomp": part}
    load_sharded(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def unbroken(job: Job, folder: Path) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Train, saving in the middle in every way; return the end state, and residuals when saved."""
    model, optimizer, attached = started(job)
    train(job, model, optimizer, 0, CUT)
    save(folder, model, optimizer)
    hybridcomp.save_state(folder / "files")
    folder.joinpath(f"pickle{dist.get_rank()}").write_bytes(pickle.dumps(attached))
    missing = sum_of_residuals(attached)
    return ended(job, model, optimizer, attached), missing


def ended(job: Job, model: Any, optimizer: Any, attached: Attached) -> Outcome:
    found = outcome(train(job, model, optimizer, CUT, LAST), model, attached)
    hybridcomp.detach(model)
    forget()
    return found


def resumed(job: Job, folder: Path, way: str) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Resume from the middle; return the end state, and the loaded residuals."""
    model, optimizer, attached = started(job)
    load(folder, model, optimizer, named=way != "unnamed")
    if way in ("files", "pickle"):
        attached.channels.residuals.drop()
        attached.channels.step = 0
    if way == "files":
        hybridcomp.load_state(folder / "files")
    if way == "pickle":
        saved = pickle.loads(folder.joinpath(f"pickle{dist.get_rank()}").read_bytes())
        attached.load_state_dict(saved)
    missing = sum_of_residuals(attached)
    return ended(job, model, optimizer, attached), missing


def same(left: tuple[Outcome, Any], right: tuple[Outcome, Any]) -> bool:
    one, other = left[0], right[0]
    return (one.losses, one.parameters, one.step) == (other.losses, other.parameters, other.step)


@pytest.mark.parametrize("name", JOBS)
def test_resumed_is_unbroken(name: str, on_ranks: RunRanks, tmp_path: Path) -> None:
    job = JOBS[name]
    whole = on_ranks(2, unbroken, job, tmp_path)
    for way in ("named", "pickle") if name == "DDP" else ("unnamed", "files"):
        again = on_ranks(2, resumed, job, tmp_path, way)
        assert all(same(a, b) for a, b in zip(whole, again, strict=True)), way
    if name == "DDP":
        without = replace(job, block={**BLOCK, "dp": {"codec": "blockint", "bits": 3}})
        assert not same(whole[0], on_ranks(2, resumed, without, tmp_path, "unnamed")[0])


def told_of_dropped(job: Job, folder: Path) -> list[bool]:
    """Return by load, with error feedback and without, whether it says that residuals drop."""
    model, optimizer, _ = started(job)
    train(job, model, optimizer, 0, 2)
    hybridcomp.save_state(folder)
    found = []
    for block in (BLOCK, {**BLOCK, "dp": {"codec": "blockint", "bits": 3}}):
        hybridcomp.detach(model)
        assert hybridcomp.attach(model, block) is not None
        with contextlib.redirect_stdout(io.StringIO()) as out:
            hybridcomp.load_state(folder)
        found.append("WARNING: the checkpoint holds what error feedback" in out.getvalue())
    hybridcomp.detach(model)
    forget()
    return found


def test_a_job_that_drops_residuals_is_told(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(2, told_of_dropped, JOBS["DDP"], tmp_path) == [[False, True], [False, False]]


@pytest.mark.nightly
@pytest.mark.parametrize("name", FEW)
def test_residuals_in_few_bits_are_resumed_exactly(
    name: str, on_ranks: RunRanks, tmp_path: Path
) -> None:
    """4 bits under FSDP2 and 8 under DDP; on other ranks they are quantized again."""
    whole = on_ranks(2, unbroken, FEW[name], tmp_path)
    again = on_ranks(2, resumed, FEW[name], tmp_path, "unnamed")
    assert all(same(a, b) for a, b in zip(whole, again, strict=True))
    missing, (taken, *_) = (
        whole[0][1],
        (one[1] for one in on_ranks(3, resumed, FEW[name], tmp_path, "named")),
    )
    for parameter, tensor in missing.items():
        most = float(tensor.abs().max())
        torch.testing.assert_close(taken[parameter], tensor, rtol=0, atol=0.2 * most)


def load_unnamed(job: Job, folder: Path) -> str:
    """Return the error of a load on another number of ranks that does not name the folder."""
    model, optimizer, _ = started(job)
    with pytest.raises(ConfigError) as caught:
        load(folder, model, optimizer, named=False)
    hybridcomp.detach(model)
    forget()
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    by_day(
        [
            (JOBS["FSDP2"], JOBS["FSDP2"], (4, 2)),
            (JOBS["FSDP2"], JOBS["FSDP2"], (2, 3)),
            (HSDP, JOBS["FSDP2"], (4, 2)),
            (JOBS["DDP"], JOBS["DDP"], (4, 2)),
        ],
        [(HSDP, JOBS["FSDP2"], (4, 2))],
    ),
    ids=["FSDP2 4 to 2", "FSDP2 2 to 3", "HSDP 4 to FSDP2 2", "DDP 4 to 2"],
)
def test_sums_are_kept_on_other_ranks(
    before: Job, after: Job, ranks: tuple[int, int], on_ranks: RunRanks, tmp_path: Path
) -> None:
    old, new = ranks
    missing = on_ranks(old, unbroken, before, tmp_path)[0][1]
    if new < old:  # torch itself says which entry a rank beyond the old number lacks
        told = on_ranks(new, load_unnamed, after, tmp_path)
        assert all("checkpoint=folder" in error for error in told)
    results = on_ranks(new, resumed, after, tmp_path, "named")
    taken = results[0][1]
    assert set(taken) == set(missing)
    assert any(float(tensor.norm()) > 0 for tensor in missing.values())
    for name, tensor in missing.items():
        torch.testing.assert_close(taken[name], tensor, rtol=1e-4, atol=1e-7)
    assert results[0][0].step == LAST


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layout_of_a_bucket(world_size: int) -> None:
    """Chunks begin at multiples of 32, and all values come back."""
    numels = [100, 1, 64, 97]
    layout = BucketLayout(["a", "b", "c", "d"], numels, world_size)
    gradients = torch.arange(1.0, sum(numels) + 1)
    flat = torch.full((layout.numel,), torch.nan)  # leftovers of another message
    layout.pack(2.0 * gradients, 0.5, flat)
    assert layout.columns % 32 == 0 and flat.numel() == layout.columns * world_size
    back = torch.zeros_like(gradients)
    layout.unpack(flat, back)
    assert torch.equal(back, gradients)
    position, starts = 0, dict(zip("abcd", [0, 100, 101, 165], strict=True))
    for piece in layout.pieces:
        held = flat[position : position + piece.numel]
        if piece.name:
            first = starts[piece.name] + piece.offset
            assert torch.equal(held, gradients[first : first + piece.numel])
            assert position % 32 == 0
        else:
            assert not held.any()
        position += piece.numel
    assert position == flat.numel()


def metadata_on_one_rank(folder: str) -> tuple[str, list[str]]:
    """Return a rank's error if rank 1's folder has no metadata; else the entries it loads."""
    attached: Any = None
    save_sharded({"hybridcomp": {f"rank_{dist.get_rank():05d}": b"x"}}, checkpoint_id=folder)
    told = ""
    try:
        AtCheckpoint(attached, folder if dist.get_rank() == 0 else f"{folder}/not there")
    except CheckpointError as error:
        told = str(error)
    return told, sorted(AtCheckpoint(attached, folder).state_dict())


def test_metadata_that_one_rank_cannot_read_is_told_on_all(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    for rank, (told, entries) in enumerate(on_ranks(2, metadata_on_one_rank, str(tmp_path))):
        assert "rank 1: FileNotFoundError" in told and "rank 0: " not in told
        assert entries == [f"rank_{rank:05d}"]
