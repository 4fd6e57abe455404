"""Generated parts are current, the README is short, and its figures are the measured ones."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hybridcomp
import make_docs
from doc_pages import bits, speeds
from hybridcomp.autotune import recheck, verdicts
from hybridcomp.errors import install_hint
from tests.docs.pages import counted_bytes
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
#: job of bits.JOBS -> bits per parameter, native and with the preset: 16 or 32 for each
#: reduce-scatter or gather (an all-reduce is both); 4.258 and 8.258 of blockint at 4 and 8 bits
BITS = {
    "zero0": (2 * 16, 2 * 4.258),
    "zero1": (2 * 16 + 16, 4.258 + 8.258),
    "zero3": (16 + 16, 4.258 + 8.258),
    "zero3_twice": (16 + 2 * 16, 4.258 + 2 * 8.258),
    "hpz": (16 + 16, 4.258 + 8.258),
    "zeropp": (4.008 + 8.004, 4.258 + 8.258),
    "fsdp2": (32 + 2 * 16, 4.258 + 2 * 8.258),
    "fsdp2_bf16": (16 + 2 * 16, 4.258 + 2 * 8.258),
    "hsdp": (2 * 32, 2 * 4.258),
    "hsdp_bf16": (2 * 16, 2 * 4.258),
    "ddp": (2 * 32, 2 * 4.258),
    "ddp_bf16": (2 * 16, 2 * 4.258),
    "ddp_x4": (2 * 16 / 4, 2 * 4.258 / 4),
    "megatron": (32 + 16, 4.258 + 8.258),
    "megatron_bf16": (16 + 16, 4.258 + 8.258),
    "activations": (16, 8.258),
}
#: layouts in README's sentence about losses
EIGHT_SEEDS = {"ZeRO 1": "dp2", "FSDP2": "fsdp2", "DDP": "ddp2"}


def _gap(training: str, layout: str, run: str) -> str:
    """Return a run's gap in docs/results/losses.csv, with its interval."""
    with open(speeds.SPEEDS.with_name("losses.csv"), encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["training"], row["layout"], row["run"]) == (training, layout, run):
                return f"{row['gap']} ± {row['interval']}"
    raise AssertionError((training, layout, run))


def test_what_is_made_from_the_code_is_current() -> None:
    pytest.importorskip("deepspeed")
    old = [str(path.relative_to(ROOT)) for path in make_docs.stale()]
    assert not old, "run scripts/make_docs.py"


def test_a_page_without_its_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected <!-- presets -->"):
        make_docs._with_part("# Presets\n", "presets", "| a |", "presets.md")


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_the_tables_bits_are_those_of_nccls_algorithms() -> None:
    assert set(bits.JOBS) == set(BITS)
    for name, (today, ours) in BITS.items():
        job = bits.JOBS[name]
        assert bits.total(job.today, job.accumulated) == pytest.approx(today, rel=1e-3)
        assert bits.total(job.recommended, job.accumulated) == pytest.approx(ours, rel=1e-3)
        row = next((row for row in README.splitlines() if row.startswith(f"| {job.words}")), None)
        assert (row is not None) == job.told
        if row is not None:
            factor = float(row.split("|")[4].strip().removesuffix("x"))
            assert factor == pytest.approx(today / ours, abs=0.051)
            assert ("(computed)" in row) != job.counted


def test_the_tables_bits_were_counted_at_interfaces_of_hosts() -> None:
    """The ledger's bytes of these runs agree within 1 %, its factor within 2 %."""
    rows = counted_bytes()
    for row in rows:  # told by the ledger, and computed
        assert abs(row.get("off", 0.0)) < 0.01 and abs(row.get("off_expected", 0.0)) < 0.02, row
        assert row["bits"] <= row.get("most_bits", math.inf), row
    counted = {row["job"] for row in rows}
    assert {n for n, job in bits.JOBS.items() if job.counted} <= counted | {"activations"}
    layouts = ("dp2", "zero1", "zero2", "zero3", "zero3_twice", "hpz", "fsdp2", "hsdp", "ddp")
    told = {(row["layout"], row["arm"]) for row in rows if "told_MB" in row}
    assert told >= {(name, arm) for name in layouts for arm in ("none", "recommended")}
    for row in rows:
        if row["arm"] == "recommended" and row["job"] in bits.JOBS:
            job = bits.JOBS["ddp" if row["job"] == "ddp_x4" else row["job"]]  # beside its hook
            nodes, per_node = (2, 1) if row["layout"] not in ("hpz", "hsdp") else (2, 2)
            today, ours = (
                bits.across(messages, nodes, per_node, levels)
                for messages, levels in ((job.today, False), (job.recommended, True))
            )
            where = "link_" if per_node > 1 else ""  # no table has traffic inside a node
            factor = row[f"native_{where}MB"] / row[f"told_{where}MB"]
            assert factor == pytest.approx(today / ours, rel=0.02), row["job"]


def test_native_bytes_of_islands_are_those_of_the_job_without_them() -> None:
    """Counted at the hosts' interfaces; the ledger's factor follows from them."""
    rows = {row["arm"]: row for row in counted_bytes() if row["job"] == "islands"}
    islands, native = rows["islands"], rows["native fp32"]
    assert islands["native_MB"] == pytest.approx(native["link_MB"], rel=0.01)
    # 96 bits per step; 2 x 4.258 bits every tenth
    assert islands["native_MB"] / islands["told_MB"] == pytest.approx(112.73, rel=0.001)
    assert abs(islands["off"]) < 0.01


def test_readme_losses_are_the_measured_ones() -> None:
    prose = " ".join(README.split())
    for words, layout in EIGHT_SEEDS.items():
        assert f"{_gap('eight seeds', layout, 'recommended')} % under {words}" in prose
    assert f"ends {_gap('loss_torch', 'ddp2', 'peer powersgd-4')} % above" in prose


def test_speeds_at_a_quarter_are_the_measured_ones() -> None:
    found = speeds.measured()
    quarter = [found[layout, arm, 0.25]["speed_up"] for layout, arm in speeds.ROWS.values()
               if arm == "recommended" and (layout, arm, 0.25) in found]  # fmt: skip
    told = re.search(r"At r = 0.25 it was (\S+) \(.*?\) to (\S+) ", README)
    assert told and told.groups() == (f"{min(quarter):.2f}", f"{max(quarter):.2f}")
    near, far = (found["dp2", "peer sdp4bit", r]["speed_up"] for r in speeds.RATIOS)
    assert f"ran at {near:.2f} and {far:.2f} at ZeRO 0" in README


def test_the_readme_begins_with_what_for_whom_and_how_much() -> None:
    """Its ranges span those of the tables: bytes, and speeds of `recommended` at r = 1."""
    title, empty, *lines = README.splitlines()[:5]
    assert title.startswith("# ") and not empty and all(lines)
    factors = [today / ours for name, (today, ours) in BITS.items() if name != "zeropp"]
    assert f"{min(factors):.1f} to {max(factors):.1f} times fewer bytes" in lines[0]
    found = re.search(r"(\d\.\d) to (\d\.\d) times as fast", lines[2])
    rows = speeds.measured()
    near = [rows[layout, arm, 1.0]["speed_up"] for layout, arm in speeds.ROWS.values()
            if arm == "recommended" and (layout, arm, 1.0) in rows]  # fmt: skip
    assert found and found.groups() == (f"{min(near):.1f}", f"{max(near):.1f}")


def test_parts_of_the_installation_can_be_pasted_alone() -> None:
    """No block installs two kinds of CuPy or clones from a placeholder address."""
    for page in ("README.md", "docs/getting_started.md"):
        for block in re.findall(r"```\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL):
            assert block.count("pip install -e") <= 1, block
            assert "git clone" not in block or "://" in block, block


def test_all_pages_install_one_torch_for_cpus() -> None:
    """They use the index whose torch has no CUDA; extras come at once, as each build takes time."""
    pages = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/getting_started.md")]
    index = "--index-url https://download.pytorch.org/whl/cpu"
    for line in (line for text in pages for line in text.splitlines()):
        if "pip install torch" in line:
            assert index in line or "for your CUDA" in line, line
    lines = [{line.strip().split("  ")[0] for line in text.splitlines() if "whl/cpu" in line}
             for text in pages]  # fmt: skip
    assert lines[0] == lines[1]
    assert "with other extras compiles only what changed" in pages[1]
    assert "or later, without a build: `pip install wandb" in pages[1]


def test_bits_of_published_weights_are_those_of_the_table() -> None:
    """From a learning rate of 1e-6 to 1e-3, rounded; a full version has at most 16."""
    told = re.search(
        r"at (\S+) bits a weight \(learning rate 1e-6\) to (\S+) \(1e-3\), at most 16",
        README,
    )
    table = (ROOT / "docs/publishing.md").read_text("utf-8")
    (row,) = re.findall(r"\| \| 1e-3 .*?1e-6 \|.*?\| bits a weight \|(.*?)\|\n", table, re.DOTALL)
    most, *_, least = (float(cell) for cell in row.split("|"))
    assert told and float(told[1]) == pytest.approx(least, abs=0.05)
    assert most <= float(told[2]) < most + 1


def test_the_front_page_has_two_bars_a_link_and_the_table_of_jobs() -> None:
    """Native messages beside the preset, in a user's words, and the four changed lines."""
    page = (ROOT / "docs/index.md").read_text("utf-8")
    assert "![Tokens a second over three links, with and without the block](speed.svg)" in page
    drawn = (ROOT / "docs/speed.svg").read_text("utf-8")
    for kind in ("native", "block"):  # a bar for each of three links, and one in the legend
        assert drawn.count(f'<rect class="{kind}"') == 1 + 3
    for r in (0.25, 1.0, 4.0):
        assert f">{speeds.measured()['zero1', 'recommended', r]['speed_up']:.2f}</text>" in drawn
    table = page.partition("<!-- jobs")[2].partition("<!-- /jobs -->")[0]
    assert sum(line.startswith("| ") for line in table.splitlines()) > 6
    assert all(line in page for line in ('+  "compression": {"preset": "recommended"}',
                                         "+  --module hybridcomp.run \\"))  # fmt: skip


def test_the_ledgers_page_says_that_the_trial_halves_the_first_factors() -> None:
    """It names the step until which the comparison runs, after its warm-up rounds."""
    page = " ".join((ROOT / "docs/ledger.md").read_text("utf-8").split())
    one = recheck.Recheck(["dp", "zero"], verdicts.WARM)
    first = f"until step {one.stop - 1}, or {one.last} in a close case"
    assert "first report shows about half of the later factors" in page and first in page


def test_pages_say_how_one_process_is_started() -> None:
    """DeepSpeed without a launcher exits; hybridcomp's module starts a single process."""
    page = (ROOT / "docs/engines/deepspeed.md").read_text("utf-8")
    assert "`--num_gpus 1`" in page and "No module named 'mpi4py'" in page


def test_ci_runs_the_commands_of_the_readme() -> None:
    assert "\n```\nscripts/test\n```\n" in README
    lines = (ROOT / ".ci/run").read_text("utf-8").splitlines()
    commands = [line.partition("#")[0].strip() for line in lines]
    assert "scripts/test --version" in commands and "scripts/test & tests=$!" in commands
    installing = [line for line in commands if "pip install" in line]
    assert not installing, "CI installs what the test command does not"


@pytest.mark.nightly
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """mkdocs treats warnings about links, anchors and navigation as errors."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip(f"mkdocs is not installed ({install_hint('docs')})")
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--build", str(tmp_path),
         "--repository", "https://example.org/team/hybridcomp"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("index", "block", "engines/huggingface", "results/speed", "nccl_on_one_gpu"):
        assert (tmp_path / f"{name}.html").is_file()
    dead = [
        f"{page.relative_to(tmp_path)}: {path}"
        for page in tmp_path.rglob("*.html")
        if page.name != "404.html"  # it is served for any address, so its links are absolute
        for path in re.findall(r'<(?:a|img)\s[^>]*(?:href|src)="([^"#?]+)', page.read_text("utf-8"))
        if not re.match(r"[a-z]+:|//", path) and not (page.parent / path).exists()
    ]
    assert not dead, dead
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert f"hybridcomp {hybridcomp.__version__}" in home and "site/logo.svg" in home
    edited = (tmp_path / "engines/slurm.html").read_text(encoding="utf-8")
    assert "https://example.org/team/hybridcomp/edit/main/docs/engines/slurm.md" in edited
    loaded = re.findall(r"<(?:script|link)[^>]+(?:src|href)=\"([^\"]+)\"", home)
    elsewhere = [path for path in loaded if "//" in path]
    assert not elsewhere, "the site must open without a network"
    # search in a page opened as a file: a worker without a server, the index as a script
    worker = "site/iframe-worker.js"
    assert worker in loaded and (tmp_path / worker).is_file()
    assert (tmp_path / "search/search_index.js").read_text("utf-8").startswith("var __index = {")


PROOF = ROOT / "docs/results/gpu_proof.md"


def test_pages_of_results_are_short_and_have_no_bitmaps() -> None:
    """Each page answers one question; raw tables are CSV files beside it, or in a named commit.

    The GPU proof is exempt: it lists the steps of its command.
    """
    for page in sorted(set((ROOT / "docs/results").glob("*.md")) - {PROOF}):
        text = page.read_text("utf-8")
        assert len(text.split()) < 1200, page.name
        assert text.count("\n|") < 80, page.name
    assert not list((ROOT / "docs").rglob("*.png"))


def test_pages_of_results_do_not_tell_how_they_came_about() -> None:
    words = (
        r"\b(?:session|earlier run|in the runs of before|what was changed|since then|written since|"
        r"of that day|the day before|by now|ran again)\b|\| before \| now \|"
    )
    for page in sorted((ROOT / "docs/results").glob("*.md")):
        told = re.findall(words, page.read_text("utf-8"), re.IGNORECASE)
        assert not told, (page.name, told)
