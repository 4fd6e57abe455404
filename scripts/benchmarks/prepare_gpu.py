#!/usr/bin/env python3
"""Prepare, without a GPU, the files for a GPU machine that is lent bare for minutes.

    prepare_gpu.py --out carry --python python3.12 --architecture 90 --nvrtc 13.0.88
    prepare_gpu.py --out carry --only kernels --architecture 90

Writes four folders, which ``prove_on_gpu.py --prepared`` takes:

wheels/   packages that the machine lacks (--wheels), for its Python
native/   the extensions of this checkout, built for its Python, and the package's metadata
kernels/  the CUDA kernels that the benches and the trainings launch, compiled for its GPU by NVRTC
          of its version: an image is looked up by the compiler's version too
data/     the data of the speed benchmark and the loss study, compressed

Existing folders are replaced. --python: a local interpreter of that machine's version. This one
needs CuPy and tokenizers.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from benchmarks.gpu_proof.steps import loss_data
from benchmarks.shared import parser_of

ROOT = Path(__file__).resolve().parents[2]
#: packages to prepare; a GPU machine has torch, CuPy, pytest and its plugins
WHEELS = ("deepspeed==0.19.*", "hjson", "megatron-core==0.16.*", "pydantic", "wrapt")
#: packages whose dependencies are prepared, too
WITH_DEPENDENCIES = ("pydantic",)
#: last lines shown of a failed command; a launcher of Pythons says in its first what is missing
TOLD = 6


class PrepareError(RuntimeError):
    """A part could not be prepared; the message gives the part and the reason."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("carry"), metavar="FOLDER")
    add("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--python", default=sys.executable, metavar="FILE", help="of that machine's version")
    add("--architecture", type=int, default=90, metavar="SM", help="of its GPU: 90 for an H100")
    add("--nvrtc", default="", metavar="VERSION", help="of its CUDA; default: the one here")
    add("--wheels", nargs="*", default=list(WHEELS), metavar="REQUIREMENT")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the parts; return 1 if one failed."""
    asked = parse(arguments)
    asked.out = asked.out.resolve()
    for name in asked.only:
        try:
            with tempfile.TemporaryDirectory(dir=_made(asked.out)) as temporary:
                made = Path(temporary) / name
                made.mkdir()
                PARTS[name](asked, made)
                shutil.rmtree(asked.out / name, ignore_errors=True)
                made.rename(asked.out / name)
        except PrepareError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        files = [path for path in (asked.out / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{name}: {len(files)} files, {size / 1e6:.1f} MB", flush=True)
    return 0


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wheels(asked: argparse.Namespace, out: Path) -> None:
    """Fetch or build the packages."""
    for requirement in asked.wheels:
        _wheel(asked.python, requirement, out)


def _wheel(python: str, requirement: str, out: Path) -> None:
    alone = () if requirement in WITH_DEPENDENCIES else ("--no-deps",)
    # DeepSpeed compiles nothing at installation; without torch it only warns
    _call(
        python, "-m", "pip", "wheel", "--quiet", *alone, "--disable-pip-version-check",
        "--wheel-dir", str(out), requirement, env={"DS_BUILD_OPS": "0"},
    )  # fmt: skip


def native(asked: argparse.Namespace, out: Path) -> None:
    """Build this checkout's extensions, and the metadata that makes it count as installed."""
    with tempfile.TemporaryDirectory() as built:
        _wheel(asked.python, str(ROOT), Path(built))
        (wheel,) = Path(built).glob("hybridcomp-*.whl")
        with zipfile.ZipFile(wheel) as file:
            for name in file.namelist():
                if name.endswith(".so") or ".dist-info/" in name:
                    file.extract(name, out)


def kernels(asked: argparse.Namespace, out: Path) -> None:
    """Compile the kernels in a process that loads the NVRTC version of --nvrtc."""
    paths = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {"CUPY_CACHE_DIR": str(out), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    code = "from benchmarks.gpu_bench import prebuild; prebuild.compile_here({}, {!r})"
    with tempfile.TemporaryDirectory() as other:
        if asked.nvrtc:
            env |= _nvrtc(asked.nvrtc, Path(other))
        _call(sys.executable, "-c", code.format(asked.architecture, asked.nvrtc), env=env)


def _nvrtc(version: str, folder: Path) -> dict[str, str]:
    """Fetch NVRTC ``version`` into ``folder``; return an environment in which CuPy uses it."""
    package = "nvidia-cuda-nvrtc" + ("-cu12" if version.startswith("12.") else "")
    _call(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder),
        "--disable-pip-version-check", f"{package}=={version}",
    )  # fmt: skip
    found = sorted(folder.rglob("libnvrtc.so*"))
    if not found:
        raise PrepareError(f"{package}=={version} has no libnvrtc.so")
    # CuPy uses an already loaded NVRTC, whose builtins library the loader has to find
    return {"LD_PRELOAD": str(found[0]), "LD_LIBRARY_PATH": str(found[0].parent)}


def data(asked: argparse.Namespace, out: Path) -> None:
    """Make the data from this Python's sources and compress it."""
    with tempfile.TemporaryDirectory() as made:
        for name, words in (("text", ()), ("gpt2", loss_data())):
            place = str(Path(made) / name)
            script = str(ROOT / "scripts/examples/prepare_data.py")
            _call(sys.executable, script, *words, "--output", place)
        for path in sorted(Path(made).iterdir()):
            with path.open("rb") as read, gzip.open(out / f"{path.name}.gz", "wb") as write:
                shutil.copyfileobj(read, write)


def _call(*words: str, env: dict[str, str] | None = None) -> None:
    """Run a command. Raises PrepareError with the last lines of its output."""
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}, cwd=ROOT,
        )  # fmt: skip
    except OSError as error:
        raise PrepareError(f"{words[0]}: {error.strerror}") from error
    if done.returncode:
        said = " ".join(" ".join(done.stdout.splitlines()[-TOLD:]).split())
        raise PrepareError(f"{Path(words[0]).name} {words[1]}: {said or 'failed'}")


#: folder name -> function that fills it; first what may miss a package here
PARTS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "data": data, "wheels": wheels, "native": native, "kernels": kernels,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
