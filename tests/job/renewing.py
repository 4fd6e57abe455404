"""Renewal of parameter copies while a rank fails: secondary shards and frozen weights."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel, Channels
from hybridcomp.channels.messages.node_copies import CopyGroups
from hybridcomp.config import CompressionConfig
from hybridcomp.patches.torch.fsdp2.copies import NodeCopyGather
from hybridcomp.patches.torch.fsdp2.frozen import FrozenGather
from hybridcomp.patches.torch.fsdp2.members import Member

NUMEL, ROWS = 3000, 8
ENGINES = ("copies", "frozen", "copies3", "frozen3")


def channel_of(zero: dict[str, Any]) -> Channel:
    return Channels(CompressionConfig.parse({"zero": zero, "min_bytes": 0}))["zero"]


class Renewing:
    """State that several ranks renew together, repeatedly.

    Between attempts all of it is gathered and checked, so that no partial state is left.
    """

    def __init__(self, folder: Path, engine: str) -> None:
        self.engine, self.is_right = engine, True

    def prepare_renew(self) -> None:
        self.is_right &= self.check()
        self.change()

    def ends_well(self) -> bool:
        return self.is_right and self.check()

    def renew(self) -> None:
        """Renew it; fails at some step."""
        raise NotImplementedError

    def held(self) -> Any:
        """Return the state that a failure must keep; a dropped copy is recreated, see ``check``."""
        return True

    def check(self) -> bool:
        """Gather; return whether the result equals the ranks' values."""
        raise NotImplementedError

    def change(self) -> None:
        """Change the values to renew."""
        raise NotImplementedError


class Copies(Renewing):
    """Renew copies of FSDP2's groups in two nodes of two ranks."""

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(folder, engine)
        members: Any = SimpleNamespace(members=[])
        channel = channel_of({"secondary": "exact"})
        self.copies = NodeCopyGather(members, channel, CopyGroups.of(2, "a test"))
        self.share = torch.full((NUMEL,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)

    def check(self) -> bool:
        out = self.share.new_empty(4 * NUMEL)
        self.copies.gather(out, self.share)
        return torch.equal(out, gathered(self.share))

    def change(self) -> None:
        self.share[::10] *= 1.0 + 2**-6

    def renew(self) -> None:
        of, native = self.copies, (self.share.numel(), self.share.dtype)
        of.kept.renew(lambda: of._sent(self.share), native, self.share.device)


class Frozen(Renewing):
    """Renew the kept frozen weights of an FSDP2 group that also trains a parameter."""

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(folder, engine)
        numel = NUMEL // ROWS * ROWS
        both = [Member(name, numel, ROWS, 0) for name in ("frozen", "trained")]
        members: Any = SimpleNamespace(
            shards=dist.group.WORLD, members=both, trained=[1],
            group=SimpleNamespace(fsdp_params=both),
        )  # fmt: skip
        channel = channel_of({"frozen": "device"})
        settings = channel.state.config.zero.keeps_frozen
        assert settings is not None
        self.gathers = FrozenGather(members, channel, settings)
        self.numel = sum(member.chunk(4) for member in both)
        self.share = torch.full((self.numel,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)

    def check(self) -> bool:
        out = self.share.new_empty(4 * self.numel)
        self.gather(out)
        return torch.equal(out, gathered(self.share))

    def gather(self, out: Tensor) -> None:
        def natively(whole: Tensor, part: Tensor, *_: Any) -> None:
            dist.all_gather_into_tensor(whole, part)

        world = cast(dist.ProcessGroup, dist.group.WORLD)
        self.gathers.gather(out, self.share.clone(), world, natively, natively)

    def change(self) -> None:
        self.share[: self.numel // 2 : 10] *= 1.0 + 2**-6
        self.out = self.share.new_empty(4 * self.numel)

    def renew(self) -> None:
        own = self.gathers  # skipped calls follow the last message
        with patch.object(own, "_put", nothing), patch.object(own, "_take", nothing):
            self.gather(self.out)


class Engine3(Renewing):
    """DeepSpeed engine at stage 3 on two nodes of two ranks, with frozen lower layers."""

    def __init__(self, folder: Path, engine: str) -> None:
        from tests.training.test_frozen import Zero3

        super().__init__(folder, engine)
        keeps = {"frozen": "device"} if engine == "frozen3" else {"secondary": "exact"}
        self.job = Zero3({"zero": keeps}, 1 if engine == "frozen3" else 2)
        self.values = torch.ones(2, 64)
        self.job.step(self.values)

    @property
    def params(self) -> list[Any]:
        return [layer.base.weight for layer in self.job.model]

    def check(self) -> bool:
        loss = self.job.step(self.values)  # from a forward pass with the renewed copies
        whole = [self.job.whole(p) for p in self.job.model.parameters()]
        return self.right(loss) and all(bool(values.isfinite().all()) for values in whole)

    def right(self, loss: float) -> bool:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, loss)
        return len(set(every)) == 1


class Copies3(Engine3):
    """Renew the secondary copies of an engine at ZeRO 3 (hpZ)."""

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(folder, engine)
        from hybridcomp.patches.ds.zero.secondary import copies_of

        copies = copies_of(self.job.model.parameters())
        assert copies is not None
        self.copies = copies

    def change(self) -> None:
        for bucket in self.copies.buckets:
            for copy in bucket.copies:
                copy.keep()
                copy.param.ds_secondary_tensor = None
                copy.param.ds_tensor.data[::10] *= 1.0 + 2**-6

    def renew(self) -> None:
        for bucket in self.copies.buckets:
            self.copies._renew(bucket)

    def held(self) -> list[bool]:
        return [copy.is_stale for bucket in self.copies.buckets for copy in bucket.copies]


class Frozen3(Engine3):
    """Renew the kept frozen weights of an engine at ZeRO 3."""

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(folder, engine)
        from hybridcomp.patches.ds.zero.frozen import weights_of

        weights = weights_of(self.job.model.parameters())
        assert weights is not None
        self.weights = weights

    def change(self) -> None:
        for param in self.params:
            param.ds_tensor.data[::10] *= 1.0 + 2**-6

    def renew(self) -> None:
        optimizer = self.job.engine.optimizer
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        self.weights.check()
        self.weights.serve(coordinator, self.params, nullcontext)
        for param in self.params:
            param.partition()

    def held(self) -> list[str]:
        return [param.ds_status.name for param in self.params]


def nothing(*_: Any) -> None:
    """Do nothing."""


def subject(folder: Path, engine: str) -> Renewing:
    kinds: dict[str, type[Renewing]] = {
        "copies": Copies, "frozen": Frozen, "copies3": Copies3, "frozen3": Frozen3,
    }  # fmt: skip
    return kinds[engine](folder, engine)


def gathered(share: Tensor) -> Tensor:
    out = share.new_empty(dist.get_world_size() * share.numel())
    dist.all_gather_into_tensor(out, share)
    return out
