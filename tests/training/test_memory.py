"""A job's predicted memory before the first step equals its tensors after the third."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from hybridcomp.channels.messages.delta_references import reference_of
from tests.patches.torch import trainer as torch_trainer
from tests.ranks import run_ranks

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training import trainer

QUIET: dict[str, Any] = {"min_bytes": 0, "ledger": {"every": 1_000_000}}
FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True}
EIGHT = {"codec": "blockint", "bits": 8}
#: bytes predicted and allocated: residuals, delta references, islands' state and messages
Figures = tuple[tuple[int, int], ...]


def block(bits: int = 32, delta: bool = False) -> dict[str, Any]:
    gradients = {**FEEDBACK, "error_feedback": {"bits": bits}}
    return {"dp": gradients, "zero": {**EIGHT, "delta": delta}, **QUIET}


def islands(**settings: Any) -> trainer.Job:
    return trainer.Job(1, block={"sync": {"islands": 1, **settings}, **QUIET})


JOBS = {
    "zero0": trainer.Job(0, block={"dp": FEEDBACK, **QUIET}),
    "zero1": trainer.Job(1, "bf16", block=block(delta=True)),
    "zero2-8": trainer.Job(2, block=block(8, delta=True)),
    "zero3-8": trainer.Job(3, block=block(8)),
    "bf16-optimizer": trainer.Job(1, "bf16", bf16_optimizer=True, block=block(16, delta=True)),
    # last: DeepSpeed keeps the islands' groups for later engines
    "islands": islands(every=2),
    "islands, late": islands(every=2, fragments=2, delay=1),
    "islands, ahead": islands(preset="wsp", every=1, **FEEDBACK),
}
TORCH = {
    "ddp": torch_trainer.Job("ddp", {"dp": FEEDBACK, **QUIET}),
    "fsdp2": torch_trainer.Job("fsdp2", block()),
    "fsdp2-4": torch_trainer.Job("fsdp2", block(4)),
}


def figures(session: Any, buffers: list[Any]) -> Figures:
    """Return predicted and actual bytes of ``session``."""
    items = {item.name: item.nbytes for item in session.memory}
    told = sum(n for name, n in items.items() if name.startswith("residuals"))
    held = [found.own.nbytes for one in buffers if (found := reference_of(one)) is not None]
    followers = session.followers.stateful
    fragments = [part.fragment for one in followers for part in one.parts]
    late = [sent for one in fragments for sent in one.under_way]
    state = [t for one in fragments for t in (one.start, one.momentum, one.residual, one.base)]
    state += [sent.kept for sent in late]
    messages = [meeting.rows for one in followers for meeting in one.under_way]
    messages += [sent.message for sent in late]
    messages += [sent.moved for sent in late if sent.moved is not sent.message]
    return (
        (told, session.channels.residuals.nbytes),
        (items.get("references of deltas", 0), sum(held)),
        (items.get("state of islands", 0), sum(t.nbytes for t in state if t is not None)),
        (
            items.get("messages of islands", 0) if late else 0,
            sum(t.nbytes for t in messages if t is not None),
        ),
    )


def trained() -> dict[str, Figures]:
    """Train each job for three steps."""
    import hybridcomp
    from hybridcomp.patches.ds.checkpoint.exact_weights import flat_groups
    from hybridcomp.session.engine_session import session_of

    found: dict[str, Figures] = {}
    for name, job in JOBS.items():
        engine = trainer.make_engine(job)
        for step in range(3):
            trainer.train_step(engine, job, step)
        stage3 = engine.zero_optimization_stage() == 3
        buffers = [] if stage3 else [flat for flat, *_ in flat_groups(engine.optimizer)]
        found[name] = figures(session_of(engine), buffers)
    hybridcomp.uninstall()
    for name, one in TORCH.items():
        model = torch_trainer.build(one)
        attached = hybridcomp.attach(model, one.block)
        assert attached is not None
        torch_trainer.train(one, model, torch_trainer.optimizer_of(one, model), 0, 3)
        found[name] = figures(attached.session, [])
        torch_trainer.forget()
    return found


def test_memory_is_told_before_it_is_taken() -> None:
    for rank in run_ranks(2, trained):
        for name, every in rank.items():
            for told, held in every:
                assert told == pytest.approx(held, rel=0.03), name
        assert all(rank[name][0][1] for name in rank if "islands" not in name)
        assert all(rank[name][1][1] for name in ("zero1", "zero2-8", "bf16-optimizer"))
        assert all(rank[name][2][1] for name in rank if "islands" in name)
        assert all(rank[name][3][1] for name in ("islands, late", "islands, ahead"))
