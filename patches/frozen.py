"""Implement ``hybridcomp.freeze`` and ``thaw``: agree on the parameters, find the engine's adapter.

``freeze`` stores a ``Frozen`` as an attribute of the engine; jobs that freeze nothing do not import
this module. Checkpoints of hybridcomp hold the ``state`` of the ``Frozen``; a job that loads a
checkpoint freezes the same parameters again (``restore``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from hybridcomp.channels import NAME
from hybridcomp.config.error_messages import NOTHING, Shown
from hybridcomp.elastic.freezing import What, asked, chosen, nearest
from hybridcomp.errors import AgreementError, ConfigError
from hybridcomp.job import error_exit
from hybridcomp.job.agreement import tell
from hybridcomp.job.together import together
from hybridcomp.log import say
from hybridcomp.patches.common.engine_packages import ENGINES, is_megatron, packages_of
from hybridcomp.patches.common.frozen_layers import ATTRIBUTE, Adapter, Frozen, frozen_of

KEY = {False: "hybridcomp.freeze", True: "hybridcomp.thaw"}
#: under FSDP2, prefix of the names of residuals that belong to sums between replicas
_BETWEEN = "between replicas: "


def freeze(engine: Any, what: What) -> tuple[str, ...]:
    """Stop training some parameters, from the next step on; every rank calls it between two steps.

    Frozen parameters do not change, at any stage of ZeRO; their gradients are neither computed nor
    sent. Their residuals are dropped, and the norm of these is printed; optimizer state stays.

    Args:
        engine: an engine of DeepSpeed, a model under DistributedDataParallel, or the root of
            fully_shard.
        what: the name of a parameter or module, such as "blocks.3", a module or parameter of the
            model, or several of these. In a pipeline all ranks name the parts of all stages.

    Returns the names of the newly frozen parameters on this rank. Raises, on every rank and with
    nothing changed: ConfigError for an unknown name, for parameters that are frozen already, if no
    parameter would train any more, or if the engine cannot freeze; AgreementError if ranks name
    different parameters or a rank does not call.
    """
    return _change(engine, what, trains=False)


def thaw(engine: Any, what: What | None = None) -> tuple[str, ...]:
    """Train parameters again that ``freeze`` has frozen; every rank calls it between two steps.

    Args:
        engine: the argument of ``freeze``.
        what: as for ``freeze``; None: all frozen parameters.

    Returns the names of the thawed parameters on this rank. Raises as ``freeze`` does, and
    ConfigError for parameters that ``freeze`` has not frozen.
    """
    return _change(engine, what, trains=True)


def restore(engine: Any, state: Mapping[str, Any]) -> None:
    """Freeze the parameters that were frozen in the loaded checkpoint; every rank calls it."""
    before = frozen_of(unwrapped(engine))
    if before is not None and before.everywhere:
        thaw(engine)
    if since := state.get("since"):
        freeze(engine, list(since))
    frozen = frozen_of(unwrapped(engine))
    if frozen is not None:
        frozen.everywhere.update(since or {})
        frozen.missed.clear()
        frozen.missed.update(state.get("missed", {}))


def _change(engine: Any, what: What | None, trains: bool) -> tuple[str, ...]:
    error_exit.install()
    key, engine = KEY[trains], unwrapped(engine)
    adapter = adapter_of(engine, key)
    frozen = frozen_of(engine) or Frozen()
    undo = ExitStack()
    with together(key, undo.close, ranks=adapter.ranks):
        names, said = _agreed(adapter, frozen, what, trains)
        undo.callback(adapter.apply, frozen)  # undone last, after everything else
        undo.callback(vars(frozen).update, copy.deepcopy(vars(frozen)))
        every = dict.fromkeys(name for statement in said for name in statement["names"])
        frozen.change(every, trains, adapter.steps())
        for name in names:
            parameter = adapter.named[name]
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(trains)
            parameter.grad = None
        parts = range(1 + max(statement["part"] for statement in said))
        frozen.wholly = [
            not any(statement["left"] for statement in said if statement["part"] == part)
            for part in parts
        ]
        adapter.apply(frozen)
    vars(engine)[ATTRIBUTE] = frozen
    lost = 0.0
    if adapter.channels is not None:
        adapter.channels.frozen = frozen.state
        if not trains and adapter.channels["dp"].error_feedback:
            lost = _drop_residuals(adapter, names)
    say(_told(len(every), trains, lost))
    return tuple(names)


def _drop_residuals(adapter: Adapter, names: Iterable[str]) -> float:
    """Drop the residuals of frozen parameters; return their norm over all ranks."""
    assert adapter.channels is not None, "attached"
    own = {getattr(adapter.named[name], NAME, name) for name in names}
    lost = adapter.channels.residuals.forget(lambda name: name.removeprefix(_BETWEEN) in own)
    said = tell({"lost": lost}, what=KEY[False], ranks=adapter.ranks)
    return math.hypot(*(statement["lost"] for statement in said))


def _told(count: int, trains: bool, lost: float) -> str:
    if trains:
        return f"thaw: {count} parameters train again"
    dropped = f"; what error feedback held back of them, of norm {lost:.3g}, is dropped"
    return f"freeze: {count} parameters train no more{dropped if lost else ''}"


def _agreed(
    adapter: Adapter, frozen: Frozen, what: What | None, trains: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return this rank's parameters that ``what`` names, and what all ranks named.

    Raises the same error on all ranks: ConfigError or AgreementError, as ``freeze`` does.
    """
    key, named = KEY[trains], adapter.named
    given = list(frozen.everywhere) if what is None else asked(what, named, key)
    names, unknown = chosen(given, named)
    if trains:
        names = [name for name in names if name in frozen.everywhere]
    else:  # skip parameters that never trained, such as base weights under adapters
        names = [n for n in names if named[n].requires_grad or n in frozen.everywhere]
    meant = set(names)
    left = sum(trains if n in meant else p.requires_grad for n, p in named.items())
    said = tell(
        {
            "call": key, "part": adapter.part, "names": names, "left": left,
            "unknown": {} if what is None else {name: nearest(name, named) for name in unknown},
            "open": adapter.is_open(), "refused": adapter.refused(),
        },
        what=key, ranks=adapter.ranks,
    )  # fmt: skip
    _check(said, frozen, key, trains)
    return names, said


def _check(said: Sequence[Mapping[str, Any]], frozen: Frozen, key: str, trains: bool) -> None:
    for place, statement in enumerate(said):
        first = next(n for n, other in enumerate(said) if other["part"] == statement["part"])
        for name in ("call", "names"):
            here, there = statement[name], said[first][name]
            if here != there:
                odd = [sorted({*a} - {*b})[:2] if name == "names" else a
                       for a, b in ((here, there), (there, here))]  # fmt: skip
                raise AgreementError(
                    f"{key}: rank {place} asks for other {name} than rank {first} ({odd[0]} "
                    f"against {odd[1]}); every rank has to make the same call"
                )
    for statement in said:
        if statement["refused"]:
            raise ConfigError(key, Shown(statement["refused"][0]), statement["refused"][1])
    for name in said[0]["unknown"]:
        if all(name in statement["unknown"] for statement in said):
            near = next(filter(None, (statement["unknown"][name] for statement in said)), "")
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(key, name, f"the model has no parameter or module of this name{hint}")
    names = [name for statement in said for name in statement["names"]]
    if not names:
        kind = "is frozen by hybridcomp.freeze" if trains else "trains"
        raise ConfigError(key, NOTHING, f"expected at least one parameter that {kind}")
    twice = [] if trains else [name for name in names if name in frozen.everywhere]
    if twice:
        raise ConfigError(key, twice[0], "is frozen already; name what is not, or thaw it before")
    if any(statement["open"] for statement in said):
        todo = "call it between two steps: behind step() and before the next forward pass"
        raise ConfigError(key, Shown("a step that has begun"), todo)
    if not any(statement["left"] for statement in said):
        raise ConfigError(key, Shown("all that trains"), "leave something to train")


def unwrapped(engine: Any) -> Any:
    """Return the engine without the wrapper of torch.compile."""
    from hybridcomp.patches.torch.attach import unwrapped as found

    return found(engine)


def adapter_of(engine: Any, key: str) -> Adapter:
    """Return the adapter of an engine. Raises ConfigError where it has none."""
    if is_megatron(engine):
        todo = (
            "its buffers hold the parameters that required gradients when the model was wrapped, "
            "and its optimizers go on moving these; save, set requires_grad_(False) before the "
            "model is wrapped, and load"
        )
        raise ConfigError(key, Shown("megatron-core"), todo)
    if "deepspeed" in packages_of(engine):
        from hybridcomp.patches.ds.freezing import EngineLayers

        return EngineLayers(engine)
    from hybridcomp.patches.torch import weights
    from hybridcomp.patches.torch.freezing import ModelLayers

    if weights.is_engine(engine):
        return ModelLayers(engine)
    raise ConfigError(key, Shown(type(engine).__name__), ENGINES)
