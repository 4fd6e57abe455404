"""Spans of messages in a trace of torch's profiler, and the timing without a profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from hybridcomp.channels import AllReduce, Channels
from hybridcomp.channels.accounting.ledger import Key
from hybridcomp.collectives.wire.handle import Meter
from hybridcomp.collectives.wire.profiler_ranges import PREFIX, MarkedClock, MarkedMeter
from hybridcomp.config import CompressionConfig
from tests.ranks import RunRanks
from tests.stand_ins.device_events import Device
from tests.stand_ins.gpu.common import QUIET, RANK, RANKS, cuda, gpu, values_of
from tests.stand_ins.gpu.common import channels as channels_of_a_gpu
from tests.stand_ins.gpu.machine import Gpu
from tests.stand_ins.process_groups import fake_group

__all__ = ["gpu"]  # a fixture

DP: Key = ("dp", "forward")
BLOCK = {"dp": {"codec": "blockint", "bits": 4}, "min_bytes": 0, "ledger": {"sample_every": 0}}


def send(channels: Channels, values: torch.Tensor, group: Any = None) -> None:
    message = AllReduce(
        numel=values.numel(), dtype=values.dtype, group=group, values=values, async_op=True
    )
    channels["dp"].run(message, native=lambda: None, encoded=lambda handle: handle.wait())


def marks_in(found: profile) -> list[tuple[int, int, str]]:
    """Return begin, end and name of each mark, without the prefix, by start time."""
    every: Any = found.events()  # type: ignore[no-untyped-call]
    events = [e for e in every if e.name.startswith(PREFIX)]
    events.sort(key=lambda e: (e.time_range.start, -e.time_range.end))
    spans = ((e.time_range.start, e.time_range.end, e.name.removeprefix(PREFIX)) for e in events)
    return [(int(start * 1e3), int(end * 1e3), name) for start, end, name in spans]


def messages_of_two_ranks() -> tuple[list[tuple[int, int, str]], list[float], list[int]]:
    """Send messages without, with and after a profiler; return marks, seconds, messages."""
    channels = Channels(CompressionConfig.parse(BLOCK))
    values, clocks = torch.ones(4096), []
    entry = channels.ledger.interval[DP]
    send(channels, values)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        channels.step = 3
        clocks.append(entry.codec_s + entry.wait_s)
        send(channels, values)
        clocks.append(entry.codec_s + entry.wait_s)
    assert type(channels["dp"].meter(torch.device("cpu"))) is Meter
    send(channels, values)
    assert values.eq(8).all() and dist.get_world_size() == 2
    return marks_in(found), clocks, [int(entry.messages), int(entry.wire_nbytes)]


def test_a_message_is_marked_where_a_profiler_records(on_ranks: RunRanks) -> None:
    for marks, clocks, (messages, nbytes) in on_ranks(2, messages_of_two_ranks):
        names = [name for *_, name in marks]
        assert names[0] == "send dp forward 4096 float32 blockint(bits=4)"
        kind, number, *where = names[1].split()
        assert kind == "message" and where == ["dp", "at", "step", "3"]
        assert {name.split()[1] for name in names[2:]} == {number}
        kinds = [name.split()[0] for name in names[2:]]
        # two ranks exchange all values at once, and settle local ones while they travel
        assert kinds == ["codec", "post", "codec", "wait", "codec"]
        posted = [int(name.split()[2]) for name in names if name.startswith("post")]
        assert messages == 3 and nbytes == 3 * sum(posted)
        assert clocks[0] < clocks[1], "marks replace no clock"
        begin, end, _ = marks[0]
        inside = [name for start, stop, name in marks[1:] if begin <= start and stop <= end]
        assert inside[:1] == names[1:2]


@QUIET
def test_marks_on_a_gpu_leave_streams_and_the_ledger_alone(gpu: Gpu) -> None:
    """Streams wait alike, and timed steps take the same seconds, with and without marks."""
    waited = []
    for recorded in (False, True):
        channels = channels_of_a_gpu(dp=BLOCK["dp"], ledger={"sample_every": 10})
        channels.step = 5
        assert channels.timing
        if recorded:
            with profile(activities=[ProfilerActivity.CPU]) as found:
                send(channels, values_of(), fake_group(RANKS, RANK))
            assert [name.split()[0] for *_, name in marks_in(found)][:2] == ["send", "message"]
        else:
            send(channels, values_of(), fake_group(RANKS, RANK))
        channels.ledger.drain(wait=True)
        entry = channels.ledger.interval[DP]
        assert entry.timed_nbytes == entry.device_nbytes > 0
        waited.append((entry.device_codec_s, entry.device_wait_s, list(gpu.waits)))
        gpu.waits.clear()
    assert waited[0] == waited[1] and waited[0][0] > 0
    assert cuda.current_stream().of.number == 0


def test_a_mark_measures_what_its_clock_measures() -> None:
    from hybridcomp.collectives.wire.device_clock import SILENT, DeviceClock

    device = Device()
    inner = DeviceClock(device.event)
    meter = MarkedMeter(inner, "dp at step 5")
    assert meter.clock.timed is inner and meter.clock.on_device
    assert MarkedClock(SILENT, 1).timed is None
    with meter.coding():
        device.work(0.25)
    start = meter.clock.begin_wait()
    device.work(0.5)
    meter.clock.end(meter, "wait", start)
    kinds = [(span.kind, span.start.at, span.stop.at) for span in meter.spans]
    assert kinds == [("codec", 0.0, 0.25), ("wait", 0.25, 0.75)]
    with pytest.raises(KeyError), meter.coding():
        raise KeyError
