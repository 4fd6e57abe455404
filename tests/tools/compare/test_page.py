"""``report.html``: the figures of ``comparison.json`` in a single file, for any run names."""

from __future__ import annotations

import json
import shutil
import subprocess
import webbrowser
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybridcomp.channels.accounting.ledger_file import JsonLines
from hybridcomp.tools import pages
from hybridcomp.tools.commands import cli
from hybridcomp.tools.compare import Wishes, command, compared, report
from hybridcomp.tools.compare.statistics import running_mean
from tests.tools.compare.made import ROW, write_run

HOSTILE = "</script><script>alert(1)</script><b>"
#: maximum size of a page that can be mailed
MOST = 5_000_000


def strictly(text: str) -> Any:
    """Parse JSON as strict parsers do, which take no NaN and no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Page(HTMLParser):
    """The tags, the tables as rows of cells, and the scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.scripts: dict[str | None, str] = {}
        self._inside: tuple[str, str | None] = ("", None)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = (tag, dict(attrs).get("id"))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ("", None)

    def handle_data(self, data: str) -> None:
        tag, name = self._inside
        if tag in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif tag == "script":
            self.scripts[name] = self.scripts.get(name, "") + data


def runs_of(folder: Path, labels: list[str], seeds: int = 2) -> list[str]:
    """Return arguments for a baseline and increasingly worse runs."""
    for number in range(len(labels)):
        for seed in range(seeds):
            write_run(
                folder / str(number) / f"seed{seed}", seed, 1 + 0.01 * number, ledger=True,
                seconds=1 / (1 + number),
                deepspeed={"compression": {"dp": {"bits": 4 + number}}, "lr": 0.1},
            )  # fmt: skip
    return [f"{label}={folder / str(number)}" for number, label in enumerate(labels)]


def made(out: Path, *words: str) -> tuple[str, dict[str, Any], Page]:
    with mock.patch.object(command, "_picture", return_value=None):
        assert cli.main(["compare", *words, "--out", str(out), "--wandb", "none"]) == 0
    text = (out / "report.html").read_text(encoding="utf-8")
    return text, json.loads((out / "comparison.json").read_text()), Page(text)


def drawn(page: Page) -> dict[str, Any]:
    return {chart["title"]: chart for chart in json.loads(page.scripts["charts"])}


def test_a_page_of_five_runs_has_the_figures_of_the_json(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    words = runs_of(tmp_path / "runs", ["base", "b", "c", "d", "e"])
    text, figures, page = made(tmp_path / "out", *words)
    assert len(text.encode()) < MOST
    assert json.loads(page.scripts["comparison"]) == figures
    result = compared(words, Wishes())
    losses, moved, differing = page.tables
    assert losses == report.losses(result) and moved == report.bytes_of(result.runs)
    assert differing == [
        ["setting", "base", "b", "c", "d", "e"], ["compression.dp.bits", "4", "5", "6", "7", "8"],
    ]  # fmt: skip
    charts = drawn(page)
    for number, row in enumerate(figures["runs"]):
        curve = running_mean(result.aligned.losses[number], 3).mean(axis=0)
        for title, end in (("Loss by tokens", row["end"]), ("Loss by time", row["seconds"])):
            line = [t for t in charts[title]["data"] if t["meta"] == number][-1]  # over its band
            assert (line["x"][-1], line["y"][-1]) == pytest.approx((end, curve[-1]), rel=1e-5)
        gap = [t for t in charts["Gap to base by tokens"]["data"] if t["meta"] == number][-1]
        assert gap["y"][-1] == pytest.approx(row["gap"], abs=1e-9)
        ledger = row["ledger"]["dp"]["forward"]
        for title, end in (
            ("MB by dimension: native (pale) and sent", (ledger["raw_MB"], ledger["wire_MB"])),
            ("Seconds by dimension: codec, and waiting (pale)", (1.51, 1.5)),
        ):
            bars = [t["y"][0] for t in charts[title]["data"] if t["meta"] == number]
            assert bars == pytest.approx(end)
        error = [t for t in charts["Relative error of one encoding"]["data"] if t["meta"] == number]
        assert (error[0]["x"], error[0]["y"]) == ([10.0], [ledger["error"]])


@pytest.mark.parametrize("is_old", [True, False], ids=["by Python's json", "by the ledger"])
def test_an_error_that_is_not_finite_is_shown_by_strict_json(tmp_path: Path, is_old: bool) -> None:
    """A codec that made values non-finite is no reason to refuse a run, or to break its page."""
    pytest.importorskip("plotly")
    words = runs_of(tmp_path / "runs", ["base", "endless"], seeds=1)
    path = tmp_path / "runs" / "1" / "seed0" / "ledger.jsonl"
    rows = {"dp": {"forward": {**ROW, "error": float("inf")}}}
    found = [{"step": 10, "dimensions": rows}, {"summary": True, "step": 60, "dimensions": rows}]
    if is_old:
        path.write_text("".join(f"{json.dumps(one)}\n" for one in found))
    else:
        path.unlink()
        lines = JsonLines(path)
        for one in found:
            lines.write(one)
        lines.close()
        assert [strictly(text) for text in path.read_text().splitlines()][0]["step"] == 10
    _, _, page = made(tmp_path / "out", *words)
    figures = strictly((tmp_path / "out" / "comparison.json").read_text())
    assert figures["runs"][1]["ledger"]["dp"]["forward"]["error"] == "Infinity"
    assert [row[6] for row in page.tables[1][1:]] == ["1.0e-01", "inf"]
    assert strictly(page.scripts["comparison"]) == figures and strictly(page.scripts["charts"])


def test_a_gap_at_equal_times_ends_where_the_baseline_does(tmp_path: Path) -> None:
    """A run twice as fast is compared at the baseline's seconds; a slower one ends later."""
    pytest.importorskip("plotly")
    write_run(tmp_path / "base", 0, 1.0)
    write_run(tmp_path / "fast", 0, 1.0, seconds=0.5)
    write_run(tmp_path / "slow", 0, 1.0, seconds=2.0)
    _, _, page = made(
        tmp_path / "out", *(str(tmp_path / name) for name in ("base", "fast", "slow"))
    )
    base, fast, slow = drawn(page)["Gap to base by time"]["data"]
    assert set(base["y"]) == {0.0}
    assert fast["y"][0] is None  # the baseline's first step takes a second
    assert max(fast["y"][1:]) < 0 and fast["x"][-1] == 30
    assert [at for at, gap in zip(slow["x"], slow["y"], strict=True) if gap is None][0] == 62
    assert "Loss by bytes" not in drawn(page)  # no ledger


def test_names_of_runs_stay_texts_and_nothing_is_fetched(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    words = runs_of(tmp_path / "runs", ["base", HOSTILE], seeds=1)
    _, figures, page = made(tmp_path / "out", *words, "--title", f"T {HOSTILE}")
    assert figures["runs"][1]["label"] == HOSTILE == page.tables[0][2][0]
    names = [tag for tag, _ in page.tags]
    assert "b" not in names and names.count("script") == 4 and "link" not in names
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.tags)
    for chart in drawn(page).values():  # Plotly interprets tags in line names
        assert not any("<" in trace["name"] for trace in chart["data"])


def test_what_crosses_which_link_is_drawn_where_the_ledger_knows(tmp_path: Path) -> None:
    """MB per step of all ranks: 60 steps, part of whose bytes crossed nodes."""
    pytest.importorskip("plotly")
    words = runs_of(tmp_path / "runs", ["base", HOSTILE], seeds=1)
    text, _, _ = made(tmp_path / "out", *words)
    assert "<svg" not in text  # one node
    row = {**ROW, "inter_raw_MB": 90.0, "inter_MB": 12.0}
    record = {"summary": True, "step": 60, "dimensions": {"dp": {"forward": row}}}
    (tmp_path / "runs" / "1" / "seed0" / "ledger.jsonl").write_text(json.dumps(record) + "\n")
    text, _, page = made(tmp_path / "out", *words)
    assert text.count("<svg") == 1 and [tag for tag, _ in page.tags].count("script") == 4
    for told in ("1 MB", "0.133 MB", "1.5 MB", "0.2 MB"):
        assert f">{told}</text>" in text


def test_without_its_packages_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = runs_of(tmp_path / "runs", ["base", "b"], seeds=1)
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("of an earlier comparison")
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    assert cli.main(["compare", *words, "--out", str(out), "--wandb", "none", "--open"]) == 0
    printed = capsys.readouterr()
    assert "no report.html: it needs jinja2 and plotly: pip install" in printed.err
    assert "written:" in printed.out and "report.html" not in printed.out
    assert (out / "report.md").is_file() and not (out / "report.html").exists()


@pytest.mark.parametrize("there", [True, False], ids=["browser", "none"])
def test_open_shows_the_page(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def show(address: str) -> bool:
        opened.append(address)
        return there

    monkeypatch.setattr(webbrowser, "open", show)
    monkeypatch.setattr(command, "_page", lambda _, wishes: (wishes.out / command.PAGE).touch())
    monkeypatch.setattr(command, "_picture", lambda *_: None)
    words = [*runs_of(tmp_path / "runs", ["base", "b"], seeds=1), "--wandb", "none"]
    assert cli.main(["compare", *words, "--out", str(tmp_path / "out")]) == 0 and not opened
    assert cli.main(["compare", *words, "--out", str(tmp_path / "out"), "--open"]) == 0
    assert opened == [(tmp_path / "out" / "report.html").as_uri()]
    assert ("--open: found no browser here; open " in capsys.readouterr().err) is not there


@pytest.mark.nightly
def test_chromium_draws_the_page(tmp_path: Path) -> None:
    """The library is unpacked and visible charts are drawn, from a file."""
    pytest.importorskip("plotly")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium")
    made(tmp_path / "out", *runs_of(tmp_path / "runs", ["base", "b", "c", "d", "e"]))
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1440,4000",
         "--virtual-time-budget=20000", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
         (tmp_path / "out" / "report.html").as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "data-ready" in done.stdout and done.stdout.count("data-drawn") == 9
    assert done.stdout.count("scatterlayer") >= 7 and "barlayer" in done.stdout
