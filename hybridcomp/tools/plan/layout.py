"""Arrange a job's ranks: its parallel degrees, its groups, and the layers of each stage.

Ranks are numbered as Megatron and DeepSpeed's ``PipeModelDataParallelTopology`` do it: tensor
innermost, then context, then data, pipeline outermost. Expert parallelism lies inside the data
dimension, as it does in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hybridcomp.errors import HybridcompError
from hybridcomp.escaping import one_line

#: the process groups of a layout
Group = Literal["tensor", "row", "column", "context", "data", "expert", "pipeline", "replicas"]
#: context parallelism: DeepSpeed's Ulysses (all-to-all), or a ring (sends), as Megatron and
#: hybridcomp.nn have it
ContextWay = Literal["ulysses", "ring"]
#: fields that are 1 or more
DEGREES = ("tensor", "stages", "virtual", "data", "expert", "context", "micro_batch",
           "accumulation", "mesh", "hpz", "shards")  # fmt: skip
#: keys of ``to_json`` that are computed from the fields
DERIVED = ("world_size", "pipeline")
#: fields that plans of earlier versions lack: written only where they differ from their defaults
LATER = ("mesh", "slices", "hpz", "copy", "frozen", "accumulate", "ratio", "sub_group", "drive",
         "knobs", "shards", "stays")  # fmt: skip
#: a node's secondary copy: DeepSpeed's, dropped after each step, or one updated by encoded steps
Copy = Literal["native", "exact", "bits8"]
#: where frozen weights are between their uses at ZeRO 3: sharded, or encoded on every rank
Frozen = Literal["gathered", "device"]
#: where the gradients of micro-batches are summed at ZeRO 2 and 3 (``dp.accumulate``)
Sums = Literal["native", "node"]


@dataclass(frozen=True)
class Layout:
    """One way to place a model on ranks. Raises HybridcompError where the degrees contradict.

    tensor: ranks that cut each layer. sequence: Megatron's sequence parallelism over them.
    stages, virtual: pipeline stages, and chunks of the model that each of them holds.
    cuts: layers of every chunk in the order of the model (``stages * virtual`` numbers); a rank of
        stage s holds chunks s, s + stages, ...
    data: replicas of the model, each with other samples. expert: number of replicas over which the
        experts of a layer are spread. context: ranks that cut each sample.
    zero_stage: 0 to 3; of Megatron's distributed optimizer 1.
    micro_batch: samples of one forward pass of a replica. accumulation: such passes in a step.
    mesh: ranks on a side of the mesh that cuts layers and activations (hybridcomp.nn.tp2d), in
        place of ``tensor``; its ranks are numbered where tensor ranks are, row by row.
    slices: tokens of each slice of a pipeline over token slices (hybridcomp.nn.slices); empty: a
        pipeline over micro-batches.
    recompute: segments ``[start, stop)`` of layers that keep only their input for backward.
    nodes: layers of every stage, for a model that is no chain.
    offload: optimizer states are on the host. hierarchy: whether dp and zero send on two levels,
        inside and between nodes; a pair (ranks of a node, nodes of a site) stands for three levels.
    hpz: ranks over which a node shards its secondary copy (``zero_hpz_partition_size``, ZeRO 3);
        1: no copy. copy: kind of the secondary copy (``"zero": {"secondary": ..}``).
    frozen: ``"device"``: ranks gather frozen weights in the first step only and keep them encoded
        (``"zero": {"frozen": ..}``, ZeRO 3 without a copy).
    accumulate: ``"node"``: gradients are summed inside nodes, and only the sums cross nodes.
    ratio: fraction of the optimizer's sub-groups that the host steps (ZeRO 3, ``offload``).
    sub_group: values of a sub-group on a rank (``sub_group_size``); 0: DeepSpeed's default.
    drive: fraction of the optimizer's states in files, the rest in host memory (``ratio`` 1).
    knobs: ZeRO 3's prefetch_bucket_size, max_live_parameters and max_reuse_distance; empty:
        DeepSpeed's defaults.
    shards: consecutive ranks over which ``fully_shard`` shards one replica of the model (HSDP);
        1: all ranks shard one replica. stays: gathered parameters stay until backward
        (``reshard_after_forward=False``).
    """

    tensor: int = 1
    sequence: bool = False
    stages: int = 1
    virtual: int = 1
    cuts: tuple[int, ...] = ()
    data: int = 1
    expert: int = 1
    context: int = 1
    context_way: ContextWay = "ulysses"
    zero_stage: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    recompute: tuple[tuple[int, int], ...] = ()
    offload: bool = False
    hierarchy: bool | tuple[int, int] = True
    nodes: tuple[tuple[int, ...], ...] = ()
    mesh: int = 1
    slices: tuple[int, ...] = ()
    hpz: int = 1
    copy: Copy = "native"
    frozen: Frozen = "gathered"
    accumulate: Sums = "native"
    ratio: float = 1.0
    sub_group: int = 0
    drive: float = 0.0
    knobs: tuple[int, ...] = ()
    shards: int = 1
    stays: bool = False

    def __post_init__(self) -> None:
        """Refuse degrees below 1 and fields that contradict each other."""
        for name in DEGREES:
            if getattr(self, name) < 1:
                raise HybridcompError(f"layout: {name} {getattr(self, name)}; expected 1 or more")
        if self.zero_stage not in (0, 1, 2, 3):
            raise HybridcompError(f"layout: zero_stage {self.zero_stage}; expected 0 to 3")
        known = get_args(Copy)
        if self.copy not in known or (self.hpz == 1 and self.copy != "native"):
            raise HybridcompError(
                f"layout: copy {self.copy!r} over {self.hpz} ranks; expected one of "
                f"{', '.join(known)}, and hpz above 1 for any but native"
            )
        if self.hpz > 1 and (self.zero_stage != 3 or self.size("replicas") % self.hpz):
            raise HybridcompError(
                f"layout: hpz {self.hpz} at ZeRO {self.zero_stage}; expected ZeRO 3, and a divisor "
                f"of the {self.size('replicas')} replicas"
            )
        alone = self.zero_stage == 3 and self.hpz == 1
        if (self.shards > 1 or self.stays) and (not alone or self.data % self.shards):
            raise HybridcompError(
                f"layout: shards {self.shards}, stays {self.stays} at ZeRO {self.zero_stage}; "
                f"expected ZeRO 3, no secondary copy, and a divisor of the {self.data} replicas"
            )
        sharded = alone and self.shards == 1
        if self.frozen not in get_args(Frozen) or (self.frozen == "device" and not sharded):
            raise HybridcompError(
                f"layout: frozen {self.frozen!r} at ZeRO {self.zero_stage}; expected gathered, or "
                "device with ZeRO 3 and no secondary copy"
            )
        several = self.zero_stage >= 2 and self.accumulation > 1
        if self.accumulate not in get_args(Sums) or (self.accumulate == "node" and not several):
            raise HybridcompError(
                f"layout: accumulate {self.accumulate!r} at ZeRO {self.zero_stage} and "
                f"{self.accumulation} micro-batches; expected native, or node with ZeRO 2 or 3 and "
                "several of them"
            )
        if not 0 <= self.ratio <= 1 or (
            self.ratio < 1 and (self.zero_stage, self.offload) != (3, True)
        ):
            raise HybridcompError(
                f"layout: ratio {self.ratio} at ZeRO {self.zero_stage}; expected 0 to 1, and below "
                "1 at ZeRO 3 with offload only"
            )
        if self.drive and not (self.offload and self.zero_stage == self.ratio * 3 == 3):
            raise HybridcompError(
                f"layout: drive {self.drive} at ZeRO {self.zero_stage}; expected 0, or ZeRO 3 with "
                "offload and ratio 1"
            )
        if self.knobs and (len(self.knobs) != 3 or self.zero_stage != 3 or self.hpz > 1):
            raise HybridcompError(
                f"layout: knobs {self.knobs} at ZeRO {self.zero_stage}; expected three numbers, at "
                "ZeRO 3 and without a secondary copy"
            )
        if self.data % self.expert:
            raise HybridcompError(
                f"layout: expert {self.expert}; expected a divisor of the {self.data} replicas"
            )
        chunks = self.stages * self.virtual
        if self.cuts and (len(self.cuts) != chunks or min(self.cuts) < 0):
            raise HybridcompError(
                f"layout: cuts {self.cuts}; expected {chunks} numbers of layers, one a chunk"
            )
        if self.mesh > 1 and self.tensor > 1:
            raise HybridcompError(
                f"layout: tensor {self.tensor} and mesh {self.mesh}; expected one of them to be 1"
            )
        few = len(self.slices) == 1 or self.stages < 2 or self.virtual > 1
        if self.slices and (few or min(self.slices) < 1):
            raise HybridcompError(
                f"layout: slices {self.slices} in {self.stages} stages; expected several slices of "
                "a token or more, in 2 stages or more and no virtual ones"
            )
        if self.context_way not in get_args(ContextWay):
            raise HybridcompError(f"layout: context_way {self.context_way!r}; expected ulysses "
                                  "or ring")  # fmt: skip

    @property
    def levels(self) -> int:
        """Number of levels on which dp and zero send, if their group spans that many."""
        return 3 if isinstance(self.hierarchy, tuple) else 1 + self.hierarchy

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.ranks_per_stage * self.stages

    @property
    def innermost(self) -> int:
        """Number of ranks over which each layer is cut; these ranks are consecutive."""
        return self.tensor * self.mesh**2

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of one pipeline stage; these ranks are consecutive."""
        return self.innermost * self.context * self.data

    @property
    def owners(self) -> int:
        """Number of ranks over which ZeRO or FSDP2 shards all that its stage shards."""
        return self.shards if self.shards > 1 else self.size("replicas")

    @property
    def sums_ours(self) -> bool:
        """Return whether hybridcomp sums micro-batches in nodes; an HSDP mesh does so itself."""
        return self.accumulate == "node" and self.shards == 1

    @property
    def is_uncut(self) -> bool:
        """Return whether every rank computes the whole model: replicas alone."""
        return self.innermost * self.context * self.stages * self.expert == 1

    @property
    def passes(self) -> int:
        """Forward passes of a stage in a step: of micro-batches, or of their slices."""
        return self.accumulation * self.slice_count

    @property
    def slice_count(self) -> int:
        """Slices of a sequence that pass through the pipeline one by one; 1: it is not sliced."""
        return max(1, len(self.slices))

    @property
    def samples(self) -> int:
        """Samples of one optimizer step, of all replicas."""
        return self.data * self.micro_batch * self.accumulation

    def size(self, group: Group) -> int:
        """Return the size of a group; ``replicas`` have the same weights (data x context)."""
        return _SIZES[group](self)

    def stride(self, group: Group) -> int:
        """Return the distance between the numbers of neighbouring ranks in a group."""
        return _STRIDES[group](self)

    def members(self, group: Group, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that ``rank`` is in, ascending."""
        stride, size = self.stride(group), self.size(group)
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + stride * size, stride))

    def chunks(self, stage: int) -> list[tuple[int, ...]]:
        """Return the layers that ``stage`` holds, for each of its virtual stages."""
        if self.nodes:
            return [self.nodes[stage]]
        stops, total = [], 0
        for count in self.cuts:
            total += count
            stops.append(total)
        numbers = range(stage, self.stages * self.virtual, self.stages)
        return [tuple(range(stops[n] - self.cuts[n], stops[n])) for n in numbers]

    @property
    def recomputed(self) -> frozenset[int]:
        """The layers that run forward a second time."""
        return frozenset(layer for start, stop in self.recompute for layer in range(start, stop))

    def replace(self, **changes: Any) -> Layout:
        """Return this layout with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON types, and those that follow from them (``DERIVED``)."""
        fields = {
            field.name: _lists(getattr(self, field.name)) for field in dataclasses.fields(self)
            if field.name not in LATER or getattr(self, field.name) != field.default
        }  # fmt: skip
        return {"world_size": self.ranks, "pipeline": self.stages, **fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Read a layout that ``to_json`` wrote. Raises HybridcompError for unknown keys."""
        known = {field.name for field in dataclasses.fields(cls)}
        data = {name: value for name, value in data.items() if name not in DERIVED}
        if unknown := sorted(set(data) - known):
            shown = ", ".join(map(one_line, unknown))
            raise HybridcompError(f"layout: unknown keys {shown}; expected some of "
                                  f"{', '.join(sorted(known))}")  # fmt: skip
        values = dict(data)
        for name in ("cuts", "slices", "knobs"):
            values[name] = tuple(values.get(name, ()))
        values["nodes"] = tuple(map(tuple, values.get("nodes", ())))
        if isinstance(values.get("hierarchy"), list):
            values["hierarchy"] = tuple(values["hierarchy"])
        values["recompute"] = tuple(
            (int(start), int(stop)) for start, stop in values.get("recompute", ())
        )
        return cls(**values)

    def __str__(self) -> str:
        """Name the degrees above 1 and the switches: ``tp2 pp4 dp3 zero1 mb1x8``."""
        words = [
            f"tp{self.tensor}{'s' if self.sequence else ''}" if self.tensor > 1 else "",
            f"mesh{self.mesh}x{self.mesh}" if self.mesh > 1 else "",
            f"pp{self.stages}{f'v{self.virtual}' if self.virtual > 1 else ''}"
            if self.stages > 1 else "",
            f"slices{len(self.slices)}" if self.slices else "",
            f"cp{self.context}{'-ring' if self.context_way == 'ring' else ''}"
            if self.context > 1 else "",
            f"ep{self.expert}" if self.expert > 1 else "",
            f"dp{self.data}" if self.data > 1 else "",
            f"zero{self.zero_stage}" if self.zero_stage else "",
            f"hsdp{self.shards}" if self.shards > 1 else "",
            "stays" if self.stays else "",
            f"hpz{self.hpz}{f'-{self.copy}' * (self.copy != 'native')}" if self.hpz > 1 else "",
            "frozen once" if self.frozen == "device" else "",
            f"mb{self.micro_batch}x{self.accumulation}{'-node' * (self.accumulate == 'node')}",
            f"recompute {len(self.recomputed)}" if self.recompute else "",
            f"offload{f' {self.ratio:.3g}' * (self.ratio < 1)}" if self.offload else "",
            f"nvme {self.drive:.3g}" if self.drive else "",
            f"levels {'x'.join(map(str, self.hierarchy))}"
            if isinstance(self.hierarchy, tuple) else "",
        ]  # fmt: skip
        return " ".join(word for word in words if word)


def _lists(value: Any) -> Any:
    """Convert tuples to lists, as JSON has them."""
    return [_lists(one) for one in value] if isinstance(value, tuple) else value


def even_cuts(layers: int, chunks: int) -> tuple[int, ...]:
    """Cut ``layers`` into ``chunks`` as evenly as can be, the larger ones first."""
    base, rest = divmod(layers, chunks)
    return tuple(base + (index < rest) for index in range(chunks))


#: by group, the number of its ranks; ``_STRIDES``: the distance between neighbouring ranks
_SIZES: dict[str, Callable[[Layout], int]] = {
    "tensor": lambda layout: layout.tensor,
    "row": lambda layout: layout.mesh,
    "column": lambda layout: layout.mesh,
    "context": lambda layout: layout.context,
    "data": lambda layout: layout.data,
    "expert": lambda layout: layout.expert,
    "pipeline": lambda layout: layout.stages,
    "replicas": lambda layout: layout.data * layout.context,
}
_STRIDES: dict[str, Callable[[Layout], int]] = {
    "tensor": lambda layout: 1,
    "row": lambda layout: 1,
    "column": lambda layout: layout.mesh,
    "context": lambda layout: layout.innermost,
    "replicas": lambda layout: layout.innermost,
    "data": lambda layout: layout.innermost * layout.context,
    "expert": lambda layout: layout.innermost * layout.context,
    "pipeline": lambda layout: layout.ranks_per_stage,
}
