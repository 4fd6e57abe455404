"""Compute bits per parameter that a node sends, for README's table.

Native messages follow NCCL's algorithms (``collectives.native_nbytes``), compressed ones the preset
``recommended``. Figures are for many nodes; n nodes send (n - 1) / n of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hybridcomp.collectives import native_nbytes
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.plan.bits_between import QGZ, QWZ

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]
FP32, BF16 = torch.float32, torch.bfloat16
#: message size and ranks for counting bytes; both cancel out
_NUMEL, _RANKS = 1 << 20, 2


@dataclass(frozen=True)
class Message:
    """A message of all parameters that the ranks of a job send once per step."""

    operation: Operation
    bits: float  # per value on the wire
    #: True if each rank holds a part of its node's values and sends it to other nodes only
    between: bool = False
    #: True for the backward pass' gather, which skips parameters kept since the forward pass
    again: bool = False

    @property
    def sent(self) -> float:
        """Return bits per value that a node sends to others, among many nodes."""
        return self.bits * (2 if self.operation == "all_reduce" else 1)


def native(
    operation: Operation, dtype: torch.dtype, between: bool = False, again: bool = False
) -> Message:
    """Return a native message; its bits per value follow from its bytes."""
    bits = 8.0 * native_nbytes.send_nbytes(1, dtype)
    if operation != "send":
        nbytes = {
            "all_reduce": native_nbytes.all_reduce_nbytes(_NUMEL, dtype, _RANKS) / 2,
            "reduce_scatter": native_nbytes.reduce_scatter_nbytes(_NUMEL, dtype, _RANKS),
            "all_gather": native_nbytes.all_gather_nbytes(_NUMEL // _RANKS, dtype, _RANKS),
        }[operation]
        bits = 8 * nbytes / _NUMEL * _RANKS / (_RANKS - 1)
    return Message(operation, bits, between, again)


def _codec_bits(dimension: str) -> float:
    """Return bits per value of the preset ``recommended``."""
    codecs = CompressionConfig.parse({"preset": "recommended"}).codecs()
    codec = next(found for (name, _), found in codecs.items() if name == dimension)
    assert codec is not None
    return codec.bits_per_value(BF16)


def gradients(operation: Operation = "reduce_scatter", between: bool = False) -> Message:
    """Return encoded gradients."""
    return Message(operation, _codec_bits("dp"), between)


def parameters(again: bool = False) -> Message:
    """Return encoded parameters."""
    return Message("all_gather", _codec_bits("zero"), again=again)


@dataclass(frozen=True)
class Job:
    """One way to train, native and with the preset."""

    words: str
    today: tuple[Message, ...]
    recommended: tuple[Message, ...]
    #: micro-batches per message
    accumulated: int = 1
    #: whether the job's bytes were counted (docs/results/bytes.md, tests/training/test_wire.py)
    counted: bool = True
    #: whether the generated table has a row for the job
    told: bool = True


def total(messages: Sequence[Message], accumulated: int = 1) -> float:
    """Return the bits per parameter and micro-batch of ``messages``."""
    return sum(message.sent for message in messages) / accumulated


_REDUCE16, _SCATTER16 = native("all_reduce", BF16), native("reduce_scatter", BF16)
_REDUCE32, _SCATTER32 = native("all_reduce", FP32), native("reduce_scatter", FP32)
_GATHER, _AGAIN = native("all_gather", BF16), native("all_gather", BF16, again=True)
_ONCE = (gradients(), parameters())
_TWICE = (*_ONCE, parameters(again=True))

JOBS = {
    "zero0": Job("ZeRO 0, bf16", (_REDUCE16,), (gradients("all_reduce"),)),
    "zero1": Job("ZeRO 1 or 2, bf16", (_REDUCE16, _GATHER), _ONCE),
    "zero3": Job("ZeRO 3, parameters gathered once", (_SCATTER16, _GATHER), _ONCE),
    "zero3_twice": Job("ZeRO 3, gathered twice", (_SCATTER16, _GATHER, _AGAIN), _TWICE),
    "hpz": Job("ZeRO 3 with hpZ", (_SCATTER16, _GATHER), _ONCE),
    "zeropp": Job(
        "ZeRO++ (hpZ, qwZ, qgZ); beside it hpZ with the preset",
        (Message("reduce_scatter", QGZ), Message("all_gather", QWZ)), _ONCE, counted=False,
    ),
    "fsdp2": Job("FSDP2, fp32 sums", (_SCATTER32, _GATHER, _AGAIN), _TWICE),
    "fsdp2_bf16": Job("FSDP2, `reduce_dtype=bf16`", (_SCATTER16, _GATHER, _AGAIN), _TWICE),
    "hsdp": Job(
        "HSDP, fp32 sums", (native("all_reduce", FP32, between=True),),
        (gradients("all_reduce", between=True),), told=False,
    ),
    "hsdp_bf16": Job(
        "HSDP, `reduce_dtype=bf16`", (native("all_reduce", BF16, between=True),),
        (gradients("all_reduce", between=True),),
    ),
    "ddp": Job("DDP, fp32", (_REDUCE32,), (gradients("all_reduce"),)),
    "ddp_bf16": Job("DDP, torch's bf16 hook", (_REDUCE16,), (gradients("all_reduce"),)),
    "ddp_x4": Job(
        "DDP, bf16 hook, 4 micro-batches a step", (_REDUCE16,), (gradients("all_reduce"),), 4
    ),
    "megatron": Job(
        "Megatron's distributed optimizer", (_SCATTER32, _GATHER), _ONCE, counted=False
    ),
    "megatron_bf16": Job(
        "the same, `--grad-reduce-in-bf16`", (_SCATTER16, _GATHER), _ONCE, counted=False
    ),
    "activations": Job(
        "pipelines, tensor parallelism: bits an activation", (native("send", BF16),),
        (Message("send", _codec_bits("pp")),),
    ),
}  # fmt: skip


def across(
    messages: Sequence[Message], nodes: int, per_node: int, levels: bool, kept: float = 0.0
) -> float:
    """Return bits per parameter that one of ``nodes`` sends to the others in a step.

    Args:
        messages: messages of all ranks.
        nodes: number of nodes, each of ``per_node`` ranks.
        per_node: ranks of a node.
        levels: True: reduce and gather within a node first, as hybridcomp does; False: rings over
            all ranks.
        kept: share of the parameters that is gathered only once.
    """
    ring, pairs = 1 - 1 / (nodes * per_node), 1 - 1 / nodes
    return sum(
        message.sent * (pairs if levels or message.between else ring) * (1 - kept * message.again)
        for message in messages
    )


def table() -> str:
    """Return README's table."""
    lines = [
        "| job | bits a parameter, natively | with `recommended` | fewer bytes |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *_rows()])


def zero3() -> str:
    """Return the table of methods under ZeRO 3, native and with the preset."""
    once, twice, hpz, zeropp = (JOBS[name] for name in ("zero3", "zero3_twice", "hpz", "zeropp"))
    rows = {
        "native": (once.today, twice.today),
        "hpZ": (once.today, hpz.today),
        "ZeRO++: hpZ, qwZ and qgZ (computed)": (zeropp.today, zeropp.today),
        "`recommended`": (once.recommended, twice.recommended),
        "hpZ with `recommended`": (once.recommended, hpz.recommended),
    }
    return _two_columns(("gathered once", "gathered twice"), rows)


def fsdp2() -> str:
    """Return the table of torch's methods and of the preset, under FSDP2 and HSDP."""
    fp32, bf16 = (JOBS["fsdp2"], JOBS["hsdp"]), (JOBS["fsdp2_bf16"], JOBS["hsdp_bf16"])
    rows = {
        "fp32 sums": (fp32[0].today, fp32[1].today),
        "`reduce_dtype=torch.bfloat16`": (bf16[0].today, bf16[1].today),
        "`recommended`": (fp32[0].recommended, fp32[1].recommended),
    }
    return _two_columns(("FSDP2", "HSDP"), rows)


def _two_columns(
    head: tuple[str, str], rows: Mapping[str, tuple[Sequence[Message], Sequence[Message]]]
) -> str:
    lines = [f"| | {head[0]} | {head[1]} |", "|---|---|---|"]
    for words, cells in rows.items():
        lines.append(f"| {words} | {' | '.join(f'{total(cell):.1f}' for cell in cells)} |")
    return "\n".join(lines)


def _rows() -> Iterator[str]:
    for job in (job for job in JOBS.values() if job.told):
        today = total(job.today, job.accumulated)
        ours = total(job.recommended, job.accumulated)
        mark = "" if job.counted else " (computed)"
        factor = f"{today / ours:.1f}" if today > ours else f"{today / ours:.2f}"
        yield f"| {job.words}{mark} | {today:.1f} | {ours:.1f} | {factor}x |"
