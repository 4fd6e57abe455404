"""Implement ``hybridcomp.attach``, ``detach`` and ``stateful`` for models under FSDP2 or DDP."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn import Module, ParameterList
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.channels import Channels
from hybridcomp.collectives.topology import Ranks, ranks_of
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import NOTHING, Shown
from hybridcomp.dimensions import ROWS
from hybridcomp.errors import AgreementError, ConfigError, PeerError, SeamError
from hybridcomp.job import agreement
from hybridcomp.job.together import together
from hybridcomp.log import complain
from hybridcomp.log import say_once as say
from hybridcomp.patches.common import island_steps, publishing_steps
from hybridcomp.patches.torch import island_masters, torch_versions, weights
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.session import Source, read
from hybridcomp.patches.torch.state import claimed_saves
from hybridcomp.patches.torch.state.at_checkpoint import AtCheckpoint
from hybridcomp.patches.torch.state.stateful import SavedState
from hybridcomp.session import process
from hybridcomp.sync.islands import is_island

#: attribute of a model: its ``Attached``; None if ``attach`` found no block
ATTRIBUTE = "_hybridcomp_attached"
#: submodule of the wrapper that torch.compile returns
COMPILED = "_orig_mod"
_UNSEEN = object()
DETACH = "hybridcomp.detach"
#: seconds for which ``detach`` waits for a rank that does not call it; going on is harmless
SILENT_S = 5.0
#: models that attach left native without a block, held weakly
without_block: weakref.WeakSet[Module] = weakref.WeakSet()
#: modules whose ``load_state_dict`` is followed -> the ``Attached``, which references the module
_loads: weakref.WeakKeyDictionary[Module, weakref.ref[Attached]] = weakref.WeakKeyDictionary()
#: detached models, which ``auto_attach`` leaves native; held weakly
detached: weakref.WeakSet[Module] = weakref.WeakSet()
REPLICATE = (
    "the composable replicate keeps its DistributedDataParallel, and the passes of the model, to "
    "itself; wrap the model in DistributedDataParallel, or use fully_shard"
)


def attach(model: Module, source: Source | None = None) -> Attached | None:
    """Implement ``hybridcomp.attach``."""
    if not isinstance(model, Module):
        todo = "attach takes one model, under fully_shard or DistributedDataParallel"
        raise ConfigError(BLOCK, Shown(type(model).__name__), todo)
    model = unwrapped(model)
    known: Any = vars(model).get(ATTRIBUTE, _UNSEEN)
    if isinstance(known, SavedState):
        known = None  # of a pickled model, which sends natively like other copies
    if known is not _UNSEEN and (source is None or known is not None):
        if source is not None:
            todo = (
                "this model is attached already; hybridcomp.detach(model) before gives it another"
            )
            raise ConfigError(BLOCK, Shown("a second block"), todo)
        found: Attached | None = known
        return found
    if not dist.is_initialized():
        todo = "torch.distributed is not up; call attach after init_process_group"
        raise ConfigError(BLOCK, NOTHING, todo)
    undo, ranks = ExitStack(), _ranks(model)
    with together("hybridcomp.attach", undo.close, ranks=ranks):
        undo.callback(detached.discard, model)
        attached = _attach(model, source, undo)
        process.forget_deleted(ranks)
        if attached is not None:
            attached.ranks = ranks
            _start(model, attached)
    object.__setattr__(model, ATTRIBUTE, attached)
    detached.discard(model)
    if attached is None:
        without_block.add(model)
    return attached


def _ranks(model: Module) -> Ranks | None:
    """Return the ranks that attach ``model`` together; None: all ranks, or unknown ones."""
    ranks: Ranks = ()
    if isinstance(model, DistributedDataParallel):
        ranks = ranks_of(model.process_group)
    elif is_sharded(model):
        with suppress(ImportError):  # torch before 2.9
            ranks = island_masters.ranks_of_model(model)
    if not 0 < len(ranks) < dist.get_world_size() or is_island(tuple(ranks)):
        return None  # with islands, the ranks of all islands attach together
    return ranks


def _start(model: Module, attached: Attached) -> None:
    """Start the block's features besides the engine's messages."""
    attached.on_detach(functools.partial(_forget, model))
    in_layers = (name for name, row in ROWS.items() if row.in_layers)
    # tables would begin a session of the process's block, into the same ledger file
    is_own = process.configured() == attached.channels.config and not process.serves_megatron()
    if is_own or any(attached.channels[name].active for name in in_layers):
        # layers of hybridcomp.nn have no reference to an engine
        process.share_session(model, attached.session)
    _follow_loads(model, attached)
    _say_native_axes(model)
    _meet(model, attached)
    known = weakref.ref(model)
    publishing_steps.start(attached.session, lambda: weights.weights_of(_alive(known)))


def _follow_loads(model: Module, attached: Attached) -> None:
    """Notify ``attached`` of loaded weights: every loader calls ``load_state_dict``."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    _loads[inner] = weakref.ref(attached)
    attached.on_detach(inner.register_load_state_dict_post_hook(_loaded).remove)


def _loaded(module: Module, keys: object) -> None:
    """Record a load. A hook; at module level, so that a model with it can be pickled."""
    known = _loads.get(module)
    if known is not None and (attached := known()) is not None:
        attached.session.restored = True


def _say_native_axes(model: Module) -> None:
    """Print which messages of transformers' ``DistributedConfig`` have no seam."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    names = {"tp_size": "tensor", "ep_size": "expert", "pp_size": "pipeline"}
    found = [name for name in names if int(getattr(config, name, None) or 1) > 1]
    if found:
        words = " and ".join(f"{names[name]} parallelism ({name})" for name in found)
        say(f"{words} of transformers' DistributedConfig: its messages stay native and uncounted")


def _meet(model: Module, attached: Attached) -> None:
    """Start the meetings of the block's islands. Raises ConfigError if they cannot meet."""
    ranks, known = island_masters.ranks_of_model(model), weakref.ref(model)
    todo = island_masters.TODO[attached.kind]
    island_steps.start(
        attached.session, lambda: island_masters.masters_of(_alive(known)), ranks, todo
    )
    if attached.channels.config.sync.jobs is not None:
        claimed_saves.follow(attached)


def _alive(known: weakref.ref[Module]) -> Module:
    found = known()
    assert found is not None, "a model that steps is alive"
    return found


def unwrapped(model: Any) -> Any:
    """Return the model to attach, without the wrapper of torch.compile or a module around it.

    If a module contains just one DistributedDataParallel, or a root of ``fully_shard`` with all of
    its parameters, the inner one is returned.
    """
    while isinstance(model, Module) and COMPILED in model._modules:
        model = model._modules[COMPILED]
    if not isinstance(model, Module):
        return model
    inside: Sequence[Module] = _roots(model) if is_sharded(model) else _inside(model)
    return inside[0] if len(inside) == 1 else model


def _roots(model: Module) -> list[Module]:
    """Return the outermost modules under ``fully_shard``; none if they leave a parameter out."""
    from torch.distributed.fsdp import FSDPModule

    found: list[Module] = []
    inside: set[Module] = set()
    for module in model.modules():  # each one before its children
        if isinstance(module, FSDPModule) and module not in inside:
            found.append(module)
            inside |= set(module.modules())
    held = {parameter for root in found for parameter in root.parameters()}
    return found if held.issuperset(model.parameters()) else []


def _inside(model: Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def detach(model: Module) -> None:
    """Restore the native communication of a model under FSDP2 or DDP; drop its state.

    Every rank calls it between two steps. If some rank passes a model that was never attached, no
    rank detaches; if a rank does not call, the others wait SILENT_S seconds and then detach. The
    model may be attached again, with another block too. Residuals of error feedback are dropped,
    with a notice; call ``save_state`` before to keep them. Harmless when called twice. DDP's
    reducer cannot drop a hook: ours stays and averages natively.

    Args:
        model: the argument of ``attach``, or a model that was attached automatically.

    Raises ConfigError on a model that was never attached, and PeerError on the other ranks.
    """
    model = unwrapped(model)
    attached: Any = getattr(model, "__dict__", {}).get(ATTRIBUTE, _UNSEEN)
    is_known = attached is not _UNSEEN or (isinstance(model, Module) and model in detached)
    if is_known and not isinstance(attached, Attached):
        return  # native already
    wrong = {} if is_known else {"found": type(model).__name__}
    ranks = attached.ranks if is_known else _only_ranks()
    told: list[dict[str, str]] = []
    if dist.is_initialized():
        try:
            told = agreement.tell(wrong, what=DETACH, ranks=ranks, seconds=SILENT_S)
        except PeerError:
            pass  # a rank has ended
        except AgreementError as error:
            words = str(error).partition(";")[0]
            complain(f"{words}; this rank sends natively from now on, as they must")
    if not is_known:
        raise _not_attached(wrong["found"])
    for place, other in enumerate(told):
        if other:
            rank = attached.ranks[place] if attached.ranks is not None else place
            words = f"{DETACH}: rank {rank}: {_not_attached(other['found'])}"
            raise PeerError.naming_rank(words)
    attached.detach()


def _not_attached(kind: str) -> ConfigError:
    todo = (
        "expected a model that is attached: the root of fully_shard, or the "
        "DistributedDataParallel; engines of DeepSpeed are let go by engine.destroy()"
    )
    return ConfigError(DETACH, Shown(kind), todo)


def _only_ranks() -> Ranks | None:
    """Return the ranks of the only model attached on this rank; None if it has several."""
    alive = [attached for known in _loads.values() if (attached := known()) is not None]
    ranks = {attached.ranks for attached in alive if not attached.is_detached}
    return ranks.pop() if len(ranks) == 1 else None


def channels_of_model(model: object) -> Channels | None:
    """Return the channels of an attached model, None where it is not attached."""
    attached = getattr(unwrapped(model), "__dict__", {}).get(ATTRIBUTE)
    return attached.channels if isinstance(attached, Attached) else None


def retry_pending() -> None:
    """Retry models that were skipped for lack of a block."""
    for model in list(without_block):
        vars(model).pop(ATTRIBUTE, None)
    without_block.clear()


def is_served(model: Module) -> bool:
    """Return whether ``model``, under ``fully_shard``, is part of an attached model."""
    if not is_sharded(model):
        return False
    from hybridcomp.patches.torch.fsdp2 import fsdp2

    return fsdp2.is_served(model)


def _forget(model: Module) -> None:
    vars(model).pop(ATTRIBUTE, None)
    detached.add(model)
    process.release(model)


def _attach(model: Module, source: Source | None, undo: ExitStack) -> Attached | None:
    if isinstance(model, DistributedDataParallel):
        if isinstance(model.module, ParameterList):  # without forward: only ``replicate`` does
            _refuse_replicate(source)
            return None
        from hybridcomp.patches.torch.ddp import ddp

        return ddp.attach(model, source, undo)
    if is_sharded(model):
        return _attach_sharded(model, source, undo)
    from torch.distributed._composable.replicate import DDP
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, DDP):
        _refuse_replicate(source)
        return None
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        todo = "FSDP1 has no slots for communication; shard with torch's fully_shard (FSDP2)"
        raise ConfigError(BLOCK, Shown("FullyShardedDataParallel (FSDP1)"), todo)
    if getattr(getattr(model, "config", None), "distributed_config", None) is not None:
        todo = (
            "nothing that hybridcomp encodes is sent: transformers' tensor, expert and pipeline "
            "parallelism have no seam; set fsdp_size above 1, which shards with fully_shard"
        )
        raise ConfigError(BLOCK, Shown("a DistributedConfig without FSDP"), todo)
    if several := len(_inside(model)):
        todo = "attach takes one model; call it for each DistributedDataParallel, in one order"
        raise ConfigError(BLOCK, Shown(f"{type(model).__name__} around {several} of them"), todo)
    todo = (
        "expected a model under fully_shard or DistributedDataParallel; call attach after one of "
        "them. DeepSpeed and Megatron take hybridcomp.install"
    )
    raise ConfigError(BLOCK, Shown(type(model).__name__), todo)


def _refuse_replicate(source: Source | None) -> None:
    block = read(source)
    if block is None:
        return
    if block.on_unsupported != "native":
        raise ConfigError(BLOCK, Shown("replicate"), REPLICATE)
    say(f"replicate stays native: {REPLICATE}")


def is_sharded(model: Module) -> bool:
    """Return whether ``fully_shard`` was applied to ``model`` or to a part of it."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _attach_sharded(model: Module, source: Source | None, undo: ExitStack) -> Attached | None:
    """Check torch, then attach: earlier versions lack modules that ``fsdp2`` imports."""
    try:
        torch_versions.check("fsdp2", torch_versions.FSDP2)
    except SeamError:
        if read(source) is None:
            return None
        raise
    from hybridcomp.patches.torch.fsdp2 import fsdp2

    return fsdp2.attach(model, source, undo)


def stateful(model: Module, checkpoint: str | Path | None = None) -> Any:
    """Return a model's ``Stateful``, which ``torch.distributed.checkpoint`` saves and loads.

    ``dcp.save({"hybridcomp": hybridcomp.stateful(model), ...}, checkpoint_id=folder)``

    Args:
        model: a model under FSDP2 or DDP; it is attached if it was not yet.
        checkpoint: the folder that is about to be loaded. Needed if another number of ranks
            wrote it, or if it may hold no state of hybridcomp.

    Raises ConfigError where there is no block.
    """
    attached = attach(model)
    if attached is None:
        todo = "there is no block, and so no state; leave it out of the checkpoint"
        raise ConfigError(BLOCK, NOTHING, todo)
    return attached if checkpoint is None else AtCheckpoint(attached, checkpoint)


def rows() -> Iterable[tuple[str, str, str]]:
    """Return the rows of the support matrix: dimension, messages, versions."""
    from hybridcomp.patches.torch.ddp import ddp

    modules: list[Any] = [ddp]
    with suppress(ImportError):  # torch before 2.9
        from hybridcomp.patches.torch.fsdp2 import fsdp2

        modules.append(fsdp2)
    for module in modules:
        what = (module.__doc__ or "").partition(", dimension")[0]
        for name in module.COVERS:
            yield name, " ".join(what.split()), module.REQUIREMENT
