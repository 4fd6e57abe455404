"""The extensions are built from every source file present, without a list."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """Load the build class by path, as setuptools does."""
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


def test_objects_are_kept_for_the_next_build(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise installing an extra later would recompile all kernels."""
    monkeypatch.setattr(build, "HERE", tmp_path)
    source, header, made = (tmp_path / name for name in ("a.cpp", "a.h", "a.o"))
    for path in (source, header, made):
        path.write_text("")
    times = {source: 1, header: 2, made: 3}
    for path, second in times.items():
        os.utime(path, (second, second))
    assert not build.is_stale(str(made), str(source))
    for newer in (source, header):
        os.utime(newer, (4, 4))
        assert build.is_stale(str(made), str(source)), newer
        os.utime(newer, (1, 1))
    assert build.is_stale(str(tmp_path / "b.o"), str(source))
    here = build.objects(["g++"])
    assert here.parent == Path("build") and here != build.objects(["clang++"])
    monkeypatch.setenv("CFLAGS", "-O1")
    assert here != build.objects(["g++"])


def test_a_build_says_what_it_compiles(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from setuptools import Distribution, Extension
    from setuptools._distutils.ccompiler import new_compiler

    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.chdir(tmp_path)
    sources = ["a.cpp", "b.cpp"]
    for name in sources:
        (tmp_path / name).write_text("")
    command = build.BuildExt(Distribution({"ext_modules": [Extension("extension", sources)]}))
    command.extensions = command.distribution.ext_modules
    command.compiler, command.build_temp = new_compiler(), "made"
    assert "compiling 2 of 2 files" in command.announcement()
    (tmp_path / "made").mkdir()
    for name, expected in (("a", "compiling 1 of 2 files"), ("b", "nothing to compile")):
        (tmp_path / "made" / f"{name}.o").write_text("")
        os.utime(tmp_path / f"{name}.cpp", (1, 1))
        assert expected in command.announcement()
