"""An error bound in a real training: bounded errors, fewer bytes, the same loss."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.ranks import RunRanks
from tests.selection import by_day

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training.trainer import Job, Outcome, final_loss, train

BOUND = 1e-2
BLOCK: dict[str, Any] = {
    "dp": {"error_bound": BOUND, "error_feedback": True},
    "min_bytes": 0,
    "ledger": {"sample_every": 1},
}


def both(job: Job) -> tuple[Outcome, Outcome, dict[str, Any]]:
    """Run the job without and with its block; return both, and the ledger's row of dp."""
    from hybridcomp.channels import channels_of

    rows: list[dict[str, Any]] = []

    def look(engine: Any, step: int) -> None:
        channels = channels_of(engine)
        assert channels is not None
        rows.append(channels.ledger.rows(channels.ledger.interval)["dp"]["forward"])

    bounded = train(job, look)
    plain = train(Job(job.stage, job.dtype, job.bf16_optimizer, steps=job.steps))
    return plain, bounded, rows[-1]


KINDS = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (0, "bf16")]


@pytest.mark.parametrize(("stage", "dtype"), by_day(KINDS, [(1, "bf16")]))
def test_bounded_gradients_train(module_ranks: RunRanks, stage: int, dtype: str) -> None:
    job = Job(stage, dtype, steps=25, block=BLOCK)
    outcomes = module_ranks(2, both, job)
    plain, bounded = ([o[i] for o in outcomes] for i in (0, 1))
    assert bounded[0].digests == bounded[1].digests
    assert final_loss(bounded) == pytest.approx(final_loss(plain), rel=0.03)
    for *_, row in outcomes:
        assert row["codec"].startswith("radix(error_bound=0.0")
        assert row["native_messages"] == 0 and row["ratio"] > 1.5
        assert row["outside_bound"] == 0
        # error of norms: most values are a few times smaller than their segment's largest
        assert 0 < row["error"] < 5 * BOUND
