"""Pipelines over slices of a sequence against the whole model: gradients, bits, bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hybridcomp.channels import Channels
from hybridcomp.codecs import make_codec
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.nn.slices import KVCache, SlicePipeline, attend
from tests.ranks import RunRanks

WIDTH, HEADS, WORDS, LENGTH, BATCH, STAGES = 16, 2, 11, 24, 2, 3
SLICES = (9, 7, 5, 3)


class Layer(nn.Module):
    """Attention to all preceding tokens, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor, past: KVCache) -> Tensor:
        batch, length, _ = values.shape
        cut = self.qkv(values).view(batch, length, 3, HEADS, -1)
        query, key, value = cut.permute(2, 0, 3, 1, 4)
        mixed = attend(query, *past.extend(self, key, value))
        values = values + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = values + self.down(F.gelu(self.up(values)))
        return out


class Stage(nn.Module):
    """Two layers of stage ``number``, with the embedding before or the output after."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH) if number == 0 else None
        self.places = nn.Embedding(LENGTH, WIDTH) if number == 0 else None
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.output = nn.Linear(WIDTH, WORDS) if number == STAGES - 1 else None

    def forward(self, values: Tensor, past: KVCache) -> Tensor:
        if self.table is not None and self.places is not None:
            places = past.start + torch.arange(values.shape[1])
            values = self.table(values) + self.places(places)
        for layer in self.layers:
            values = layer(values, past)
        return values if self.output is None else self.output(values)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model(dtype: torch.dtype) -> list[Stage]:
    """Return all stages, the same on all ranks."""
    torch.manual_seed(5)
    return [Stage(number).to(dtype) for number in range(STAGES)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    return whole[:, :-1], whole[:, 1:]


def trained(
    slices: Sequence[int], dtype: torch.dtype, block: Mapping[str, Any] | None = None
) -> tuple[Tensor | None, list[Tensor], Channels | None]:
    """Return the loss (last stage), this stage's gradients and its channels."""
    stage = model(dtype)[dist.get_rank()]
    channels = None if block is None else Channels(CompressionConfig.parse(dict(block)))
    pipeline = SlicePipeline(stage, slices, WIDTH, loss_of, dtype=dtype, channels=lambda: channels)
    loss = pipeline.step(*batch())
    return loss, [p.grad for p in stage.parameters() if p.grad is not None], channels


def errors(slices: Sequence[int], dtype: torch.dtype) -> list[float]:
    """Return relative L2 errors of loss and gradients against the whole model."""
    stages, (tokens, labels) = model(dtype), batch()
    values: Tensor = tokens
    for stage in stages:
        values = stage(values, KVCache())
    expected = loss_of(values, labels)
    expected.backward()  # type: ignore[no-untyped-call]
    loss, grads, _ = trained(slices, dtype)
    every = [p.grad for p in stages[dist.get_rank()].parameters()]
    assert len(grads) == len(every)
    pairs = [(f, e) for f, e in zip(grads, every, strict=True) if e is not None]
    if loss is not None:
        pairs.append((loss, expected.detach()))
    return [float((f - e).norm() / e.norm()) for f, e in pairs]


@pytest.mark.parametrize(("dtype", "most", "slices"), [
    (torch.float32, 1e-6, SLICES), (torch.float64, 1e-12, (LENGTH,)),
    (torch.float64, 1e-12, (1,) * LENGTH),
])  # fmt: skip
def test_gradients_are_those_of_the_whole_sequence(
    on_ranks: RunRanks, dtype: torch.dtype, most: float, slices: Sequence[int]
) -> None:
    for result in on_ranks(STAGES, errors, slices, dtype):
        assert len(result) >= 12 and max(result) <= most


def under_autocast() -> list[float]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return errors(SLICES, torch.float32)


def test_autocast_is_that_of_the_whole_sequence(on_ranks: RunRanks) -> None:
    """Stages then output bf16, and their messages have that dtype."""
    for result in on_ranks(STAGES, under_autocast):
        assert max(result) <= 0.05


def lossless() -> None:
    native = trained(SLICES, torch.float32)[1]
    for codec in ("none", "mpc", "expcode"):
        block = {"preset": "none", "pp": codec, "min_bytes": 0}
        assert all(map(torch.equal, trained(SLICES, torch.float32, block)[1], native)), codec


def test_lossless_codecs_are_native_to_the_bit(on_ranks: RunRanks) -> None:
    on_ranks(STAGES, lossless)


def counted() -> None:
    """Return the ledger's bytes: each slice once per direction and neighbouring stage."""
    block = {"pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0}
    _, native, _ = trained(SLICES, torch.float32)
    _, encoded, channels = trained(SLICES, torch.float32, block)
    worst = max(float((f - n).norm() / n.norm()) for f, n in zip(encoded, native, strict=True))
    assert 0 < worst < 0.05
    assert channels is not None
    codec, rank = make_codec("blockint", bits=8), dist.get_rank()
    each = sum(codec.wire_nbytes(BATCH * n * WIDTH, torch.float32) for n in SLICES)
    sends = {"forward": rank < STAGES - 1, "backward": rank > 0}
    for direction, does in sends.items():
        entry = channels.ledger.interval["pp", direction]  # type: ignore[index]
        assert entry.wire_nbytes == does * each
        assert entry.raw_nbytes == does * 4 * BATCH * LENGTH * WIDTH
        assert entry.messages == does * len(SLICES) and not entry.native


def test_eight_bits_are_close_and_counted(on_ranks: RunRanks) -> None:
    on_ranks(STAGES, counted)


def refused() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        SlicePipeline(Stage(1), (3, 0), WIDTH, loss_of)
    pipeline = SlicePipeline(Stage(1), (3, 4), WIDTH, loss_of)
    tokens, labels = batch()
    with pytest.raises(ConfigError, match="found sequences of .* tokens; the slices have 7"):
        pipeline.step(tokens, labels)
    with pytest.raises(ConfigError, match="found labels of 8 tokens; the slices have 7"):
        pipeline.step(tokens[:, :7], labels[:, :8].float())


def test_slices_that_do_not_fit_are_refused(on_ranks: RunRanks) -> None:
    on_ranks(1, refused)


def unlike() -> None:
    """Build stages for different messages: all get an error; also a stage that sends others."""
    rank = dist.get_rank()
    for key, mine, theirs in (
        ("width", WIDTH, 2 * WIDTH), ("slices", SLICES, SLICES[::-1]),
        ("dtype", torch.float32, torch.bfloat16),
    ):  # fmt: skip
        given: dict[str, Any] = {"slices": SLICES, "width": WIDTH, "dtype": torch.float32}
        given[key] = theirs if rank == 1 else mine
        pipeline = SlicePipeline(Stage(rank), loss=loss_of, **given)
        with pytest.raises(ConfigError, match=rf"^pp: found {key} .* on stage 1 and .* on stage 0"):
            pipeline.step(*batch())
    pipeline = SlicePipeline(Stage(rank), SLICES, WIDTH - 1, loss_of)
    if rank:  # waits for the first
        pipeline._agree()
        return
    with pytest.raises(ConfigError, match=rf"hidden states \(2, 9, {WIDTH}\); expected \(2, 9, 15"):
        pipeline.step(*batch())


def test_stages_that_do_not_fit_are_refused(on_ranks: RunRanks) -> None:
    on_ranks(STAGES, unlike)


def test_evaluation_keeps_no_graph() -> None:
    stages, (tokens, _) = model(torch.float32), batch()
    with torch.no_grad():
        whole, pasts, parts, start = tokens, [KVCache() for _ in stages], [], 0
        for stage in stages:
            whole = stage(whole, KVCache())
        for piece in torch.split(tokens, list(SLICES), dim=1):
            values = piece
            for stage, past in zip(stages, pasts, strict=True):
                values = stage(values, past.at(start))
            start += piece.shape[1]
            parts.append(values)
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)
