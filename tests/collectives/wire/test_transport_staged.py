"""GPU tensors on gloo groups: torch.distributed sees staged host memory only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.collectives import Meter, gather_words
from hybridcomp.collectives.low_rank import Matrix
from hybridcomp.collectives.wire import staging, transport
from hybridcomp.collectives.wire.group import Group
from tests.collectives.calls import low_rank_sum
from tests.collectives.common import digest, values_of
from tests.collectives.late import everything, sizes_ahead
from tests.ranks import RunRanks

#: functions that pass tensors to torch.distributed
CALLS = ("all_reduce", "isend", "irecv")


class Pretended(staging.Staging):
    """Treats every tensor as a GPU tensor, and records staged ones."""

    devices = frozenset({"cpu"})

    def __init__(self) -> None:
        self.kept: list[Tensor] = []  # staged tensors; keeps their addresses
        self.calls: dict[str, int] = {}

    def needed(self, tensor: Tensor, group: Group) -> bool:
        return True

    def room(self, like: Tensor) -> Tensor:
        found = torch.empty(like.shape, dtype=like.dtype)
        self.kept.append(found)
        return found

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` lies in staged memory."""
        starts = [(found.data_ptr(), found.nbytes) for found in self.kept]
        return any(0 <= tensor.data_ptr() - start <= nbytes for start, nbytes in starts)

    def guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``call`` to reject tensors that were not staged."""

        def checked(*args: Any, **kwargs: Any) -> Any:
            for tensor in (arg for arg in args if isinstance(arg, Tensor)):
                assert self.holds(tensor), f"{name} was given memory of a GPU"
            self.calls[name] = self.calls.get(name, 0) + 1
            return call(*args, **kwargs)

        return checked


@contextmanager
def pretended() -> Iterator[Pretended]:
    found = Pretended()
    with ExitStack() as stack:
        for module in (staging, transport):
            stack.enter_context(mock.patch.object(module, "STAGING", found))
        stack.enter_context(sizes_ahead())  # as on a GPU
        for name in CALLS:
            checked = found.guarded(name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, checked))
        yield found


def everything_staged(codec_name: str, settings: dict[str, Any]) -> list[str]:
    """Return the digests of all collectives' results, in two levels too, and gathered words."""
    codec, words = make_codec(codec_name, **settings), torch.tensor([dist.get_rank(), 7])
    gathered = torch.tensor(gather_words(words, Group.of(None), Meter())).view(-1)
    found = everything(codec, torch.float32, not codec.lossless, 1)
    return [digest(gathered), *(bits for bits, _ in found)]


def low_rank(_: None) -> list[str]:
    rank, residual = dist.get_rank(), torch.zeros(3001)
    steps = low_rank_sum(
        values_of(rank, 3001), [Matrix("m", 1, 50, 40)], 2, None,
        residual=residual, warm={},
    )  # fmt: skip
    try:
        while True:
            next(steps).wait()
    except StopIteration as stop:
        return [digest(stop.value, residual)]


def compare(function: Callable[..., list[str]], *args: Any) -> tuple[bool, dict[str, int]]:
    """Return ``(same results with and without staging, calls into torch.distributed)``."""
    expected = function(*args)
    with pretended() as found:
        return function(*args) == expected, found.calls


@pytest.mark.parametrize(
    ("name", "settings"),
    [("blockint", {"bits": 8}), ("expcode", {}), ("radix", {"error_bound": 1e-2})],
    ids=lambda value: str(value),
)
def test_collectives_hand_over_host_memory_only(
    on_ranks: RunRanks, name: str, settings: dict[str, Any]
) -> None:
    found = on_ranks(4, compare, everything_staged, name, settings)
    assert all(same for same, _ in found)
    sent, received = ([calls[call] for _, calls in found] for call in ("isend", "irecv"))
    assert sum(sent) == sum(received) and min(sent + received) >= 3 * 10, "three for each message"


def test_low_rank_sums_do_too(on_ranks: RunRanks) -> None:
    for same, calls in on_ranks(2, compare, low_rank, None):
        assert same and calls


def test_only_gpus_on_gloo_are_staged(on_ranks: RunRanks) -> None:
    assert on_ranks(2, _decide) == [("gloo", "gloo", False, True)] * 2


def _decide() -> tuple[str, str, bool, bool]:
    there = mock.Mock(is_cuda=True, device=torch.device("cuda"))
    needed, group = staging.Staging().needed, Group.of(None)
    return (
        group.backends["cpu"], group.backends["cuda"],
        needed(torch.zeros(1), group), needed(there, group),
    )  # fmt: skip


def test_a_group_of_two_backends_is_asked_for_the_devices() -> None:
    config, group = "cpu:gloo,cuda:nccl", Group(cast(Any, None), 0, 1)
    with mock.patch.object(dist, "get_backend_config", lambda group: config):
        assert group.backends == {"cpu": "gloo", "cuda": "nccl"}
