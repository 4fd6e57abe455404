"""Time a gradient's message and the end of a step in each state of `"when": "auto"`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hybridcomp.autotune.recheck import Recheck
from hybridcomp.autotune.verdicts import Decision
from hybridcomp.channels import AllReduce, Channels
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs import Codec
from hybridcomp.config import CompressionConfig

#: a step well past the first comparisons
STEP = 100
#: first step of a finished comparison, and of a running one
OVER, UNDER_WAY = 3, STEP - 3
CPU = torch.device("cpu")


def _channels(setting: object, pays: bool | None = None, first: int = OVER) -> Channels:
    """Make channels at a late step; ``pays``: the decision, None if nothing was measured."""
    block = {"dp": setting, "min_bytes": 0, "ledger": {"sample_every": 0}}
    made = Channels(CompressionConfig.parse(block))
    made.step = STEP
    state = made["dp"].state
    state.is_weighed = True
    if pays is not None:
        verdicts = state.verdicts
        verdicts.by_dimension["dp"] = Decision(pays, 1, 1.0, 1.0, checked=first == OVER)
        verdicts.recheck, verdicts._is_planned = Recheck(["dp"], first), True
    return made


def _send(channels: Channels, values: Tensor, pieces: tuple[Piece, ...]) -> None:
    """Send a gradient as a seam does; does nothing if the dimension is native."""
    message = AllReduce(
        values=values, parameters=pieces, numel=values.numel(), dtype=values.dtype, group=None
    )
    channels["dp"].run(message, native=lambda: None, encoded=lambda handle: handle.wait())


def kinds(codec: Codec, values: Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls by name; call inside ``as_on_a_gpu``."""
    setting = {"codec": codec.name, "bits": 4, "error_feedback": True}
    always, auto = {**setting, "when": "always"}, {**setting, "when": "auto"}
    every = {
        "none": _channels("none"),
        "auto, native": _channels(auto, False),
        "always": _channels(always),
        "auto, encoded": _channels(auto, True),
        "auto, comparing": _channels(auto, False, UNDER_WAY),
    }
    pieces = (Piece("weight", 0, values.numel()),)
    found: dict[str, Callable[[], object]] = {}
    for name, one in every.items():
        found[f"message: {name}"] = partial(_send, one, values, pieces)
        if name != "auto, comparing":  # its end of step is counted once
            found[f"end of step: {name}"] = partial(one.close_step, False, CPU)
    return found
