"""Hold the block and the session of this process, for patched code that knows no engine.

Tensor-parallel layers, megatron-core and GPT-NeoX's mpu know no engine. For such code the process
holds one ``EngineSession``: the first attached engine's (``share_session``), or without an engine a
new session from the block of ``hybridcomp.install(config)`` or of the file that
``HYBRIDCOMP_CONFIG`` names.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

# This module's functions have the default group as a default argument: if it is first imported
# after init_process_group, as by DistributedDataParallel, they hold that group forever (see
# _let_go).
import torch.distributed.nn.functional  # noqa: F401

from hybridcomp.channels import Channels
from hybridcomp.config import BLOCK, SOURCE, CompressionConfig, load_config, read_source
from hybridcomp.config.error_messages import NOTHING, near_key
from hybridcomp.dimensions import ROWS
from hybridcomp.errors import ConfigError
from hybridcomp.job import drain_gloo, environment
from hybridcomp.job.agreement import tell
from hybridcomp.log import say_once
from hybridcomp.session.engine_session import EngineSession

#: environment variable that names the block of a process without an upstream config file
ENVIRONMENT = environment.CONFIG
#: upstream package -> function that returns the size of each of its groups; set by its patches
GROUP_SIZES: dict[str, Callable[[], Mapping[Any, int]]] = {}


@dataclass
class _Holder:
    """Block and session of this process."""

    config: CompressionConfig | None = None
    explicit: bool = False  # the block was set by a call, so the environment is ignored
    session: EngineSession | None = None
    lender: weakref.ref[Any] | None = None  # engine that lent the session
    settled: bool = False  # the ranks have agreed, with or without a block


_holder = _Holder()


@atexit.register
def _let_go() -> None:
    """Drop the session and thereby its process groups while the interpreter still runs.

    Groups that are still referenced keep their threads; these get time to release their last
    message.
    """
    _hold(_Holder())
    drain_gloo.let_go()


def _hold(holder: _Holder) -> None:
    """Replace the holder; close the old session unless a living engine will. No collective."""
    global _holder
    before, _holder = _holder, holder
    if before.session is not None and (before.lender is None or before.lender() is None):
        before.session.close()


def put_back() -> Callable[[], None]:
    """Return a function that restores this process's present block and session; no collective."""
    kept = replace(_holder)

    def back() -> None:
        if kept.session is None or kept.session is not _holder.session:
            _hold(kept)

    return back


def configure(config: Mapping[str, Any] | str | Path | CompressionConfig | None) -> None:
    """Set the block of this process; None clears it, and reads the environment again.

    ``config``: a CompressionConfig, a block, a dict with a block under "compression", or the path
    of a file with a block or such a dict. Closes the process's own session; takes effect with the
    next message. Raises ConfigError.
    """
    _hold(_Holder(config=parse(config), explicit=config is not None))
    say_once.forget()


def parse(
    config: Mapping[str, Any] | str | Path | CompressionConfig | None,
) -> CompressionConfig | None:
    """Parse the block from any of these forms; None if there is none. Raises ConfigError."""
    if config is None or isinstance(config, CompressionConfig):
        return config
    whole = read_source(config)
    if BLOCK in whole or near_key(whole, BLOCK) is not None:
        return load_config(whole)
    block = CompressionConfig.parse(whole)
    return block if block.enabled else None


def configured() -> CompressionConfig | None:
    """Return the block of this process, set by call or environment. Raises ConfigError."""
    if not _holder.explicit and (path := os.environ.get(ENVIRONMENT)):
        try:
            _holder.config = parse(path)
        except ConfigError as error:
            if error.key != SOURCE:
                raise
            raise ConfigError(ENVIRONMENT, error.found, error.todo) from None
    return _holder.config


def say_native(what: str, looked: str = "") -> None:
    """Tell the user that nothing of ``what`` is compressed, and where no block was found.

    ``looked``: the place in upstream's configuration where a block would be.
    """
    path = os.environ.get(ENVIRONMENT)
    if _holder.explicit:
        places = ["that of hybridcomp.install is not enabled"]
    elif path:
        places = [f"that of {ENVIRONMENT}={path} is not enabled"]
    else:
        places = ["hybridcomp.install was given none", f"{ENVIRONMENT} is not set"]
    looked_in = "; ".join([looked] * bool(looked) + places)
    say_once(f"no block found ({looked_in}): nothing of {what} is compressed")


def say_unused(block: CompressionConfig | None) -> None:
    """Tell the user that an engine's own ``block`` acts, and not another one of this process."""
    if configured() not in (None, block):
        whose = (
            "hybridcomp.install" if _holder.explicit else f"{ENVIRONMENT}={os.environ[ENVIRONMENT]}"
        )
        say_once(
            f"DeepSpeed's configuration has a block of its own: that of {whose} does nothing here"
        )


def use(channels: Channels | None) -> None:
    """Use existing ``channels``: the ranks have agreed on them, and their creator reports them."""
    session = None if channels is None else EngineSession(channels)
    _hold(_Holder(session=session, explicit=True, settled=True))
    say_once.forget()


def share_session(engine: Any, session: EngineSession) -> None:
    """Let the layers of this process send through ``engine``'s session; see ``forget_deleted``.

    Layers do not know their engine, so all of them use the first living engine's session. Raises
    ConfigError if a second engine's block sets other codecs for the layers' dimensions.
    """
    channels = session.channels
    first = shared_channels()
    if first is None:
        if _holder.session is not None:
            _holder.session.close()  # the engine reports from now on, possibly into the same file
        _holder.session, _holder.lender = session, weakref.ref(engine)
        _holder.settled = True
        say_once.forget()
        return
    # a preset sets all dimensions, so only explicit ones are compared
    asked = first.config.explicit | channels.config.explicit
    for name in (name for name, row in ROWS.items() if row.in_layers and name in asked):
        for way in ROWS[name].directions:
            mine = channels.policy.codecs.get((name, way))
            theirs = first.policy.codecs.get((name, way))
            if mine != theirs:
                raise ConfigError(
                    f"{BLOCK}.{name}",
                    mine or "none",
                    f"another engine of this process set {theirs or 'none'}, and layers cannot "
                    "tell whose they are; write the same in both blocks",
                )


def forget_deleted(ranks: Sequence[int] | None = None) -> None:
    """Lend no session of an engine that was deleted on any rank; a collective.

    Every engine calls it when it is attached. Until then layers send through the session of a
    deleted engine: ranks collect garbage at different times, and all must send alike. ``ranks``:
    global ranks of the new engine; None: all.
    """
    if shared_channels() is not None:
        gc.collect()  # engines hang in reference cycles
    lives = shared_channels() is not None
    if dist.is_initialized():
        said = tell({"lives": lives}, what="compression block", ranks=ranks)
        lives = all(rank["lives"] for rank in said)
    if not lives and _holder.lender is not None:
        configure(_holder.config)


def mark_no_block() -> None:
    """Record that the ranks agreed, when an engine was built, on having no block.

    Layers then do not ask the other ranks: in a pipeline, ranks reach their first message one after
    the other, each waiting for a neighbour, so a collective of all ranks would hang.
    """
    _holder.settled = True


def release(engine: Any) -> None:
    """Stop lending the session of ``engine``, which was destroyed but may still be referenced."""
    if _holder.lender is not None and _holder.lender() is engine:
        configure(_holder.config)


def shared_channels() -> Channels | None:
    """Return the channels that a living engine lent, else None."""
    if _holder.lender is None or _holder.lender() is None or _holder.session is None:
        return None
    return _holder.session.channels


def session() -> EngineSession | None:
    """Return the session that an engine lent, or the process's own; None without a block.

    The first call after torch.distributed is up begins the session: a collective through the
    rendezvous store, which every rank reaches without waiting for an upstream message.
    """
    if not _holder.settled and dist.is_initialized():
        _settle()
    return _holder.session


def own_session() -> EngineSession | None:
    """Return the process's own session, None if an engine has lent one."""
    mine = session()
    return None if _holder.lender is not None else mine


def serves_megatron() -> bool:
    """Return whether Megatron's groups exist, whose layers send through this process's session."""
    return bool(_layout())


def has_begun() -> bool:
    """Return whether a process without an engine already has a session; begins none."""
    return _holder.session is not None and _holder.lender is None


def current() -> Channels | None:
    """Return the channels of this process, None without a block; see ``session``."""
    here = session()
    return None if here is None else here.channels


def known() -> Channels | None:
    """Return ``current`` if this rank may have a block; else None, without asking other ranks.

    For layers that work without hybridcomp's patches, since unpatched ranks would not answer.
    """
    return None if _holder.session is None and configured() is None else current()


def _settle() -> None:
    """Begin the session of a process without an engine, as in a job on megatron-core."""
    _holder.settled = True
    config = configured()
    packages = ("megatron-core",)
    _holder.session = EngineSession.begin(config, packages=packages, layout=_layout)
    if config is None:
        say_native("this process's layers and data-parallel groups")
    if config is None or _holder.session is None:
        return
    if config.error_feedback("dp"):
        _holder.session.say(
            "dp: Megatron's checkpoints do not hold residuals; call hybridcomp.save_state(folder) "
            "where it saves and hybridcomp.load_state(folder) where it loads"
        )
    if config.zero.delta:
        _holder.session.say(
            "zero: Megatron's checkpoints do not hold what deltas are added to; the first gather "
            "after a restart is exact"
        )


def _layout() -> Mapping[str, int]:
    """Return the size of each group whose coordinates are part of Megatron's parameter names."""
    every: dict[str, int] = {}
    for package, sizes in GROUP_SIZES.items():
        if package in sys.modules:
            every.update(sizes())
    return {name: size for name, size in every.items() if name in ("tp", "pp", "ep")}


def save_state(folder: str | Path, loss_scale: float | None = None) -> None:
    if (mine := _session_for("save_state", "written")) is not None:
        mine.save(folder, loss_scale)


def load_state(folder: str | Path, loss_scale: float | None = None) -> None:
    if (mine := _session_for("load_state", "read")) is not None:
        mine.load(folder, loss_scale)


def _session_for(call: str, done: str) -> EngineSession | None:
    """Return the session; if its engine's checkpoints hold its state, say so and return None."""
    here = session()
    if here is None:
        todo = f"this process has no block, or torch.distributed is not up; do not call {call} here"
        raise ConfigError(BLOCK, NOTHING, todo)
    if here.kept_in:
        here.say(f"{call}: {here.kept_in} hold this already; nothing is {done}")
        return None
    return here
