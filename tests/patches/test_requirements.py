"""Each upstream's requirement is in one module, from which everything else derives."""

from __future__ import annotations

import ast
import sys

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from doc_pages import releases
from hybridcomp.patches.ds import requirement as ds
from hybridcomp.patches.mcore import requirement as mcore
from hybridcomp.patches.registry import MODULES, OPTIONAL, patches_of
from hybridcomp.patches.torch import torch_versions
from hybridcomp.seams.patching import since
from tests.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")


def spelled() -> dict[str, list[str]]:
    """Return, by package, modules with a string that requires a version of it."""
    found: dict[str, list[str]] = {}
    folders = (ROOT / "hybridcomp", ROOT / "patches")
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                try:
                    requirement = Requirement(node.value)
                except InvalidRequirement:
                    continue
                if requirement.specifier:
                    found.setdefault(requirement.name, []).append(str(path.relative_to(ROOT)))
    return found


def test_each_upstream_has_its_requirement_in_one_place() -> None:
    found = spelled()
    del found["toytrain"]  # belongs to the template, which users copy
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
    known = {
        "deepspeed": ["patches/ds/requirement.py"],
        "megatron-core": ["patches/mcore/requirement.py"],
        "sglang": ["hybridcomp/inference/upstream.py"],
        "torch": ["patches/torch/torch_versions.py"],
        "transformer-engine": ["patches/mcore/requirement.py"],
        "transformers": ["hybridcomp/nn/huggingface.py"],
        "verl": ["hybridcomp/inference/upstream.py"],
        "vllm": ["hybridcomp/inference/upstream.py"],
    }
    assert found.items() >= known.items()


def test_the_build_installs_what_the_seams_fit() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    said = {Requirement(text) for text in (*extras["deepspeed"], *extras["megatron"])}
    assert said == {Requirement(ds.REQUIREMENT), Requirement(mcore.REQUIREMENT)}
    assert Requirement(torch_versions.TORCH) in map(Requirement, project["dependencies"])


@pytest.mark.parametrize("package", [name for name in MODULES if name.startswith("deepspeed")])
def test_a_seam_only_narrows_the_requirement(package: str) -> None:
    whole = Requirement(ds.REQUIREMENT).specifier
    limits = {limit for limit in whole if limit.operator == "<"}
    narrower = 0
    for patch in patches_of(package):
        own = Requirement(patch.seam.requirement)
        assert own.name == "deepspeed" and limits < set(own.specifier)
        narrower += own.specifier != whole
    assert 0 < narrower < 5
    assert package not in OPTIONAL


def test_since_changes_the_oldest_release_alone() -> None:
    assert since("toy >= 1.0, < 2.0", "1.4") == "toy >= 1.4, < 2.0"
    assert since("toy >= 1.0", "1.4") == "toy >= 1.4"


def test_releases_in_words() -> None:
    assert releases.minors("toy >= 0.19, < 0.20") == "0.19"
    assert releases.minors("toy >= 0.13, < 0.20") == "0.13 to 0.19"
    neox = releases.current("engines/neox.md", "DeepSpeed 0.1, not DeepSpeed 0.1.2 or 0.1")
    assert neox.startswith(f"DeepSpeed {releases.minors(ds.REQUIREMENT)}, not DeepSpeed 0.1.2")
    with pytest.raises(ValueError, match="expected a sentence"):
        releases.current("engines/megatron.md", "megatron-core 0.16")
