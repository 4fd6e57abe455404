"""The preset ``planned``: its block comes from a plan, and a wrong plan gives a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.codecs import BlockInt
from hybridcomp.errors import ConfigError
from tests.config.common import parse

LAYOUT = {"data": 2, "stages": 2, "zero_stage": 1}
BLOCK = {
    "preset": "recommended", "dp": {"error_feedback": True}, "zero": "none", "min_bytes": 1024,
}  # fmt: skip


def write(folder: Path, **changed: Any) -> str:
    """Write a plan with changed keys; None drops a key."""
    whole = {"hybridcomp_plan": 1, "layout": LAYOUT, "block": BLOCK, **changed}
    path = folder / "plan.json"
    path.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    return str(path)


def test_the_block_is_the_plans_with_what_is_written_beside_it(tmp_path: Path) -> None:
    plan = write(tmp_path)
    config = parse({"preset": "planned", "plan": plan, "pp": {"bits": 6}})
    codecs = config.policy().codecs
    assert codecs["dp", "forward"] == BlockInt(4)
    assert config.error_feedback("dp")
    assert codecs["pp", "forward"] == BlockInt(6), "what is written overrides the plan"
    assert codecs["zero", "forward"] is None, "the plan overrides the preset that it names"
    assert config.min_bytes == 1024
    assert parse({"preset": "planned", "plan": plan, "min_bytes": 5}).min_bytes == 5
    assert config.explicit == {"pp"}
    assert config.planned is not None
    assert dict(config.planned.layout) == {"ranks": 4, **LAYOUT}


def test_ranks_have_to_agree_on_codecs_and_layout_and_not_on_where_the_file_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    here, there = write(tmp_path), write(tmp_path / "other")
    digests = [parse({"preset": "planned", "plan": plan}).digest() for plan in (here, there)]
    assert digests[0] == digests[1]
    write(tmp_path / "other", layout={**LAYOUT, "data": 4})
    assert parse({"preset": "planned", "plan": there}).digest() != digests[0]
    write(tmp_path / "other", block={**BLOCK, "zero": "mpc"})
    assert parse({"preset": "planned", "plan": there}).digest() != digests[0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hybridcomp_plan": 2}, "format 2, this version reads 1"),
        ({"hybridcomp_plan": None}, "is no plan"),
        ({"layout": [1]}, "lacks its block or its layout"),
        ({"layout": {"data": "two"}}, "data is no number"),
        ({"layout": {}}, "its layout says nothing"),
        ({"block": {"preset": "planned"}}, "names itself"),
    ],
)
def test_a_wrong_plan_is_one_sentence(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse({"preset": "planned", "plan": write(tmp_path, **changed)})
    assert str(caught.value).startswith("compression.plan")
    assert "\n" not in str(caught.value)


def test_errors_of_the_plans_own_block_name_the_key(tmp_path: Path) -> None:
    plan = write(tmp_path, block={"dp": {"codec": "blockint", "bits": 40}})
    with pytest.raises(ConfigError, match=r"compression\.dp"):
        parse({"preset": "planned", "plan": plan})


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"preset": "planned"}, 'add "plan": "plan.json"'),
        ({"preset": "planned", "plan": "nowhere.json"}, "no such file, seen from"),
        ({"preset": "planned", "plan": "."}, "cannot be read"),
        ({"preset": "planned", "plan": 3}, "needs what `hybridcomp plan` wrote"),
        ({"preset": "recommended", "plan": "plan.json"}, 'only "preset": "planned" reads it'),
    ],
)
def test_plan_and_preset_belong_together(block: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(block)
