"""Make sessions for models under torch's engines: read the block, and compare it over the ranks.

Making a session is a collective over the whole job where the block has two levels (``hierarchy``)
or measures (``when: auto``): every rank attaches the same models in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hybridcomp.channels import Channels
from hybridcomp.collectives.topology import Ranks, machines
from hybridcomp.config import BLOCK, CompressionConfig, describe
from hybridcomp.config.error_messages import NOTHING
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import ConfigError
from hybridcomp.job import peer_liveness
from hybridcomp.job.agreement import agree, versions
from hybridcomp.job.devices import device_name
from hybridcomp.log import say_once
from hybridcomp.patches.common import island_steps
from hybridcomp.patches.rules.planned import hold_to_machines, hold_to_plan
from hybridcomp.session import process
from hybridcomp.session.agreement import refuse_deepspeeds
from hybridcomp.session.engine_session import EngineSession
from hybridcomp.session.reporter import numbers
from hybridcomp.sync.islands import is_island

#: the engines' names in messages to the user
ENGINES = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard"}
#: the forms in which a user may give a block
Source = Mapping[str, Any] | str | Path | CompressionConfig

#: number of models that write to a ledger file, by its path
_writers: Counter[str] = Counter()


def read(source: Source | None) -> CompressionConfig | None:
    """Read the block of ``source``; None: that of ``hybridcomp.install`` or the environment.

    Returns None where there is no block, or one with ``"enabled": false``. Raises ConfigError.
    """
    block = process.configured() if source is None else process.parse(source)
    # a copy, since a dimension that one model cannot encode becomes native in the model's block
    return block.model_copy() if block is not None and block.enabled else None


def island_group(
    block: Mapping[str, Any] | str | Path | CompressionConfig | None = None,
) -> ProcessGroup:
    """Return the process group of this rank's island, for a model whose block has ``sync``.

    Build DistributedDataParallel or the mesh of fully_shard with it; DeepSpeed's engines use it
    automatically. Every rank calls it, after ``init_process_group``; a second call returns the same
    group. If each island is a separate job, the group is the whole job's. ``block``: as for
    ``attach``. Raises ConfigError if the block has no islands, or if the job cannot be cut into
    islands.
    """
    found, whole = read(block), dist.group.WORLD
    if found is not None and found.sync.jobs is not None and whole is not None:
        return whole
    islands = None if found is None else island_steps.islands_in(found)
    if islands is None:
        todo = 'the block has no "sync", and so no islands; add it'
        raise ConfigError(f"{BLOCK}.sync", NOTHING, todo)
    return islands.inside


def agree_on(block: CompressionConfig | None, kind: str, ranks: Ranks) -> None:
    """Compare the block and the versions over the ranks of one model.

    Raises AgreementError if they differ, ConfigError for keys that act only under DeepSpeed.

    If there is a block, the ranks then exchange host names, for errors about lost ranks.
    """
    refuse_deepspeeds(block)
    settings = {BLOCK: None} if block is None else block.flat()
    agree({**settings, "engine": kind, **versions()}, ranks=ranks)
    if block is None:
        which = "this model" if numbers() else "models"  # others may have a block
        process.say_native(f"{which} under {ENGINES[kind]}")
    else:
        # with islands, the ranks of all islands attach together
        peer_liveness.announce(None if is_island(tuple(ranks)) else ranks)


def session_of(
    block: CompressionConfig,
    device: torch.device,
    absent: Collection[Dimension],
    ranks: Ranks,
    undo: ExitStack,
) -> EngineSession:
    """Make the session of a model whose ranks have agreed on ``block``; describe it to the user.

    Further models of a process write their ledger into ``name.2.jsonl`` and so on. Raises
    ConfigError if ``block`` is from a plan for another number of ranks.

    Args:
        block: the block on which the ranks have agreed.
        device: device of the messages.
        absent: dimensions of which the model has no messages.
        ranks: global ranks of the model.
        undo: receives the callback that closes the session.
    """
    hold_to_plan(block, {"ranks": dist.get_world_size()})
    hold_to_machines(block, lambda: machines(device_name(device)))
    found = EngineSession(Channels(block), device, kept_in="torch.distributed.checkpoint")
    found.channels.leave_out(absent)
    say_once(*describe(block, absent))
    path = block.ledger.jsonl
    undo.callback(found.close)
    if path:
        _writers[path] += 1
        undo.callback(_writers.subtract, [path])
    found.open_reporter(_numbered(path, _writers[path]) if path else None, ranks)
    return found


def _numbered(path: str, number: int) -> Path:
    whole = Path(path)
    return whole if number == 1 else whole.with_name(f"{whole.stem}.{number}{whole.suffix}")
