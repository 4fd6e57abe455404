"""List the ranges of weights that this rank holds under megatron-core, for publishing.

Megatron's own ``sharded_state_dict`` gives the global name, shape and offset of every part, with
layers numbered over all pipeline stages. Only parameters are taken: buffers are no weights.

Where gathers of the distributed optimizer overlap the next forward pass, the weights are gathered
before they are read, as Megatron does before it saves.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.collectives.topology import Ranks
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common import island_steps, publishing_steps
from hybridcomp.patches.common.table_weights import with_tables
from hybridcomp.patches.common.unchanged import KnownParameters, changed
from hybridcomp.patches.mcore.hugging_face_names import EMBEDDING, HuggingFaceNames
from hybridcomp.patches.mcore.weight_parts import WeightPart
from hybridcomp.publishing import EngineWeights, Held, stretch_of_block, unless_refused
from hybridcomp.session import process
from hybridcomp.session.engine_session import EngineSession

KEY = "publish"
#: metadata that makes Megatron name one tensor per layer, with the layer's number
METADATA = {"non_homogeneous_layers": True}
#: the wrapped chunks of a session, in the order in which they were made
_wrapped: weakref.WeakKeyDictionary[EngineSession, list[weakref.ref[Any]]] = (
    weakref.WeakKeyDictionary()
)


def is_engine(engine: Any) -> bool:
    """Return whether ``engine`` is megatron-core's DistributedDataParallel, or a list of them."""
    chunks = engine if isinstance(engine, (list, tuple)) else [engine]
    return bool(chunks) and all(
        any(cls.__module__.startswith("megatron.core.distributed") for cls in type(chunk).__mro__)
        for chunk in chunks
    )


def weights_of(engine: Any) -> EngineWeights:
    """Return the weights of a wrapped model, or of the chunks of a virtual pipeline.

    Raises ConfigError if reading the weights would change the training. If a rank cannot name or
    cut its weights, ``refused`` says so.
    """
    chunks: Sequence[Any] = engine if isinstance(engine, (list, tuple)) else [engine]
    _check(chunks)
    return unless_refused(functools.partial(_of_chunks, chunks), _ranks())


def _ranks() -> Ranks:
    """Return the ranks that together hold the model: with islands, only this rank's island."""
    session = process.own_session()
    if session is None:
        return tuple(range(dist.get_world_size()))
    return island_steps.ranks_in(session.channels.config)


def _of_chunks(chunks: Sequence[Any]) -> EngineWeights:
    parts = []
    for chunk in chunks:
        parts += (found := list(_parts(chunk)))
        _check_all_there(chunk.module, found)
    renamed = functools.partial(_hugging_face, chunks, parts)
    later = functools.partial(unless_refused, renamed, _ranks())
    weights = _as_they_are(chunks, parts, {}, later)
    return with_tables(weights, *(chunk.module for chunk in chunks))


def _hugging_face(chunks: Sequence[Any], parts: Sequence[WeightPart]) -> EngineWeights:
    """Return the weights under Hugging Face's names. Raises ConfigError on unknown models."""
    module = chunks[0]
    while hasattr(module, "module"):
        module = module.module
    names = HuggingFaceNames.of(module)
    aliases = {}
    if getattr(module, "share_embeddings_and_output_weights", False):
        aliases = {"lm_head.weight": f"{names.family.outside[EMBEDDING]}.weight"}
    found = [one for part in parts for one in names.translate(part)]
    return _as_they_are(chunks, found, aliases, None)


def _as_they_are(
    chunks: Sequence[Any],
    parts: Sequence[WeightPart],
    aliases: dict[str, str],
    hugging_face: Callable[[], EngineWeights] | None,
) -> EngineWeights:
    shapes, dtypes, held = {}, {}, []
    for part in parts:
        stretch = stretch_of_block(part.name, part.shape, part.offset, part.local)
        if stretch is None:
            shown = Shown(f"{part.name} {part.shape} of which {part.local} is here")
            raise ConfigError(KEY, shown, "its values on a rank are no evenly spaced rows")
        shapes[part.name], dtypes[part.name] = part.shape, part.values.dtype
        held.append(Held(stretch, part.values.detach))
    return EngineWeights(
        shapes, dtypes, held, _ranks(), aliases,
        functools.partial(_gather, chunks), _unchanged(chunks, parts), hugging_face,
    )  # fmt: skip


def _unchanged(chunks: Sequence[Any], parts: Sequence[WeightPart]) -> Callable[[], None]:
    """Return a function that raises PublishError if the model's parameters have moved in memory."""
    known = [KnownParameters(chunk.module) for chunk in chunks]

    def check() -> None:
        for one in known:
            one()
        memory = {
            parameter.untyped_storage().data_ptr()
            for chunk in chunks for parameter in chunk.module.parameters()
        }  # fmt: skip
        for part in parts:
            if part.values.untyped_storage().data_ptr() not in memory:
                raise changed(part.name, "its values are elsewhere than they were")

    return check


def note(session: EngineSession, wrapper: Any) -> None:
    """Publish the weights of ``wrapper``, whose parameters have names, if the block asks for it."""
    known = _wrapped.setdefault(session, [])
    if not known:
        publishing_steps.start(session, functools.partial(_of_living, known))
    known.append(weakref.ref(wrapper))


def _of_living(known: Sequence[weakref.ref[Any]]) -> EngineWeights:
    gc.collect()  # a deleted chunk may remain in a reference cycle, on some ranks
    return weights_of([found for one in known if (found := one()) is not None])


def _parts(chunk: Any) -> Iterator[WeightPart]:
    """Yield every part of a parameter on this rank, under the name of Megatron's checkpoints."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    found = chunk.module.sharded_state_dict(metadata=dict(METADATA))
    apply_factories(found)
    memory = {p.untyped_storage().data_ptr() for p in chunk.module.parameters()}
    for part in _leaves(found):
        if not isinstance(part, ShardedTensor) or part.data is None:
            continue
        values = part.data.detach()
        if values.untyped_storage().data_ptr() not in memory:
            continue
        local = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        shape, offset = tuple(part.global_shape), tuple(part.global_offset)
        yield WeightPart(part.key, shape, offset, local, values)


def _leaves(found: Any) -> Iterator[Any]:
    if isinstance(found, dict):
        for value in found.values():
            yield from _leaves(value)
    elif isinstance(found, list):
        for value in found:
            yield from _leaves(value)
    else:
        yield found


def _check_all_there(module: Any, parts: Sequence[WeightPart]) -> None:
    """Refuse parameters whose values ``parts`` lacks, since checkpoints store them reordered."""
    found = {(part.values.data_ptr(), part.values.numel()) for part in parts}
    for name, parameter in module.named_parameters():
        begin, end = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
        if sum(numel for at, numel in found if begin <= at < end) < parameter.numel():
            todo = (
                "its values are not in sharded_state_dict as they are in memory; with "
                "moe_use_legacy_grouped_gemm, leave that out"
            )
            raise ConfigError(KEY, Shown(f"{name} {tuple(parameter.shape)}"), todo)


def _overlaps(chunk: Any) -> bool:
    config = chunk.ddp_config
    return bool(config.use_distributed_optimizer and config.overlap_param_gather)


def _check(chunks: Sequence[Any]) -> None:
    """Refuse ``delta`` with overlapped gathers: a gather before reading would add deltas twice."""
    channels = process.known()
    if channels is not None and channels["zero"].delta and any(map(_overlaps, chunks)):
        todo = (
            "weights are gathered before they are read, and deltas would be added twice; turn off "
            'overlap_param_gather or "delta"'
        )
        raise ConfigError(KEY, Shown('overlap_param_gather beside "zero": {"delta": true}'), todo)


@torch.no_grad()
def _gather(chunks: Sequence[Any]) -> None:
    """Gather the parameters now that upstream would gather during the next forward pass."""
    for chunk in chunks:
        if _overlaps(chunk):
            chunk.start_param_sync(force_sync=True)
