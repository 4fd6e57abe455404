"""Build commands of the package for setuptools; not imported at run time.

``pyproject.toml`` names these classes under ``[tool.setuptools] cmdclass``. setuptools loads the
file by its path, so nothing else of the package is imported during a build.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
#: files of a checkout that lie outside the package
BESIDE = (
    "CHANGELOG.md", "CONTRIBUTING.md", "configs", "docs", "scripts", "tests", ".ci", ".github",
)  # fmt: skip
#: files that running and building leave in the tree
LEFT_BEHIND = ("__pycache__", ".pyc", ".so", ".o")
#: portable headers, which both back ends include by their bare names
FORMATS = HERE / "formats"
#: folder of each extension; all of its files are compiled
FOLDERS = {"hybridcomp.kernels._cpu": "cpu", "hybridcomp.kernels._launch": "cuda"}
COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    # no fused multiply-add, so that every CPU gives the same bytes
    "-ffp-contract=off",
    # lets comparisons become vector selects; changes no value
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fvisibility=hidden",
    # vectors are only passed to inlined functions
    "-Wno-psabi",
    "-g0",
]


def found(name: str) -> tuple[list[str], list[str]]:
    """Return the sources of the extension ``name`` and their headers, relative to the root."""
    folder, root = HERE / FOLDERS[name], HERE.parent.parent
    sources = sorted(folder.glob("*.cpp"))
    headers = sorted([*folder.glob("*.h"), *FORMATS.glob("*.h")]) if folder.name == "cpu" else []
    told = ([path.relative_to(root).as_posix() for path in paths] for paths in (sources, headers))
    return next(told), next(told)


def objects(compiler: Sequence[str]) -> Path:
    """Return the folder in the checkout that keeps object files for the next build.

    pip builds in a new folder each time, so every extra installed later would recompile all
    kernels. Each combination of compiler, Python and flags has its own folder.
    """
    made_by = [*compiler, sys.version, *COMPILE_ARGS]
    made_by += [f"{name}={os.environ.get(name, '')}" for name in ("CFLAGS", "CXXFLAGS", "CPPFLAGS")]
    digest = hashlib.sha256("\n".join(made_by).encode()).hexdigest()[:12]
    return Path("build") / f"objects-{digest}"


def is_stale(made: str, source: str) -> bool:
    """Return whether the object ``made`` is missing, or older than its source or any header."""
    if not Path(made).exists():
        return True
    newest = max(path.stat().st_mtime_ns for path in (Path(source), *HERE.rglob("*.h")))
    return Path(made).stat().st_mtime_ns <= newest


class BuildExt(build_ext):  # type: ignore[misc]  # setuptools is untyped here
    """build_ext with the files of each folder and our flags."""

    def finalize_options(self) -> None:
        """Set the files of every extension: for a build, and for a source distribution."""
        super().finalize_options()
        for extension in self.extensions or ():
            if extension.name in FOLDERS:
                extension.sources, extension.depends = found(extension.name)

    def build_extensions(self) -> None:
        """Build every extension, with OpenMP if the compiler supports it as installed."""
        self.build_temp = str(objects(self.compiler.compiler_so))
        _tell(self.announcement())
        openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
        for extension in self.extensions:
            extension.include_dirs.append(str(FORMATS))
            extension.extra_compile_args += COMPILE_ARGS + openmp
            extension.extra_link_args += openmp
        compile_one = self.compiler.compile

        def compile_stale(sources: list[str], **options: Any) -> list[str]:
            """Compile the stale files of an extension, one per core; return all its objects."""
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                stale = ([source] for source in self._stale(sources))
                list(threads.map(lambda one: compile_one(one, **options), stale))
            return list(self.compiler.object_filenames(sources, output_dir=self.build_temp))

        self.compiler.compile = compile_stale
        super().build_extensions()

    def _stale(self, sources: list[str]) -> list[str]:
        made = self.compiler.object_filenames(sources, output_dir=self.build_temp)
        return [each for kept, each in zip(made, sources, strict=True) if is_stale(kept, each)]

    def announcement(self) -> str:
        """Return a message on what will be compiled, and how long that takes."""
        sources = [path for extension in self.extensions for path in extension.sources]
        stale = len(self._stale(sources))
        if not stale:
            return "hybridcomp: the CPU kernels are compiled already; nothing to compile"
        return (
            f"hybridcomp: compiling {stale} of {len(sources)} files of the CPU kernels; "
            "all of them take 50 s on two cores"
        )


class Sdist(sdist):  # type: ignore[misc]  # setuptools is untyped here
    """sdist with all files of a checkout: scripts, configurations, documents, tests."""

    def make_distribution(self) -> None:
        """Add the files outside the package to those that setuptools has found."""
        self.filelist.extend([str(path) for name in BESIDE for path in _files(Path(name))])
        super().make_distribution()


def _files(path: Path) -> Iterator[Path]:
    """Yield the files below ``path``, or ``path`` itself; nothing if it is missing."""
    if path.is_file():
        if not path.name.endswith(LEFT_BEHIND):
            yield path
    elif path.is_dir() and path.name not in LEFT_BEHIND:
        for inner in sorted(path.iterdir()):
            yield from _files(inner)


def _tell(message: str) -> None:
    """Print a message, also directly to the terminal, because pip hides a build's output.

    Without a terminal the message only goes into the build's log.
    """
    print(message, flush=True)
    try:
        with open(os.ctermid(), "w", encoding="utf-8") as terminal:
            terminal.write(f"\n{message}\n")
    except OSError:
        pass  # no terminal, as in CI or a container
