"""What the messages of a rank take is reckoned from their sizes."""

from __future__ import annotations

import pytest
import torch

from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.varying_pieces import WORDS_NBYTES
from hybridcomp.config.rank_messages import RankMessages, buffer_nbytes, node_sums_nbytes


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("codec", [make_codec("blockint", bits=4), make_codec("mpc")], ids=str)
def test_tables_are_copies_of_all_messages_under_way_at_once(codec: Codec, on_gpu: bool) -> None:
    """The words of an encoder on a GPU are there once, however many messages are under way."""

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
    """In fp32, whatever the dtype of the messages is; in one level nothing."""
    nodes = RankMessages((1000, 3), "scatter", torch.bfloat16, 8, width=4)
    assert node_sums_nbytes(nodes) == 4 * (250 + 1)
    assert node_sums_nbytes(RankMessages((1000,), "own", torch.bfloat16, 8)) == 0
