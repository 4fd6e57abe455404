"""List and copy the example configurations of the package: ``hybridcomp configs``."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from hybridcomp.errors import ConfigError

#: folder of the examples: next to the package's modules, in a checkout and in site-packages
FOLDER = Path(__file__).resolve().parents[2] / "configs"
#: suffixes of configurations; the README that describes them is in that folder too
SUFFIXES = (".json", ".yml")
#: a row of the README's tables: a file of this folder, and its purpose
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)

DESCRIPTION = """\
List the example configurations that come with hybridcomp, or copy some of them:

    hybridcomp configs                                  what there is, and what each is for
    hybridcomp configs ds_zero1_recommended --to .      copies ds_zero1_recommended.json
    hybridcomp configs neox/20B.yml --to configs/       copies 20B.yml, for GPT-NeoX
"""


def names() -> list[str]:
    """List every configuration, relative to ``FOLDER``: in the README's order, GPT-NeoX's last."""
    files = [file for file in FOLDER.rglob("*") if file.suffix in SUFFIXES]
    listed = [str(file.relative_to(FOLDER)) for file in files]
    order = {name: row for row, name in enumerate(purposes())}
    return sorted(listed, key=lambda name: ("/" in name, order.get(name, len(order)), name))


def purposes() -> dict[str, str]:
    """Read the purpose of each configuration, by name, from the README in ``FOLDER``."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    return {name: purpose.replace("`", "") for name, purpose in ROW.findall(page)}


def find(name: str) -> Path:
    """Return the file of a configuration; ``name`` with or without suffix.

    Raises:
        ConfigError: There is no such configuration.
    """
    for listed in names():
        if name in (listed, str(Path(listed).with_suffix(""))):
            return FOLDER / listed
    near = difflib.get_close_matches(Path(name).stem, [Path(listed).stem for listed in names()], 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError("NAME", name, f"`hybridcomp configs` lists the examples{meant}")


def copy(chosen: Sequence[str], folder: Path) -> list[Path]:
    """Copy the configurations of these names into ``folder``, which is created if missing.

    Raises:
        ConfigError: There is no such configuration, or the folder has another file of its name;
            then nothing was copied.
    """
    found = [find(name) for name in chosen]
    for file in found:
        target = folder / file.name
        if target.exists() and target.read_bytes() != file.read_bytes():
            raise ConfigError("--to", str(target), "another file of that name is there; move it")
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(file, folder / file.name)) for file in found]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``configs`` to the commands of the command line."""
    parser = commands.add_parser(
        "configs",
        help="list the example configurations, or copy some",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to copy")
    parser.add_argument("--to", type=Path, default=Path(), metavar="FOLDER", help="where to")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run ``hybridcomp configs``; returns the exit status."""
    if options.names:
        for file in copy(options.names, options.to):
            print(file)
    else:
        listed, purpose = names(), purposes()
        width = max(map(len, listed))
        for name in listed:
            print(f"{name:{width}}  {purpose.get(name, '')}".rstrip())
    return 0
