"""Time trials and decide whether encoding pays.

With ``"when": "auto"`` the real collectives run on the real group, native and encoded in turns: for
dp and zero before the first step, for tp and pp after it, when their messages are known
(``observed``). The seconds of the slowest rank in the whole job count, so every rank decides on the
same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from hybridcomp.autotune import measured
from hybridcomp.autotune.memory_limits import room_for
from hybridcomp.autotune.trials import Run, StepTraffic
from hybridcomp.autotune.verdicts import Decision
from hybridcomp.job import small_messages
from hybridcomp.job.together import ending

#: number of values in the trial messages, in order
SIZES = (1 << 19, 1 << 21, 1 << 23)
#: fewest and most timed rounds of each variant, after one warm-up round; the shortest counts, as
#: noise only lengthens. Close results are settled by timing real steps (``recheck``)
REPEATS = 1, 4
#: the same bounds for messages of layers and stages, which are short; their median counts
REPEATS_SEEN = 2, 8
#: fp32 values written before each timed run of such messages: 64 MB, more than most caches hold
WORK_NUMEL = 1 << 24
#: seconds that the trials of a dimension should take; on a slow link small messages suffice
BUDGET_S = 1.0
#: share of the budget for timing single messages of a known step, to estimate how many fit
FIRST_LOOK = 0.1
#: factor by which encoded messages must be faster: the codec takes cores that the model needs
MARGIN = 1.1
#: if a small message is this many times as fast encoded as native, larger ones are not tried: per
#: byte, the link takes as long for a larger message and the codec less
SURE = 3.0


def judge(
    trials: Callable[[StepTraffic], tuple[Run, Run]],
    sent: StepTraffic,
    itemsize: int,
    device: torch.device,
    whole: bool,
) -> Decision:
    """Time trials of growing size, while there is time; a collective over the whole job.

    ``trials``: returns functions that send messages natively and encoded. ``sent``: the messages of
    a step if known (``whole``, the same on all ranks), else one message of all values. It times
    single messages of ``SIZES``, up to the longest of ``sent``, then all messages of the step, or
    as many as the time allows by these measurements.
    """
    longest = max(sent.numels)
    largest = _largest(longest, device)
    enough = BUDGET_S * (FIRST_LOOK if whole else 1.0)
    spent = 0.0
    for size in SIZES:
        single = replace(sent, numels=(max(1, min(size, longest)),))
        rows = _timed(trials(single), BUDGET_S / len(SIZES), device)
        spent += float(rows.sum())
        if spent > enough or size >= largest or _is_sure(rows):
            break
    messages, values = 1, min(size, largest)
    in_time = int(BUDGET_S / (1 + REPEATS[0]) / float(rows.amin(dim=0).sum()) * values)
    total = _largest(sent.numel, device) if whole else values
    if min(total, in_time) > values and not _is_sure(rows):
        part = sent.cut(min(room_for(device), in_time))
        rows = _timed(trials(part), BUDGET_S, device)
        messages = _largest(len(part.numels), device)
        values = _largest(part.numel, device)
    native_s, coded_s = rows.amin(dim=0).tolist()
    pays = coded_s * MARGIN <= native_s
    return Decision(
        pays,
        values * itemsize,
        native_s,
        coded_s,
        messages=messages,
        of=total * itemsize if total > values else 0,
        gain_s=(native_s - coded_s) * total / values if whole else None,
    )


def confirm(
    trials: Callable[[StepTraffic], tuple[Run, Run]],
    sent: StepTraffic,
    seconds: Callable[[StepTraffic], tuple[float, float] | None],
    itemsize: int,
    device: torch.device,
) -> Decision | None:
    """Return the verdict by a table if timed short messages confirm the table; None: run a trial.

    A collective over the job. ``seconds``: returns the native and encoded seconds of messages by
    the table, the same on all ranks; None: not in the table.
    """
    short = replace(sent, numels=(max(1, min(SIZES[0], max(sent.numels))),))
    by_table, whole = seconds(short), seconds(sent)
    if by_table is None or whole is None:
        return None
    native_s, coded_s = whole
    if max(native_s, coded_s) < measured.SURE * min(native_s, coded_s):
        return None
    runs = trials(short)
    _race(runs, 1, device)
    timed = _race(runs, REPEATS[1], device).amin(dim=0).tolist()
    off = [max(now / then, then / now) for now, then in zip(timed, by_table, strict=True)]
    if max(off) > measured.OFF:
        return None
    gain_s = native_s - coded_s
    nbytes = sent.numel * itemsize
    return Decision(
        gain_s > 0, nbytes, native_s, coded_s, len(sent.numels), checked=True, gain_s=gain_s
    )


def _is_sure(rows: torch.Tensor) -> bool:
    native_s, coded_s = rows.amin(dim=0).tolist()
    return bool(coded_s * SURE <= native_s)


def _largest(numel: int, device: torch.device) -> int:
    """Return the largest ``numel`` of all ranks, as stages differ; a collective over the job."""
    return int(small_messages.most(torch.tensor(numel, device=device)))


def _timed(runs: tuple[Run, Run], budget_s: float, device: torch.device) -> torch.Tensor:
    """Time the rounds that count; return seconds, ``[rounds, 2]``."""
    once = float(_race(runs, 1, device).sum())
    return _race(runs, _repeats(REPEATS, budget_s / once - 1), device)


def judge_seen(runs: tuple[Run, Run], nbytes: int, device: torch.device) -> Decision:
    """Time this rank's messages natively and encoded; a collective over the job.

    ``nbytes``: size of the largest of these messages in the job, 0 if planning failed. A first
    timing decides the number of rounds. Each round follows work that clears the caches, as a layer
    does. The median counts: such messages are short, and disturbances are normal if ranks share
    cores.
    """
    if not nbytes:
        return Decision(True, 0, 0.0, 0.0)
    work = torch.zeros(WORK_NUMEL, device=device, dtype=torch.float32)

    def compute() -> None:
        work.add_(1.0)
        small_messages.wait_for_all()  # wait for all, or early ranks would count their wait

    start = time.perf_counter()
    _race(runs, 1, device, compute)
    once = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    small_messages.most(once)
    repeats = _repeats(REPEATS_SEEN, BUDGET_S / float(once))
    native_s, coded_s = _race(runs, repeats, device, compute).median(dim=0).values.tolist()
    return Decision(coded_s * MARGIN <= native_s, nbytes, native_s, coded_s)


def _repeats(limits: tuple[int, int], wanted: float) -> int:
    least, most = limits
    return max(least, min(most, int(wanted)))


def _race(
    runs: tuple[Run, Run], repeats: int, device: torch.device, before: Run | None = None
) -> torch.Tensor:
    """Time both variants in turns: seconds ``[repeats, 2]`` of the slowest rank, equal on all.

    ``before``: runs untimed before each variant; by default all ranks wait for each other, so that
    no rank begins a message that another rank failed to prepare.
    """
    rows = torch.zeros(repeats, len(runs), dtype=torch.float64, device="cpu")
    for row in rows:
        for column, run in enumerate(runs):
            (before or small_messages.wait_for_all)()
            row[column] = seconds(run, device)
    return small_messages.most(rows.to(device))


def seconds(run: Run, device: torch.device) -> float:
    """Return the seconds of ``run``, on a GPU until its work is done there.

    A failure on one rank ends the job, since gates between messages would distort the timing.
    """
    with ending("a trial"):
        _finish(device)
        start = time.perf_counter()
        run()
        _finish(device)
        return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
