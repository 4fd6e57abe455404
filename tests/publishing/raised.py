"""Raise an error at the n-th call within some work, whichever function it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: modules whose calls are counted, and the functions they call
OURS = ("hybridcomp/publishing", "hybridcomp/inference")


def raised_at(number: int, error: type[BaseException], work: Callable[[], Any]) -> bool:
    """Do ``work`` with ``error`` raised at call ``number``; return whether it was raised."""
    count = 0

    def counts(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event not in ("call", "c_call"):
            return
        if not any(one in frame.f_code.co_filename for one in OURS):
            return
        count += 1
        if count == number:
            sys.setprofile(None)
            raise error("injected")

    sys.setprofile(counts)
    try:
        work()
    except error as found:
        if "injected" not in str(found):
            raise
    finally:
        sys.setprofile(None)
    return count >= number
