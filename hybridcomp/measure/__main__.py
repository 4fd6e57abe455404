"""Run ``python -m hybridcomp.measure``, which a launcher starts on every rank."""

from __future__ import annotations

from hybridcomp.measure.command import main

if __name__ == "__main__":
    raise SystemExit(main())
