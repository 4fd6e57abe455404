"""The way of a gradient bucket of ZeRO 1 is the one that ``docs/architecture.md`` lists."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.paths import ROOT
from tests.ranks import run_ranks

PAGE = ROOT / "docs" / "architecture.md"
MOST = 15
#: with several buckets a step, some of which go directly and some by the balanced plan
BLOCK = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, "min_bytes": 0}


class Way:
    """The files of hybridcomp whose functions are entered, in the order in which they are met."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename).resolve()
            if path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] in (
                "hybridcomp",
                "patches",
            ):
                self.files.setdefault(str(path.relative_to(ROOT)))

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, seen from its call to its return."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            sys.setprofile(self._enter)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(None)

        return call


def _walked() -> list[str]:
    """What the buckets of the third step of a training pass on this rank: nothing is new to it."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from tests.training.trainer import Job, make_engine, train_step

    job = Job(stage=1, block=BLOCK)
    engine, way = make_engine(job), Way()
    for step in range(3):
        if step == 2:
            patched = DeepSpeedZeroOptimizer.allreduce_and_scatter
            DeepSpeedZeroOptimizer.allreduce_and_scatter = way.watched(patched)
        train_step(engine, job, step)
    DeepSpeedZeroOptimizer.allreduce_and_scatter = patched
    engine.destroy()
    return list(way.files)


def documented() -> list[str]:
    """The files between the page's markers, in order."""
    section = PAGE.read_text().split("<!-- bucket-way -->")[1].split("<!-- /bucket-way -->")[0]
    return re.findall(r"(?m)^\d+\. `([\w/.]+\.py)`", section)


def test_a_bucket_takes_the_way_that_the_page_lists() -> None:
    walked = run_ranks(2, _walked)
    assert walked[1] == documented(), "rank 1 owns nothing of the first bucket, so it encodes first"
    assert sorted(walked[0]) == sorted(walked[1]), "ranks take the same way"
    assert len(walked[1]) <= MOST
