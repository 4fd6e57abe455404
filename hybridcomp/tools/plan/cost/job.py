"""A model on a cluster: seconds of its layers on each rank, and the messages of a layout."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from hybridcomp.dimensions import ROWS, Dimension, Direction, Key
from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.choices import NATIVE, Choice, Choices
from hybridcomp.tools.plan.cost.calls import Coded, EngineCall
from hybridcomp.tools.plan.cost.copies import Copying, Whole, copyings, filing
from hybridcomp.tools.plan.cost.host import Host, Hosts, Style, least, nearest, style_of
from hybridcomp.tools.plan.cost.prices import Prices
from hybridcomp.tools.plan.cost.spans import GroupSpans
from hybridcomp.tools.plan.layout import Group, Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.estimates import NOTHING, Estimate
from hybridcomp.tools.plan.machines.rows import Kind, Operation
from hybridcomp.tools.plan.models.model import BatchShape, Messages, Model, ModelLayer
from hybridcomp.tools.plan.request import Batch, SearchLimits

#: mean fraction of another rank's keys and values that a rank decodes, and computes gradients of,
#: under a causal mask (half of an earlier rank's, all of a later rank's)
SEEN = 0.75
#: codec calls for keys and values, in halves, and codec calls for the gradients of keys and values
KEYS_PARTS, GRADIENTS_PARTS = 4, 2
#: collectives that replace an all-reduce under sequence parallelism
GATHER_AND_SCATTER: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
ALL_REDUCE: tuple[Operation, ...] = ("all_reduce",)


@dataclass(frozen=True)
class Item:
    """Equal messages of one dimension and direction: one call, its dtype, and how many there are.

    fixed: the choice, if no search may change it; None: the search chooses.
    """

    key: Key
    call: EngineCall | Copying
    dtype: torch.dtype
    count: float = 1.0
    fixed: Choice | None = None


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """A model to train on a cluster. Caches the prices and seconds that a search needs again.

    overlap: fraction of a step's compute that hides messages of gradients and parameters, if the
    cluster has no trainings to tell. hosts: the engine's overhead in addition to layers and
    messages (``calibrated``).
    """

    model: Model
    cluster: Cluster
    batch: Batch
    limits: SearchLimits
    overlap: float = 0.1
    hosts: Hosts = field(default_factory=dict)
    _seconds: dict[tuple[object, ...], tuple[Estimate, Estimate]] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def prices(self) -> Prices:
        """Return the prices of messages on this cluster."""
        return Prices(self.cluster)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and activations."""
        return self.limits.torch_dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Return the dtype in which gradients are reduced: fp32 under Megatron and FSDP2."""
        return self.dtype if self.limits.engine in ("deepspeed", "neox") else torch.float32

    def can_price(self, dimension: Dimension, choice: Choice) -> bool:
        """Return whether the cluster has coding speeds for ``choice`` on ``dimension``."""
        dtype = self.gradient_dtype if dimension == "dp" else self.dtype
        return self.prices.knows(choice, dtype, copied=not ROWS[dimension].between_ranks)

    @property
    def on_cpu(self) -> bool:
        """Return whether the devices are CPUs."""
        return self.cluster.on_cpu

    @cached_property
    def capacity(self) -> float:
        """Return the bytes that a rank may fill; infinite if no rank's memory is known."""
        sizes = [rank.nbytes for rank in self.cluster.ranks if rank.nbytes]
        return self.limits.memory_share * min(sizes) if sizes else float("inf")

    @property
    def cluster_name(self) -> str:
        """Describe the cluster for people: ranks, devices, nodes."""
        devices = dict.fromkeys(rank.device for rank in self.cluster.ranks)
        return f"{self.cluster.world_size} x {', '.join(devices)} on {self.cluster.nodes} nodes"

    def shape(self, layout: Layout) -> BatchShape:
        """Return the shape of the part of a micro-batch that one rank of ``layout`` computes."""
        return BatchShape(
            layout.micro_batch, self.batch.length, self.dtype.itemsize, layout.tensor,
            layout.sequence, layout.context, layout.expert, layout.mesh,
            layout.slice_count, layout.context > 1 and layout.context_way == "ring",
        )  # fmt: skip

    def layers(self, layout: Layout) -> tuple[ModelLayer, ...]:
        """Return the model's layers as one rank of ``layout`` holds them."""
        return self.model.layers(self.shape(layout))

    def has_blocking_pipeline(self, layout: Layout) -> bool:
        """Return whether DeepSpeed's pipeline engine, also GPT-NeoX's, runs ``layout``."""
        plain = layout.stages > 1 and layout.virtual == 1 and not layout.slices
        return plain and self.limits.engine != "megatron"

    def sharded(self, layout: Layout) -> bool:
        """Return whether the optimizer's states are sharded over the replicas.

        DeepSpeed's pipelines in bf16 also shard them at ZeRO 0 (``BF16_Optimizer``).
        """
        pipe = layout.stages > 1 and self.limits.dtype == "bf16"
        return layout.zero_stage >= 1 or (pipe and self.limits.engine != "megatron")

    def slowest_rank(self, layout: Layout, stage: int) -> int:
        """Return the rank of ``stage`` that computes slowest: the other ranks wait for it."""
        first = stage * layout.ranks_per_stage
        return min(range(first, first + layout.ranks_per_stage),
                   key=lambda rank: (self.cluster.speeds[rank], rank))  # fmt: skip

    def compute(self, layer: ModelLayer, rank: int) -> tuple[Estimate, Estimate]:
        """Return the seconds of forward and of backward of one layer on ``rank``."""
        key = layer.kind, layer.flops, layer.backward_flops, layer.moved_nbytes, rank, layer.frozen
        if key not in self._seconds:
            ahead, behind = self._compute(layer, rank)
            self._seconds[key] = ahead, NOTHING if layer.frozen == 1 else behind
        return self._seconds[key]

    def _compute(self, layer: ModelLayer, rank: int) -> tuple[Estimate, Estimate]:
        dtype = self.limits.dtype
        if layer.kind in ("block", "module"):
            # a measured backward speed assumes twice the FLOPs of the forward pass
            more = layer.backward_flops if self.cluster.by_hand else (
                2 * layer.flops - layer.spared_flops)  # fmt: skip
            return (
                self.cluster.kernel("block_forward", dtype, layer.flops, rank),
                self.cluster.kernel("block_backward", dtype, more, rank),
            )
        moved = self._elementwise(layer.moved_nbytes, rank)
        one = self.cluster.kernel("product", dtype, layer.flops, rank)
        two = self.cluster.kernel("product", dtype, layer.backward_flops, rank)
        return one.plus(moved), two.plus(moved)

    def _elementwise(self, nbytes: float, rank: int) -> Estimate:
        """Return the seconds to read and write ``nbytes``; zero if unknown."""
        try:
            return self.cluster.kernel("elementwise", self.limits.dtype, nbytes, rank)
        except HybridcompError:
            return NOTHING

    def adam(self, values: float, rank: int, on_host: bool = False) -> Estimate:
        """Return the seconds of the optimizer for ``values``, estimated where not measured.

        on_host: Adam on the host where its speed is known, else on the device.
        """
        kinds: tuple[Kind, ...] = ("host_adam", "adam") if on_host else ("adam",)
        for kind in kinds:
            with contextlib.suppress(HybridcompError):
                return self.cluster.kernel(kind, "fp32", values, rank)
        return self._elementwise(28 * values, rank)

    def host(self, layout: Layout, rank: int, choices: Choices | None) -> Host:
        """Return the engine's overhead on ``rank``, in addition to layers and messages.

        choices: None for a lower bound over all choices, the least overhead of all styles.
        """
        if not self.hosts:
            return Host(overlap=self.overlap)
        alone = layout.size("replicas") < 2
        stage = 0 if alone else layout.zero_stage
        styles: tuple[Style, ...] = ("native", "plain", "feedback")
        if choices is not None:
            styles = ("native",) if alone else (style_of(choices),)
        # the overheads are the slowest rank's, since the other ranks waited for it
        share = min(self.cluster.speeds) / self.cluster.speeds[rank]
        return least(nearest(self.hosts, stage, style).times(share) for style in styles)

    @cached_property
    def groups(self) -> GroupSpans:
        """Return the cached nodes and sites of groups, which a search reads a million times."""
        return GroupSpans(self.cluster)

    def layer_items(
        self, layout: Layout, stage: int, messages: Messages, way: Direction
    ) -> Iterator[Item]:
        """Yield the messages of one layer in one pass of one micro-batch."""
        for numel in messages.tensor:
            for operation in GATHER_AND_SCATTER if layout.sequence else ALL_REDUCE:
                call = self.groups.call(operation, numel, layout, "tensor", stage)
                yield Item(("tp", way), call, self.dtype)
        if layout.context_way == "ring":
            yield from self._ring_items(layout, stage, messages.ring, way)
        else:
            for numel in messages.context:
                call = self.groups.call("all_to_all", numel, layout, "context", stage)
                yield Item(("cp", way), call, self.dtype)
        for block in messages.mesh:
            call = self.groups.send(block.numel, layout, block.line, stage)
            yield Item(("tp2d", block.kind), call, self.dtype, layout.mesh - 1)
        for numel in messages.expert:
            call = self.groups.call("all_to_all", numel, layout, "expert", stage)
            yield Item(("ep", way), call, self.dtype)

    def _ring_items(
        self, layout: Layout, stage: int, keys: tuple[float, ...], way: Direction
    ) -> Iterator[Item]:
        """Yield the messages of ring attention: keys and values in both passes, then gradients.

        A hop is one message of keys and values. The rank that owns them encodes them once, in the
        forward pass, and keeps the payload; the other ranks pass the payload on, and in each pass
        decode the part that the mask lets them see. They encode gradients for the owner, which adds
        them up.
        """
        if not keys:
            return
        hops = layout.context - 1
        opened = Coded("decode", SEEN * KEYS_PARTS, 1 / KEYS_PARTS)
        packed = Coded("encode", KEYS_PARTS / hops, 1 / KEYS_PARTS)
        coded = (packed, opened) if way == "forward" else (opened,)
        call = self.groups.send(sum(keys), layout, "context", stage, coded)
        yield Item(("cp", "forward"), call, self.dtype, hops)
        if way == "backward":
            one = 1 / GRADIENTS_PARTS
            sums = Coded("encode", GRADIENTS_PARTS, one), Coded("decode_add", GRADIENTS_PARTS, one)
            call = self.groups.send(SEEN * sum(keys), layout, "context", stage, sums)
            yield Item(("cp", "backward"), call, self.dtype, hops)

    def sends(self, layout: Layout, stage: int, values: float, way: Direction) -> list[Item]:
        """Return the messages that ``stage`` sends to its neighbour after one micro-batch's pass.

        Each of DeepSpeed's tensor ranks sends a part, and the receivers all-gather the parts.
        """
        if layout.stages == 1:
            return []
        rank = stage * layout.ranks_per_stage
        step = layout.ranks_per_stage if way == "forward" else -layout.ranks_per_stage
        other = (rank + step) % layout.ranks
        parts = 1
        if self.limits.engine != "megatron" and not layout.sequence:
            parts = layout.tensor
        nodes, sites = self.cluster.nodes_of((rank, other)), self.cluster.sites_of((rank, other))
        call = EngineCall("send", values / parts, 2, nodes, sites=sites)
        found = [Item(("pp", way), call, self.dtype)]
        if parts > 1:
            gather = self.groups.call("all_gather", values, layout, "tensor", stage)
            found.append(Item(("pp", way), gather, self.dtype, fixed=NATIVE))
        return found

    def gradient_items(self, layout: Layout, stage: int, values: float, group: Group) -> list[Item]:
        """Return one reduction of ``values`` gradients over ``group``, in the engine's buckets."""
        buckets = max(1, math.ceil(values / self.limits.bucket_numel))
        operation: Operation = "all_reduce"
        encoded: Operation = "all_reduce"
        if layout.zero_stage == 3 or (self.limits.engine == "megatron" and layout.zero_stage):
            operation = encoded = "reduce_scatter"
        elif layout.zero_stage:  # DeepSpeed all-reduces a bucket, and keeps a part
            encoded = "reduce_scatter"
        call = self.groups.call(operation, values / buckets, layout, group, stage)
        call = replace(call, encoded_as=encoded, levels=layout.levels)
        return [Item(("dp", "forward"), call, self.gradient_dtype, buckets)]

    def copy_items(
        self, layout: Layout, values: float, layers: int, whole: Whole, share: float = 1.0
    ) -> list[Item]:
        """Return copies of ``values`` gradients to the host and of parameters back.

        share: fraction of the values that step on the host. DeepSpeed also copies the gradient sums
        of the other values to the host and back in every micro-batch. With states on a drive the
        gradient and parameter copies are native.
        """
        # at stage 3 a rank has a part of every layer, else whole layers
        shards = 1 if layout.zero_stage == 3 else layout.size("replicas")
        count, width = max(1.0, layers / shards), self.dtype.itemsize
        there, back = copyings(layout, share * values, width, count, whole)
        how = NATIVE if layout.drive else None
        found = [
            Item(("offload", "backward"), there, self.dtype, count, how),
            Item(("offload", "forward"), back, self.dtype, count, how),
        ]
        if layout.drive:
            files = max(1.0, values / layout.sub_group)
            one = filing(layout.drive * values / files)
            found.append(Item(("offload", "states"), one, self.dtype, files))
        if share == 1:
            return found
        numel = (1 - share) * values / count
        nbytes = width * layout.accumulation * numel
        bounced = Copying("to_host", numel, nbytes, nbytes)
        found.append(Item(("offload", "backward"), bounced, self.dtype, count, fixed=NATIVE))
        return found if share else found[2:]

    def gather_items(self, layout: Layout, stage: int, values: float, group: Group) -> list[Item]:
        """Return one all-gather of ``values`` parameters over ``group``, in buckets."""
        buckets = max(1, math.ceil(values / self.limits.bucket_numel))
        call = self.groups.call("all_gather", values / buckets, layout, group, stage)
        call = replace(call, levels=layout.levels)
        return [Item(("zero", "forward"), call, self.dtype, buckets)]
