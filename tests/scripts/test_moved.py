"""Command lines of the version before: a script that has moved still runs, and says where it is."""

from __future__ import annotations

import subprocess
import sys

from tests.paths import ROOT

SCRIPTS = ROOT / "scripts"
MOVED = sorted(path.name for path in SCRIPTS.iterdir() if path.is_symlink())


def test_every_old_name_leads_to_one_script() -> None:
    assert "bench_codecs.py" in MOVED and "loss_study.py" in MOVED
    for name in MOVED:
        assert str((SCRIPTS / name).readlink()) == "moved.py"
        (found,) = SCRIPTS.glob(f"*/{name}")
        assert "__main__" in found.read_text()
        assert f"`{name}`" in (SCRIPTS / "README.md").read_text()


def test_the_old_command_line_says_so_and_acts() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/project_scale.py", "--no-such-option"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    first, *rest = done.stderr.splitlines()
    assert first == "scripts/project_scale.py has moved: scripts/studies/project_scale.py"
    assert done.returncode == 2 and rest[0].startswith("usage: project_scale.py")


def test_the_link_itself_is_no_script() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/moved.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "a script that has moved" in done.stderr
