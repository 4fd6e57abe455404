"""Bytes inside nodes and between them equal those that the planner prices, per message."""

from __future__ import annotations

import pytest
import torch

from hybridcomp.channels.accounting.rank_messages import RankMessages, Way
from hybridcomp.codecs import make_codec
from hybridcomp.tools.plan.choices import Choice
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.prices import Prices
from hybridcomp.tools.plan.crossing import OPERATIONS, of_messages
from tests.tools.plan.clusters import cluster

NUMEL = 1 << 20
BITS = {"codec": "blockint", "bits": 4}


@pytest.mark.parametrize("how", list(OPERATIONS))
@pytest.mark.parametrize(
    ("nodes", "per_node", "levels"), [(4, 8, 2), (4, 1, 1), (2, 4, 1), (2, 2, 2), (1, 4, 1)]
)
def test_it_is_what_a_plan_has(how: Way, nodes: int, per_node: int, levels: int) -> None:
    ranks, (operation, encoded_as) = nodes * per_node, OPERATIONS[how]
    width = per_node if levels > 1 else 1
    message = RankMessages((NUMEL,), how, torch.bfloat16, ranks, width=width)
    native, sent = of_messages([message], make_codec("blockint", bits=4), per_node)
    call = EngineCall(operation, NUMEL, ranks, nodes, encoded_as, levels)
    priced = Prices(cluster(nodes, per_node)).of(call, Choice.of(BITS), torch.bfloat16)
    assert (native.inside + native.between) / per_node == pytest.approx(priced.native_nbytes)
    assert native.between / per_node == pytest.approx(priced.between_native_nbytes)
    assert (sent.inside + sent.between) / per_node == pytest.approx(priced.nbytes)
    assert sent.between / per_node == pytest.approx(priced.between_nbytes)
    if nodes == 1:
        assert native.between == sent.between == 0.0
    else:
        assert sent.between < native.between


def test_small_messages_and_those_without_a_codec_stay_native() -> None:
    both, long, short = (
        [RankMessages(numels, "scatter", torch.bfloat16, 8, width=4)]
        for numels in ((1000, NUMEL), (NUMEL,), (1000,))
    )
    native, plain = of_messages(both, None, 4)
    assert native == plain
    codec = make_codec("blockint", bits=4)
    (_, whole), (small, _) = (of_messages(some, codec, 4) for some in (long, short))
    _, sent = of_messages(both, codec, 4, min_bytes=4096)
    assert sent.between == pytest.approx(whole.between + small.between)
