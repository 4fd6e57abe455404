#!/usr/bin/env python3
"""Run a script at its new place; the scripts of the version before that moved are links to this.

``scripts/bench_codecs.py`` is ``scripts/bench/bench_codecs.py`` now. The old command line says so,
and does what it did.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent


def main() -> None:
    """Become the script of this name in one of the folders below."""
    name = Path(__file__).name
    found = sorted(HERE.glob(f"*/{name}"))
    if len(found) != 1:
        sys.exit(f"usage: scripts/{name} is called by the name of a script that has moved")
    print(f"scripts/{name} has moved: scripts/{found[0].relative_to(HERE)}", file=sys.stderr)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, str(found[0]), *sys.argv[1:]])


if __name__ == "__main__":
    main()
