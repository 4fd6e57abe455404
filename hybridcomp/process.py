"""The block and the channels of this process, for seams that have no engine at hand.

Tensor-parallel layers, megatron-core and GPT-NeoX's mpu know no engine: there is one ``Channels``
for the process. It comes from the first DeepSpeed engine that attaches (``lend``); without one
from ``hybridcomp.install(config)`` or the file that ``HYBRIDCOMP_CONFIG`` names.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp import presence
from hybridcomp.agreement import agree, versions
from hybridcomp.channels import Channels
from hybridcomp.config import BLOCK, CompressionConfig, load_config, read_source
from hybridcomp.errors import ConfigError
from hybridcomp.policy import DIRECTIONS, Dimension
from hybridcomp.reporter import Reporter

#: environment variable with the path of a block, or of a file that holds one under "compression"
ENVIRONMENT = "HYBRIDCOMP_CONFIG"
#: dimensions whose layers know no engine
ENGINELESS: tuple[Dimension, ...] = ("tp", "cp")


@dataclass
class _Holder:
    """What this process has instead of an engine."""

    config: CompressionConfig | None = None
    explicit: bool = False  # configured by call: the environment is not asked
    channels: Channels | None = None
    lender: weakref.ref[Any] | None = None  # the engine whose channels these are
    reporter: Reporter | None = None
    settled: bool = False  # the ranks agreed, with or without a block
    chunks: int = 0  # Megatron's model chunks wrapped for data parallelism so far
    loss_scale: float = 1.0  # of Megatron's last step
    restored: bool = False  # a Megatron optimizer was, since the channels were made
    state_loaded: bool = False  # hybridcomp's own state was
    said: set[str] = field(default_factory=set)


_holder = _Holder()


def configure(config: Mapping[str, Any] | str | Path | CompressionConfig | None) -> None:
    """Set the block of this process; None forgets it, and asks the environment again.

    Takes a CompressionConfig, a block, a dict or file with a block under "compression", or the path
    of any of these. Acts on the next message; channels that exist are dropped. Raises ConfigError.
    """
    global _holder
    _holder = _Holder(config=_parse(config), explicit=config is not None)


def _parse(
    config: Mapping[str, Any] | str | Path | CompressionConfig | None,
) -> CompressionConfig | None:
    if config is None or isinstance(config, CompressionConfig):
        return config
    whole = read_source(config)
    if BLOCK in whole:
        return load_config(whole)
    block = CompressionConfig.parse(whole)
    return block if block.enabled else None


def configured() -> CompressionConfig | None:
    """The block of this process, by call or by environment. Raises ConfigError."""
    if not _holder.explicit and (path := os.environ.get(ENVIRONMENT)):
        _holder.config = _parse(path)
    return _holder.config


def use(channels: Channels | None) -> None:
    """Take over channels that somebody else made, agreed on and reports about."""
    global _holder
    _holder = _Holder(channels=channels, explicit=True, settled=True)


def lend(engine: Any, channels: Channels) -> None:
    """Let the layers of this process report to ``engine``'s channels, while it lives.

    The first living engine lends: layers cannot tell whose they are. Raises ConfigError when a
    second engine's block asks for other codecs in their dimensions.
    """
    if borrowed() is not None:
        gc.collect()  # engines hang in reference cycles: one that was deleted must not count
    first = borrowed()
    if first is None:
        if _holder.reporter is not None:
            _holder.reporter.close()  # the engine reports from now on, maybe into the same file
        config, explicit = _holder.config, _holder.explicit
        use(channels)
        _holder.config, _holder.explicit = config, explicit
        _holder.lender = weakref.ref(engine)
        return
    asked = first.config.explicit | channels.config.explicit  # a preset names all dimensions
    for name in (name for name in ENGINELESS if name in asked):
        for way in DIRECTIONS:
            mine = channels.policy.codecs.get((name, way))
            theirs = first.policy.codecs.get((name, way))
            if mine != theirs:
                raise ConfigError(
                    f"{BLOCK}.{name}",
                    mine or "none",
                    f"another engine of this process set {theirs or 'none'}, and layers cannot "
                    "tell whose they are; write the same in both blocks",
                )


def decline() -> None:
    """The ranks agreed, at an engine's construction, that there is no block for its messages.

    So no layer has to ask: in a pipeline the first message of a stage comes only after the last
    stage's neighbours sent theirs, and a question to all ranks would wait forever.
    """
    _holder.settled = True


def release(engine: Any) -> None:
    """``engine`` is destroyed: it lends no more, though something may still hold it."""
    if _holder.lender is not None and _holder.lender() is engine:
        configure(_holder.config)


def borrowed() -> Channels | None:
    """The channels that a living engine lent, else None."""
    if _holder.lender is None or _holder.lender() is None:
        return None
    return _holder.channels


def current() -> Channels | None:
    """The channels of this process, None without a block.

    The first call after torch.distributed is up makes them: a collective through the rendezvous
    store, which every rank reaches without waiting for a message of upstream.
    """
    if _holder.lender is not None and _holder.lender() is None:
        configure(_holder.config)  # the engine is gone, and its traffic with it
    if not _holder.settled and dist.is_initialized():
        _settle()
    return _holder.channels


def _settle() -> None:
    _holder.settled = True
    config = configured()
    settings = {BLOCK: None} if config is None else config.flat()
    agree({**settings, **versions("megatron-core")})
    presence.announce()
    if config is None:
        return
    _holder.channels = Channels(config)
    jsonl = config.ledger.jsonl
    _holder.reporter = Reporter(_holder.channels, Path(jsonl) if jsonl else None, device())
    for line in config.describe():
        say(line)
    if config.error_feedback("dp"):
        say(
            "dp: Megatron's checkpoints do not hold residuals; call hybridcomp.save_state(folder) "
            "where it saves and hybridcomp.load_state(folder) where it loads"
        )
    if config.zero.delta:
        say(
            "zero: Megatron's checkpoints do not hold what deltas are added to; the first gather "
            "after a restart is exact"
        )


def reporter() -> Reporter | None:
    """Who reports about channels that this process made itself; None where an engine does."""
    return _holder.reporter


def device() -> torch.device:
    """Where the default group reduces."""
    if "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def next_chunk() -> int:
    """The number of the model chunk that is being wrapped."""
    _holder.chunks += 1
    return _holder.chunks - 1


def loss_scale() -> float:
    """The loss scale that the residuals are in."""
    return _holder.loss_scale


def note_loss_scale(scale: float) -> None:
    """Megatron's loss scale after a step."""
    _holder.loss_scale = scale


def note_restored() -> None:
    """A Megatron optimizer has loaded a checkpoint."""
    _holder.restored = True


def note_state_loaded(scale: float) -> None:
    """What belongs to that checkpoint is loaded, in units of this loss scale."""
    _holder.state_loaded, _holder.loss_scale = True, scale


def lacks_state() -> bool:
    """Whether a checkpoint was loaded and what belongs to it was not."""
    return _holder.restored and not _holder.state_loaded


def say(text: str) -> None:
    """Print ``text`` on rank 0, once."""
    if text not in _holder.said and dist.get_rank() == 0:
        print(f"[hybridcomp] {text}", flush=True)
    _holder.said.add(text)
