"""Tensors that a pipeline's codec may change, and messages whose buffers have other dtypes.

``tests/training/test_identity_pipe.py`` holds the marks and the order of messages on engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("deepspeed")

from hybridcomp.channels import Channels, Send
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.ds.pipeline import pipeline
from hybridcomp.patches.ds.pipeline.agreement import Agreed, Agreement, Neighbour
from hybridcomp.patches.ds.pipeline.pipe import PIPE, RUNNING, Pipe
from hybridcomp.patches.ds.pipeline.values import carries_values, is_mask, passed_through

FLOAT, HALF, INT = torch.float32, torch.float16, torch.int64


def additive_mask() -> Tensor:
    mask = torch.zeros(4, 8).masked_fill(torch.arange(8) > 4, -math.inf)
    return mask.requires_grad_()


# which tensors carry values


def test_lone_tensors() -> None:
    assert carries_values([torch.ones(4)]) == [True]  # constant, without grad: still the activation
    assert carries_values([torch.ones(4, dtype=torch.float64)]) == [False]
    assert carries_values([torch.ones(4, dtype=torch.int64)]) == [False]


def test_tuples_in_training() -> None:
    hidden = nn.Linear(8, 8)(torch.randn(4, 8))
    table = torch.randn(4, 8).requires_grad_()  # such as rotary positions
    received = torch.randn(4, 8).requires_grad_()
    tensors = [
        hidden,
        torch.randn(4, 8),
        additive_mask(),
        table,
        received.clone().unsqueeze(0).transpose(0, 1),
        received * 2,
        torch.arange(3),
        torch.ones(3, dtype=torch.bool),
    ]
    assert carries_values(tensors) == [True, False, False, False, False, True, False, False]
    as_half = torch.randn(4, 8).half().requires_grad_() * 2
    assert carries_values([hidden, as_half], mask_last=True) == [True, False]
    prompt = nn.Parameter(torch.randn(2, 4))
    assert not passed_through(prompt) and not passed_through(prompt.expand(3, 2, 4))


def test_partitioned_activation_comes_second() -> None:
    tensors = [torch.arange(5), torch.randn(8), torch.randn(8).half()]
    assert carries_values(tensors, partitioned=True) == [False, True, False]
    assert carries_values([tensors[0], torch.arange(8)], partitioned=True) == [False, False]


@torch.no_grad()
def test_evaluation_follows_training() -> None:
    tensors = [torch.randn(4), torch.randn(4)]
    assert carries_values(tensors) == [False, False]
    assert carries_values(tensors, known=[True, False]) == [True, False]
    assert carries_values(tensors, known=[True]) == [False, False]
    assert carries_values([tensors[0], tensors[1].int()], known=[True, True]) == [True, False]


def test_masks_out_of_an_opaque_node() -> None:
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return hidden * 2, mask * 1

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            return grads

    apply: Any = Opaque.apply
    outputs = apply(torch.randn(4, 8).requires_grad_(), additive_mask())
    assert not passed_through(outputs[1])
    assert carries_values(outputs) == [True, False]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, -math.inf, 0.0], True),
        ([1.0, 1.0], True),
        ([0.0, 1.0, 2.0], False),
        ([math.nan, 1.0], False),
        ([], False),
    ],
)
def test_two_valued(values: list[float], expected: bool) -> None:
    assert is_mask(torch.tensor(values)) is expected


# send and recv

A, B, C = Agreed(FLOAT, True), Agreed(HALF, False), Agreed(INT, False)


def test_gradients_come_back_for_the_set_that_went() -> None:
    link = Neighbour(agreed=Agreement((A, C, B), (A, B)))
    assert [link.activation() for _ in range(3)] == [A, C, B]
    link.agreed = Agreement((B,), (B,))  # another shape in between
    assert link.activation() == B
    assert [link.gradient() for _ in range(3)] == [A, B, B]
    assert not link.waiting
    link.activation()  # of an evaluation, for which no gradient comes back
    link.restart()
    link.agreed = Agreement((A,), (A,))
    assert [link.activation(), link.gradient()] == [A, A]


class Wire:
    """Stand-in for a channel that encodes everything; records messages."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.incoming = torch.arange(16.0)

    def run(self, message: Any, *, native: Any, encoded: Any) -> Any:
        hop = message.between
        if isinstance(message, Send):
            values = message.load()
            self.calls.append((*hop, message.direction, values.tolist()))
        else:
            values = message.buffer()
            self.calls.append((*hop, message.direction))
            values.copy_(self.incoming)
            message.put(values)
        assert values.dtype == message.dtype and values.dim() == 1 and values.is_contiguous()
        return encoded(None)


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Yield a wire with the pipeline of stage 1 of 3."""
    wire = Wire()
    engine = SimpleNamespace(
        next_stage=2, stage_id=1,
        grid=SimpleNamespace(stage_to_global=lambda stage_id: 10 + stage_id),
        has_attention_mask=False, has_bool_tensors=False, is_grad_partitioned=False,
        is_pipe_partitioned=False,
    )  # fmt: skip
    pipe = Pipe(engine, wire)  # type: ignore[arg-type]
    pipe.agree(pipe.outgoing, [A])
    pipe.agree(pipe.incoming, [Agreed(torch.bfloat16, True)])
    with RUNNING.inside(pipe):
        yield wire


def test_buffers_of_another_dtype_and_layout(wire: Wire) -> None:
    """Gradients have the dtype of the activation, not of the buffer that it came in."""
    send, recv = pipeline.make_send(pytest.fail), pipeline.make_recv(pytest.fail)
    bf16 = torch.empty(4, 4, dtype=torch.bfloat16)
    for buffer in (bf16, torch.empty(4, 4), bf16.t()):
        assert recv(buffer, 0) is None
        assert torch.equal(buffer.float(), torch.arange(16.0).view(4, 4))
        assert wire.calls.pop() == (10, 11, "forward")  # global ranks of both ends
        column = torch.arange(16.0).view(4, 4).t()  # not contiguous
        send(column, 0)
        assert wire.calls.pop() == (11, 10, "backward", column.flatten().tolist())


def test_gradients_of_partitioned_and_masked_sets(wire: Wire) -> None:
    pipe = RUNNING.get()
    assert pipe is not None

    def gradients(activations: list[Agreed], **flags: bool) -> tuple[Agreed, ...]:
        link = Neighbour()
        off = dict.fromkeys(("has_bool_tensors", "is_pipe_partitioned", "is_grad_partitioned"))
        vars(pipe.engine).update({**off, **flags})
        pipe.agree(link, activations)
        assert link.agreed is not None
        return link.agreed.gradients

    assert gradients([A, B, C]) == (A, B)
    assert gradients([A, B], has_bool_tensors=True) == (A,)
    assert gradients([C, A], is_pipe_partitioned=True) == (A,)
    assert gradients([C, A], is_pipe_partitioned=True, is_grad_partitioned=True) == (C, A)


def test_training_after_an_evaluation_agrees_anew(wire: Wire) -> None:
    pipe = RUNNING.get()
    assert pipe is not None
    pipe.engine.first_output_send, pipe.engine.pipe_recv_buf = False, "buffer"
    with torch.no_grad():
        pipe.agree(pipe.outgoing, [A])
        pipe.begin()
    assert not pipe.engine.first_output_send
    pipe.begin()
    assert pipe.engine.first_output_send and pipe.engine.pipe_recv_buf is None
    pipe.engine.first_output_send = False
    pipe.begin()
    assert not pipe.engine.first_output_send


def test_schedule_of_an_engine_without_a_block_stays_apart(wire: Wire) -> None:
    seen: list[Any] = []
    schedule = pipeline.make_exec_schedule(lambda self, pipe_schedule: seen.append(RUNNING.get()))
    outer = RUNNING.get()
    schedule(SimpleNamespace(), None)
    schedule(SimpleNamespace(**{PIPE: outer}), None)
    assert seen == [None, outer]
    with RUNNING.inside(None):
        assert pipeline.make_send(lambda *_: "upstream")(torch.ones(16), 2) == "upstream"
        assert pipeline.make_recv(lambda *_: "upstream")(torch.ones(16), 2) == "upstream"


@pytest.mark.parametrize("way", ["error", "native"])
def test_dualpipev(way: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    dualpipev = pytest.importorskip("deepspeed.runtime.pipe.dualpipev")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    engine = object.__new__(dualpipev.DualPipeVEngine)
    off = Channels(CompressionConfig.parse({"dp": "bf16"}))
    pipeline.attached(engine, off)
    block = {"pp": {"codec": "blockint", "bits": 8}, "on_unsupported": way}
    channels = Channels(CompressionConfig.parse(block))
    if way == "error":
        with pytest.raises(ConfigError, match=r"compression.pp.*DualPipeV"):
            pipeline.attached(engine, channels)
    else:
        pipeline.attached(engine, channels)
        assert "DualPipeV" in capsys.readouterr().out
    assert PIPE not in vars(engine)
