"""``hybridcomp watch``: figures of a ledger that grows, is truncated, set aside or restarted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.channels.accounting.ledger_file import JsonLines
from hybridcomp.tools.commands import cli, watch
from hybridcomp.tools.commands.ledger_reader import HEAD, LedgerReader
from tests.paths import ROOT

ROW: dict[str, Any] = {
    "codec": "blockint(bits=4)", "messages": 80, "native_messages": 0, "raw_MB": 75.0,
    "wire_MB": 10.0, "ratio": 7.5, "error": 0.1, "native_since": None, "encoded_since": None,
}  # fmt: skip
FIRST = 1_700_000_000.0


def report(step: int, seconds: float = 4.0, **more: Any) -> dict[str, Any]:
    """Return reports of every tenth step, each some seconds after the last."""
    reports = step / 10
    return {
        "step": step, "time": FIRST + seconds * reports, "total_raw_MB": 75.0 * reports,
        "total_wire_MB": 10.0 * reports, "dimensions": {"dp": {"forward": ROW}}, **more,
    }  # fmt: skip


def write(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(path: Path) -> LedgerReader:
    reader = LedgerReader(path)
    reader.read()
    return reader


def test_the_table_has_what_the_last_reports_say(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ways = {
        "forward": {**ROW, "native_messages": 12, "wire_MB": 5.0},
        "backward": {**ROW, "native_messages": 80, "ratio": None, "error": None, "native_since": 7},
    }
    more: dict[str, Any] = {
        "dimensions": {"dp": {"forward": ROW}, "tp": ways}, "saved_s": 52.4, "residual_norm": 0.0,
        "publish": {"version": 9.0, "versions": 2.0, "bits_per_weight": 2.5},
        "sync": {"meetings": 1.0, "skipped": 0.0, "drift": 0.01},
    }  # fmt: skip
    write(path, *(report(step, **more) for step in (10, 20, 30)))
    reader = read(path)
    assert reader.table() == [
        HEAD,
        ["dp", "blockint(bits=4)", "7.50x", "1.0e-01", "20.0", "encoded", "30.0", "225.0"],
        ["tp", "blockint(bits=4)", "7.50x", "1.0e-01", "10.0", "encoded, 12 of 80 native", "15.0",
         "225.0"],
        ["tp backward", "blockint(bits=4)", "-", "-", "20.0", "native since step 7", "30.0",
         "225.0"],
    ]  # fmt: skip
    assert reader.told(FIRST + 15)[:3] == [
        "step 30, 0.4 s a step, sent 30.0 MB, natively it would have been 225.0 MB (7.50x), "
        "saved about 52 s as far as measured",
        "publish: version 9, versions 6, bits a weight 2.5",
        "sync: meetings 3, drift 0.01",
    ]
    assert reader.told(FIRST + 15)[3].endswith(", 3 s ago")
    write(path, report(40, dimensions={"dp": {"forward": {**ROW, "error": None}}}))
    assert reader.read() and reader.table()[1][3] == "1.0e-01"  # the last sample is kept
    assert reader.told(FIRST + 99)[3].endswith(", 83 s ago: the job is late, or was ended")
    write(path, {"summary": True, "step": 40, "time": FIRST + 17, "dimensions": {}})
    assert reader.read() and reader.told(FIRST + 99)[3].startswith("the job ended at ")
    assert reader.table()[1][0] == "dp"  # the last report is kept


def test_a_file_without_times_has_no_speed(tmp_path: Path) -> None:
    """A file of an earlier version: everything but the speed is shown."""
    records = [{key: value for key, value in report(s).items() if key != "time"} for s in (10, 20)]
    write(tmp_path / "ledger.jsonl", *records)
    reader = read(tmp_path / "ledger.jsonl")
    assert reader.table()[1][2:5] == ["7.50x", "1.0e-01", "-"]
    assert reader.told(FIRST)[0].startswith("step 20, sent 20.0 MB")


def test_either_may_end_and_start_again(tmp_path: Path) -> None:
    """The job sets its file aside; a restarted reader shows the same as the first."""
    path = tmp_path / "ledger.jsonl"
    reader = LedgerReader(path)
    assert not reader.read() and reader.told(FIRST) == ["no report yet: there is no such file"]
    assert reader.table() == [HEAD]
    job = JsonLines(path)
    assert not reader.read() and reader.told(FIRST) == ["no report yet"]
    for step in (10, 20, 30):
        job.write(report(step))
        assert reader.read() and not reader.read()
    assert reader.table() == read(path).table() and reader.told(FIRST) == read(path).told(FIRST)
    assert reader.table()[1][6] == "30.0"
    job = JsonLines(path)  # restarted by the same command before the first has closed
    job.write(report(10))
    assert reader.read() and (tmp_path / "ledger.1.jsonl").exists()
    assert reader.table() == read(path).table() and reader.table()[1][6] == "10.0"
    path.write_text("")  # emptied by another program
    assert not reader.read()
    write(path, report(10), report(20))
    assert reader.read() and reader.table()[1][6] == "20.0"
    path.unlink()
    assert not reader.read() and reader.table()[1][6] == "20.0"


def test_a_line_that_is_being_written_counts_when_it_is_whole(tmp_path: Path) -> None:
    path, text = tmp_path / "ledger.jsonl", json.dumps(report(20))
    write(path, report(10))
    reader = read(path)
    for part, steps in ((text[:40], "step 10"), (text[40:], "step 10"), ("\n", "step 20")):
        with path.open("a") as file:
            file.write(part)
        reader.read()
        assert reader.told(FIRST)[0].startswith(steps)
    assert reader.unreadable == 0


@pytest.mark.parametrize(
    "line",
    [
        "no JSON", "[1]", "{}", '{"step": "x"}', '{"step": 1e999, "dimensions": {}}', "\x80",
        '{"step": 30, "dimensions": {"dp": 1}}', '{"step": 30, "dimensions": null}',
        '{"step": 30, "dimensions": {"dp": {"forward": {"wire_MB": "x", "raw_MB": 1}}}}',
        '{"step": 30, "time": "now", "dimensions": {}}',
        '{"step": 30, "dimensions": {"dp": {"forward": {"wire_MB": 1, "raw_MB": 1, "error": []}}}}',
        '{"step": 30, "dimensions": {}, "sync": {"meetings": "many"}}',
    ],
)  # fmt: skip
def test_what_is_no_record_is_counted_and_passed(line: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, report(10), report(20))
    with path.open("ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    write(path, report(40))
    reader = read(path)
    assert reader.told(FIRST)[0].startswith("step 40, ") and len(reader.table()) == 2
    assert reader.told(FIRST)[-1] == "1 line is no record of a ledger"


def test_once_prints_the_table_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("jinja2")
    monkeypatch.setenv("COLUMNS", "200")
    path, page = tmp_path / "ledger.jsonl", tmp_path / "watch.html"
    hostile = {**ROW, "codec": "[bold]\x1b[31m<script>x</script>"}
    write(path, report(10, dimensions={"dp": {"forward": hostile}}))
    assert cli.main(["watch", str(path), "--once", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "[bold]\\x1b[31m<script>x</script>" in printed and "7.50x" in printed
    text = page.read_text()
    assert '<meta http-equiv="refresh" content="10">' in text and "step 10" in text
    assert ">7.50x</td>" in text and "<script" not in text
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_it_follows_until_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the output is not a terminal it prints a table per report, and nothing in between."""
    pytest.importorskip("rich")
    path = tmp_path / "ledger.jsonl"
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) in (2, 5):
            write(path, report(10 * len(looks)))
        if len(looks) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert cli.main(["watch", str(path), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("dimension") == 2
    assert "step 20," in printed and "step 50," in printed
    assert looks == [watch.LOOK_S] * 8 and "step 50," in (tmp_path / "page.html").read_text()


def test_the_file_of_another_machine_comes_by_standard_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As piped from ``tail -F``: after a restart of the job the steps begin again."""
    outer, inner = os.pipe()
    with os.fdopen(outer) as stdin, os.fdopen(inner, "w") as job:
        monkeypatch.setattr(sys, "stdin", stdin)
        reader = LedgerReader(Path("-"))
        assert not reader.read()
        for step, sent in ((10, "10.0"), (20, "20.0"), (10, "10.0")):
            job.write(json.dumps(report(step)) + "\n")
            job.flush()
            assert reader.read() and reader.table()[1][6] == sent


def test_all_of_standard_input_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than a pipe holds, written late; where it ends, there is nothing left to follow."""
    write(tmp_path / "ledger.jsonl", *(report(10 * n, note="x" * 1000) for n in range(1, 201)))
    monkeypatch.setattr(watch, "LOOK_S", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    for words in (["--once"], []):
        later = f"sleep 0.3; cat {tmp_path}/ledger.jsonl"
        with subprocess.Popen(["sh", "-c", later], stdout=subprocess.PIPE, text=True) as job:
            monkeypatch.setattr(sys, "stdin", job.stdout)
            assert cli.main(["watch", "-", *words]) == 0
        said = capsys.readouterr().out
        assert "step 2,000, " in said, "the last report"
        assert "7…" in said or "7.50x" in said, "no figure without its last digits"


def test_it_needs_rich_and_no_torch(tmp_path: Path) -> None:
    """It runs beside a training, so it must be small: importing torch takes seconds."""
    code = (
        "import sys\n"
        "from hybridcomp.tools.commands import cli\n"
        "if '--poor' in sys.argv: sys.modules['rich'] = None\n"
        "status = cli.main(['watch', sys.argv[1], '--once'])\n"
        "assert not {'torch', 'pydantic', 'plotly', 'pandas'} & sys.modules.keys()\n"
        "raise SystemExit(status)\n"
    )
    write(tmp_path / "ledger.jsonl", report(10))
    words = [sys.executable, "-c", code, str(tmp_path / "ledger.jsonl")]
    poor = subprocess.run([*words, "--poor"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert poor.returncode == 2, poor.stderr
    assert poor.stderr.startswith("hybridcomp: watch needs rich: pip install")
    pytest.importorskip("rich")
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)


def test_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert cli.main(["watch", str(tmp_path)]) == 2
    assert "expected the file of a ledger" in capsys.readouterr().err
