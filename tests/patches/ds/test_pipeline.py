"""Pipeline seams on fakes: marked tensors, the header for the other side, buffer cursors."""

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
from hybridcomp.patches.ds.pipeline.agreement import (
    VALUES,
    Agreed,
    Agreement,
    Neighbour,
    dtype_slots,
    set_marks,
    take_marks,
)
from hybridcomp.patches.ds.pipeline.pipe import PIPE, RUNNING, Pipe
from hybridcomp.patches.ds.pipeline.values import carries_values, is_mask, passed_through
from hybridcomp.seams.patching import Patch, apply_all, revert_all

FLOAT, HALF, INT = torch.float32, torch.float16, torch.int64


def additive_mask() -> Tensor:
    mask = torch.zeros(4, 8).masked_fill(torch.arange(8) > 4, -math.inf)
    return mask.requires_grad_()


def test_apply_and_revert() -> None:
    from deepspeed.runtime.pipe import p2p

    before = p2p.send
    applied = apply_all(Patch(seam, make) for seam, make in pipeline.PATCHES)
    assert p2p.send is not before and p2p.send.__wrapped__ is before
    revert_all(applied)
    assert p2p.send is before


# which tensors carry values


def test_lone_tensors() -> None:
    assert carries_values([torch.ones(4)]) == [True]  # constant, without grad: still the activation
    assert carries_values([torch.ones(4, dtype=torch.bfloat16)]) == [True]
    assert carries_values([torch.ones(4, dtype=torch.float64)]) == [False]
    assert carries_values([torch.ones(4, dtype=torch.int64)]) == [False]


def test_tuples_in_training() -> None:
    layer = nn.Linear(8, 8)
    hidden = layer(torch.randn(4, 8))
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


def test_bool_mask_as_half_comes_last() -> None:
    hidden = nn.Linear(8, 8)(torch.randn(4, 8)).half()
    mask = torch.randn(4, 8).half().requires_grad_() * 2
    assert carries_values([hidden, mask]) == [True, True]
    assert carries_values([hidden, mask], mask_last=True) == [True, False]


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_two_valued(values: list[float], expected: bool, dtype: torch.dtype) -> None:
    assert is_mask(torch.tensor(values, dtype=dtype)) is expected


def test_a_parameter_is_no_passed_through_tensor() -> None:
    prompt = nn.Parameter(torch.randn(2, 4))
    assert not passed_through(prompt)
    assert not passed_through(prompt.expand(3, 2, 4))


# the shape message

DTYPES = [torch.float32, torch.float64, torch.float16]


def meta_of(numbers: list[int]) -> Tensor:
    """Return metadata as upstream does: 256 int32, garbage after the used part."""
    meta = torch.full((256,), 77, dtype=torch.int32)
    meta[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    return meta


@pytest.mark.parametrize(
    ("numbers", "slots", "marks"),
    [
        ([0, 2, 3, 4, 5, 6], [1], [True]),
        ([0, 0, 0], [1], [False]),
        ([2, 3, 0, 2, 7, 8, 1, 0, 2, 1, 9], [2, 6, 8], [True, False, True]),
        ([2, 0], [], []),
    ],
)
def test_marks_there_and_back(numbers: list[int], slots: list[int], marks: list[bool]) -> None:
    meta = meta_of(numbers)
    assert dtype_slots(numbers) == slots
    marked = set_marks(meta, marks)
    assert torch.equal(meta, meta_of(numbers))
    assert sum(int(x) >= VALUES for x in marked) == sum(marks)
    found = take_marks(marked, DTYPES)
    assert [agreed.values for agreed in found] == marks
    assert [agreed.dtype for agreed in found] == [DTYPES[numbers[slot]] for slot in slots]
    assert torch.equal(marked, meta)


# links

A, B, C = Agreed(FLOAT, True), Agreed(HALF, False), Agreed(INT, False)


def test_gradients_come_back_for_the_set_that_went() -> None:
    link = Neighbour(agreed=Agreement((A, C, B), (A, B)))
    assert [link.activation() for _ in range(3)] == [A, C, B]
    link.agreed = Agreement((B,), (B,))  # another shape in between
    assert link.activation() == B
    assert [link.gradient() for _ in range(3)] == [A, B, B]
    assert not link.waiting


def test_restart_forgets_an_evaluation() -> None:
    link = Neighbour(agreed=Agreement((A, C), (A,)))
    link.activation()
    link.restart()
    assert [link.activation() for _ in range(2)] == [A, C]
    assert link.gradient() == A
    assert not link.waiting


def test_nothing_agreed() -> None:
    assert Neighbour().activation() is None
    assert Neighbour().gradient() is None


# send and recv


class Wire:
    """Stands for a channel and upstream's p2p; records calls."""

    active = True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.hops: list[tuple[int, int, str]] = []
        self.incoming: Tensor = torch.empty(0)

    def run(self, message: Any, *, native: Any, encoded: Any) -> Any:
        assert message.between is not None
        self.hops.append((*message.between, message.direction))
        if message.numel < 8:
            return self.run_native(message, native)
        if isinstance(message, Send):
            values = message.load()
            assert not values.requires_grad
            sent = values.dtype, values.tolist(), message.native_nbytes(2)
            self.calls.append(("send", message.direction, message.between[1], *sent))
        else:
            values = message.buffer()
            self.calls.append(("recv", message.direction, message.between[0], values.dtype))
            values.copy_(self.incoming)
            message.put(values)
        assert values.dim() == 1 and values.is_contiguous()
        return encoded(None)

    def run_native(self, message: Any, native: Any) -> Any:
        if nbytes := message.native_nbytes(2):
            self.count_native(nbytes, message.direction)
        return native()

    def count_native(self, nbytes: int, direction: str) -> None:
        self.calls.append(("native", direction, nbytes))

    def upstream(self, tensor: Tensor, stage: int, async_op: bool = False) -> str:
        self.calls.append(("upstream", stage, tensor.tolist()))
        return "upstream"


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Yield a wire with the pipeline of stage 1 of 3."""
    wire = Wire()
    engine = SimpleNamespace(
        next_stage=2,
        stage_id=1,
        prev_stage=0,
        grid=SimpleNamespace(stage_to_global=lambda stage_id: 10 + stage_id),
        has_attention_mask=False,
        has_bool_tensors=False,
        is_grad_partitioned=False,
        is_pipe_partitioned=False,
        ID_TO_DTYPE=DTYPES,
    )
    pipe = Pipe(engine, wire)  # type: ignore[arg-type]
    pipe.agree(pipe.outgoing, [A, Agreed(FLOAT, False), C])
    pipe.agree(pipe.incoming, [Agreed(torch.bfloat16, True)])
    with RUNNING.inside(pipe):
        yield wire


def test_send_encodes_values_only(wire: Wire) -> None:
    send = pipeline.make_send(wire.upstream)
    column = torch.arange(16.0).view(4, 4).t().requires_grad_()  # not contiguous
    assert send(column, 2) is None
    assert send(torch.zeros(9), 2) == "upstream"
    assert send(torch.arange(9), 2) == "upstream"
    assert send(torch.ones(2, 2), 2) == "upstream"  # the next set; below the codec's minimum size
    assert [call[:3] for call in wire.calls] == [
        ("send", "forward", 12),
        ("native", "forward", 36),
        ("upstream", 2, [0.0] * 9),
        ("native", "forward", 72),
        ("upstream", 2, list(range(9))),
        ("native", "forward", 16),
        ("upstream", 2, [[1.0, 1.0], [1.0, 1.0]]),
    ]
    assert wire.calls[0][3:] == (FLOAT, column.reshape(-1).tolist(), 64)


def test_recv_decodes_as_agreed_whatever_the_buffer(wire: Wire) -> None:
    recv = pipeline.make_recv(wire.upstream)
    wire.incoming = torch.arange(16.0)
    for buffer in (
        torch.empty(4, 4, dtype=torch.bfloat16),
        torch.empty(4, 4),
        torch.empty(4, 4, dtype=torch.bfloat16).t(),
    ):
        assert recv(buffer, 0) is None
        assert torch.equal(buffer.float(), torch.arange(16.0).view(4, 4))
        assert wire.calls.pop() == ("recv", "forward", 10, torch.bfloat16)


def test_gradients_use_the_dtype_of_the_activation(wire: Wire) -> None:
    send, recv = pipeline.make_send(wire.upstream), pipeline.make_recv(wire.upstream)
    wire.incoming = torch.arange(16.0)
    recv(torch.empty(16, dtype=torch.bfloat16), 0)
    send(torch.ones(16), 0)  # the buffer was fp32, so the gradient is
    assert wire.hops == [(10, 11, "forward"), (11, 10, "backward")]  # global ranks of both ends
    assert wire.calls[-1] == ("send", "backward", 10, torch.bfloat16, [1.0] * 16, 64)
    for tensor in (torch.ones(16), torch.ones(16), torch.arange(16)):
        send(tensor, 2)
    wire.calls.clear()
    recv(torch.empty(16), 2)
    assert wire.calls.pop() == ("recv", "backward", 12, FLOAT)
    recv(torch.zeros(16), 2)  # the mask's
    assert wire.calls.pop() == ("upstream", 2, [0.0] * 16)


def test_without_a_running_pipeline_upstream_does_it(wire: Wire) -> None:
    with RUNNING.inside(None):
        assert pipeline.make_send(wire.upstream)(torch.ones(16), 2) == "upstream"
        assert pipeline.make_recv(wire.upstream)(torch.ones(16), 2) == "upstream"
    assert [call[0] for call in wire.calls] == ["upstream", "upstream"]


def test_gradients_of_partitioned_and_masked_sets(wire: Wire) -> None:
    pipe = RUNNING.get()
    assert pipe is not None
    link, engine = Neighbour(), pipe.engine

    def gradients(activations: list[Agreed], **flags: bool) -> tuple[Agreed, ...]:
        vars(engine).update(
            {
                "has_bool_tensors": False,
                "is_pipe_partitioned": False,
                "is_grad_partitioned": False,
                **flags,
            }
        )
        pipe.agree(link, activations)
        assert link.agreed is not None
        return link.agreed.gradients

    assert gradients([A, B, C]) == (A, B)
    assert gradients([A, B], has_bool_tensors=True) == (A,)
    assert gradients([C, A], is_pipe_partitioned=True) == (A,)
    assert gradients([C, A], is_pipe_partitioned=True, is_grad_partitioned=True) == (C, A)


# dispatch


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
    assert RUNNING.get() is outer


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
