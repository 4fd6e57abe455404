"""Memory of a rank's messages, computed from their sizes."""

from __future__ import annotations

import pytest
import torch

from hybridcomp.channels.accounting.memory import MemoryItem, frozen
from hybridcomp.channels.accounting.rank_messages import (
    RankMessages,
    buffer_nbytes,
    copy_nbytes,
    node_sums_nbytes,
)
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.varying_pieces import WORDS_NBYTES
from hybridcomp.config import CompressionConfig


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("codec", [make_codec("blockint", bits=4), make_codec("mpc")], ids=str)
def test_tables_are_copies_of_all_messages_under_way_at_once(codec: Codec, on_gpu: bool) -> None:
    """The words of an encoder on a GPU exist once, for any number of pending messages."""

    def nbytes(*numels: int, tabled: bool = False) -> int:
        messages = RankMessages(numels, "sum", torch.float32, 4, on_gpu=on_gpu, tabled=tabled)
        return buffer_nbytes(messages, codec)

    first, second = 10_000, 70_000
    assert nbytes(first, tabled=True) == nbytes(first) + 4 * first
    words = WORDS_NBYTES if on_gpu and not codec.fixed_size else 0
    both = nbytes(first) + nbytes(second) - words
    assert nbytes(first, second, tabled=True) == both + 4 * (first + second)
    assert nbytes(first, second) == nbytes(second), "one after the other, the largest counts"


def test_a_rank_keeps_its_share_of_the_sums_of_micro_batches() -> None:
    """In fp32, for any dtype of messages; none in one level."""
    nodes = RankMessages((1000, 3), "scatter", torch.bfloat16, 8, width=4)
    assert node_sums_nbytes(nodes) == 4 * (250 + 1)
    assert node_sums_nbytes(RankMessages((1000,), "own", torch.bfloat16, 8)) == 0


def test_a_rank_keeps_its_slice_of_the_copy_of_its_node() -> None:
    """Exact, or in 8 bits with a scale per 32 values; without nodes there is no copy."""
    gathered = RankMessages((6400, 640), "gather", torch.bfloat16, 8, width=4)
    assert copy_nbytes(gathered, None) == 2 * (1600 + 160)
    assert copy_nbytes(gathered, 8) == pytest.approx((1600 + 160) * 33 / 32, abs=32)
    assert copy_nbytes(RankMessages((6400,), "gather", torch.bfloat16, 8), None) == 0


def test_frozen_weights_are_whole_on_each_rank() -> None:
    """Vectors exactly, in 11.2 of 16 bits; matrices in the configured bits."""
    block = {"zero": {"frozen": {"on": "host", "bits": 4}}}
    numels = {(torch.bfloat16, False): 3200, (torch.bfloat16, True): 100}
    few = frozen(CompressionConfig.parse(block), numels)
    (item,) = few
    assert item.on_host and item.nbytes == pytest.approx(100 * (16 + 1) + 140, abs=16)
    whole = frozen(CompressionConfig.parse({"zero": {"frozen": "device"}}), numels)
    assert whole == [MemoryItem("frozen weights", round(3200 * 1.4) + 140)]
    assert frozen(CompressionConfig.parse({"zero": "bf16"}), numels) == []
