"""Islands that are killed, stopped and paused: the short form of ``scripts/chaos_islands.py``."""

from __future__ import annotations

import pytest

import chaos_islands

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_struck_islands_lose_nothing_of_others() -> None:
    assert chaos_islands.main(["--strikes", "8", "--calm", "0", "--seed", "5"]) == 0
