"""Device time in the ledger: read late, scaled to the interval, without blocking."""

from __future__ import annotations

import json

import pytest
import torch

from hybridcomp.channels import Channels
from hybridcomp.channels.accounting.ledger import Key, Ledger, entries_of
from hybridcomp.collectives import Meter
from hybridcomp.collectives.wire.device_clock import SILENT, DeviceClock
from hybridcomp.collectives.wire.handle import HOST
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.session.reporter import events_of, line
from tests.stand_ins.device_events import Device

DP: Key = ("dp", "forward")
GPU = torch.device("cuda", 0)


def message(clock: DeviceClock, device: Device, codec_s: float, wait_s: float) -> Meter:
    """Encode, send and decode a message."""
    meter = Meter(wire_nbytes=100, clock=clock)
    with meter.coding():
        device.work(codec_s / 2)
    device.work(5.0)  # the model's own work in between
    with meter.waiting():
        device.work(wait_s)
    with meter.coding():
        device.work(codec_s / 2)
    return meter


def test_events_are_read_when_the_device_has_passed_them() -> None:
    device, ledger = Device(), Ledger()
    ledger.clocks[GPU] = clock = DeviceClock(device.event)
    ledger.record(DP, 400, message(clock, device, 0.25, 0.5))
    ledger.drain()
    assert ledger.interval[DP].device_codec_s == 0, "nothing is through"
    device.done = 0.25 / 2 + 5.0
    ledger.drain()
    assert ledger.interval[DP].device_codec_s == 0.25 / 2, "the first encoding is"
    assert ledger.interval[DP].device_wait_s == 0
    device.catch_up()
    ledger.drain()
    assert ledger.interval[DP].device_codec_s == pytest.approx(0.25)
    assert ledger.interval[DP].device_wait_s == pytest.approx(0.5)
    assert device.synchronized == 0 and len(device.events) == 6
    ledger.record(DP, 400, message(clock, device, 0.25, 0.5))
    assert len(device.events) == 6, "events are used again"
    ledger.drain(wait=True)
    assert device.synchronized > 0
    assert ledger.interval[DP].device_wait_s == pytest.approx(1.0)


def test_events_do_not_pile_up_where_no_step_ends() -> None:
    device, ledger = Device(), Ledger()
    ledger.clocks[GPU] = clock = DeviceClock(device.event)
    for _ in range(2000):
        ledger.record(DP, 400, message(clock, device, 0.25, 0.5))
        device.catch_up()
    assert len(device.events) < 3000 and device.synchronized == 0
    ledger.drain(wait=True)
    assert ledger.interval[DP].device_codec_s == pytest.approx(500)


def test_spans_of_an_interval_stay_its_own() -> None:
    """A report drains pending spans before the next interval begins."""
    device, ledger = Device(), Ledger()
    ledger.clocks[GPU] = clock = DeviceClock(device.event)
    first = ledger.interval[DP]
    ledger.record(DP, 400, message(clock, device, 0.25, 0.5))
    ledger.restart()
    ledger.drain(wait=True)
    assert first.device_codec_s == pytest.approx(0.25)
    assert ledger.interval[DP].device_codec_s == 0


def test_time_is_scaled_by_bytes_and_said_to_be_the_device_s() -> None:
    """Two ranks; one of four steps is timed, and a receiver counts no bytes."""
    vectors: list[torch.Tensor] = []
    for rank in range(2):
        device, ledger = Device(), Ledger(codecs={DP: "blockint(bits=4)"})
        ledger.clocks[GPU] = clock = DeviceClock(device.event)
        for step in range(4):
            if step == 2:
                ledger.record(DP, 1000, message(clock, device, 0.01, 0.02))
                received = message(clock, device, 0.01, 0.0)
                ledger.record_time(DP, received)
            else:
                meter = Meter(wire_nbytes=100, clock=SILENT)
                with meter.coding(), meter.waiting():
                    device.work(1.0)
                ledger.record(DP, 1000, meter)
        ledger.record_native(DP, 5000)
        ledger.drain(wait=True)
        assert rank == 0 or ledger.vector().equal(vectors[0])
        vectors.append(ledger.vector())
    rows = Ledger().rows(entries_of(vectors[0] + vectors[1]))
    row = rows["dp"]["forward"]
    assert row["clock"] == "device"
    assert row["codec_ms"] == pytest.approx(2 * 4 * 20)
    assert row["wait_ms"] == pytest.approx(2 * 4 * 20)
    assert "MB, device codec 160 ms, wait 160 ms, 2 of 10 messages native)" in line(4, rows)
    assert dict(events_of(rows, 0.0))["train/compression/dp/codec_ms"] == pytest.approx(160)
    json.dumps(rows)


def test_an_interval_without_a_timed_step_has_no_time() -> None:
    ledger = Ledger()
    ledger.record(DP, 1000, Meter(wire_nbytes=100, clock=SILENT))
    rows = ledger.rows(ledger.interval)
    assert rows["dp"]["forward"]["codec_ms"] is None and rows["dp"]["forward"]["wait_ms"] is None
    assert line(4, rows) == "step 4: dp none 10.00x (0.00 of 0.00 MB)"
    assert not any(name.endswith("_ms") for name, _ in events_of(rows, 0.0))


def test_on_a_cpu_it_is_the_host_s() -> None:
    meter = Meter()
    with meter.coding():
        pass
    with meter.waiting():
        pass
    assert meter.codec_s > 0 and meter.wait_s > 0 and not meter.spans
    ledger = Ledger()
    ledger.record(DP, 1000, meter)
    assert ledger.rows(ledger.interval)["dp"]["forward"]["clock"] == "host"
    with pytest.raises(KeyError), meter.coding():
        raise KeyError


@pytest.mark.parametrize(
    ("every", "timed"), [(10, [5, 15, 25]), (1, list(range(30))), (0, []), (25, [12])]
)
def test_which_steps_are_timed(
    every: int, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the first step, nor one that samples errors unless all do."""
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    block = {"dp": "bf16", "ledger": {"sample_every": every}}
    channels = Channels(CompressionConfig.parse(block))
    found = []
    for step in range(30):
        channels.step = step
        clock = channels.clock(GPU)
        assert channels.clock(torch.device("cpu")) is HOST
        if clock is not SILENT:
            assert clock is channels.ledger.device_clock(GPU)
            found.append(step)
    assert found == timed
    capturing, channels.step = True, 5
    with pytest.raises(ConfigError, match="a message inside of a CUDA graph"):
        channels.clock(GPU)
