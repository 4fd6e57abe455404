"""``validate --picture``: the bytes of a step on each link, drawn and as text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.tools import pages
from hybridcomp.tools.commands import cli, link_picture
from hybridcomp.tools.commands.job_files import read_job_file
from hybridcomp.tools.commands.memory import JobSize
from hybridcomp.tools.pages.links import LinkMB, amount, draw
from hybridcomp.tools.plan.pays import MessageGroup, documented, step_cost
from tests.paths import ROOT

pytest.importorskip("jinja2")

SVG = "{http://www.w3.org/2000/svg}"
#: widest letter of the labels, in pixels of a 480 pixel wide picture
LETTER, WIDTH = 9.0, 480
SIZE = ["--parameters", "1.3e9", "--world-size", "32", "--ranks-per-node", "8"]


STAGE_3 = {"zero_optimization": {"stage": 3}}


def job(tmp_path: Path, stage: int = 2, **changed: Any) -> Path:
    file = tmp_path / "ds_config.json"
    settings = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "compression": {"preset": "recommended"}, **changed,
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    return file


def texts(svg: str) -> list[tuple[str, float]]:
    """Return the labels with the maximum right end of each."""
    found = []
    for one in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        length = LETTER * len(one.text or "")
        end = float(one.attrib["x"]) + (0 if one.get("text-anchor") == "end" else length)
        found.append((one.text or "", end))
    return found


def test_the_four_nodes_of_the_docs_are_drawn_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/links.svg is the output of the page's command for the page's file."""
    page = (ROOT / "docs" / "four_nodes.md").read_text()
    block = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    command = re.search(r"^hybridcomp (validate .* --picture \S+)$", page, re.MULTILINE)
    assert block is not None and command is not None
    (tmp_path / "ds_config.json").write_text(block[1])
    words = [str(tmp_path / word) if "." in word and "/" not in word and not word[0].isdigit()
             else word for word in command[1].split()]  # fmt: skip
    assert cli.main(words) == 0
    told = capsys.readouterr().out
    written = (tmp_path / "links.svg").read_text()
    assert written == (ROOT / "docs" / "links.svg").read_text()
    labels = [label for label, _ in texts(written)]
    assert labels[:4] == ["node 1", "8 ranks", "node 2 of 4", "8 ranks"]
    between = labels[labels.index("Between nodes, such as Ethernet") :]
    assert f"between nodes {between[4]} instead of {between[2]}" in told
    assert "](links.svg)" in page and "](links.svg)" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_a_rank_on_each_node_it_is_what_pays_says(stage: int, tmp_path: Path) -> None:
    file = read_job_file(job(tmp_path, stage))
    block = CompressionConfig.parse({"preset": "recommended"})
    native, sent = link_picture.node_nbytes(block, file, JobSize(1 << 30, 4))
    told = step_cost(block, 1 << 30, MessageGroup(4, stage), documented("gpu"), 8)
    assert native.inside == sent.inside == 0.0
    assert native.between == pytest.approx(told.native_nbytes, rel=1e-6)
    assert sent.between == pytest.approx(told.wire_nbytes, rel=1e-6)


def test_tensor_ranks_share_a_node(tmp_path: Path) -> None:
    """Two tensor ranks halve each rank's parameters and double a node's groups."""
    file = read_job_file(job(tmp_path, 1))
    block = CompressionConfig.parse({"preset": "recommended"})
    whole = link_picture.node_nbytes(block, file, JobSize(1 << 30, 16, None, 4))
    split = link_picture.node_nbytes(block, file, JobSize(1 << 30, 16, None, 4, tensor_ranks=2))
    assert split[1].between == pytest.approx(whole[1].between)
    assert split[1].inside < whole[1].inside


def test_bars_have_the_lengths_of_their_figures_and_labels_stay_inside() -> None:
    rows = [LinkMB("Inside <a> node", 99_900.0, 50_000.0), LinkMB("Between", 1234.5, 0.0)]
    svg = draw("T & <T>", rows, 1024, 64)
    bars = [
        one for one in ElementTree.fromstring(svg).iter(f"{SVG}rect") if one.get("height") == "22"
    ]
    widths = [float(one.attrib["width"]) for one in bars]
    assert widths[:3] == pytest.approx([250, 250 * 50 / 99.9, 250 * 1.2345 / 99.9], abs=0.1)
    assert widths[3] == 1.0  # the minimum width stays visible
    labels = texts(svg)
    assert all(end <= WIDTH for _, end in labels), labels
    assert [label for label, _ in labels if "B" in label][0:2] == ["99.9 GB", "50.0 GB"]
    assert "prefers-color-scheme: dark" in svg and "http" not in svg.replace(SVG[1:-1], "")
    anonymous = [label for label, _ in texts(draw("T", rows))]
    assert anonymous[:2] == ["a node", "another node"] and "None" not in "".join(anonymous)


@pytest.mark.parametrize(
    ("megabytes", "told"),
    [(0.0, "0 MB"), (0.1234, "0.123 MB"), (99.96, "100 MB"), (9999.0, "9,999 MB"),
     (12345.0, "12.3 GB")],
)  # fmt: skip
def test_amounts(megabytes: float, told: str) -> None:
    assert amount(megabytes) == told
    assert amount(megabytes, 12345.0).endswith(" GB")  # two figures to compare have one unit


@pytest.mark.parametrize(
    ("words", "changed", "said"),
    [
        ([], {}, "draws several nodes; add --parameters, --world-size and --ranks-per-node"),
        (SIZE[:4] + ["--ranks-per-node", "32"], {}, "draws several nodes"),
        (SIZE, {"compression": {"sync": {"islands": 4}}}, "leave it out for islands"),
        (SIZE, {**STAGE_3, "compression": {"zero": {"secondary": "exact"}}}, "secondary copies"),
        (SIZE, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}},
         "found secondary copies; draws jobs whose micro-batches all cross nodes"),
        (SIZE, {**STAGE_3, "compression": {"dp": {"codec": "bf16", "accumulate": "node"}}},
         'found "dp.accumulate": "node"; draws jobs'),
        (SIZE, {"compression": {"dp": {"codec": "powersgd"}}}, "matrices; draw another codec"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_one_line(
    words: list[str], changed: dict[str, Any], said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    picture = tmp_path / "links.svg"
    file = job(tmp_path, 0, **changed)
    assert cli.main(["validate", str(file), *words, "--picture", str(picture)]) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not picture.exists()


def test_without_jinja_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(Exception, match="--picture: it needs jinja2: pip install") as found:
        link_picture.write(
            tmp_path / "x.svg", CompressionConfig.parse({"preset": "recommended"}),
            read_job_file(job(tmp_path)), JobSize(1000, 4),
        )  # fmt: skip
    assert not isinstance(found.value, ConfigError)
