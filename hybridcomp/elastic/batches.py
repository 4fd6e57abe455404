"""Divide a global batch over any number of replicas, and scale a learning rate with the batch."""

from __future__ import annotations

from typing import Literal, get_args

from hybridcomp.errors import ConfigError

#: how the learning rate changes with the batch size: in proportion, with its square root, or not
Scaling = Literal["linear", "sqrt", "keep"]
#: power of the ratio of batch sizes that multiplies the learning rate
_POWERS = {"linear": 1.0, "sqrt": 0.5, "keep": 0.0}


def share(samples: int, replicas: int, key: str = "samples") -> int:
    """Return how many samples of an optimizer step each replica trains on.

    ``samples``: samples of a step over all replicas. Raises ConfigError if ``replicas`` does not
    divide ``samples``; the error names the nearest batch sizes and rank counts that work.
    """
    if samples < 1 or replicas < 1:
        raise ConfigError(key, samples, f"expected 1 or more, over {replicas} data-parallel ranks")
    if samples % replicas == 0:
        return samples // replicas
    below = samples // replicas * replicas
    nearest = [str(size) for size in (below, below + replicas) if size]
    fits = [ranks for ranks in range(1, min(samples, 2 * replicas) + 1) if samples % ranks == 0]
    raise ConfigError(
        key, samples,
        f"does not divide by {replicas} data-parallel ranks: take {' or '.join(nearest)} samples, "
        f"or {', '.join(map(str, fits[-4:]))} ranks",
    )  # fmt: skip


def micro_batches(samples: int, replicas: int, most: int) -> tuple[int, int]:
    """Return the largest micro-batch of up to ``most`` samples, and how many a replica accumulates.

    Micro-batch x steps of accumulation x ``replicas`` is ``samples`` exactly. Raises ConfigError.
    """
    own = share(samples, replicas)
    if most < 1:
        raise ConfigError("micro_batch", most, "expected 1 sample or more")
    micro = next(size for size in range(min(most, own), 0, -1) if own % size == 0)
    return micro, own // micro


def lr_factor(before: int | None, now: int | None, scaling: str | None) -> float:
    """Return the learning-rate factor if a step has ``now`` samples instead of ``before``.

    The factor is 1 if ``before`` or ``now`` is None (unknown). Raises ConfigError if ``scaling`` is
    not a known name, or is None although the batch size has changed.
    """
    if scaling is not None and scaling not in get_args(Scaling):
        raise ConfigError("lr", scaling, f"expected one of {', '.join(get_args(Scaling))}")
    if before is None or now is None or before == now:
        return 1.0
    if scaling is None:
        ratio = now / before
        todo = (
            f"the checkpoint's steps had {before}: keep these, or name what becomes of the "
            f'learning rate: lr="linear" (times {ratio:g}), "sqrt" (times {ratio**0.5:g}), "keep"'
        )
        raise ConfigError("samples of a step", now, todo)
    factor: float = (now / before) ** _POWERS[scaling]
    return factor
