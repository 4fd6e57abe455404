"""The end of a process: a failing close does not keep others open, and is reported."""

from __future__ import annotations

from typing import Any

import pytest

from hybridcomp.channels.accounting.time_saved import TimeSaved
from hybridcomp.session import closing
from hybridcomp.session.followers import Followers


class Closed:
    """Something closed at the end; fails if ``error`` is set."""

    def __init__(self, order: list[Any], error: Exception | None = None) -> None:
        self.order, self.error = order, error

    def close(self) -> None:
        self.order.append(self)
        if self.error is not None:
            raise self.error


def test_one_that_fails_to_close_keeps_no_other_open(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "_open", opened := [])
    monkeypatch.setattr(closing, "_accounts", [closing.Account(TimeSaved())])
    order: list[Closed] = []
    opened += [Closed(order), Closed(order, OSError("a full disk")), Closed(order)]
    with pytest.raises(OSError, match="a full disk"):
        closing._end()
    assert set(order) == set(opened)
    assert "this run compressed nothing" in capsys.readouterr().out


def test_a_follower_that_fails_to_close_keeps_no_other_open() -> None:
    order: list[Closed] = []
    made: list[Any] = [Closed(order), Closed(order, OSError("a full disk")), Closed(order)]
    followers = Followers(made)
    with pytest.raises(OSError, match="a full disk"):
        followers.close()
    assert order == made[::-1] and not followers
    followers.close()
    assert len(order) == 3
