"""Describe each dimension of parallelism in one row: its messages, timing and engines.

Policy, block, presets, rules, ledger, planner and pages read these rows. To add a dimension, add a
name to ``Dimension``, a row to ``ROWS`` and the seams that send its messages;
``docs/contributing/dimension.md`` shows an example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

#: every dimension, in the order of tables, messages and counters
Dimension = Literal[
    "dp",
    "zero",
    "tp",
    "pp",
    "ep",
    "cp",
    "offload",
    "tp2d",
    "sync",
    "embed",
]
#: ``forward`` is for activations and parameters, ``backward`` for gradients of activations.
#: Reductions of gradients and gathers of parameters are ``forward``. In offload, ``forward`` copies
#: parameters to the device, ``backward`` copies gradients to the host, and ``states`` are optimizer
#: states in files on NVMe. tp2d has kinds of messages, sent in both passes, instead of directions.
Direction = Literal["forward", "backward", "activations", "weights", "gradients", "states"]
#: native operation: ``all_reduce`` sums values, the other collectives only transfer values, and
#: ``copy`` transfers them between device and host
Operation = Literal["all_reduce", "all_gather", "broadcast", "send", "all_to_all", "copy"]
#: when a dimension under ``"when": "auto"`` is timed
Timed = Literal["at start-up", "after the first step", "in real steps"]
#: model in ``hybridcomp.config`` that defines a dimension's keys, except those of its codec
Settings = Literal[
    "plain", "gradients", "parameters", "activations", "tensor", "pipeline", "offload", "mesh",
    "islands",
]  # fmt: skip

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
#: kinds of messages of tp2d, used instead of directions
KINDS: tuple[Direction, ...] = ("activations", "weights", "gradients")

DEEPSPEED, MEGATRON, FSDP2, DDP = "DeepSpeed", "Megatron", "FSDP2", "DDP"
ALL = (DEEPSPEED, MEGATRON, FSDP2, DDP)


@dataclass(frozen=True)
class DimensionRow:
    """One dimension of parallelism.

    Attributes:
        about: sentence that describes the messages, shown in the block's schema and the pages.
        operation: upstream's operation that sends the messages.
        settings: which keys the dimension has in the block.
        directions: the directions, or kinds, that have codecs and counters of their own.
        apart: the directions that are native unless the block names a codec for them.
        timed: when ``"when": "auto"`` compares the codec with native; None: it never does.
        recommended: settings in the preset ``recommended``; None: no preset names the dimension.
        engines: engines whose seams encode its messages.
        group: its process groups, in words.
        two_levels: whether ``hierarchy`` treats its groups as nodes times local ranks.
        in_layers: whether layers send its messages, which look up the process's engine.
        by_script: whether only scripts that build layers from ``hybridcomp.nn`` use the dimension;
            other jobs print nothing about it.
        by_request: whether only blocks that name the dimension use it; other jobs print nothing
            about it.
    """

    about: str
    operation: Operation
    settings: Settings = "activations"
    directions: tuple[Direction, ...] = DIRECTIONS
    apart: tuple[Direction, ...] = ()
    timed: Timed | None = None
    recommended: Mapping[str, Any] | None = None
    engines: tuple[str, ...] = ALL
    group: str = ""
    two_levels: bool = False
    in_layers: bool = False
    by_script: bool = False
    by_request: bool = False

    @property
    def summed(self) -> bool:
        """Return whether messages are added up, so that a value may be quantized twice."""
        return self.operation == "all_reduce"

    @property
    def is_quiet(self) -> bool:
        """Return whether jobs print nothing about the dimension unless their block names it."""
        return self.by_script or self.by_request

    @property
    def between_ranks(self) -> bool:
        return self.operation != "copy"

    @property
    def one_way(self) -> bool:
        """Return whether messages have only one direction, which printed names then omit."""
        return len(self.directions) == 1

    @property
    def together(self) -> tuple[Direction, ...]:
        """Return the directions that use the dimension's codec unless they name another."""
        return tuple(way for way in self.directions if way not in self.apart)

    @property
    def keeps_residuals(self) -> bool:
        """Return whether error feedback may keep the encoding error of messages."""
        return self.settings == "gradients"

    @property
    def sends_deltas(self) -> bool:
        """Return whether messages may be differences from the previous ones."""
        return self.settings == "parameters"


_INTS_8 = {"codec": "blockint", "bits": 8}

ROWS: Mapping[Dimension, DimensionRow] = {
    "dp": DimensionRow(
        "Gradient reduction.", "all_reduce", "gradients", directions=("forward",),
        timed="at start-up", recommended={"codec": "blockint", "bits": 4}, group="data-parallel",
        two_levels=True,
    ),
    "zero": DimensionRow(
        "ZeRO parameter all-gather.", "all_gather", "parameters", directions=("forward",),
        timed="at start-up", recommended=_INTS_8, engines=(DEEPSPEED, MEGATRON, FSDP2),
        group="data-parallel", two_levels=True,
    ),
    "tp": DimensionRow(
        "Tensor parallel.", "all_reduce", "tensor", timed="after the first step",
        recommended=_INTS_8, engines=(DEEPSPEED, MEGATRON), group="tensor-parallel", in_layers=True,
    ),
    "pp": DimensionRow(
        "Pipeline sends.", "send", "pipeline", timed="after the first step", recommended=_INTS_8,
        engines=(DEEPSPEED, MEGATRON), group="pipeline",
    ),
    "ep": DimensionRow(
        "Expert (MoE) all-to-all.", "all_to_all", recommended=_INTS_8,
        engines=(DEEPSPEED, MEGATRON), group="expert-parallel",
    ),
    "cp": DimensionRow(
        "Context or sequence parallel.", "all_to_all", recommended=_INTS_8,
        group="context-parallel", in_layers=True,
    ),
    "offload": DimensionRow(
        "ZeRO-Offload: gradients to the host, updated parameters back; files of states on NVMe.",
        "copy", "offload", directions=(*DIRECTIONS, "states"), apart=("states",),
        timed="in real steps", engines=(DEEPSPEED,),
    ),
    "tp2d": DimensionRow(
        "Two-dimensional tensor parallel: layers of hybridcomp.nn.tp2d.", "broadcast", "mesh",
        directions=KINDS, engines=(DEEPSPEED,), in_layers=True, by_script=True,
    ),
    "sync": DimensionRow(
        "Islands of ranks that train by themselves and meet every few steps: what each has moved.",
        "all_gather", "islands", directions=("forward",), engines=(DEEPSPEED, MEGATRON, FSDP2, DDP),
        by_request=True,
    ),
    "embed": DimensionRow(
        "Rows of tables (hybridcomp.nn.CachedEmbedding) and their gradients; gradients of "
        "Embedding(sparse=True).",
        "all_to_all", engines=(DEEPSPEED, FSDP2, DDP), in_layers=True, by_request=True,
    ),
}  # fmt: skip

DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
Key = tuple[Dimension, Direction]
#: every dimension and direction that has a codec and counters of its own
KEYS: tuple[Key, ...] = tuple((name, way) for name, row in ROWS.items() for way in row.directions)
#: dimensions whose messages have one direction
ONE_WAY = tuple(name for name, row in ROWS.items() if row.one_way)
#: dimensions whose codec is compared with native message by message
MEASURED = tuple(name for name, row in ROWS.items() if row.timed not in (None, "in real steps"))
#: dimensions of MEASURED that are compared before the first step
MEASURED_EARLY = tuple(name for name, row in ROWS.items() if row.timed == "at start-up")
#: dimensions whose messages go from rank to rank
BETWEEN_RANKS = tuple(name for name, row in ROWS.items() if row.between_ranks)
#: dimensions that the presets name
IN_PRESETS = tuple(name for name, row in ROWS.items() if row.recommended is not None)
#: dimensions whose groups ``hierarchy`` treats as nodes times local ranks
TWO_LEVELS = tuple(name for name, row in ROWS.items() if row.two_levels)


def listed(names: Iterable[str]) -> str:
    """Join names as in a sentence: ``dp, zero and tp``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
