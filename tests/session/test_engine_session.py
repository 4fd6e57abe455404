"""A toy engine on ``EngineSession``: a plain torch.distributed loop, without patches.

``Toy`` uses only the public interface: it averages gradients over its ranks through the session's
channel ``dp``, and passes names, groups and steps to the session.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import AllReduce
from hybridcomp.collectives.topology import ranks_of
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import AgreementError, CheckpointError
from hybridcomp.metric_names import follower_line
from hybridcomp.session import reporter
from hybridcomp.session.engine_session import EngineSession
from tests.ranks import RunRanks

WIDTH, STEPS = 40, 12
FEEDBACK = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, "min_bytes": 0}


class Toy:
    """A model, Adam, and gradients averaged in a single flat buffer."""

    def __init__(self, block: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH + 3), torch.nn.Tanh(), torch.nn.Linear(WIDTH + 3, WIDTH)
        )
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-2)
        config = None if block is None else CompressionConfig.parse(block)
        self.session = EngineSession.begin(config)
        self.worst = 0.0  # largest error of a sum, in units of its bound's scale
        if self.session is not None:
            self.session.name_parameters(self.model.named_parameters())
            self.session.place([ranks_of(None)])
            numel = sum(parameter.numel() for parameter in self.parameters)
            self.session.measure(None, torch.float32, numel)

    def step(self, index: int) -> float:
        """Train on a batch of this rank; return its loss."""
        generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
        values = torch.randn(8, WIDTH, generator=generator)
        if self.session is not None:
            self.session.begin_step()
        loss = (self.model(values) - values.roll(1, 1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in self.parameters]
        assert all(gradient is not None for gradient in gradients)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None])
        self.add_up(flat)
        parts = torch.split(flat / dist.get_world_size(), [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        if self.session is not None:
            self.session.end_step()
        return float(loss.detach())

    def add_up(self, flat: Tensor) -> None:
        """Sum ``flat`` over the ranks, in place, as the block says."""
        if self.session is None:
            dist.all_reduce(flat)
            return
        channel = self.session.channels["dp"]
        exact, scale = flat.clone(), self.scale(flat)
        dist.all_reduce(exact)
        message = AllReduce(
            numel=flat.numel(), dtype=flat.dtype, group=None, values=flat,
            parameters=self.session.pieces(self.parameters),
        )  # fmt: skip
        channel.run(
            message,
            native=lambda: dist.all_reduce(flat),
            encoded=lambda handle: handle.wait(),
        )
        self.worst = max(self.worst, float(((flat - exact).abs() / scale).max()))

    def scale(self, flat: Tensor) -> Tensor:
        """Return by element the sum over ranks of its parameter's largest magnitude."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        largest = torch.cat([part.abs().max().expand(part.numel()) for part in parts])
        dist.all_reduce(largest)
        return largest

    def train(self, first: int, last: int) -> list[float]:
        return [self.step(index) for index in range(first, last)]


def several(blocks: list[dict[str, Any] | None]) -> list[tuple[list[float], float, bool]]:
    return [losses(block) for block in blocks]


def losses(block: dict[str, Any] | None) -> tuple[list[float], float, bool]:
    """Return losses of a run, its largest error, and whether the codec was used."""
    toy = Toy(block)
    losses_of_run = toy.train(0, STEPS)
    encoded = False
    if toy.session is not None:
        entry = toy.session.channels.ledger.interval["dp", "forward"]
        encoded = entry.messages == STEPS and entry.native == 0
        assert toy.session.channels.step == STEPS
    return losses_of_run, toy.worst, encoded


def test_exact_codecs_change_nothing_and_bounds_hold(on_ranks: RunRanks) -> None:
    quiet = {"min_bytes": 0, "ledger": {"every": 1000}}
    bound = {"codec": "auto", "error_bound": 1e-2}
    blocks = [None, {"dp": "none", **quiet}, {"dp": "expcode", **quiet}, {"dp": bound, **quiet}]
    for native, none, lossless, lossy in on_ranks(2, several, blocks):
        assert none[0] == native[0] and not none[2]
        assert lossless[0] == native[0] and lossless[2] and lossless[1] == 0
        assert lossy[0] != native[0] and lossy[2]
        assert 0 < lossy[1] <= 1e-2
        assert lossy[0][-1] == pytest.approx(native[0][-1], rel=0.05)


def side_by_side() -> list[str]:
    """Return the lines of two models, and of the second alone, before and after another block."""
    block = {**FEEDBACK, "ledger": {"every": 1}}
    with mock.patch.object(reporter, "say") as said:
        first, second = Toy(block), Toy(block)
        assert first.session is not None
        first.step(0)
        second.step(0)
        reporter.say_kept(CompressionConfig.parse(block))
        reporter.say_kept(None)
        first.session.close()
        second.step(1)
        reporter.say_kept(CompressionConfig.parse({"dp": "bf16"}))
    return [call.args[0] for call in said.call_args_list]


def test_lines_of_several_models_say_whose_they_are(on_ranks: RunRanks) -> None:
    lines, _ = on_ranks(2, side_by_side)
    heads = ["model 1, step 1: ", "model 2, step 1: ", "hybridcomp.install: 2 model(s) that are "
             "attached keep", "step 2: ", "hybridcomp.install: 1 model(s) that"]  # fmt: skip
    assert all(line.startswith(head) for line, head in zip(lines, heads, strict=True)), lines


def resumed(folder: str) -> tuple[list[float], list[float], float]:
    """Run in one go, and with a save half-way and a new engine."""
    half = STEPS // 2
    toy = Toy(FEEDBACK)
    toy.train(0, half)
    assert toy.session is not None
    own = Path(folder) / f"toy_{dist.get_rank()}.pt"
    toy.session.save(folder)
    torch.save([toy.model.state_dict(), toy.optimizer.state_dict()], own)
    whole = toy.train(half, STEPS)
    again = Toy(FEEDBACK)
    model, optimizer = torch.load(own)
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    assert again.session is not None
    again.session.load(folder)
    assert again.session.channels.step == half
    residual = again.session.channels.residuals.norm()
    return whole, again.train(half, STEPS), residual


def test_a_resumed_run_is_the_unbroken_one(on_ranks: RunRanks, tmp_path: Path) -> None:
    for whole, after, residual in on_ranks(2, resumed, str(tmp_path)):
        assert residual > 0
        assert after == whole


def damaged(folder: str) -> tuple[int, int]:
    """Return how often a follower was resumed, from a sound checkpoint and from a damaged one."""
    toy, follower = Toy(FEEDBACK), mock.Mock()
    toy.train(0, 1)
    assert toy.session is not None
    toy.session.save(folder)
    toy.session.follow(follower)
    toy.session.load(folder)
    sound = follower.resume.call_count
    dist.barrier()
    if dist.get_rank() == 1:
        (Path(folder) / "hybridcomp_residuals_rank_00001.pt").write_bytes(b"")
    dist.barrier()
    with pytest.raises(CheckpointError, match="rank 1"):
        toy.session.load(folder)
    return sound, follower.resume.call_count - sound


def test_followers_keep_theirs_where_a_file_is_damaged(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(2, damaged, str(tmp_path)) == [(1, 0)] * 2


def followed() -> tuple[list[float], int]:
    """Return residual norms after a step, after the loss scale doubled, and after an overflow."""
    toy = Toy(FEEDBACK)
    toy.train(0, 1)
    assert toy.session is not None
    norms = [toy.session.channels.residuals.norm()]
    toy.session.end_step(loss_scale=2.0)
    norms.append(toy.session.channels.residuals.norm())
    toy.session.end_step(overflow=True, loss_scale=1.0)
    norms.append(toy.session.channels.residuals.norm())
    toy.session.close()
    return norms, toy.session.channels.step


def test_residuals_follow_the_loss_scale_and_overflows(on_ranks: RunRanks) -> None:
    for (first, doubled, dropped), step in on_ranks(2, followed):
        assert first > 0 and doubled == pytest.approx(2 * first)
        assert dropped == 0 and step == 3


def reported(jsonl: str) -> None:
    toy = Toy({**FEEDBACK, "ledger": {"jsonl": jsonl, "every": 4}})
    toy.train(0, STEPS)
    assert toy.session is not None
    toy.session.close()


def test_the_ledger_reports_without_an_engine(on_ranks: RunRanks, tmp_path: Path) -> None:
    jsonl = tmp_path / "ledger.jsonl"
    on_ranks(2, reported, str(jsonl))
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 8, 12, 12]
    assert records[-1]["summary"] and records[-1]["dimensions"]["dp"]["forward"]["messages"] == 24


def reported_by_one(folder: str) -> list[bool]:
    """Return whether ranks write the ledger if only this or only the other rank names its file."""
    for number in range(2):
        named = dist.get_rank() == number
        jsonl = f"{folder}/{number}.jsonl"
        toy = Toy({**FEEDBACK, "ledger": {"every": 4, **({"jsonl": jsonl} if named else {})}})
        toy.train(0, 4)
        assert toy.session is not None
        toy.session.close()
    return [Path(folder, f"{number}.jsonl").is_file() for number in range(2)]


def test_the_ledger_may_be_named_on_some_ranks_only(on_ranks: RunRanks, tmp_path: Path) -> None:
    """Scripts name it on the writing rank: no rank waits, and rank 0's name counts."""
    assert on_ranks(2, reported_by_one, str(tmp_path)) == [[True, False]] * 2


def disagreeing() -> str:
    try:
        Toy(FEEDBACK if dist.get_rank() else None)
    except AgreementError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_told(on_ranks: RunRanks) -> None:
    for text in on_ranks(2, disagreeing):
        assert "rank(s) 1 differ" in text


def test_rows_of_meetings_and_versions_are_told_in_words() -> None:
    """They had been bare keys: ``meet_wait_ms 31.47, drift 0.009614, full_versions 0``."""
    row = {"meetings": 2.0, "skipped": 0.0, "meet_wait_ms": 31.47, "drift": 0.0, "staleness": 0.0}
    assert follower_line(("sync", row)) == "sync: meetings 2, waited for others 31.47 ms, drift 0"
    row = {"version": 20.0, "versions": 2.0, "full_versions": 0.0, "changed_share": 0.0123,
           "bits_per_weight": 3.8, "wire_MB": 21.0, "link_gbps": 1.5}  # fmt: skip
    assert follower_line(("publish", row)) == (
        "publish: version 20, versions 2, changed 1.23 %, bits a weight 3.8, sent 21 MB, "
        "link 1.5 Gb/s"
    )
