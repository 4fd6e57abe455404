"""Interval between islands' meetings: a meeting's cost, and when islands are proposed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridcomp.codecs import make_codec
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.commands import cli
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.meetings import LEAST, SHARE, MeetingCost, estimated, measured, proposal
from hybridcomp.tools.plan.pays import CODING, DEVICES
from hybridcomp.tools.plan.plan import Plan
from tests.tools.plan.answer.made import plan, prediction
from tests.tools.plan.clusters import cluster, small


@pytest.mark.parametrize(("seconds", "step_s"), [(0.001, 1.0), (2.0, 1.0), (37.0, 0.4), (900, 2)])
def test_meetings_take_their_share_or_less(seconds: float, step_s: float) -> None:
    every = MeetingCost(0.0, seconds).every(step_s)
    assert seconds / (seconds + every * step_s) <= SHARE * (1 + 1e-9)
    fewer = 0.89 * every  # two digits: rounded up by at most a tenth
    assert every == LEAST or seconds / (seconds + fewer * step_s) > SHARE


def test_a_meeting_takes_the_link_and_the_codec() -> None:
    """Four islands: a rank sends its payload to three, encodes one and decodes four."""
    codec, numel = make_codec("blockint", bits=4), 1 << 20
    found = measured(numel, 4, cluster(nodes=4, ranks_per_node=1, gbits=1.0), codec)
    nbytes = codec.wire_nbytes(numel, torch.float32)
    assert found.nbytes == 3 * nbytes
    wire, coding = 8 * found.nbytes / 1e9, 5 * 4 * numel / 1.1e9
    assert found.seconds == pytest.approx(wire + coding, rel=0.3)
    shared = measured(numel, 4, cluster(nodes=4, ranks_per_node=4, gbits=1.0), codec)
    assert shared.seconds - coding > 3 * wire, "the ranks of a node share its link"


def slow(**changed: object) -> Plan:
    """Return a plan whose gradients take half of its step."""
    told = prediction(1.0, exposed={"dp": 0.4, "zero": 0.1})
    return plan(Layout(data=4, zero_stage=1), told, **changed)


def test_islands_are_proposed_where_messages_between_nodes_are_long() -> None:
    two = cluster(nodes=2, ranks_per_node=2, gbits=0.1)
    found = proposal(slow(), two, small())
    assert found is not None and "they train otherwise" in found.lower()
    block = json.loads(found.partition('"sync": ')[2])
    sync = CompressionConfig.parse({"sync": block}).sync
    cost = measured(small().parameters / 2, 2, two, make_codec("blockint", bits=4))
    assert sync.every == cost.every(0.5) and sync.islands == "node" and sync.error_feedback


@pytest.mark.parametrize(
    ("layout", "exposed", "nodes"),
    [
        (Layout(data=4), {"dp": 0.5}, 1),
        (Layout(data=4), {"dp": 0.05}, 2),
        (Layout(data=2, tensor=2), {"dp": 0.5}, 2),
        (Layout(data=2, stages=2, cuts=(3, 3)), {"dp": 0.5}, 2),
        (Layout(data=2), {"dp": 0.5}, 2),
    ],
    ids=["one node", "short messages", "tensor parallel", "pipeline", "ranks without work"],
)
def test_nothing_is_proposed_where_islands_do_not_help_or_do_not_go(
    layout: Layout, exposed: dict[str, float], nodes: int
) -> None:
    made = plan(layout, prediction(1.0, exposed=exposed))
    assert proposal(made, cluster(nodes=nodes, ranks_per_node=4 // nodes), small()) is None


def test_pays_says_how_often_to_meet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "block.json"
    block = {"sync": {"preset": "diloco", "every": 20, "codec": "blockint", "bits": 4}}
    file.write_text(json.dumps({"compression": block}))
    words = ["--parameters", "1e9", "--compute", "1", "--link", "1", "--ranks", "2"]
    assert cli.main(["pays", str(file), "--device", "cpu", *words]) == 0
    said = capsys.readouterr().out
    device = DEVICES["cpu"]
    cost = estimated(1e9, 2, 1e9, make_codec("blockint", bits=4), device)
    assert cost.nbytes == pytest.approx(1e9 * 4.25 / 8, rel=0.02)
    assert cost.seconds == pytest.approx(4.3 + CODING * 3 * 4 / 1.1, rel=0.05)
    share = cost.seconds / (cost.seconds + 20)
    assert f"{share:.1%} of the time with every 20 steps of 1 s" in said
    assert f"every {cost.every(1.0)} steps it is 5% or less" in said
