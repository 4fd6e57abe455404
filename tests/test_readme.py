"""The README against the code: what is generated is current, and its examples parse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridcomp.config import CompressionConfig, read_source
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_support_matrix_is_made_from_the_seams() -> None:
    pytest.importorskip("deepspeed")
    from hybridcomp.patches import support_matrix

    found = re.search(
        r"<!-- support-matrix[^>]*-->\n(.*?)\n<!-- /support-matrix -->", README, re.DOTALL
    )
    assert found is not None
    assert found[1] == support_matrix(), "run `hybridcomp seams` and put it into the README"


def test_example_block_parses(tmp_path: Path) -> None:
    found = re.search(r"```jsonc\n\"compression\": (\{.*?\n\})\n```", README, re.DOTALL)
    assert found is not None
    example = tmp_path / "block.json"
    example.write_text(found[1])
    config = CompressionConfig.parse(read_source(example))
    assert config.active("dp") and config.active("pp")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"`((?:scripts|configs|tests|patches)/[\w./-]+)`", README):
        assert (ROOT / target).exists(), target
