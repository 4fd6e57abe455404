"""Frozen parameters stay as they are, send nothing and train again, under every engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.channels import channels_of
from hybridcomp.codecs.words import DTYPES
from hybridcomp.elastic.freezing import asked, chosen, nearest, target
from hybridcomp.patches.ds.freezing import EngineLayers
from tests.elastic.jobs import (
    FEEDBACK,
    WIDTH,
    Layer,
    ds_config,
    engine_of,
    loss_of,
    mean,
    pipeline_of,
    save_torch,
)
from tests.elastic.jobs import target as wanted
from tests.patches.torch.trainer import forget
from tests.ranks import Trained, run_ranks
from tests.selection import by_day
from tests.training.in_turn import start_deepspeed

pytest.importorskip("deepspeed")

LAYERS, CLIP, FRONT = 4, 0.05, ("0", "1")
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
#: what happens in front of a step
FREEZE: dict[int, tuple[str, Any]] = {3: ("freeze", "0"), 5: ("freeze", ["1.up", "1.down"])}
THAW = {**FREEZE, 8: ("thaw", "1"), 10: ("thaw", None)}


@dataclass(frozen=True)
class Case:
    """An engine, "ddp", "fsdp2" or "zero0" to "zero3", and what is set for it."""

    engine: str
    lossy: bool = False
    dtype: str = "fp32"
    offload: bool = False
    native: bool = False
    block: tuple[tuple[str, Any], ...] = ()
    plan: str = "freeze"

    def __str__(self) -> str:
        parts = [self.engine, self.dtype, "4bits" if self.lossy else "none", self.plan]
        parts += ["offload"] * self.offload + ["native"] * self.native
        return "-".join([*parts, *(name for name, _ in self.block)])

    @property
    def is_torch(self) -> bool:
        return self.engine in ("ddp", "fsdp2")

    @property
    def compression(self) -> dict[str, Any] | None:
        dp = FEEDBACK if self.lossy else "none"
        shared = {"dp": dp, "min_bytes": 0, "hierarchy": "none", "ledger": {"every": 10**6}}
        return None if self.native else {**shared, **dict(self.block)}


@dataclass
class Seen:
    """One rank's figures of a training.

    Attributes:
        moved: largest change of a weight while it was frozen; and afterwards, when it trains again.
        sent: by step and dimension, the bytes that native would have sent.
        residuals: by step, the bytes of residuals.
    """

    losses: list[float] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)
    thawed: dict[str, float] = field(default_factory=dict)
    sent: list[dict[str, int]] = field(default_factory=list)
    residuals: list[int] = field(default_factory=list)
    said: str = ""


def model_of() -> nn.Sequential:
    return nn.Sequential(*(Layer(seed) for seed in range(LAYERS)))


def deepspeed_engine(case: Case) -> Any:
    start_deepspeed()
    hybridcomp.uninstall() if case.native else hybridcomp.install()
    stage = int(case.engine[-1])
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 4000,
                            "stage3_param_persistence_threshold": 0}  # fmt: skip
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    more = {} if case.compression is None else {"compression": case.compression}
    config = ds_config(
        stage, case.dtype, 4, optimizer=ADAMW, zero_optimization=zero, gradient_clipping=CLIP,
        **more,
    )  # fmt: skip
    return engine_of(model_of(), config)


def torch_model(case: Case) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    model: Any = model_of()
    if case.engine == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    if case.compression is not None:
        assert hybridcomp.attach(model, case.compression) is not None
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def weights(case: Case, engine: Any) -> dict[str, Tensor]:
    """Return the whole weights by name."""
    if case.engine == "zero3":
        from deepspeed import zero

        found = {}
        for name, p in engine.module.named_parameters():
            with zero.GatheredParameters([p]):
                found[name] = p.detach().clone()
        return found
    inner = engine if case.engine == "fsdp2" else engine.module
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p
             for n, p in inner.named_parameters()}  # fmt: skip
    return {n: p.detach().clone() for n, p in whole.items()}


@contextlib.contextmanager
def engine_for(case: Case) -> Iterator[tuple[Any, Any]]:
    """Yield an engine and its optimizer; leave nothing of them."""
    if case.is_torch:
        engine, optimizer = torch_model(case)
        yield engine, optimizer
        if not case.native:
            hybridcomp.detach(engine)
        forget()
    else:
        engine = deepspeed_engine(case)
        yield engine, engine.optimizer
        engine.destroy()


def channels_for(case: Case, engine: Any) -> Any:
    if case.native:
        return None
    attached: Any = hybridcomp.attach(engine) if case.is_torch else None
    return channels_of(engine) if attached is None else attached.channels


def one_step(case: Case, engine: Any, optimizer: Any, step: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    values = torch.randn(4, WIDTH, generator=generator).to(DTYPES[case.dtype])
    for group in optimizer.param_groups:  # as a scheduler does
        group["lr"] = 1e-2 * 0.95**step
    loss = loss_of(engine(values).float(), wanted(values).float())
    if case.is_torch:
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(engine.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    else:
        engine.backward(loss)
        engine.step()
    return loss.item()


def trained(case: Case, steps: int = 12) -> Seen:
    """Train, with freezes and thaws by the case's plan."""
    with engine_for(case) as (engine, optimizer):
        return trained_on(case, engine, optimizer, steps)


def trained_on(case: Case, engine: Any, optimizer: Any, steps: int) -> Seen:
    plan, seen, said = THAW if case.plan == "thaw" else FREEZE, Seen(), StringIO()
    channels = channels_for(case, engine)
    frozen: dict[str, Tensor] = {}
    with contextlib.redirect_stdout(said):
        for step in range(steps):
            if step in plan:
                call, what = plan[step]
                before = weights(case, engine)
                if call == "freeze":
                    names = hybridcomp.freeze(engine, what)
                    frozen.update({name: before[name] for name in names})
                else:
                    for name in hybridcomp.thaw(engine, what):
                        seen.moved[name] = distance(before[name], frozen[name])
            at = total(channels)
            seen.losses.append(mean(one_step(case, engine, optimizer, step)))
            now = total(channels)
            seen.sent.append({name: now[name] - at.get(name, 0) for name in now})
            seen.residuals.append(0 if channels is None else channels.residuals.nbytes)
    now_weights = weights(case, engine)
    for name, values in frozen.items():
        (seen.thawed if name in seen.moved else seen.moved)[name] = distance(
            now_weights[name], values
        )
    seen.said = said.getvalue()
    return seen


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def total(channels: Any) -> dict[str, int]:
    entries = {} if channels is None else channels.ledger.interval
    found: dict[str, int] = {}
    for (dimension, _), entry in entries.items():
        found[dimension] = found.get(dimension, 0) + int(entry.raw_nbytes)
    return found


def every(cases: list[Case]) -> list[Seen]:
    return [trained(case) for case in cases]


ENGINES = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
EXACT = [Case(engine, plan="thaw") for engine in ENGINES]
EXACT += [Case(engine, offload=True, plan="thaw") for engine in ("zero2", "zero3")]
EXACT += [Case(engine, native=True, plan="thaw") for engine in ("ddp", "zero2")]
DAY_LOSSY = ("ddp", "zero1", "zero3")
LOSSY = [Case(engine, lossy=True) for engine in ENGINES]
ZERO = ("zero", {"codec": "blockint", "bits": 8})
OTHERS = [Case("zero0", dtype="bf16"), Case("zero1", dtype="bf16"), Case("zero1", dtype="fp16"),
          Case("zero3", dtype="bf16"), Case("zero2", dtype="bf16", block=(ZERO,)),
          Case("zero3", block=(("zero", {"codec": "none", "frozen": "device"}),))]  # fmt: skip


CASES = EXACT + LOSSY + OTHERS
#: engines that reduce, or hold what they freeze, each in its own way
DAY = [Case("fsdp2", plan="thaw"), Case("zero2", plan="thaw"), Case("zero3", plan="thaw"),
       Case("zero3", offload=True, plan="thaw"), *(c for c in LOSSY if c.engine in DAY_LOSSY),
       OTHERS[1], OTHERS[-1]]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Trained]:
    with Trained(2, every) as trained:
        yield trained


@pytest.mark.parametrize("case", by_day(CASES, DAY), ids=str)
def test_what_is_frozen_stays_to_the_last_bit(case: Case, outcomes: Trained) -> None:
    for seen in outcomes(case):
        names = {f"{n}.{part}" for n in FRONT for part in ("up", "down")}
        assert set(seen.moved) == names
        # a lossy gather leaves decoded weights; the first one behind it brings the exact ones
        most = 0.01 if case.block == (ZERO,) else 0.0
        assert all(moved <= most for moved in seen.moved.values()), seen.moved
        assert all(moved > 1e-4 for moved in seen.thawed.values())
        assert set(seen.thawed) == (names if case.plan == "thaw" else set())
        assert "WARNING" not in seen.said


@pytest.mark.parametrize("case", by_day(EXACT, [case for case in EXACT if case in DAY]), ids=str)
def test_losses_are_those_of_the_same_freezes_under_ddp(case: Case, outcomes: Trained) -> None:
    reference = outcomes(Case("ddp", native=True, plan="thaw"))[0].losses
    apart = [abs(a - b) for a, b in zip(outcomes(case)[0].losses, reference, strict=True)]
    assert len(reference) == 12 and max(apart) < 1e-6, apart


#: bytes of a layer's gradients, in fp32
LAYER = 2 * 3 * WIDTH * WIDTH * 4


@pytest.mark.parametrize("case", by_day(LOSSY, [c for c in LOSSY if c in DAY]), ids=str)
def test_what_is_frozen_sends_no_gradient_and_keeps_no_residual(
    case: Case, outcomes: Trained
) -> None:
    both = outcomes(case)
    for seen in both:
        whole, front, half = (seen.sent[step]["dp"] for step in (2, 3, 5))
        assert whole > 0 and (front, half) == (whole * 3 // 4, whole // 2)
        assert "what error feedback held back of them" in both[0].said and not both[1].said
    sums = [sum(seen.residuals[step] for seen in both) for step in (2, 3, 5, 11)]
    assert sums[1] == sums[0] * 3 // 4 and sums[2] == sums[3] == sums[0] // 2


@pytest.mark.parametrize("engine", by_day(["zero1", "zero2"], ["zero2"]))
def test_gathers_leave_out_what_is_frozen(engine: str, outcomes: Trained) -> None:
    both = outcomes(Case(engine, plan="thaw"))
    steps = [sum(seen.sent[step]["zero"] for seen in both) for step in range(12)]
    whole, rest = 4 * LAYER, [3 * LAYER, 2 * LAYER]
    # all of it once more in the first gather after a freeze
    assert steps[2:8] == [whole, whole, rest[0], whole, rest[1], rest[1]]
    assert steps[10:] == [whole, whole]


def test_copies_on_the_device_are_counted_as_native(outcomes: Trained) -> None:
    kept = outcomes(OTHERS[-1])
    assert kept[0].sent[2]["zero"] == kept[0].sent[11]["zero"] > 0  # what native would send


def test_fully_sharded_and_bf16_optimizers_reduce_what_trains(outcomes: Trained) -> None:
    for seen in outcomes(Case("zero1", dtype="bf16")):
        assert seen.sent[6]["dp"] * 2 == seen.sent[2]["dp"] > 0
    for seen in outcomes(Case("fsdp2", plan="thaw")):
        assert seen.sent[6]["dp"] * 2 == seen.sent[2]["dp"] == seen.sent[11]["dp"]
        assert seen.sent[6]["zero"] < seen.sent[2]["zero"] == seen.sent[11]["zero"]


def frozen_then_thawed() -> tuple[list[bool], list[bool]]:
    """Return which weights a lossy gather left alone, and, thawed, which gathers go on so."""
    from hybridcomp.patches.ds.zero.parameter_gathers import TRAINED

    case = Case("zero1", block=(ZERO,))
    with engine_for(case) as (engine, optimizer):
        hybridcomp.freeze(engine, "0")
        before = weights(case, engine)
        one_step(case, engine, optimizer, 0)
        now = weights(case, engine)
        hybridcomp.thaw(engine)
        left = [hasattr(flat, TRAINED) for flat in optimizer.bit16_groups_flat]
        return [torch.equal(now[name], before[name]) for name in now], left


def test_no_lossy_gather_changes_what_is_frozen(outcomes: Trained) -> None:
    for same, left in outcomes.pool.run(frozen_then_thawed):
        assert same == [True] * 2 + [False] * 6 and left == [False]


def attempt(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused() -> list[str]:
    """Return the errors of wrong calls, which change nothing."""
    case, rank = Case("zero1"), dist.get_rank()
    engine = deepspeed_engine(case)
    before = [p.requires_grad for p in engine.module.parameters()]
    found = [
        attempt(hybridcomp.freeze, engine, "4"),
        attempt(hybridcomp.freeze, engine, ["0", "1.upp"]),
        attempt(hybridcomp.freeze, engine, 3),
        attempt(hybridcomp.freeze, engine, []),
        attempt(hybridcomp.freeze, engine, str(rank)),
        attempt(hybridcomp.freeze if rank else hybridcomp.thaw, engine, "0"),
        attempt(hybridcomp.freeze, engine, engine.module),
        attempt(hybridcomp.thaw, engine),
        attempt(hybridcomp.freeze, nn.Linear(2, 2), "weight"),
        attempt(hybridcomp.freeze, [engine], "0"),
    ]
    assert before == [p.requires_grad for p in engine.module.parameters()]
    hybridcomp.freeze(engine, engine.module[0])
    found.append(attempt(hybridcomp.freeze, engine, ["1", "0.up"]))
    found.append(attempt(hybridcomp.thaw, engine, "1"))
    from hybridcomp.patches.ds.zero import trained_gathers

    fails_once = Mock(side_effect=[OSError("full"), None])
    with patch.object(trained_gathers, "follow", fails_once) if rank else nullcontext():
        found.append(attempt(hybridcomp.freeze, engine, "1"))
    assert [p.requires_grad for p in engine.module.parameters()] == [False] * 2 + [True] * 6
    assert hybridcomp.freeze(engine, "1") == ("1.up", "1.down")
    engine.destroy()
    return found


def test_wrong_calls_are_one_line_on_all_ranks_and_change_nothing(outcomes: Trained) -> None:
    first, second = outcomes.pool.run(refused)
    for here, there, part in zip(
        first, second,
        [
            "ConfigError: hybridcomp.freeze: found '4'; the model has no parameter or module",
            "found '1.upp'; the model has no parameter or module of this name; did you mean '1.up'",
            "ConfigError: hybridcomp.freeze: found 'int'; expected names of parameters or modules",
            "ConfigError: hybridcomp.freeze: found nothing; expected at least one parameter",
            "AgreementError: hybridcomp.freeze: rank 1 asks for other names than rank 0 "
            "(['1.down', '1.up'] against ['0.down', '0.up'])",
            "rank 1 asks for other call than rank 0 (hybridcomp.freeze against hybridcomp.thaw)",
            "ConfigError: hybridcomp.freeze: found all that trains; leave something to train",
            "ConfigError: hybridcomp.thaw: found nothing; expected at least one parameter",
            "ConfigError: hybridcomp.freeze: found Linear; expected an engine of DeepSpeed",
            "ConfigError: hybridcomp.freeze: found megatron-core; its buffers hold",
            "ConfigError: hybridcomp.freeze: found '0.up'; is frozen already",
            "ConfigError: hybridcomp.thaw: found nothing; expected at least one parameter that is",
            "PeerError: hybridcomp.freeze: rank 1: OSError: full",
        ],
        strict=True,
    ):  # fmt: skip
        assert part in here and part in there.replace(
            "hybridcomp.thaw: rank 1", "hybridcomp.freeze: rank 1"
        ), (here, there)
        assert "\n" not in here + there


def alone() -> str:
    """Freeze on rank 1 only; return this rank's error."""
    from hybridcomp.job import agreement

    said = ""
    with engine_for(Case("ddp")) as (model, _), patch.object(agreement, "_timeout_s", lambda: 1.0):
        if dist.get_rank():
            said = attempt(hybridcomp.freeze, model, "0")
            assert all(p.requires_grad for p in model.parameters())
        dist.barrier()
    return said


def test_a_freeze_on_one_rank_alone_ends_and_names_the_others() -> None:
    assert "hybridcomp.freeze: rank(s) 0 never stated theirs" in run_ranks(2, alone)[1]


def test_names_modules_and_parameters_mean_the_same() -> None:
    model = nn.Sequential(nn.Linear(2, 2), *(nn.Identity() for _ in range(9)), nn.Linear(2, 2))
    named = dict(model.named_parameters())
    both = ["0.weight", "0.bias"]
    for what in ("0", model[0], [model[0].weight, "0.bias"], both[::-1]):
        assert chosen(asked(what, named, "x"), named) == (both, [])
    assert chosen(["1"], named) == ([], ["1"])  # not that of 10
    assert chosen(asked(nn.Linear(2, 2), named, "x"), named) == ([], [])  # of another stage
    assert asked("_orig_mod.0._checkpoint_wrapped_module.bias", named, "x") == ["0.bias"]
    assert nearest("10.weigth", named) == "10.weight" and not nearest("zzzz", named)
    assert nearest("encoder.laier", ["encoder.layer.up.weight"]) == "encoder.layer"


def test_steps_that_were_skipped_are_no_steps() -> None:
    layers = EngineLayers.__new__(EngineLayers)
    layers._engine = SimpleNamespace(global_steps=7, skipped_steps=2)
    assert layers.steps() == 5


def test_the_rule_is_pipetransformers() -> None:
    frozen, counts = 0, []
    for _ in range(5):
        frozen = target(12, frozen, 1 / 3)
        counts.append(frozen)
    assert counts == [4, 7, 9, 10, 11]
    assert target(12, 0, 1 / 3, [5.0, 4.0, 1.0, *[9.0] * 9]) == 2
    assert target(12, 0, 1 / 3, [9.0] * 11 + [1.0]) == 4
    assert target(12, 2, 1 / 3, [0.0, 0.0, 5.0, 1.0, *[9.0] * 8]) == 3  # of the active blocks


PIPE = {"pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0, "hierarchy": "none",
        "ledger": {"every": 10**6}}  # fmt: skip
MICROS = 4


def pipeline(stage: int, dtype: str, clip: float, **more: Any) -> Any:
    start_deepspeed()
    hybridcomp.install()
    model = pipeline_of(Layer, [(seed,) for seed in range(LAYERS)], 2)
    config = ds_config(
        stage, dtype, 4, gradient_accumulation_steps=MICROS, optimizer=ADAMW,
        gradient_clipping=clip, compression=PIPE, **more,
    )  # fmt: skip
    return engine_of(model, config)


@dataclass
class Piped:
    losses: list[float]
    moved: float
    backward: list[int]  # bytes of gradients between stages, by step


def piped(stage: int, dtype: str, clip: float, whole: bool, more: dict[str, Any]) -> Piped:
    """Freeze layers 0 and 1, all of the first stage, or one of them, for four steps of ten.

    ``whole`` False: the same, with the backward passes of the schedule left in for one weight.
    """
    engine = pipeline(stage, dtype, clip, **more)
    channels, data = channels_of(engine), engine.grid.get_data_parallel_id()
    assert channels is not None
    found = Piped([], 0.0, [])
    start: dict[str, Tensor] = {}
    names: tuple[str, ...] = ()
    for step in range(10):
        if step == 4:
            start = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
            names = hybridcomp.freeze(engine, ["0", "1"] if whole else ["0", "1.up"])
        if step == 8:
            now = dict(engine.module.named_parameters())
            found.moved = max((distance(now[n], start[n]) for n in names), default=0.0)
            hybridcomp.thaw(engine)

        def batches(step: int = step) -> Any:
            for micro in range(MICROS):
                seed = 1000 * step + 10 * micro + data
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
                x = x.to(next(engine.module.parameters()).dtype)
                yield x, wanted(x)

        before = int(channels.ledger.interval["pp", "backward"].raw_nbytes)
        found.losses.append(float(engine.train_batch(batches())))
        found.backward.append(int(channels.ledger.interval["pp", "backward"].raw_nbytes) - before)
    engine.destroy()
    return found


def begun_frozen() -> list[int]:
    """Count steps of a pipeline whose first layer, on the first stage, never trained."""
    engine = pipeline(0, "fp32", 0.0)
    for name, parameter in engine.module.named_parameters():
        parameter.requires_grad_(not name.startswith("0."))
    schedule = hybridcomp.FreezeSchedule(engine, list("0123"), steps={1: 1, 2: 2})
    found = [schedule.step() for _ in range(2)]
    engine.destroy()
    return found


def test_stages_count_what_another_stage_never_trained() -> None:
    assert run_ranks(2, begun_frozen, timeout=60) == [[1, 2]] * 2


def stepless(clip: float) -> list[float]:
    """Return the losses of a first stage that runs all passes but skips its optimizer steps."""
    engine = pipeline(0, "fp32", clip)
    step = engine.optimizer.step
    losses = []
    for number in range(8):
        if number == 4 and engine.stage_id == 0:
            engine.optimizer.step = lambda *_, **__: None
        x = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * number + 10 * n))
             for n in range(MICROS)]  # fmt: skip
        losses.append(float(engine.train_batch(iter([(one, wanted(one)) for one in x]))))
    engine.optimizer.step = step
    engine.destroy()
    return losses


FLOATS = {"data_types": {"grad_accum_dtype": "fp32"}}
PIPES: list[tuple[int, str, float, dict[str, Any]]] = [
    (0, "fp32", 0.0, {}), (0, "fp32", CLIP, {}), (1, "fp32", CLIP, {}), (1, "bf16", CLIP, {}),
    (1, "bf16", CLIP, FLOATS), (0, "fp16", CLIP, {}),
]  # fmt: skip


def every_pipeline(pipes: list[tuple[Any, ...]]) -> list[Any]:
    found: list[Any] = [stepless(0.0)] if pipes[0] == PIPES[0] else []
    for stage, dtype, clip, more in pipes:
        found += [piped(stage, dtype, clip, whole, more) for whole in (True, False)]
    return found


@pytest.mark.parametrize(
    "pipes", by_day([PIPES, [PIPES[0], PIPES[4]]], [[PIPES[0], PIPES[4]]]), ids=["all", "few"]
)
def test_a_frozen_first_stage_runs_no_backward_pass(pipes: list[Any]) -> None:
    first, second = run_ranks(2, every_pipeline, pipes, timeout=600.0)
    assert first[0] == first[1].losses[:8]  # without clipping: equal to the last bit
    sends, other = second[1:], first[1:]
    for number, (front, behind) in enumerate(zip(other, sends, strict=True)):
        assert front.moved == 0.0 and front.losses == behind.losses
        assert front.losses[-1] < front.losses[0]
        whole, sent = number % 2 == 0, behind.backward
        assert sent[0] > 0 and sent[9] == sent[0]
        assert sent[5] == (0 if whole else sent[0])


SAVED = Case("zero1", lossy=True)


def steps_on(engine: Any) -> list[float]:
    """Return the losses of three steps with a frozen front, and of three that train all."""
    losses = [one_step(SAVED, engine, engine.optimizer, step) for step in range(6, 9)]
    hybridcomp.thaw(engine)
    losses += [one_step(SAVED, engine, engine.optimizer, step) for step in range(9, 12)]
    engine.destroy()
    return losses


def saves(folder: str) -> list[float]:
    """Train, freeze and save under DeepSpeed and FSDP2; return DeepSpeed's losses behind it."""
    engine = deepspeed_engine(SAVED)
    for step in range(6):
        if step == 3:
            hybridcomp.freeze(engine, FRONT)
        one_step(SAVED, engine, engine.optimizer, step)
    engine.save_checkpoint(f"{folder}/ds")
    assert not any(p.requires_grad for p in engine.module[0].parameters())
    losses = steps_on(engine)
    case = Case("fsdp2")
    with engine_for(case) as (model, optimizer):
        for step in range(6):
            if step == 3:
                hybridcomp.freeze(model, FRONT)
            one_step(case, model, optimizer, step)
        save_torch(model, optimizer, Path(folder, "torch", "step6"))
    return losses


def goes_on(folder: str) -> tuple[list[float], list[str], str]:
    """Resume; return the losses, the frozen parameters and what is said."""
    said = StringIO()
    engine = deepspeed_engine(SAVED)
    with contextlib.redirect_stdout(said):
        hybridcomp.resume(engine, f"{folder}/ds")
    frozen = [n for n, p in engine.module.named_parameters() if not p.requires_grad]
    losses = steps_on(engine)
    with engine_for(Case("fsdp2")) as (model, optimizer):
        hybridcomp.resume(model, f"{folder}/torch", optimizer=optimizer)
        assert frozen == [n for n, p in model.named_parameters() if not p.requires_grad]
    return losses, frozen, said.getvalue()


def test_a_checkpoint_keeps_what_is_frozen(tmp_path: Any, outcomes: Trained) -> None:
    saved = outcomes.pool.run(saves, str(tmp_path))
    again = outcomes.pool.run(goes_on, str(tmp_path))
    for losses, (resumed, frozen, said) in zip(saved, again, strict=True):
        assert frozen == ["0.up", "0.down", "1.up", "1.down"]
        assert max(abs(a - b) for a, b in zip(losses, resumed, strict=True)) < 1e-6
        assert "WARNING" not in said
    assert "4 parameters are frozen in the checkpoint" in again[0][2]


def refuses_schedule(engine: Any, **given: Any) -> str:
    return attempt(lambda: hybridcomp.FreezeSchedule(engine, list("0123"), **given))


def scheduled_one(case: Case) -> tuple[list[int], list[Any], list[str]]:
    """Return the number of frozen blocks by step, the norms of each decision, and the errors."""
    counts = []
    with engine_for(case) as (engine, optimizer):
        given = hybridcomp.FreezeSchedule(engine, list("0123"), steps={2: 1, 4: 3})
        for step in range(5):
            one_step(case, engine, optimizer, step)
            counts.append(given.step())
        hybridcomp.thaw(engine)
        rule = hybridcomp.FreezeSchedule(engine, list("0123"), every=2, alpha=0.5, most=2)
        decide = Mock(side_effect=[1, 2, 2])
        with patch("hybridcomp.patches.freeze_schedule.target", decide):
            for step in range(5, 11):
                one_step(case, engine, optimizer, step)
                counts.append(rule.step())
            resumed = hybridcomp.FreezeSchedule(engine, list("0123"), every=2)
            resumed.load_state_dict({"taken": 1})  # saved one step before a decision
            one_step(case, engine, optimizer, 11)
            counts.append(resumed.step())
        settings: list[dict[str, Any]] = [
            {}, {"every": 2, "alpha": 1.0}, {"every": 0}, {"every": 2, "most": 4},
            {"steps": {1: 3, 2: 1}},
        ]  # fmt: skip
        wrong = [refuses_schedule(engine, **one) for one in settings]
    return counts, [call.args[3] for call in decide.call_args_list], wrong


def scheduled() -> list[Any]:
    return [scheduled_one(Case(engine)) for engine in ("ddp", "fsdp2", "zero2")]


def test_a_schedule_freezes_the_front(outcomes: Trained) -> None:
    first, second = outcomes.pool.run(scheduled)
    assert first == second
    for counts, norms, wrong in first:
        assert counts == [0, 1, 1, 3, 3, 0, 1, 1, 2, 2, 2, 2]
        assert [len(one) for one in norms] == [LAYERS] * 3
        assert all(value > 0 for value in norms[0]) and norms[1][0] == 0 < norms[1][1]
        keys = ["FreezeSchedule: ", "alpha: found 1.0", "every: found 0", "most: found 4", "steps"]
        assert all(key in text for key, text in zip(keys, wrong, strict=True)), wrong
