"""``when: auto`` under torch's engines: each dimension is timed on its own links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import hybridcomp
from hybridcomp.channels.online_tuner import OnlineTuner
from tests.docs.pages import DOCS, fences
from tests.patches.torch.trainer import Job, build, optimizer_of, outcome, train
from tests.ranks import RunRanks
from tests.stand_ins.link_clock import clock

AUTO: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True, "when": "auto"},
    "min_bytes": 0,
    "ledger": {"every": 1_000_000},
}
BOTH = {**AUTO, "zero": {"codec": "blockint", "bits": 8, "when": "auto"}}
STEPS = 4


def trained(job: Job, native_s: float, coded_s: float) -> tuple[Any, list[Any]]:
    """Return the end of a run on such a link, and its trials: dimensions, rank distance, dtype."""
    seen: list[Any] = []
    weigh = OnlineTuner.run_autotune

    def noted(self: OnlineTuner, group: Any, dtype: Any, *rest: Any, **more: Any) -> list[str]:
        ranks = dist.get_process_group_ranks(group)
        seen.append((tuple(more["only"]), ranks[1] - ranks[0], str(dtype)))
        return weigh(self, group, dtype, *rest, **more)

    model, attached = build(job), None
    with clock(native_s, coded_s), patch.object(OnlineTuner, "run_autotune", noted):
        if job.block is not None:
            attached = hybridcomp.attach(model, job.block)
        losses = train(job, model, optimizer_of(job, model), 0, STEPS)
    return outcome(losses, model, attached), seen


@pytest.mark.parametrize("job", [Job(block=BOTH), Job(engine="ddp", block=AUTO)], ids=str)
def test_a_fast_link_is_native_and_a_slow_one_is_not(module_ranks: RunRanks, job: Job) -> None:
    """A native decision gives native bits."""
    native = module_ranks(2, trained, Job(engine=job.engine), 1.0, 1.0)
    fast = module_ranks(2, trained, job, 0.01, 0.02)
    slow = module_ranks(2, trained, job, 0.09, 0.01)
    for (plain, _), (one, _), (other, _) in zip(native, fast, slow, strict=True):
        assert (one.losses, one.parameters) == (plain.losses, plain.parameters)
        assert all(count == exact for count, exact, *_ in one.ledger.values())
        assert other.losses != plain.losses
        assert all(exact == 0 for _, exact, *_ in other.ledger.values())


def test_replicas_and_shards_are_timed_on_links_of_their_own(module_ranks: RunRanks) -> None:
    job = Job(block=BOTH, replicas=2, bf16=True, reduce_dtype="float32")
    for _, seen in module_ranks(4, trained, job, 0.09, 0.01):
        # ranks 0, 1 and 2, 3 shard; 0, 2 and 1, 3 replicate
        assert seen == [(("zero",), 1, "torch.bfloat16"), (("dp",), 2, "torch.float32")]


def by_the_page(block: Any, engine: Any) -> tuple[int, bool]:
    job = Job(engine=engine)
    model = build(job)
    attached = hybridcomp.attach(model, block)
    assert attached is not None
    train(job, model, optimizer_of(job, model), 0, 2)
    found = attached.step, attached.channels["dp"].active
    attached.detach()
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_first_block_of_the_page_is_taken_by_both_engines(
    module_ranks: RunRanks, engine: str, tmp_path: Path
) -> None:
    page = DOCS / "engines" / "fsdp2_ddp.md"
    block = json.loads(next(fence.body for fence in fences("json") if fence.page == page))
    block["ledger"]["jsonl"] = str(tmp_path / block["ledger"]["jsonl"])
    assert module_ranks(2, by_the_page, block, engine) == [(2, True)] * 2
