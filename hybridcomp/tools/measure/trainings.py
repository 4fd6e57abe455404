"""Time small trainings in the engine, for its overhead in addition to layers and messages.

DeepSpeed's engine runs some blocks, with every rank as a replica: at ZeRO 0, 1 and 2, native, with
a codec, and with error feedback, each through hybridcomp's patches and channels. The trainings take
turns with each other and with the block outside the engine: a machine's speed changes by the
second, and the difference of two timings (``plan/cost/host``) must not depend on when each was
taken.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product as every
from typing import Any

import torch
from torch import Tensor, nn

import hybridcomp
from hybridcomp.codecs.words import DTYPE_NAMES
from hybridcomp.job import small_messages
from hybridcomp.log import say
from hybridcomp.patches.ds.engine_of import engine_of
from hybridcomp.tools.measure.block import BlockSize, TransformerBlock
from hybridcomp.tools.measure.clock import PERIODS, CallClock, Run, times_over
from hybridcomp.tools.measure.kernels import PreparedBlock
from hybridcomp.tools.measure.team import MeasuredPart, Team
from hybridcomp.tools.plan.machines.estimates import summary
from hybridcomp.tools.plan.machines.rows import Kernel, TrainedSmall

ENGINE = "deepspeed"
ZERO_STAGES = (0, 1, 2)
#: blocks of the native models; the difference shows which seconds grow with the parameters
FEW, MANY = 1, 3
#: blocks of compression: a codec alone, and the preset with error feedback, which costs most
EIGHT = {"codec": "blockint", "bits": 8}
STYLES: tuple[Mapping[str, Any], ...] = (
    {"dp": EIGHT, "zero": EIGHT},
    {"preset": "recommended", "when": "always", "dp": {"error_feedback": True}},
)
#: micro-batches of a step: the first has no gradients to add to, the last ends the step
MICRO_BATCHES = 3
#: steps of every training: warm-up steps do not count, rounds end when the time is over; a step
#: over slow links that takes longer than LONG_S is run LEAST_LONG times at least
WARM, LEAST, LEAST_LONG, MOST = 1, 4, 2, 40
LONG_S = 0.5
#: trainings are left out where starting them, or their first steps, take longer than this and than
#: the whole measurement may
PATIENCE_S = 60.0
#: fraction of a device's memory that all models together may take; bytes per parameter in training
SHARE, VALUE_NBYTES = 0.25, 28
#: timings of a block in every round; fewer if one timing spans several CPU-quota periods
BLOCK_TIMES, LONG_TIMES = 3, 1


@dataclass
class _Job:
    """One small training: its engine, and the seconds of its steps on this rank."""

    zero_stage: int
    block: Mapping[str, Any]
    blocks: int
    engine: Any
    values: Tensor
    #: seconds of each step, from its beginning to the end of every micro-batch
    steps: list[tuple[float, ...]] = field(default_factory=list)

    def step(self) -> None:
        """Run one optimizer step, as a training loop does, and append its seconds to ``steps``."""
        begin, ends, losses = time.perf_counter(), [], []
        for number in range(MICRO_BATCHES):
            # the input requires a gradient, as the output of an embedding does
            loss = self.engine(self.values.detach().requires_grad_()).float().square().mean()
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
            if number + 1 < MICRO_BATCHES:
                _synchronize(self.values)
                ends.append(time.perf_counter() - begin)
        mean = torch.stack(losses).mean()
        float(small_messages.total(mean))
        self.steps.append((*ends, time.perf_counter() - begin))


def training_rows(
    team: Team, clock: CallClock, part: MeasuredPart, size: BlockSize, memory_nbytes: int
) -> tuple[list[TrainedSmall], list[Kernel]]:
    """Time trainings of blocks of ``size`` in turns with a single block outside the engine.

    Returns rows of the trainings, the same on all ranks, and this rank's rows of the block. A
    collective over the job. Returns no rows, and prints why, where a rank has no DeepSpeed or too
    little memory.
    """
    parameters = sum(parameter.numel() for parameter in TransformerBlock(size).parameters())
    trainings: list[tuple[int, Mapping[str, Any], int]] = [
        (stage, {}, count) for stage in ZERO_STAGES for count in (FEW, MANY)
    ]
    for stage, style in every(ZERO_STAGES, STYLES):
        # a block with zero is refused at stage 0
        block = {name: one for name, one in style.items() if name != "zero" or stage}
        trainings.append((stage, block, MANY))
    if not trainings:  # in tests
        return [], []
    needed = VALUE_NBYTES * parameters * sum(count for *_, count in trainings)
    missing = importlib.util.find_spec("deepspeed") is None
    if team.most([float(missing)])[0]:
        say("not every rank has DeepSpeed: what an engine's step costs is not measured")
        return [], []
    if team.most([float(memory_nbytes > 0 and needed > SHARE * memory_nbytes)])[0]:
        say("too little memory for small trainings: what an engine's step costs is not measured")
        return [], []
    dtype = torch.bfloat16 if team.device.type == "cuda" else torch.float32
    alone = Alone(size, team.device, dtype)
    with _installed():
        jobs, begin = list[_Job](), time.perf_counter()
        for training in trainings:
            if team.most([time.perf_counter() - begin])[0] <= _limit_s(part):
                jobs.append(_started(team, size, dtype, *training))
        if len(jobs) < len(trainings) or not _rounds(team, clock, part, jobs, alone):
            say(
                f"a step of each small training takes more than {_limit_s(part):g} s over these "
                "links: what an engine's step costs is not measured; more --seconds would"
            )
            return [], []
    name = DTYPE_NAMES[dtype]
    rows = [_row(team, job, size, parameters, name) for job in jobs]
    return rows, alone.rows(team.rank, name)


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Install hybridcomp's patches while trainings run, and raise log levels to WARNING.

    The context hides torch's warnings about deprecated functions in DeepSpeed, which every rank
    would print.
    """
    loggers = [logging.getLogger(name) for name in ("DeepSpeed", "hybridcomp")]
    levels = [logger.level for logger in loggers]
    hybridcomp.install()
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        hybridcomp.uninstall()


def _rounds(
    team: Team, clock: CallClock, part: MeasuredPart, jobs: list[_Job], alone: Alone
) -> bool:
    """Run rounds, a step of each training and some passes of the block, until time is over.

    Returns False where the first round takes too long (``PATIENCE_S``).
    """
    least = WARM + LEAST
    for number in range(WARM + MOST):
        begin = time.perf_counter()
        for job in jobs if number % 2 == 0 else reversed(jobs):
            team.barrier()
            job.step()
            if not number and team.most([time.perf_counter() - begin])[0] > _limit_s(part):
                return False
        team.barrier()
        alone.time(clock)
        if team.most([time.perf_counter() - begin])[0] > LONG_S * len(jobs):
            least = WARM + LEAST_LONG
        allowance = part.each(max(1, least - 1 - number))
        if number + 1 >= least and not allowance:
            break
    return True


def _limit_s(part: MeasuredPart) -> float:
    return max(PATIENCE_S, part.whole_s)


def _started(
    team: Team, size: BlockSize, dtype: torch.dtype, zero_stage: int, block: Mapping[str, Any],
    blocks: int,
) -> _Job:  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(*(TransformerBlock(size) for _ in range(blocks))).to(team.device)
    numel = sum(parameter.numel() for parameter in model.parameters())
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.batch,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": zero_stage, "reduce_bucket_size": numel, "allgather_bucket_size": numel,
        },
    }  # fmt: skip
    if block:
        settings["compression"] = dict(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    values = torch.randn(size.batch, size.length, size.width, device=team.device, dtype=dtype)
    return _Job(zero_stage, block, blocks, engine_of(model, optimizer, settings), values)


class Alone:
    """The block alone, forward and backward, as ``kernels`` times it."""

    def __init__(self, size: BlockSize, device: torch.device, dtype: torch.dtype) -> None:
        self._size, block = size, PreparedBlock(size, device, dtype)
        self._runs: tuple[Run, Run] = block.forward(), block.backward()
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._counts: list[int] = []

    def time(self, clock: CallClock) -> None:
        """Time both directions some times."""
        least = PERIODS * clock.period_s
        if not self._counts:
            self._counts = [times_over(clock, run, least) if least else 1 for run in self._runs]
        for _ in range(LONG_TIMES if least else BLOCK_TIMES):
            for run, count, seconds in zip(self._runs, self._counts, self._seconds, strict=True):
                seconds.append(clock.seconds(run, count))

    def rows(self, rank: int, dtype: str) -> list[Kernel]:
        """Return the rows of both directions."""
        told, (ahead, behind) = self._size.describe(), map(summary, self._seconds)
        return [
            Kernel(rank, "block_forward", dtype, self._size.flops, ahead, told),
            Kernel(rank, "block_backward", dtype, 2 * self._size.flops, behind, told),
        ]


def _row(team: Team, job: _Job, size: BlockSize, parameters: int, dtype: str) -> TrainedSmall:
    """Return the row of a training, with the slowest rank's seconds; a collective."""
    first, middle, ends = (team.most(own) for own in zip(*job.steps[WARM:], strict=True))
    micro = [end - begin for begin, end in zip(first, middle, strict=True)]
    last = [end - begin for begin, end in zip(middle, ends, strict=True)]
    return TrainedSmall(
        ENGINE, job.zero_stage, dtype, job.blocks, size.flops, parameters, size.batch,
        size.length, summary(micro), summary(last), job.block,
    )  # fmt: skip


def _synchronize(values: Tensor) -> None:
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
