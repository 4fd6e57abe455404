"""Run ``python -m hybridcomp.tools.measure``, which a launcher starts on every rank."""

from __future__ import annotations

from hybridcomp.tools.measure.command import main

if __name__ == "__main__":
    raise SystemExit(main())
