"""Locations of the repository's folders, for tests."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
SCRIPTS = ROOT / "scripts"
EXAMPLES = SCRIPTS / "examples"
