"""Residuals redistributed to another number of ranks: the job's sum is kept, and all is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.channels.checkpoint import save_load as checkpoint
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.channels.residuals.saved_residuals import held_in
from hybridcomp.collectives.hierarchical.discovery import Hierarchy
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import CheckpointError
from tests.channels import sent
from tests.ranks import RunRanks
from tests.selection import by_day

FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True}
NUMELS = {"a": 1000, "b": 77}
PIECES = [Piece(name, 0, numel) for name, numel in NUMELS.items()]
WHOLE = sum(NUMELS.values())


def channels_in(hierarchy: Hierarchy | Literal["low rank"], bits: int = 32) -> Channels:
    """Make channels; ``hierarchy``: "low rank" for powersgd, with gathers on two-rank nodes."""
    feedback = {**FEEDBACK, "error_feedback": True if bits == 32 else {"bits": bits}}
    block: dict[str, Any] = {
        "dp": feedback,
        "min_bytes": 0,
        "hierarchy": hierarchy,
        "ledger": {"every": 1000},
    }
    if hierarchy == "low rank":
        block |= {"dp": {"codec": "powersgd", "rank": 1}, "zero": "blockint", "hierarchy": 2}
    channels = Channels(CompressionConfig.parse(block))
    channels.numels = dict(NUMELS)
    channels.factors.learn("a", (40, 25))
    channels.place([tuple(range(dist.get_world_size()))])
    return channels


def sum_up(channels: Channels, flat: torch.Tensor) -> torch.Tensor:
    """Send one message; return the sum over the ranks."""
    channel = channels["dp"]
    codec = channel.codec(flat.numel(), flat.dtype, None)
    assert codec is not None
    sent.all_reduce(channel, flat, codec, None, pieces=PIECES).wait()
    return flat


def missing(channels: Channels) -> torch.Tensor:
    """Return the sum of all residuals of the job, by element."""
    found = {name: torch.zeros(numel) for name, numel in NUMELS.items()}
    for name, (offset, values) in held_in(channels.residuals.state_dict()):
        found[name][offset : offset + values.numel()] += values
    total = torch.cat(list(found.values()))
    dist.all_reduce(total)
    return total


def gradients(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(WHOLE, generator=generator)


def first_run(
    folder: str, hierarchy: Hierarchy, bits: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run two steps and save; return applied minus given gradients, and the residuals."""
    channels = channels_in(hierarchy, bits)
    owed = torch.zeros(WHOLE)
    for step in range(2):
        given = gradients(step)
        dist.all_reduce(given)
        owed += given - sum_up(channels, gradients(step))
    checkpoint.save(Path(folder), channels, 1.0, {})
    return owed, missing(channels)


def saved_again(folder: str, hierarchy: Hierarchy, times: int, bits: int = 32) -> torch.Tensor:
    """Load and save ``times`` times with no step in between; return the residuals."""
    for _ in range(times):
        channels = channels_in(hierarchy, bits)
        checkpoint.load(Path(folder), channels, 1.0)
        dist.barrier()
        for old in Path(folder).glob("hybridcomp_residuals_rank_*.pt"):
            if int(old.stem[-5:]) >= dist.get_world_size() and dist.get_rank() == 0:
                old.unlink()
        checkpoint.save(Path(folder), channels, 1.0, {})
    return missing(channels)


def flushed(
    folder: str, hierarchy: Hierarchy, bits: int = 32
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Load, send only residuals, losslessly; return the received sum, the remainder, memory."""
    from hybridcomp.codecs import LOSSLESS

    channels = channels_in(hierarchy, bits)
    checkpoint.load(Path(folder), channels, 1.0)
    held = channels.residuals.nbytes
    flat = torch.zeros(WHOLE)
    if dist.get_world_size() == 1:
        assert channels["dp"].codec(WHOLE, torch.float32, None) is LOSSLESS
    sent.all_reduce(channels["dp"], flat, LOSSLESS, None, pieces=PIECES).wait()
    if dist.get_world_size() == 1:
        assert channels["dp"].codec(WHOLE, torch.float32, None) is None, "native from now on"
    return flat, missing(channels), held


#: ranks and levels that save, and that resume
CHANGES: list[tuple[tuple[int, Any], tuple[int, Any]]] = [
    ((4, "none"), (2, "none")), ((4, 2), (4, "none")), ((4, "low rank"), (4, "low rank")),
    ((4, "none"), (1, "none")), ((2, "none"), (4, 2)), ((4, "none"), (4, 2)),
    ((4, 2), (2, "none")), ((2, "none"), (3, "none")), ((8, [2, 2]), (8, 2)),
    ((8, [2, 2]), (4, "none")), ((4, 2), (8, [2, 2])),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), by_day(CHANGES, CHANGES[:4]), ids=str)
def test_sums_stay_and_all_is_sent(
    old: tuple[int, Any], new: tuple[int, Any], on_ranks: RunRanks, tmp_path: Path
) -> None:
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    owed, held = on_ranks(old[0], first_run, str(tmp_path), old[1])[0]
    assert float(owed.norm()) > 1
    torch.testing.assert_close(held, owed, **near)
    for again in on_ranks(new[0], saved_again, str(tmp_path), new[1], 3):
        torch.testing.assert_close(again, owed, **near)
    results = on_ranks(new[0], flushed, str(tmp_path), new[1])
    for arrived, left, _ in results:
        torch.testing.assert_close(arrived, owed, **near)
        assert not left.any()
    if new[1] == "none" and new[0] != old[0]:
        assert sum(nbytes for *_, nbytes in results) == 4 * WHOLE, "no value is held twice"


@pytest.mark.parametrize("bits", by_day([8, 4], [4]))
def test_few_bits_stay_too(bits: int, on_ranks: RunRanks, tmp_path: Path) -> None:
    """From four ranks to two: the sum stays up to half a step, files and memory are small."""
    wide, few = tmp_path / "wide", tmp_path / "few"
    before = on_ranks(4, first_run, str(wide), "none")[0][0]
    owed, held = on_ranks(4, first_run, str(few), "none", bits)[0]
    # for each of two messages a rank leaves out at most 0.27, the owner of a sum twice as much;
    # rounding loses half a step of that, and so does loading
    top = {8: 127, 4: 7}[bits]
    near: dict[str, Any] = {"rtol": 0.0, "atol": 2 * (4 + 2 + 1) * 0.5 * 0.27 / top}
    torch.testing.assert_close(held, owed, **near)
    sizes = [sum(map(_nbytes_held, folder.glob("*rank*"))) for folder in (wide, few)]
    assert sizes[0] > 0.9 * sizes[1] * 32 / (bits + 0.5)
    for again in on_ranks(2, saved_again, str(few), "none", 1, bits):
        torch.testing.assert_close(again, owed, **near)
    for again in on_ranks(2, saved_again, str(wide), "none", 1, bits):  # an older checkpoint
        torch.testing.assert_close(again, before, **near)
    for arrived, left, nbytes in on_ranks(2, flushed, str(few), "none", bits):
        torch.testing.assert_close(arrived, owed, **near)
        assert not left.any()
        assert nbytes <= WHOLE / 2 * (bits + 0.5) / 8 + 64


def _nbytes_held(path: Path) -> int:
    """Return the bytes of a file's residuals."""
    stored = torch.load(path, weights_only=True)["residuals"]
    found = [values for hop in stored.values() for one in hop.values() for _, values in one]
    return sum((v["data"] if isinstance(v, dict) else v).nbytes for v in found)


def a_step_later(folder: str, hierarchy: Hierarchy) -> tuple[torch.Tensor, torch.Tensor]:
    """Load and take a step; return given minus applied gradients, and the residuals."""
    channels = channels_in(hierarchy)
    checkpoint.load(Path(folder), channels, 1.0)
    given = gradients(2)
    dist.all_reduce(given)
    return given - sum_up(channels, gradients(2)), missing(channels)


@pytest.mark.parametrize(("hierarchy", "ranks"), [(2, 4), ("low rank", 4), ([2, 2], 8)], ids=str)
def test_a_step_takes_each_value_once(
    hierarchy: Hierarchy, ranks: int, on_ranks: RunRanks, tmp_path: Path
) -> None:
    owed, _ = on_ranks(ranks // 2, first_run, str(tmp_path), hierarchy)[0]
    for more, held in on_ranks(ranks, a_step_later, str(tmp_path), hierarchy):
        torch.testing.assert_close(held, owed + more, rtol=1e-4, atol=1e-5)


def strike(folder: str, name: str, offset: int, value: float) -> str:
    """Put a slice with a valid checksum into rank 1's file of four; return the load error."""
    path = Path(folder, "hybridcomp_residuals_rank_00001.pt")
    if dist.get_rank() == 0:
        state = torch.load(path, weights_only=True)
        state["residuals"]["sender"][name] = [(offset, torch.full((3,), value))]
        torch.save(state, path)
    dist.barrier()
    channels = channels_in("none")
    try:
        checkpoint.load(Path(folder), channels, 1.0)
    except CheckpointError as error:
        assert not channels.residuals.nbytes
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "offset", "value", "told"),
    [("a", 10**9, 1.0, "'a'"), ("a", 0, float("nan"), "rank_00001.pt"), ("c", 0, 1.0, "")],
)
def test_values_that_nothing_has_left_are_refused(
    ranks: int, name: str, offset: int, value: float, told: str, on_ranks: RunRanks, tmp_path: Path
) -> None:
    on_ranks(4, first_run, str(tmp_path), "none")
    for text in on_ranks(ranks, strike, str(tmp_path), name, offset, value):
        assert told in text and bool(told) == bool(text)


def older_file(folder: str) -> str:
    """Replace rank 3's file by an earlier step's, as after a failed save; return the error."""
    path = Path(folder, "hybridcomp_residuals_rank_00003.pt")
    if dist.get_rank() == 0:
        state = torch.load(path, weights_only=True)
        torch.save({**state, "step": state["step"] + 1}, path)
    dist.barrier()
    channels = channels_in("none")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(Path(folder), channels, 1.0)
    return str(caught.value)


def test_files_of_two_saves_are_no_checkpoint_on_fewer_ranks(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    on_ranks(4, first_run, str(tmp_path), "none")
    for text in on_ranks(2, older_file, str(tmp_path)):
        assert "rank_00003.pt" in text and "not saved together" in text and "Restore" in text
