"""What the extensions are built from: every file that is there, named nowhere."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """The build class, loaded by its path as setuptools does."""
    pytest.importorskip("pybind11")
    pytest.importorskip("setuptools")
    path = ROOT / "hybridcomp" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("kernels_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_source_and_header_is_found(build: ModuleType) -> None:
    kernels = ROOT / "hybridcomp" / "kernels"
    named: set[str] = set()
    for name in build.FOLDERS:
        sources, headers = build.found(name)
        assert sources and all((ROOT / path).is_file() for path in (*sources, *headers))
        named |= {*sources, *headers}
    there = {*kernels.rglob("*.cpp"), *(kernels / "cpu").glob("*.h")}
    there |= set((kernels / "formats").glob("*.h"))
    assert named == {path.relative_to(ROOT).as_posix() for path in there}


def test_the_command_has_them(build: ModuleType) -> None:
    from setuptools import Distribution, Extension

    names = list(build.FOLDERS)
    distribution = Distribution({"ext_modules": [Extension(name, []) for name in names]})
    command = build.BuildExt(distribution)
    command.ensure_finalized()
    assert [extension.sources for extension in command.extensions] == [
        build.found(name)[0] for name in names
    ]
    assert "hybridcomp/kernels/formats/radix.h" in command.get_source_files()
