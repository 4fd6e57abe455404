"""``hybridcomp compare`` on JSON-lines logs: figures, pairing, alignment, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.tools.commands import cli
from hybridcomp.tools.compare import CompareError, Wishes, compared, draw, page
from hybridcomp.tools.compare.reading import read_run, split_label
from hybridcomp.tools.compare.runs import short
from hybridcomp.tools.compare.statistics import student
from tests.tools.compare.made import ROW, record, write_run


def compare(*runs: Any, **wishes: Any) -> Any:
    return compared([str(run) for run in runs], Wishes(**wishes))


def test_table_report_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for seed in range(3):
        write_run(tmp_path / "base" / f"seed{seed}", seed, 1.0)
        write_run(tmp_path / "lossy" / f"seed{seed}", seed, 1.01 + 0.001 * seed, ledger=True)
    out = tmp_path / "out"
    words = [f"baseline={tmp_path}/base/*/loss.jsonl", f"lossy={tmp_path}/lossy", "--need-ledger"]
    assert cli.main(["compare", *words, "--out", str(out), "--wandb", "none"]) == 0
    printed = capsys.readouterr().out
    half = 4.303 * 0.1 / 3**0.5
    assert f"+1.10 ± {half:.2f}" in printed
    assert "blockint(bits=4)" in printed and "7.50" in printed and "150.0" in printed
    assert "note:" not in printed
    figures = json.loads((out / "comparison.json").read_text())
    rows = figures["runs"]
    assert [row["label"] for row in rows] == ["baseline", "lossy"]
    assert rows[1]["gap"] == pytest.approx(1.1) and rows[1]["valid_gap"] == pytest.approx(1.1)
    assert rows[1]["gap_interval"] == pytest.approx(half)
    assert rows[1]["clock_gap"] == pytest.approx(1.1)  # equally fast
    assert rows[0]["gap"] == 0.0 and rows[0]["end"] == 6000 and rows[0]["unit"] == "tokens"
    assert rows[1]["ledger"]["dp"]["forward"]["wire_MB"] == 20.0
    picture = (out / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    report = (out / "report.md").read_text()
    assert "| lossy | 3 |" in report and "![loss curves](losses.png)" in report
    assert "seeds 0, 1, 2" in report and "hybridcomp compare" in report


def test_seeds_are_paired_not_ordered(tmp_path: Path) -> None:
    base = [write_run(tmp_path / f"base{seed}", seed, 1.0) for seed in (0, 40)]
    lossy = [write_run(tmp_path / f"lossy{seed}", seed, 1.02) for seed in (40, 0)]
    found = compare(*(",".join(map(str, files)) for files in (base, lossy)))
    assert found.comparisons[1].gap == pytest.approx(2.0)
    assert found.comparisons[1].gaps == pytest.approx([2.0, 2.0])


def test_two_seeds_have_a_range_and_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Student's t with one degree of freedom had given "-1.36 ± 172.07" for two seeds."""
    for seed, factor in enumerate((0.86, 1.14)):
        write_run(tmp_path / "base" / f"seed{seed}", seed, 1.0)
        write_run(tmp_path / "lossy" / f"seed{seed}", seed, factor)
    out = tmp_path / "out"
    words = [f"{tmp_path}/base", f"{tmp_path}/lossy", "--out", str(out), "--wandb", "none"]
    assert cli.main(["compare", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.count("0.00 (-14.00 to +14.00)") == 2 and "±" not in printed
    assert "two seeds: the range of their gaps is shown; 3 give an interval" in printed
    report = (out / "report.md").read_text()
    assert "paired by seed, with the range over the two seeds." in report and "95%" not in report
    row = json.loads((out / "comparison.json").read_text())["runs"][1]
    assert row["gap_interval"] is None and row["clock_gaps"] == pytest.approx([-14.0, 14.0])


def test_a_small_gap_of_one_seed_is_no_news(tmp_path: Path) -> None:
    """It had printed: its gap of -0.02 % is beyond the noise between steps (± 0.00 %)."""
    found = compare(write_run(tmp_path / "a", 0, 1.0), write_run(tmp_path / "b", 0, 0.9998))
    assert not any("noise" in note for note in found.notes)
    found = compare(write_run(tmp_path / "a", 0, 1.0), write_run(tmp_path / "c", 0, 0.99))
    (noted,) = [note for note in found.notes if "noise" in note]
    assert "± 0.00 %" not in noted and "gap of -1.00 % is beyond" in noted


def test_logs_without_seed_are_paired_by_order(tmp_path: Path) -> None:
    found = compare(write_run(tmp_path / "a", None, 1.0), write_run(tmp_path / "b", None, 0.99))
    assert found.comparisons[1].gap == pytest.approx(-1.0)
    assert any("does not say which model" in note for note in found.notes)
    assert any("does not say which data order" in note for note in found.notes)


def test_runs_are_compared_where_the_shorter_ends(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", 0, 1.0, steps=200)
    found = compare(base, write_run(tmp_path / "b", 0, 1.01))
    assert found.aligned.axis[-1] == 6000 and found.comparisons[1].gap == pytest.approx(1.0)
    assert found.notes[0] == "compared up to 6000 tokens, where the shortest run ends, of 20000"


def test_runs_that_logged_at_other_tokens_are_interpolated(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", 0, 1.0)
    found = compare(base, write_run(tmp_path / "b", 0, 1.01, every=3), last=5)
    assert list(found.aligned.axis[:2]) == [300, 600] and found.aligned.axis[-1] == 6000
    assert found.comparisons[1].gap == pytest.approx(1.0)
    assert found.notes[:2] == ["runs logged at different tokens: interpolated",
                           "no figures of bytes in the logs of: b"]  # fmt: skip


def test_twice_as_fast_wins_at_equal_wall_clock(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", 0, 1.0, steps=400)
    fast = write_run(tmp_path / "b", 0, 1.001, steps=400, seconds=0.5)
    found = compare(base, fast, last=1).comparisons[1]
    assert found.gap == pytest.approx(0.1)
    # the baseline is at step 200 when the other is at 400
    expected = 100 * (1.001 * (2 + 3 / 400) / (2 + 3 / 200) - 1)
    assert found.clock_gap == pytest.approx(expected, abs=1e-6) and expected < 0
    assert found.seconds == pytest.approx(200)


def sends(run: Path, mbytes: dict[int, float], total: float) -> Path:
    """Put a ledger beside a log: MB by report step, and in total."""
    lines: list[dict[str, Any]] = [
        {"step": step, "dimensions": {"dp": {"forward": {**ROW, "wire_MB": sent}}}}
        for step, sent in mbytes.items()
    ]
    whole = {"dp": {"forward": {**ROW, "wire_MB": total}}}
    lines.append({"summary": True, "step": 400, "dimensions": whole})
    (run.parent / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_whoever_sends_less_wins_at_equal_bytes(tmp_path: Path) -> None:
    base = sends(write_run(tmp_path / "a", 0, 1.0, steps=400), {100: 100.0, 200: 100.0}, 400.0)
    # nothing is sent before step 300, so half of the bytes are sent by step 350
    less = sends(write_run(tmp_path / "b", 0, 1.001, steps=400), {300: 0.0}, 100.0)
    found = compare(base, less, last=1).comparisons[1]
    # the baseline at step 100 has sent what the other sends in 400
    expected = 100 * (1.001 * (2 + 3 / 400) / (2 + 3 / 100) - 1)
    assert found.byte_gap == pytest.approx(expected, abs=1e-6) and expected < 0
    back = compare(less, base, last=1).comparisons[1]
    assert back.byte_gap == pytest.approx(100 * (100 / (100 + expected) - 1), abs=1e-6)
    half = compare(sends(base, {}, 50.0), less, last=1).comparisons[1]
    assert half.byte_gap == pytest.approx(
        100 * (1.001 * (2 + 3 / 350) / (2 + 3 / 400) - 1), abs=1e-6
    )
    (base.parent / "ledger.jsonl").unlink()
    found = compare(base, less, last=1).comparisons[1]
    assert found.byte_gap is None and found.byte_gap_interval is None


def _replace(path: Path, text: str) -> None:
    path.write_text(text)


def _two_records(**figures: float) -> str:
    return "".join(json.dumps({**record(step, 2.0), **figures}) + "\n" for step in (1, 2))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda log, ledger: log.unlink(), "no such run"),
        (lambda log, ledger: _replace(log, ""), "holds no step"),
        (lambda log, ledger: _replace(log, "step 1 loss 2\n"), ":1: expected JSON"),
        (lambda log, ledger: _replace(log, "[1]\n"), ":1: expected a JSON object"),
        (lambda log, ledger: _replace(log, '{"epoch": 1}\n'), "expected records with step and"),
        (lambda log, ledger: _replace(log, json.dumps(record(1, float("nan")))), "not finite"),
        (
            lambda log, ledger: _replace(log, json.dumps({**record(1, 2.0), "tokens": 7})),
            r"0 points in common, from 100 to 7 tokens",
        ),
        (lambda log, ledger: _replace(log, _two_records(tokens=100)), "its tokens do not rise"),
        (lambda log, ledger: _replace(log, _two_records(seconds=float("nan"))), "seconds of 0"),
        (lambda log, ledger: write_run(log.parent, 7, 1.0), "another seed: .* no run of seed 7"),
        (
            lambda log, ledger: write_run(log.parent, 0, 1.0, model={"layers": 4, "width": 64}),
            r"lossy: another model than base: model.width is 64 to 128",
        ),
        (
            lambda log, ledger: write_run(log.parent, 0, 1.0, data={"content": "aa", "order": "c"}),
            "another data order than base: data.order is 'c' to 'bb'",
        ),
        (
            lambda log, ledger: write_run(log.parent, 0, 1.0, tokens_per_step=50),
            "another data order than base: data.tokens_per_step is 50 to 100",
        ),
        (lambda log, ledger: ledger.unlink(), "found no ledger.jsonl beside the log"),
        (lambda log, ledger: _replace(ledger, ""), "expected hybridcomp's ledger"),
        (lambda log, ledger: _replace(ledger, '{"dimensions": {}}\n'), "did the run end early"),
        (
            lambda log, ledger: _replace(
                ledger, '{"summary": true, "dimensions": {"dp": {"forward": {"codec": "mpc"}}}}\n'
            ),
            r"dp forward lacks \['ratio', 'raw_MB', 'wire_MB'\]",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    damage: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_run(tmp_path / "base", 0, 1.0)
    lossy = write_run(tmp_path / "lossy", 0, 1.01, ledger=True)
    damage(lossy, lossy.with_name("ledger.jsonl"))
    words = [str(base), str(lossy), "--need-ledger", "--out", str(tmp_path / "out")]
    assert cli.main(["compare", *words]) == cli.BAD_INPUT
    printed = capsys.readouterr()
    assert printed.err.startswith("hybridcomp: ") and printed.err.count("\n") == 1
    assert re.search(message, printed.err), printed.err
    assert printed.out == "" and not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("error")
def test_losses_of_zero_and_below_have_gaps_where_there_are_any(tmp_path: Path) -> None:
    """The baseline starts at 0 and ends below, as under reinforcement learning."""
    base, run = (write_run(tmp_path / name, 0, 1.0) for name in "ab")
    for log, factor, seconds, valid in ((base, -1.0, 1.0, 0.0), (run, -1.01, 0.1, 2.0)):
        rows = [record(step, 0.0 if step <= 20 else factor) for step in range(1, 61)]
        rows = [{**row, "seconds": seconds} for row in rows]
        rows.append({"summary": True, "valid_loss": valid})
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = compare(base, run)
    found = result.comparisons[1]
    assert found.gap == pytest.approx(-1.0), "a lower loss"
    assert (found.valid_gap, found.clock_gap) == (None, None)
    for chart in page.charts(result, 3):
        json.dumps(chart, allow_nan=False)
    assert student(12) == pytest.approx(2.201, abs=0.003)  # 11 degrees of freedom
    assert student(31) == pytest.approx(2.042, abs=0.001)


def test_other_settings_than_the_block_are_noted(tmp_path: Path) -> None:
    settings = {"optimizer": {"params": {"lr": 1e-3}}, "compression": {"preset": "zhybrid"}}
    base = write_run(tmp_path / "a", 0, 1.0, deepspeed={"optimizer": {"params": {"lr": 2e-3}}})
    run = write_run(tmp_path / "b", 0, 1.0, deepspeed=settings, ledger=True)
    assert "b: optimizer.params.lr is 0.001, in a 0.002" in compare(base, run).notes


def test_a_block_that_left_no_trace_is_noted(tmp_path: Path) -> None:
    """As for a job started without hybridcomp.run."""
    for block, traced in (({"preset": "zhybrid"}, True), ({"dp": "bf16", "enabled": False}, False)):
        base = write_run(tmp_path / "a", 0, 1.0)
        run = write_run(tmp_path / "b", 0, 1.0, deepspeed={"compression": block})
        told = [note for note in compare(base, run).notes if "--module hybridcomp.run" in note]
        assert len(told) == traced


def test_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_run(tmp_path / "base", 0, 1.0)
    assert cli.main(["compare", str(log), str(log)]) == cli.BAD_INPUT
    assert "base: two runs have this label" in capsys.readouterr().err
    assert cli.main(["compare", str(log)]) == cli.BAD_INPUT
    assert "found 1 runs; give a baseline and at least one" in capsys.readouterr().err
    assert cli.main(["compare", str(log), str(log), "--last", "0"]) == cli.BAD_INPUT
    assert "--last: expected at least 1" in capsys.readouterr().err
    assert split_label("runs/rec/loss.jsonl") == ("rec", "runs/rec/loss.jsonl")
    assert split_label("rec.jsonl") == ("rec", "rec.jsonl")
    assert split_label("a=b/*.jsonl") == ("a", "b/*.jsonl")
    assert split_label("runs/rec") == ("rec", "runs/rec")


def test_folders_stand_for_their_logs(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / "many" / f"seed{seed}", seed, 1.0)
    assert read_run("many", str(tmp_path / "many"), "ledger.jsonl").seeds == [0, 1]
    assert read_run("one", str(tmp_path / "many" / "seed1"), "ledger.jsonl").seeds == [1]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CompareError, match="found no run in this folder"):
        read_run("none", str(tmp_path / "empty"), "ledger.jsonl")


def test_codecs_are_short_in_tables() -> None:
    assert short("radix(error_bound=0.00499976, segment=4096, mode=rel)") == (
        "radix(error_bound=0.005)"
    )
    assert short("zfp(rate=8) + none") == "zfp(rate=8) + none"
    assert short("radix(error_bound=0.1, segment=512, mode=abs)") == (
        "radix(error_bound=0.1, mode=abs)"
    )


def test_commas_between_paths_and_in_them(tmp_path: Path) -> None:
    logs = [write_run(tmp_path / "4 bits, deltas 3" / f"seed{seed}", seed, 1.0) for seed in (0, 1)]
    plain = write_run(tmp_path / "plain", 2, 1.0)
    write_run(tmp_path / "4 bits" / "seed0", 0, 1.0)  # a prefix of the other's name
    for paths in (f"{logs[0]},{logs[1]},{plain}", f"{tmp_path}/4 bits, deltas 3/seed*,{plain}"):
        assert read_run("ours", paths, "ledger.jsonl").seeds == [0, 1, 2]
    with pytest.raises(CompareError, match=r"^missing: no such run"):
        read_run("ours", f"{plain},missing,{logs[0]}", "ledger.jsonl")


def test_every_run_of_a_picture_looks_different() -> None:
    styles = [draw.style_of(number) for number in range(29)]
    assert len({(style["color"], style.get("linestyle")) for style in styles}) == 29
