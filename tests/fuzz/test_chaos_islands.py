"""Killed, stopped and paused islands: the short version of ``scripts/chaos_islands.py``."""

from __future__ import annotations

import pytest

import chaos_islands

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("preset", ["diloco", "streaming", "wsp"])
def test_struck_islands_lose_nothing_of_others(preset: str) -> None:
    args = ["--strikes", "8", "--calm", "0", "--seed", "5", "--preset", preset]
    assert chaos_islands.main(args) == 0


def test_four_islands_are_three_and_four_again() -> None:
    """Losses, including the returning island's, equal those of undisturbed runs."""
    assert chaos_islands.main(["--strikes", "1", "--kinds", "away", "--calm", "3"]) == 0
