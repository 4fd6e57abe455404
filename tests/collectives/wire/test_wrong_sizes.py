"""A rank that announces oversized payloads: a single error, and no memory allocated for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.collectives import Meter
from hybridcomp.collectives.async_p2p import Posting
from hybridcomp.collectives.ring import Contents, Ring
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.headers import Header, spec_digest
from hybridcomp.errors import CodecError
from tests.collectives.calls import all_gather, all_reduce, all_to_all, group_of
from tests.collectives.common import values_of
from tests.collectives.late import late, sizes_ahead
from tests.ranks import RunRanks
from tests.stand_ins.allocated import Allocated

N, LIAR, CODEC = 6144, 1, make_codec("expcode")
#: bytes added to the liar's sizes: within a machine's memory, or beyond any
LIES = (1 << 28, -(1 << 28))
CALLS: dict[str, Callable[[Tensor], object]] = {
    "all_gather": lambda values: all_gather(values, values.new_empty(3 * N), CODEC, None).wait(),
    "all_to_all": lambda values: all_to_all(torch.empty_like(values), values, CODEC, None).wait(),
    "all_reduce": lambda values: all_reduce(values, CODEC, None).wait(),
}


class _Told(Exception):
    """Raised after the liar has sent its sizes; it sends nothing more."""


@contextmanager
def _lying(lie: int) -> Iterator[None]:
    """Change the sizes that this rank sends ahead; their payloads are not sent."""

    def changed(send: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Tensor, values: Tensor, *more: Any) -> Any:
            if values.dtype != torch.int64:
                raise _Told
            return send(out, values + lie, *more)

        return call

    with ExitStack() as stack:
        for name in ("all_to_all", "all_gather"):
            found = changed(getattr(transport, name))
            stack.enter_context(mock.patch.object(transport, name, found))
        yield


@contextmanager
def _lying_in_front(lie: int) -> Iterator[None]:
    """Change the sizes that this rank writes in front of its payloads."""
    write = payload_sizes.write_head

    def changed(message: Tensor, nbytes: list[int]) -> None:
        write(message, [one + lie for one in nbytes])

    with mock.patch.object(payload_sizes, "write_head", changed):
        yield


def _heard(name: str, ahead: str, lie: int) -> tuple[str, int]:
    """Return this rank's error, and its peak allocation."""
    values, said = values_of(dist.get_rank(), N), ""
    lying = _lying_in_front if ahead == "in front" else _lying
    where: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "in front": ExitStack, "ahead": sizes_ahead, "late": late,
    }  # fmt: skip
    with where[ahead](), ExitStack() as stack, Allocated() as allocated:
        if dist.get_rank() == LIAR:
            stack.enter_context(lying(lie))
        try:
            CALLS[name](values)
        except (CodecError, _Told) as error:
            said = str(error)
    return said, allocated.most


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        ("all_gather", "in front"), ("all_to_all", "in front"), ("all_gather", "ahead"),
        ("all_to_all", "ahead"), ("all_gather", "late"), ("all_reduce", "late"),
    ],
)  # fmt: skip
def test_all_that_see_it_say_so_and_take_no_memory(
    on_ranks: RunRanks, name: str, ahead: str
) -> None:
    part = {"all_gather": N, "all_to_all": N // 3, "all_reduce": N // 3}[name]
    most = CODEC.wire_nbytes(part, torch.float32)
    for lie in LIES:
        for rank, (said, taken) in enumerate(on_ranks(3, _heard, name, ahead, lie)):
            assert taken < 1 << 24
            if rank != LIAR:
                assert said.startswith(f"rank {LIAR} announces a payload of "), (rank, said)
                assert f"with expcode(), which has at most {most}:" in said


def _parcel() -> str:
    """Return this rank's error about the parcel that the liar forwards."""
    ring = Ring(CODEC, group_of(None), Meter(), torch.device("cpu"))
    values = values_of(dist.get_rank(), N)
    with _lying_in_front(LIES[0]) if dist.get_rank() == LIAR else ExitStack():
        parcel = ring.pack([values])
    try:
        ring.shift(parcel, 1, Contents((N,), values.dtype)).wait()
    except CodecError as error:
        return str(error)
    return ""


def test_parcels_of_a_ring(on_ranks: RunRanks) -> None:
    said, fine = on_ranks(2, _parcel)
    assert said.startswith(f"rank {LIAR} announces a payload of ") and not fine
    assert f"at most {CODEC.wire_nbytes(N, torch.float32)}:" in said


def test_sizes_ahead_of_a_parcel_and_in_a_posted_message() -> None:
    group: Any = SimpleNamespace(global_ranks=(4, 5))
    values, expected = torch.zeros(N), Contents((N,), torch.float32)
    most = CODEC.wire_nbytes(N, torch.float32)
    ring = Ring(CODEC, group, Meter(), torch.device("cpu"))

    def shift(out: Tensor, *_: object) -> mock.Mock:
        out.fill_(most + 16)
        return mock.Mock()

    said = f"rank 5 announces a payload of {most + 16} bytes with expcode.*at most {most}:"
    with mock.patch.object(transport, "shift", shift), pytest.raises(CodecError, match=said):
        ring._tell_sizes(None, expected, LIAR, LIAR)
    header = Header(spec_digest(CODEC.spec), torch.float32, N, most + 16).pack()
    message = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    with pytest.raises(CodecError, match=said):
        Posting(CODEC).decode(message, values, 5, Meter())
