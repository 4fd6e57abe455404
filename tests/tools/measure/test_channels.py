"""Messages through channels: results, codecs, alternation on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from hybridcomp.collectives.topology import Nodes
from hybridcomp.tools.measure.channels import MESSAGES, channels_of, runner
from hybridcomp.tools.measure.clock import HostCallClock
from hybridcomp.tools.measure.links import Key, in_turns
from hybridcomp.tools.measure.team import Team, connected, shapes_of
from tests.ranks import RunRanks

#: values of a message, for native and encoded
NUMEL = 1 << 12


def sent(blocks: list[tuple[str, dict[str, int]]]) -> list[dict[str, tuple[int, int, int]]]:
    """Return messages, native ones and wire bytes, by dimension, for each block."""
    team = Team(torch.device("cpu"), Nodes([0, 0], "the test"))
    (shape,) = connected(shapes_of([0, 0]), team)
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = []
    for codec, settings in blocks:
        channels = channels_of(codec, settings)
        rows = {}
        for name, operation in MESSAGES:
            before = _of(channels, name)
            runner(name, Key(operation, shape, "alone"), values, channels, team)()
            after = _of(channels, name)
            rows[f"{name} {operation}"] = tuple(b - a for a, b in zip(before, after, strict=True))
            runner(name, Key(operation, shape, "alone"), values, None, team)()
        found.append(rows)
    return found  # type: ignore[return-value]


def _of(channels: Any, name: str) -> tuple[int, int, int]:
    own = [row for (dimension, _), row in channels.ledger.interval.items() if dimension == name]
    return (sum(row.messages for row in own), sum(row.native for row in own),
            sum(row.wire_nbytes for row in own))  # fmt: skip


def test_every_message_takes_the_channel_of_its_dimension(on_ranks: RunRanks) -> None:
    (native, eight, lossless), _ = on_ranks(
        2, sent, [("none", {}), ("blockint", {"bits": 8}), ("expcode", {})]
    )
    assert list(native) == [f"{name} {operation}" for name, operation in MESSAGES]
    for name, (messages, left, nbytes) in native.items():
        assert messages == left == 1, name
        assert nbytes > 0
        for codec in (eight, lossless):
            assert codec[name][:2] == (1, 0), name
            assert codec[name][2] < nbytes


def turned(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the runs made in the first two counted rounds."""
    team = Team(torch.device("cpu"), Nodes([0, 0], "the test"))
    made: list[str] = []

    def run(name: str) -> Any:
        return lambda: made.append(name)

    runs = {name: run(name) for name in names}
    clock = HostCallClock()
    once = 0.01
    clock.seconds = lambda run, times=1: (run(), once)[1]  # type: ignore[method-assign]
    in_turns(team, clock, names, runs if team.rank == 0 else {}, 0.0)
    warm = 2 * len(names)
    return made[warm : warm + len(names)], made[warm + len(names) : warm + 2 * len(names)]


def test_turns_go_there_and_back(on_ranks: RunRanks) -> None:
    names = ["", "none", "expcode()"]
    (first, second), (others, _) = on_ranks(2, turned, names)
    assert (first, second, others) == (names, names[::-1], [])
