"""Steps of DeepSpeed's ZeRO stages by their seams."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.scale_bench.step import DTYPE, Engine, native
from hybridcomp.channels import NAME
from hybridcomp.channels.engine_state import ATTRIBUTE


class _Address:
    """A gradient that has an address, also on "meta", where ZeRO 0's seam knows it by that."""

    def __init__(self, values: Tensor) -> None:
        self.numel, self.shape = values.numel, values.shape

    def data_ptr(self) -> int:
        """Return an address that no other gradient has."""
        return id(self)


class _Kept:
    """A parameter that keeps its gradient."""

    def __init__(self, parameter: Any, gradient: Tensor) -> None:
        self.grad, self.numel = _Address(gradient), parameter.numel
        setattr(self, NAME, getattr(parameter, NAME))


class Zero0(Engine):
    """DeepSpeed without ZeRO: an all-reduce of each block's gradients."""

    def prepare(self) -> None:
        """Give every parameter a gradient."""
        from hybridcomp.patches.ds import zero0

        self.kept = [[_Kept(p, self.flat([p])) for p in block] for block in self.blocks]
        self.engine = SimpleNamespace(
            communication_data_type=DTYPE, gradient_average=True,
            postscale_gradients=lambda: True, gradient_predivide_factor=lambda: 1.0,
            flatten=self.flat, optimizer=None,
            module=SimpleNamespace(parameters=lambda: (p for block in self.kept for p in block)),
            **{ATTRIBUTE: self.channels},
        )  # fmt: skip
        self.reduce = zero0.make_allreduce_bucket(native)

    def step(self) -> None:
        """Reduce the buckets."""
        for block in reversed(self.kept):
            self.reduce(self.engine, [p.grad for p in block], None)


class Zero1(Engine):
    """DeepSpeed at ZeRO 1 and 2: buckets to the owners of their parts, then a gather of all."""

    def prepare(self) -> None:
        """Cut the model and its buckets among the owners as upstream does, in one flat group."""
        from hybridcomp.patches.ds import parameter_gathers, zero12

        total = sum(p.numel() for block in self.blocks for p in block)
        self.part = -(-total // self.ranks)
        self.optimizer = SimpleNamespace(
            dp_process_group=dist.group.WORLD, sequence_parallel_size=1, gradient_average=True,
            overlap_comm=False, bit16_groups=[], ipg_buckets={}, **{ATTRIBUTE: self.channels},
        )  # fmt: skip
        starts = list(accumulate((self.flat(b).numel() for b in self.blocks), initial=0))
        self.buckets = [
            self._bucket(block, start) for block, start in zip(self.blocks, starts, strict=False)
        ]
        whole = self.empty(self.part * self.ranks)
        setattr(whole, ATTRIBUTE, self.channels)
        self.groups = [whole], [torch.split(whole, self.part)], [dist.group.WORLD]
        reduce = zero12.make_allreduce_and_scatter(native)
        self.average = zero12.make_average_tensor(
            lambda optimizer, tensor, dtype: reduce(optimizer, self.slices, dtype)
        )
        self.gather = parameter_gathers.make_all_gather_into_tensor_dp_groups(native)

    def _bucket(self, block: Sequence[Any], start: int) -> tuple[list[Any], Tensor, list[Any]]:
        """Return a bucket's parameters, last first, its tensor and its slices with their owners."""
        found: list[tuple[int, int]] = []
        ends = list(accumulate(p.numel() for p in block))
        for parameter, end in zip(reversed(block), reversed(ends), strict=True):
            low, stop = start + end - parameter.numel(), start + end
            while low < stop:
                owner = low // self.part
                high = min(stop, (owner + 1) * self.part)
                if found and found[-1][0] == owner:  # upstream joins neighbours of one owner
                    found[-1] = owner, found[-1][1] + high - low
                else:
                    found.append((owner, high - low))
                low = high
        flat, owners = self.flat(block), [owner for owner, _ in found]
        views = torch.split(flat, [numel for _, numel in found])
        return list(reversed(block)), flat, list(zip(owners, views, strict=True))

    def step(self) -> None:
        """Reduce the buckets, last block first, and gather what the owners have updated."""
        for parameters, flat, slices in reversed(self.buckets):
            self.slices = slices
            self.optimizer.bit16_groups = [parameters]
            params = [(0, index, None) for index in range(len(parameters))]
            self.optimizer.ipg_buckets = {DTYPE: SimpleNamespace(params=params)}
            self.average(self.optimizer, flat, DTYPE)
        self.gather(*self.groups)


class Zero3(Engine):
    """DeepSpeed at ZeRO 3: a gather of each block in both passes, a reduce-scatter behind."""

    def prepare(self) -> None:
        """Note the parts of the parameters."""
        from hybridcomp.patches.ds import parameter_gathers, zero3

        self.fetch = parameter_gathers
        self.gather = parameter_gathers.make_dist_allgather_fn(native)
        scatter = zero3.make_reduce_scatter_coalesced(native)
        group = dist.group.WORLD
        self.reduce = zero3.make_avg_scatter_grads(
            lambda optimizer, params, dtype: scatter([p.data for p in params], group)
        )
        self.optimizer = SimpleNamespace(**{ATTRIBUTE: self.channels})

    def _gather(self, block: Sequence[Any]) -> None:
        lengths = tuple(-(-p.numel() // self.ranks) for p in block)
        shard, out = self.empty(sum(lengths)), self.empty(self.ranks * sum(lengths))
        with self.fetch._fetch(self.fetch._Fetch(self.channels["zero"], lengths), False):
            self.gather(shard, out, dist.group.WORLD).wait()

    def step(self) -> None:
        """Gather for forward, then for backward, and reduce."""
        for block in self.blocks:
            self._gather(block)
        for block in reversed(self.blocks):
            self._gather(block)
            self.reduce(self.optimizer, block, DTYPE)
