"""Sizes kept on the device: the same bits and bytes as host sizes, with fewer waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.codecs import Bounded, Codec, make_codec
from hybridcomp.collectives import Meter
from hybridcomp.collectives.wire import payload_sizes, staging
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.pieces import IMAGE
from tests.collectives import late as calls
from tests.collectives.calls import all_reduce
from tests.collectives.common import digest, values_of
from tests.collectives.late import NUMEL, Reads, Sums, everything, late, moved, sizes_ahead
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import EmulatedLauncher, emulated
from tests.ranks import RunRanks
from tests.selection import by_day


class Counting(EmulatedLauncher):
    """Counts kernel launches, except those that a CPU uses to add values of another dtype."""

    launches = 0

    def launch(self, source: str, *words: Any, **options: Any) -> None:
        self.launches += source != "casts.cu"
        super().launch(source, *words, **options)


CODECS = [
    make_codec("radix", error_bound=1e-2, segment=256), make_codec("expcode"), make_codec("mpc"),
]  # fmt: skip


def both(codec: Codec, dtype: torch.dtype, feedback: bool, emulate: bool, bits: int = 32) -> int:
    """Compare both ways; return the number of size exchanges that the device one waited for."""
    steps = 1 if emulate else 2
    with sizes_ahead():
        expected = everything(codec, dtype, feedback, steps, bits)
    on_device = kernels_replaced(CudaKernels(EmulatedLauncher())) if emulate else nullcontext()
    refuse = AssertionError("an encoder was asked for its size")
    with ExitStack() as stack:
        found = stack.enter_context(late())
        stack.enter_context(on_device)
        stack.enter_context(mock.patch.object(type(codec), "encode", side_effect=refuse))
        assert everything(codec, dtype, feedback, steps, bits) == expected
    assert found.waits == found.copies
    return found.waits


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("ranks", by_day([2, 3, 4], [3]))
def test_bits_bytes_and_residuals_are_those_of_sizes_that_are_returned(
    on_ranks: RunRanks, ranks: int, codec: Codec, feedback: bool
) -> None:
    dtype = torch.float32 if feedback else torch.bfloat16
    assert min(on_ranks(ranks, both, codec, dtype, feedback, False)) >= 10


@pytest.mark.parametrize("codec", by_day(CODECS, CODECS[1:]), ids=str)
@pytest.mark.parametrize("ranks", by_day([2, 3], [3]))
def test_with_the_kernels_of_a_device(on_ranks: RunRanks, ranks: int, codec: Codec) -> None:
    """Kernels for all pieces of a message also compute sums and residuals."""
    for image in ((f"{codec.name}.cu",), (f"{codec.name}.cu", *IMAGE), ("pieces.cu",)):
        emulated(*image)  # built once, or skipped
    assert min(on_ranks(ranks, both, codec, torch.bfloat16, True, True)) > 5


@pytest.mark.parametrize("aligned", by_day([True, False], [False]))
@pytest.mark.parametrize("bits", by_day([4, 8, 16], [8]))
def test_residuals_of_few_bits_are_those_of_a_cpu(
    on_ranks: RunRanks, bits: int, aligned: bool
) -> None:
    """All pieces of a message at once, with borders between and inside blocks of a residual."""
    codec = make_codec("radix", error_bound=1e-2, segment=256)
    assert min(on_ranks(3, _few, codec, bits, aligned)) > 5


def _few(codec: Codec, bits: int, aligned: bool) -> int:
    def cuts_of(numel: int) -> list[int]:
        return list(range(640, numel, 640))

    with mock.patch.object(calls, "cuts_of", cuts_of) if aligned else nullcontext():
        return both(codec, torch.bfloat16, True, True, bits)


@pytest.mark.parametrize("bits", by_day([4, 8, 16], [8]))
def test_launches_do_not_grow_with_pieces_of_few_bits(on_ranks: RunRanks, bits: int) -> None:
    """For 1, 4 and 12 pieces; a single piece has no table."""
    codec, steps = make_codec("expcode"), (NUMEL, 2304, 768)
    for one, several, many in on_ranks(3, _launches, codec, torch.bfloat16, steps, bits):
        assert several == many and max(several) <= 32, (one, several, many)
        assert all(few <= more + 2 for few, more in zip(one, many, strict=True))


def _launches(
    codec: Codec, dtype: torch.dtype, steps: Sequence[int] = (3000, 500), bits: int = 32
) -> list[list[int]]:
    """Return launches of each reduction, with borders so far apart."""
    found = []
    for step in steps:

        def cuts_of(numel: int, step: int = step) -> list[int]:
            return list(range(step, numel, step))

        sums, counts, launcher = Sums(codec, dtype, True, bits), list[int](), Counting()
        with (
            late(),
            kernels_replaced(CudaKernels(launcher)),
            mock.patch.object(calls, "cuts_of", cuts_of),
        ):
            for call in (sums.all_reduce, sums.reduce_scatter, sums.direct, sums.balanced):
                launcher.launches = 0
                call(0, Meter())
                counts.append(launcher.launches)
        found.append(counts)
    return found


@pytest.mark.parametrize("codec", by_day(CODECS, CODECS[1:2]), ids=str)
def test_launches_do_not_grow_with_the_parts(on_ranks: RunRanks, codec: Codec) -> None:
    dtype = torch.bfloat16 if codec.lossless else torch.float32
    for few, many in on_ranks(3, _launches, codec, dtype):
        assert few == many and max(few) <= 16, (few, many)


def test_a_bound_leaves_sizes_where_its_codecs_do(on_ranks: RunRanks) -> None:
    assert min(on_ranks(2, _bounded)) > 5


def _bounded() -> int:
    codec = Bounded(1e-2, segment=256, family="radix")
    with sizes_ahead():
        expected = everything(codec, torch.float32, True, 1)
    with late() as found:
        assert everything(codec, torch.float32, True, 1) == expected
    return found.waits


def _in_front(codec: Codec, dtype: torch.dtype) -> tuple[int, int]:
    """Compare with sizes sent ahead; return numbers of messages."""
    with sizes_ahead():
        ahead = everything(codec, dtype, True, 2)
    found = everything(codec, dtype, True, 2)
    assert [bits for bits, _ in found] == [bits for bits, _ in ahead]
    here, there = ([figures for _, figures in row if figures] for row in (found, ahead))
    messages = [sum(cast(int, figures[0]) for figures in row) for row in (here, there)]
    for (_, few, *_), (_, many, *_) in zip(here, there, strict=True):
        assert cast(int, few) <= cast(int, many) + 16 * 20, "a head is padded, slots are not"
    return messages[0], messages[1]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("ranks", by_day([2, 3, 4], [3]))
def test_sizes_in_front_of_payloads_change_no_bit(
    on_ranks: RunRanks, ranks: int, codec: Codec
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for few, many in on_ranks(ranks, _in_front, codec, dtype):
            assert few < many, "no message for sizes"


def _waits(codec: Codec) -> dict[str, tuple[int, int]]:
    """Return by collective the waits for sizes, and all reads of tensors."""
    sums, found = Sums(codec, torch.float32, True), {}
    calls: list[Callable[[int, Meter], object]] = [
        sums.all_reduce, sums.reduce_scatter, sums.direct, sums.balanced
    ]  # fmt: skip
    for call in calls:
        with late() as watched, Reads() as reads:
            call(0, Meter())
        found[call.__name__] = (watched.waits, reads.count)
    with late() as watched, Reads() as reads:
        moves = moved(codec, torch.float32)
        for name in ("all_gather", "all_to_all", "empty", "short"):
            before = watched.waits, reads.count
            next(moves)
            found[name] = (watched.waits - before[0], reads.count - before[1])
        next(moves)
    return found


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_host_waits_once_for_an_exchange(on_ranks: RunRanks, codec: Codec) -> None:
    """It reads nothing else, for any number of payloads."""
    for rank, found in enumerate(on_ranks(3, _waits, codec)):
        # a second hop, or the other direction of a pair: a receiver reads a header
        sent = {0: (1, 1), 1: (0, 1), 2: (0, 0)}[rank]
        header = {0: (0, 0), 1: (0, 1), 2: (0, 0)}[rank]
        assert found == {
            "all_reduce": (2, 2), "reduce_scatter": (1, 1), "direct": (1, 1), "balanced": (2, 2),
            "all_gather": (1, 1), "all_to_all": (1, 1), "empty": header, "short": sent,
        }  # fmt: skip


def _overlapping() -> list[int]:
    """Return waits after creating two handles, after the first wait, and after both."""
    codec, found = make_codec("expcode"), []
    tensors = [values_of(dist.get_rank() + index, NUMEL) for index in range(2)]
    expected = [tensor.clone() for tensor in tensors]
    for tensor in expected:
        all_reduce(tensor, codec, None).wait()
    with late() as watched:
        handles = [all_reduce(tensor, codec, None, async_op=True) for tensor in tensors]
        found.append(watched.waits)
        for handle in handles:
            handle.wait()
            found.append(watched.waits)
    assert digest(*tensors) == digest(*expected)
    return found


def test_nobody_waits_before_a_handle_is_met(on_ranks: RunRanks) -> None:
    assert on_ranks(2, _overlapping) == [[0, 1, 2]] * 2


class Recorder(payload_sizes.SizeReader):
    """Records the operations of each stream."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.stream = "caller's"
        self.cuda = SimpleNamespace(Stream=lambda device: "own", stream=self._entered)

    @contextmanager
    def _entered(self, stream: str) -> Iterator[None]:
        self.stream, before = stream, self.stream
        yield
        self.stream = before

    def note(self, what: str) -> None:
        self.log.append(f"{what} on the {self.stream}")

    def copied(self, words: Tensor) -> payload_sizes.Arrival:
        self.note("copy")
        event = SimpleNamespace(synchronize=lambda: self.note("host waits"))
        return payload_sizes.Arrival(torch.tensor([7]), event)

    def message(self) -> Any:
        self.note("post")
        return SimpleNamespace(wait=lambda: self.note("message arrives"))


def test_on_a_gpu_sizes_travel_beside_the_callers_stream() -> None:
    """Checks the order of calls; their effect on a GPU is not visible here."""
    found = Recorder()
    words = mock.Mock(is_cuda=True, device=torch.device("cuda", 0))
    with (
        mock.patch.object(payload_sizes, "cuda", found.cuda),
        mock.patch.object(staging.STAGING, "needed", lambda tensor, group: False),
    ):
        steps = found.fetch(words, found.message(), None)  # type: ignore[arg-type]
        arrival = next(steps)
        assert found.log == [
            "post on the caller's", "message arrives on the own", "copy on the own"
        ]  # fmt: skip
        words.record_stream.assert_called_once_with("own")
        arrival.wait()
        with pytest.raises(StopIteration) as stop:
            next(steps)
    assert found.log[3:] == ["host waits on the caller's"]
    assert stop.value.value == [7]


def test_only_codecs_of_variable_size_on_a_gpu() -> None:
    stay, cuda = payload_sizes.SizeReader().stay, torch.device("cuda")
    assert stay(make_codec("radix"), cuda) and not stay(make_codec("blockint"), cuda)
    assert not stay(make_codec("radix"), torch.device("cpu"))
