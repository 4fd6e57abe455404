"""Steps of torch's engines, of tensor and of pipeline parallelism by their seams; all by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from bench.scale_bench.step import DTYPE, Engine, Shape, native
from bench.scale_bench.zero import Zero0, Zero1, Zero3
from hybridcomp.channels import NAME, AllReduce, PostSend
from hybridcomp.dimensions import Direction


class Fsdp2(Engine):
    """FSDP2: a gather of each block in both passes, a reduce-scatter behind."""

    def prepare(self) -> None:
        """Fill the slots of a group for each block."""
        from hybridcomp.patches.torch.fsdp2_gathers import EncodedAllGather
        from hybridcomp.patches.torch.fsdp2_members import Members
        from hybridcomp.patches.torch.fsdp2_sums import EncodedReduceScatter

        attached: Any = SimpleNamespace(channels=self.channels, reduced=lambda: None, is_open=True)
        self.slots = []
        for number, block in enumerate(self.blocks):
            group = SimpleNamespace(
                fsdp_params=[self._fsdp(number, p) for p in block], mesh_info=SimpleNamespace(),
                is_sharded_post_forward=False, _training_state=None,
                gradient_divide_factor=None,
            )  # fmt: skip
            members = Members(group, {})
            empty: Any = SimpleNamespace()
            self.slots.append((
                members, EncodedAllGather(members, attached, empty),
                EncodedReduceScatter(members, attached, empty, False),
            ))  # fmt: skip

    def _fsdp(self, number: int, parameter: Any) -> Any:
        name = getattr(parameter, NAME)
        return SimpleNamespace(
            _module_info=SimpleNamespace(module=parameter, param_name=name),
            _orig_size=parameter.shape, fsdp_placement=SimpleNamespace(dim=0),
            sharded_param=parameter,
        )  # fmt: skip

    def step(self) -> None:
        """Gather for forward, then for backward, and reduce."""
        for members, gather, _ in self.slots:
            self._gather(members, gather)
        for members, gather, scatter in reversed(self.slots):
            self._gather(members, gather)
            every = self.empty(members.numel(members.trained, self.ranks))
            own = self.empty(every.numel() // self.ranks)
            assert dist.group.WORLD is not None
            scatter(own, every, dist.group.WORLD, dist.ReduceOp.AVG)

    def _gather(self, members: Any, gather: Any) -> None:
        out = self.empty(members.numel(members.trained, self.ranks))
        shard = out[: out.numel() // self.ranks]
        gather(out, shard, dist.group.WORLD, True).wait()


class Ddp(Engine):
    """DistributedDataParallel: a bucket for each block."""

    def prepare(self) -> None:
        """Make the reducer of the communication hook."""
        from hybridcomp.patches.torch.ddp_reducer import Reducer

        model: Any = SimpleNamespace(
            process_group=dist.group.WORLD, find_unused_parameters=False, static_graph=False,
            _has_rebuilt_buckets=True,
        )  # fmt: skip
        attached: Any = SimpleNamespace(channels=self.channels, reduced=lambda: None)
        self.reducer = Reducer(model, attached)

    def step(self) -> None:
        """Call the hook with the buckets, last block first."""
        last = len(self.blocks) - 1
        for index, block in enumerate(reversed(self.blocks)):
            gradients = self.flat(block)
            bucket = SimpleNamespace(
                buffer=lambda g=gradients: g, index=lambda i=index: i,
                is_last=lambda i=index: i == last, parameters=lambda b=block: b,
            )  # fmt: skip
            self.reducer(bucket)


class TensorParallel(Engine):
    """Tensor parallelism: two all-reduces of activations in each pass of a block."""

    def step(self) -> None:
        """Sum the activations, and the gradients of the inputs."""
        numel = self.shape.tokens * self.shape.width
        for direction in ("forward", "backward"):
            for _ in range(2 * len(self.blocks)):
                message = AllReduce(
                    numel=numel, dtype=DTYPE, group=None, direction=direction,
                    values=self.empty(numel),
                )  # fmt: skip
                self.channels["tp"].run(message, native=native, encoded=lambda done: done.wait())


class Pipeline(Engine):
    """A stage in the middle of a pipeline: sends an activation ahead and a gradient back."""

    def step(self) -> None:
        """Encode both messages for upstream, which posts them."""
        numel, self.posted = self.shape.tokens * self.shape.width, 2
        ways: tuple[tuple[Direction, int], ...] = (
            ("forward", self.me + 1),
            ("backward", self.me - 1),
        )
        for direction, other in ways:
            message = PostSend(
                numel=numel, dtype=DTYPE, group=None, direction=direction,
                between=(self.me, other % self.ranks), values=self.empty(numel),
            )  # fmt: skip
            self.channels["pp"].run(message, native=native, encoded=lambda posted: posted.done())


ENGINES: dict[str, Callable[[Shape, str], Engine]] = {
    "ZeRO 0": Zero0, "ZeRO 1 and 2": Zero1, "ZeRO 3": Zero3, "FSDP2": Fsdp2, "DDP": Ddp,
    "tp": TensorParallel, "pp": Pipeline,
}  # fmt: skip
