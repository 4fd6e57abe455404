"""Ledger arithmetic, the JSON rows, the progress line and the JSONL file."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.channels.accounting.ledger import KEYS, Ledger, entries_of
from hybridcomp.channels.accounting.ledger_file import JsonLines
from hybridcomp.collectives import Meter
from hybridcomp.config import CompressionConfig
from hybridcomp.session.reporter import events_of, line


def filled() -> Ledger:
    ledger = Ledger(codecs={("dp", "forward"): "blockint(bits=4)"})
    ledger.record(("dp", "forward"), 8_000_000, Meter(2, 1_000_000, 0.25, 0.5))
    ledger.record(("dp", "forward"), 8_000_000, Meter(2, 1_000_000, 0.25, 0.5))
    ledger.record_native(("dp", "forward"), 100_000)
    ledger.record_error(("dp", "forward"), 0.01, 1.0)
    ledger.record_native(("pp", "backward"), 50)
    return ledger


def test_rows() -> None:
    ledger = filled()
    rows = ledger.rows(ledger.interval)
    assert set(rows) == {"dp", "pp"}
    row = rows["dp"]["forward"]
    assert row["messages"] == 3 and row["native_messages"] == 1
    assert row["raw_MB"] == pytest.approx(16.1)
    assert row["wire_MB"] == pytest.approx(2.1)
    assert row["ratio"] == pytest.approx(16.1 / 2.1)
    assert row["codec_ms"] == pytest.approx(500)
    assert row["wait_ms"] == pytest.approx(1000)
    assert row["error"] == pytest.approx(0.1)
    assert rows["pp"]["backward"]["codec"] == "none"
    assert rows["pp"]["backward"]["ratio"] == 1.0
    assert rows["pp"]["backward"]["error"] is None
    json.dumps(rows)


def test_vector_adds_up_over_ranks() -> None:
    ledger = filled()
    summed = entries_of(ledger.vector() + ledger.vector())
    assert list(summed) == list(KEYS)
    entry = summed["dp", "forward"]
    assert entry.raw_nbytes == 2 * 16_100_000 and entry.messages == 6
    assert entry.error == pytest.approx(0.1)
    ledger.restart()
    assert not ledger.vector().any()


def test_line_says_what_stayed_native() -> None:
    ledger = filled()
    text = line(10, ledger.rows(ledger.interval))
    assert text.startswith("step 10: dp blockint(bits=4) 7.67x (2.10 of 16.10 MB")
    assert "error 1.0e-01" in text and "1 of 3 messages native" in text
    assert line(3, {}) == "step 3: nothing was sent"


def test_events() -> None:
    ledger = filled()
    events = dict(events_of(ledger.rows(ledger.interval), 2.0))
    assert events["train/compression/dp/ratio"] == pytest.approx(16.1 / 2.1)
    assert events["train/compression/pp/backward/wire_MB"] == pytest.approx(50e-6)
    assert events["train/compression/dp/residual_norm"] == 2.0
    assert "train/compression/pp/backward/error" not in events


def test_each_direction_has_its_own_codec() -> None:
    """What {"tp": {"codec": "blockint", "bits": 4, "backward": {"bits": 8}}} looks like."""
    block = {"tp": {"codec": "blockint", "bits": 4, "backward": {"bits": 8}}}
    codecs = CompressionConfig.parse(block).policy().codecs
    ledger = Ledger(codecs={key: codec.spec for key, codec in codecs.items() if codec})
    ledger.record(("tp", "forward"), 8_000_000, Meter(1, 1_000_000))
    forward_only = ledger.rows(ledger.interval)
    assert "tp.forward blockint(bits=4) 8.00x" in line(1, forward_only)
    ledger.record(("tp", "backward"), 8_000_000, Meter(1, 2_000_000))
    rows = ledger.rows(ledger.interval)
    assert [row["codec"] for row in rows["tp"].values()] == ["blockint(bits=4)", "blockint(bits=8)"]
    assert [row["wire_MB"] for row in rows["tp"].values()] == [1.0, 2.0]
    assert "tp.backward blockint(bits=8) 4.00x (2.00 of 8.00 MB" in line(1, rows)
    events = dict(events_of(rows, 0.0))
    assert events["train/compression/tp/forward/ratio"] == 8.0
    assert events["train/compression/tp/backward/ratio"] == 4.0


def test_jsonl_is_whole_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 1})
    assert json.loads(path.read_text()) == {"step": 1}
    lines.write({"step": 2})
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 2]
    lines.close()


def test_a_resumed_run_keeps_the_figures_of_the_run_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for step in range(3):
        lines = JsonLines(path)
        lines.write({"step": step})
        lines.close()
    files = ["ledger.1.jsonl", "ledger.2.jsonl", "ledger.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    assert [json.loads((tmp_path / name).read_text())["step"] for name in files] == [0, 1, 2]


class NearlyFull(io.FileIO):
    """A file on a disk with ``room`` bytes left."""

    room = 0

    def write(self, data: Any, /) -> int:
        part = bytes(data)[: self.room]
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(part)
        return int(super().write(part))

    def truncate(self, size: int | None = None, /) -> int:
        held = os.fstat(self.fileno()).st_size
        left = int(super().truncate(size))
        self.room += held - left
        return left


def test_a_full_disk_costs_records_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A partial line is removed, and logging continues when there is room again."""
    path = tmp_path / "ledger.jsonl"
    lines = JsonLines(path)
    lines.close()
    disk = NearlyFull(path, "w")
    disk.room = 30
    lines._file = disk
    for step in range(4):
        lines.write({"step": step, "what": "dp"})  # 26 bytes
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [0]
    said = capsys.readouterr().err
    assert said.count("\n") == 1  # once, not for every record
    assert "a record cannot be written (" in said and "the run goes on" in said
    disk.room = 100
    lines.write({"step": 4, "what": "dp"})
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [0, 4]
    lines.close()
    assert capsys.readouterr().err.endswith("ledger.jsonl: 3 records are missing\n")
