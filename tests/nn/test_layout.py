"""Assignment of sequence shards to ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hybridcomp.nn import huggingface, ring_attention
from hybridcomp.nn.context.layout import (
    LAYOUTS,
    Layout,
    check_length,
    chunks_of,
    documents_of,
    documents_of_mask,
    gather,
    part,
    positions,
    shard,
    unshard,
)
from hybridcomp.nn.huggingface import shard_batch
from tests.ranks import RunRanks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_are_what_a_causal_mask_shows(ranks: int, layout: Layout) -> None:
    length = 4
    chunk = length // len(chunks_of(0, ranks, layout))
    held = [
        [c * chunk + i for c in chunks_of(r, ranks, layout) for i in range(chunk)]
        for r in range(ranks)
    ]
    for rank in range(ranks):
        for owner in range(ranks):
            seen = torch.tensor([[q >= k for k in held[owner]] for q in held[rank]])
            covered = torch.zeros_like(seen)
            what = part(rank, owner, length, ranks=ranks, causal=True, layout=layout)
            if what is not None:
                block = covered[what.queries, what.keys]
                block |= torch.ones_like(block).tril() if what.causal else torch.ones_like(block)
                assert what.keys.start == 0  # a slice from the first key on travels
            assert torch.equal(seen, covered)


def test_zigzag_is_balanced() -> None:
    """Every rank computes equally many scores at every step."""
    ranks, length = 4, 8
    for step in range(1, ranks):
        scores = set()
        for rank in range(ranks):
            what = part(
                rank, (rank - step) % ranks, length, ranks=ranks, causal=True, layout="zigzag"
            )
            assert what is not None
            rows, keys = (len(range(length)[s]) for s in (what.queries, what.keys))
            scores.add(rows * keys)
        assert scores == {length * length // 2}


def of_one_rank() -> None:
    whole = torch.arange(14).view(2, 7)
    for layout in LAYOUTS:
        mine = shard(whole, layout=layout)
        assert torch.equal(mine, whole)
        assert torch.equal(gather(mine, layout=layout), whole)
    q = torch.randn(2, 1, 7, 4, generator=torch.Generator().manual_seed(0))
    one = torch.zeros_like(whole)  # one document
    torch.testing.assert_close(ring_attention(q, q, q, documents=one), ring_attention(q, q, q))
    nowhere = q.to("meta")  # has no autocast
    assert ring_attention(nowhere, nowhere, nowhere).shape == q.shape
    with pytest.raises(ValueError, match=r"documents: expected .2 or 1, 7.*, found .3, 7."):
        ring_attention(q, q, q, documents=one.new_zeros(3, 7))


def test_one_rank_takes_every_length(on_ranks: RunRanks) -> None:
    on_ranks(1, of_one_rank)


def round_trip() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(2 * 12 * ranks).view(2, 12 * ranks)
    for layout in LAYOUTS:
        mine = shard(whole, layout=layout)
        assert torch.equal(whole[0, positions(12 * ranks, layout=layout)], mine[0])
        parts = [shard(whole, layout=layout, rank=r) for r in range(ranks)]
        assert torch.equal(parts[rank], mine)
        assert torch.equal(unshard(parts, layout=layout), whole)
        assert torch.equal(gather(mine, layout=layout), whole)


def test_shards_come_back(on_ranks: RunRanks) -> None:
    on_ranks(3, round_trip)


def test_lengths_that_cannot_be_cut_are_told() -> None:
    with pytest.raises(ValueError, match="multiple of 8, the chunks of 4 ranks.*pad it to 104"):
        check_length(100, 4, "zigzag")
    check_length(100, 4, "contiguous")


def test_documents() -> None:
    numbers = documents_of(torch.tensor([0, 3, 4, 6]), 8)
    assert numbers.tolist() == [[0, 0, 0, 1, 2, 2, -1, -1]]
    assert documents_of_mask(torch.tensor([[1, 1, 0]])).tolist() == [[0, 0, -1]]


def packed() -> None:
    """Positions that restart mark documents of a batch without a mask."""
    tokens = torch.arange(16).view(2, 8)
    whole = torch.arange(8).expand(2, 8)
    two = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0]])
    batch = shard_batch({"input_ids": tokens, "position_ids": two, "labels": tokens})
    numbers = [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 2]]
    assert batch["documents"].tolist() == numbers and batch["documents"].dtype == torch.int32
    assert torch.equal(gather(batch["position_ids"]), two)
    assert torch.equal(gather(batch["input_ids"]), tokens)
    mask = torch.ones_like(tokens)
    mask[0, 7] = 0
    for more in ({"position_ids": whole}, {"position_ids": two, "attention_mask": mask}, {}):
        assert "documents" not in shard_batch({"input_ids": tokens, **more})
    with pytest.raises(
        ValueError, match=r"^position_ids: expected \(batch, 8, ...\), found \(3, 2, 8"
    ):
        shard_batch({"input_ids": tokens, "position_ids": two.expand(3, 2, 8)})
    with pytest.raises(ValueError, match=r"^rewards: expected \(batch, 8, ...\), found \(2,\)"):
        shard_batch({"rewards": torch.zeros(2), "input_ids": tokens})
    embedded = shard_batch({"inputs_embeds": torch.zeros(2, 8, 3), "labels": tokens})
    assert torch.equal(gather(embedded["position_ids"]), whole)
    own = {"position_ids": two, "documents": whole}
    assert shard_batch({"input_ids": tokens, **own})["documents"] is whole


def test_packed_positions_are_documents(on_ranks: RunRanks) -> None:
    on_ranks(2, packed)


@pytest.mark.parametrize(
    ("option", "value"),
    [("sliding_window", 4), ("cu_seq_lens_q", torch.tensor([0, 4])), ("s_aux", torch.zeros(2))],
)
def test_what_the_ring_does_not_compute_is_refused(option: str, value: object) -> None:
    module = SimpleNamespace(training=False)
    huggingface._check(module, 0.5, {option: None, "position_ids": torch.zeros(1)})
    with pytest.raises(ValueError, match=f"SimpleNamespace: ring attention has no {option}; found"):
        huggingface._check(module, 0.0, {option: value})
