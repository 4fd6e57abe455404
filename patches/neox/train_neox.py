"""Train GPT-NeoX with hybridcomp; nothing of the GPT-NeoX checkout is changed.

From anywhere; the configurations are read before anything starts:

    GPT_NEOX_HOME=/path/to/gpt-neox python -m hybridcomp.patches.neox CONFIG.yml [CONFIG.yml ...]

or in the checkout with GPT-NeoX's own launcher, this file standing for its train.py:

    ./deepy.py $(python -m hybridcomp.patches.neox --path) CONFIG.yml [CONFIG.yml ...]

The block stands in the configuration under "deepspeed_extra_args": {"compression": {...}}, or in
the file that HYBRIDCOMP_CONFIG names. The checkout is GPT_NEOX_HOME, else the current folder.
HYBRIDCOMP_NEOX_CPU=1 runs on CPUs, for trying out (configs/neox/tiny_cpu.yml).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

FILE = Path(__file__).resolve()
NAME = FILE.name
#: environment variables that the launcher also exports to other machines
HANDED_ON = ("GPT_NEOX_HOME", "HYBRIDCOMP_CONFIG", "HYBRIDCOMP_NEOX_CPU")

#: modules whose package has another name
PACKAGES = {"pkg_resources": "setuptools<81", "yaml": "pyyaml"}


def fail(message: str) -> NoReturn:
    """Print one line to stderr and exit with code 2."""
    print(f"{NAME}: {message}", file=sys.stderr)
    raise SystemExit(2)


def find_checkout() -> Path:
    """Return the GPT-NeoX checkout: GPT_NEOX_HOME, else the current folder."""
    named = os.environ.get("GPT_NEOX_HOME")
    folder = Path(named) if named else Path.cwd()
    for needed in ("train.py", "deepy.py", "megatron/neox_arguments"):
        if not (folder / needed).exists():
            where = "GPT_NEOX_HOME" if named else "the current folder"
            fail(
                f"{where} is {folder}, which is no GPT-NeoX checkout (no {needed}); start in the "
                "checkout or set GPT_NEOX_HOME to it"
            )
    return folder.resolve()


def prepare(checkout: Path) -> None:
    """Make the checkout importable; on a CPU install stand-ins for CUDA."""
    sys.path.insert(0, str(checkout))
    try:
        importlib.import_module("hybridcomp")
    except ImportError as error:
        fail(f"{error}; install hybridcomp for {sys.executable}")
    if on_cpu():
        from hybridcomp.patches.neox import cpu_shim

        cpu_shim.install()


def on_cpu() -> bool:
    """Return whether this run is a trial on CPUs."""
    return os.environ.get("HYBRIDCOMP_NEOX_CPU", "0") not in ("", "0")


def work(checkout: Path) -> None:
    """Run one rank: GPT-NeoX's train.py, with the arguments of the launcher."""
    import hybridcomp
    from hybridcomp.job import error_exit

    hybridcomp.install()  # before anything of the checkout is imported
    if on_cpu():
        from hybridcomp.patches.neox import cpu_shim

        cpu_shim.patch()
    with told_what_is_missing(checkout, error_exit.tell):  # on one of the ranks
        runpy.run_path(str(checkout / "train.py"), run_name="__main__")


def launch(checkout: Path, arguments: Sequence[str]) -> None:
    """Run GPT-NeoX's deepy.py, with this file as the script that it launches."""
    from deepspeed.launcher import runner

    from hybridcomp.patches.neox.configuration import Problem, check, find_files

    try:
        check(find_files(arguments))
    except Problem as problem:
        fail(str(problem))
    runner.EXPORT_ENVS.extend(name for name in HANDED_ON if name in os.environ)
    if importlib.util.find_spec("pybind11") is None:  # ranks build C++ with it
        fail(needs("pybind11", checkout))
    sys.argv = [str(checkout / "deepy.py"), str(FILE), *arguments]
    with told_what_is_missing(checkout, lambda text: print(text, file=sys.stderr)):
        runpy.run_path(sys.argv[0], run_name="__main__")


@contextlib.contextmanager
def told_what_is_missing(checkout: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Exit with code 2 where a file of the checkout imports a package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        # leave out frames of the import machinery
        own = [file for file in files if not file.startswith("<frozen ")]
        missing = (error.name or "").partition(".")[0]
        if not missing or checkout not in Path(own[-1]).parents or is_of(missing, checkout):
            raise
        tell(f"{NAME}: {needs(missing, checkout)}")
        raise SystemExit(2) from None


def is_of(module: str, checkout: Path) -> bool:
    """Return whether ``module`` is part of the checkout, not a package to install."""
    return (checkout / module).exists() or (checkout / f"{module}.py").exists()


def needs(module: str, checkout: Path) -> str:
    """Return a sentence: what to install for ``module``, and which requirements file lists it."""
    package = PACKAGES.get(module, module)
    name = re.split("[<>=]", package)[0].replace("_", "-")
    listed = [
        f"requirements/{file.name}"
        for file in sorted((checkout / "requirements").glob("*.txt"))
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if re.split(r"[\s<>=@\[;~!]", line.strip())[0].lower().replace("_", "-") == name.lower()
    ]
    where = f"its {listed[0]}" if listed else "none of its requirements/ names it"
    return f"GPT-NeoX needs {module}: pip install {shlex.quote(package)} ({where})"


def main(arguments: Sequence[str]) -> None:
    """Run as worker or launcher: only the launcher passes ``--megatron_config``."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--path":
        print(FILE)
        return
    checkout = find_checkout()
    prepare(checkout)
    if any(argument.startswith("--megatron_config") for argument in arguments):
        work(checkout)
    else:
        launch(checkout, arguments)


if __name__ == "__main__":
    # Python would import modules from the folder of a script first
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != FILE.parent]
    main(sys.argv[1:])
