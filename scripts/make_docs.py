#!/usr/bin/env python3
"""Generate the parts of docs/ that come from the code, or build the site.

make_docs.py                    write docs/block.md, the tables inside other pages, and the releases
                                that they name
make_docs.py --check            list stale pages; the exit status is then 1
make_docs.py --build FOLDER     build the site there, strictly (pip install -e '.[docs]');
                                --repository URL: its pages link to where they are edited
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hybridcomp
from doc_pages import bits, block, chooser, inside, jobs, link, parts, releases, speeds

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CONFIG = DOCS / "mkdocs" / "mkdocs.yml"
#: generated files below docs/
PAGES: Mapping[str, Callable[[], str]] = {
    "block.md": block.page,
    "site/blocks.js": chooser.script,
}
#: page, name of the part between `<!-- NAME -->` and `<!-- /NAME -->`, its generator
PARTS: Sequence[tuple[str, str, Callable[[], str]]] = (
    ("../README.md", "bits", bits.table),
    ("../README.md", "speeds", speeds.table),
    ("index.md", "jobs", jobs.table),
    ("coming_from.md", "zero3", bits.zero3),
    ("link.md", "link", link.table),
    ("coming_from.md", "fsdp2", bits.fsdp2),
    ("choosing.md", "presets", parts.presets),
    ("contributing/dimension.md", "dimensions", parts.dimensions),
    ("support.md", "support-matrix", parts.support_matrix),
    ("unsupported.md", "deepspeed-rules", parts.deepspeed_rules),
    ("unsupported.md", "megatron-rules", parts.megatron_rules),
    ("api.md", "api", inside.api),
    ("api.md", "errors", inside.error_classes),
    ("wire_formats.md", "formats", inside.formats),
)


def made() -> dict[Path, str]:
    """Return the text of every generated page. Raises ValueError if a marker is missing."""
    pages = {(DOCS / name).resolve(): make() for name, make in PAGES.items()}
    for name, mark, make in PARTS:
        path = (DOCS / name).resolve()
        text = pages.get(path) or path.read_text("utf-8")
        pages[path] = _with_part(text, mark, make(), name)
    for name in releases.PAGES:
        path = (DOCS / name).resolve()
        text = pages.get(path) or path.read_text("utf-8")
        pages[path] = releases.current(name, text)
    return pages


def _with_part(text: str, mark: str, part: str, name: str) -> str:
    """Return ``text`` with ``part`` between the markers."""
    pattern = re.compile(f"(<!-- {mark}[^>]*-->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"docs/{name}: expected <!-- {mark} --> and <!-- /{mark} -->")
    return pattern.sub(lambda match: f"{match[1]}\n{part}\n\n{match[2]}", text, count=1)


def stale() -> list[Path]:
    """Return the pages that differ from their generated text."""
    return [
        path for path, text in made().items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]  # fmt: skip


def build(folder: Path, repository: str = "") -> int:
    """Build the site into ``folder``; returns the exit status of mkdocs.

    ``repository``: URL, which makes each page link to its source file.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(CONFIG)]
    # silences the theme's notice on every build about its end of support
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
        "SITE_NAME": f"hybridcomp {hybridcomp.__version__}",
        "SITE_REPOSITORY": repository,
        "SITE_EDIT": "edit/main/docs/" if repository else "",
    }
    result = subprocess.run([*command, "-d", str(folder.resolve())], env=environment, check=False)
    return result.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, check or build; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="of the site")
    parser.add_argument("--repository", default="", metavar="URL", help="whose files are edited")
    options = parser.parse_args(arguments)
    if options.build:
        return build(options.build, options.repository)
    for path in (old := stale()):
        print(f"{path.relative_to(ROOT)}: {'not current' if options.check else 'written'}")
        if not options.check:
            path.write_text(made()[path], encoding="utf-8")
    return int(bool(old) and options.check)


if __name__ == "__main__":
    sys.exit(main())
