"""Run jobs of the example one after the other on forked ranks, and return their results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.paths import SCRIPTS
from tests.ranks import Trained
from tests.training.pipe_trainer import start_deepspeed


def in_turn(jobs: Sequence[Any], train: Callable[[Any], Any]) -> list[Any]:
    """Return the result of ``train`` for every job, patched; hybridcomp's errors as text."""
    import hybridcomp
    from hybridcomp.errors import HybridcompError
    from hybridcomp.session import process

    start_deepspeed()
    sys.path.insert(0, str(SCRIPTS))
    hybridcomp.install()
    outcomes: list[Any] = []
    for job in jobs:
        try:
            outcomes.append(train(job))
        except HybridcompError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        finally:
            process.configure(None)
    return outcomes


def first(outcomes: Trained, name: str) -> Any:
    """Return rank 0's result of a successful job; all ranks have the same losses."""
    for outcome in outcomes[name]:
        assert not isinstance(outcome, str), outcome
        assert outcome.losses == outcomes[name][0].losses
    return outcomes[name][0]
