#!/usr/bin/env python3
"""GPT-NeoX with hybridcomp, under the path that it had before it came with the package.

What it does is ``hybridcomp/neox/train_neox.py``: ``python -m hybridcomp.neox CONFIG.yml ...``, and
``./deepy.py $(python -m hybridcomp.neox --path) CONFIG.yml ...`` with GPT-NeoX's own launcher.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Say once where it is now, then do as before."""
    if os.environ.get("RANK", "0") == "0":
        print(
            "train_neox.py: this is part of hybridcomp now: python -m hybridcomp.neox, or "
            "deepy.py $(python -m hybridcomp.neox --path); this file goes on working",
            file=sys.stderr,
        )
    try:
        from hybridcomp.neox import train_neox
    except ImportError as error:
        print(f"train_neox.py: {error}; install hybridcomp for {sys.executable}", file=sys.stderr)
        raise SystemExit(2) from None
    train_neox.main(sys.argv[1:])


if __name__ == "__main__":
    main()
