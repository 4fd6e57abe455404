"""Run an unmodified training script with the patches armed.

``deepspeed --module hybridcomp.run train.py --deepspeed_config ds_config.json ...``

The launcher puts ``--local_rank=N`` before the script's name (0.19 does so with --module); it is
passed to the script before the script's arguments, where `deepspeed train.py` puts it.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from typing import NoReturn

import hybridcomp
from hybridcomp.job import agreement
from hybridcomp.job.environment import RECORD
from hybridcomp.log import say

USAGE = (
    "usage: deepspeed --module hybridcomp.run SCRIPT [ARGUMENT ...]\n"
    "       torchrun -m hybridcomp.run SCRIPT [ARGUMENT ...]\n"
    "python and accelerate launch as torchrun; -m MODULE in the place of SCRIPT runs a module\n"
)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into the launcher's arguments, and the script's name with the rest."""
    for position, argument in enumerate(arguments):
        if not argument.startswith("--local_rank"):
            return list(arguments[:position]), list(arguments[position:])
    return list(arguments), []


def main(arguments: Sequence[str] | None = None) -> None:
    """Arm the patches, then run the script in this process."""
    launcher, rest = split(sys.argv[1:] if arguments is None else arguments)
    module = bool(rest) and rest[0] == "-m"
    if module:
        rest = rest[1:]
    if not rest or rest[0] in ("-h", "--help"):
        _end(USAGE, 0 if rest else 2)
    script = rest[0]
    if not module and (problem := _not_a_script(script)):
        _end(f"hybridcomp.run: {problem}\n{USAGE}", 2)
    hybridcomp.install()
    _run(script, module, [script, *launcher, *rest[1:]])
    _say_if_idle()


def _run(script: str, module: bool, words: list[str]) -> None:
    sys.argv = words
    if module:
        sys.path.insert(0, os.getcwd())
        if problem := _not_a_module(script):
            _end(f"hybridcomp.run: {problem}\n{USAGE}", 2)
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        # as with `python script.py`, the script's folder comes first on the path
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")


def _not_a_script(path: str) -> str | None:
    """Return why Python cannot run the file; None if it can, or shows a mistake in it itself."""
    if os.path.isdir(path):
        return f"{path} is a folder; name a script in it"
    if not os.path.isfile(path):
        return f"no such script: {path}"
    if path.endswith(".json"):  # Python runs JSON without true, false and null
        return f"{path} is no Python script"
    try:
        with open(path, "rb") as file:
            code = file.read()
        if not path.endswith((".py", ".pyc")) and not zipfile.is_zipfile(path):
            compile(code, path, "exec")
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except (SyntaxError, ValueError):
        return f"{path} is no Python script"
    return None


def _not_a_module(name: str) -> str | None:
    """Return why ``python -m name`` would not start, None if it would; imports parent packages."""
    if name.endswith(".py"):
        return f"-m {name}: expected a module, {name.removesuffix('.py')}; or leave -m out"
    try:
        found = None if name[:1] in ("", ".") else importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            name = f"{name}.__main__"
            found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the module needs
        found = None
    return None if found is not None else f"no module {name} is found from {os.getcwd()}"


def _say_if_idle() -> None:
    """Tell the user if hybridcomp met no supported engine, or no engine that it could record."""
    file, record = os.environ.get(RECORD), sys.modules.get("hybridcomp.patches.ds.record")
    if file and (record is None or not record.has_recorded()):
        say(
            f"WARNING: {RECORD}: nothing is written into {file}: this script trained no DeepSpeed "
            "engine"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1" and not agreement.has_compared():
        say(
            "nothing was compressed: this script trained nothing under DeepSpeed, megatron-core, "
            "fully_shard or DistributedDataParallel"
        )


def _end(text: str, status: int) -> NoReturn:
    """End this rank; the node's first rank prints why, since all ranks have the same arguments."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, end="", file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
