"""Data that the trainings of the benchmarks' tests read."""

from __future__ import annotations

from pathlib import Path

import prepare_data
import pytest


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of a small dataset."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    words = ["--output", str(prefix), "--max-bytes", "60000", "--valid-fraction", "0.2"]
    assert prepare_data.main(words) == 0
    return prefix
