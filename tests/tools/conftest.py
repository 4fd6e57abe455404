"""A command of hybridcomp on a file that the test writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.tools.commands import cli


@pytest.fixture
def said_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command on a file, and returns its output, or its error.

    The file holds ``content``, as JSON unless it is a text.
    """

    def run(
        name: str, content: Any, *words: str, status: int = 0, file: str = "ds_config.json"
    ) -> str:
        path = tmp_path / file
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        assert cli.main([name, str(path), *words]) == status
        shown = capsys.readouterr()
        return shown.err if status else shown.out

    return run
