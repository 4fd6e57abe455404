"""Where the repository's folders are, for tests that read or start what lies in them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
SCRIPTS = ROOT / "scripts"
EXAMPLES = SCRIPTS / "examples"
