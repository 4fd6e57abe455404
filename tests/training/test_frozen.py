"""``zero.frozen`` at ZeRO 3 and under FSDP2: adapters on weights that are gathered once."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import RunRanks
from tests.selection import by_day
from tests.training.in_turn import start_deepspeed

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

WIDTH, STEPS = 64, 5
EXACT: dict[str, Any] = {"zero": {"frozen": "device"}}
FEW: dict[str, Any] = {"zero": {"frozen": {"on": "host", "bits": 4}}}
ENGINES = ("zero3", "hpz", "fsdp2")


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank adapter, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, values: Tensor) -> Tensor:
        changed: Tensor = values + torch.tanh(self.base(values) + self.up(self.down(values)))
        return changed


class Zero3:
    """DeepSpeed engine at stage 3."""

    def __init__(self, block: dict[str, Any] | None, hpz: int) -> None:
        from deepspeed.utils import groups

        import hybridcomp

        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        start_deepspeed()
        hybridcomp.uninstall() if block is None else hybridcomp.install()
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(Adapted(), Adapted(), Adapted())
        self.settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3, "stage3_param_persistence_threshold": 0,
                "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0,
                "zero_hpz_partition_size": hpz,
            },
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1000,
        }  # fmt: skip
        if block is not None:
            self.settings["compression"] = {"min_bytes": 0, **block}
        self._initialize()

    def _initialize(self) -> None:
        import deepspeed

        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=trained, config=self.settings
        )

    def step(self, values: Tensor) -> float:
        loss = self.engine(values.to(torch.bfloat16)).float().square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def merge(self) -> None:
        """Merge an adapter into its frozen weight, as peft does under ZeRO 3."""
        import deepspeed

        layer = self.model[0]
        some = [layer.base.weight, layer.up.weight, layer.down.weight]
        with deepspeed.zero.GatheredParameters(some, modifier_rank=0):
            if dist.get_rank() == 0:
                layer.base.weight.data.add_(layer.up.weight @ layer.down.weight)

    def write(self) -> None:
        """Change a rank's shard by hand."""
        share = self.model[1].base.weight.ds_tensor
        if dist.get_rank() == 3:
            share.data[5] = 0.5

    def train(self) -> None:
        """Make another engine train a frozen weight too."""
        self.engine.destroy()
        self.model[1].base.weight.requires_grad_(True)
        self._initialize()

    def wire(self) -> int:
        from hybridcomp.channels import channels_of

        channels = channels_of(self.engine)
        assert channels is not None
        return int(channels.ledger.interval["zero", "forward"].wire_nbytes)

    def whole(self, weight: Any) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            found: Tensor = weight.detach().float().clone()
        return found

    def kept(self) -> int:
        from hybridcomp.patches.ds.zero.frozen import weights_of

        weights = weights_of(self.model.parameters())
        assert weights is not None
        return weights.nbytes

    def told(self) -> list[Any]:
        from hybridcomp.session.engine_session import session_of

        session = session_of(self.engine)
        assert session is not None
        return session.memory

    def available(self) -> float:
        """Return how many elements DeepSpeed counts as gathered."""
        from hybridcomp.patches.ds.zero.frozen import AVAILABLE

        coordinator = self.engine.optimizer.parameter_offload.get_param_coordinator()
        return float(getattr(coordinator, AVAILABLE))


class Sharded:
    """The same under FSDP2, with a group per layer."""

    def __init__(self, block: dict[str, Any] | None) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        import hybridcomp

        torch.manual_seed(0)
        self.model: Any = nn.Sequential(Adapted(), Adapted(), Adapted())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.attached = None
        if block is not None:
            self.attached = hybridcomp.attach(self.model, {"min_bytes": 0, **block})
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(self, values: Tensor) -> float:
        loss = self.model(values).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def merge(self) -> None:
        layer = self.model[0]
        with torch.no_grad():
            up, down = layer.up.weight.full_tensor(), layer.down.weight.full_tensor()
            whole = layer.base.weight.full_tensor() + up @ down
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = layer.base.weight.device_mesh, layer.base.weight.placements
            layer.base.weight.copy_(distribute_tensor(whole, mesh, placements))

    def write(self) -> None:
        if dist.get_rank() == 3:
            self.model[1].base.weight.to_local().data.view(-1)[5] = 0.5

    def train(self) -> None:
        weight = self.model[1].base.weight.requires_grad_(True)
        self.optimizer.add_param_group({"params": [weight]})

    def wire(self) -> int:
        assert self.attached is not None
        return int(self.attached.channels.ledger.interval["zero", "forward"].wire_nbytes)

    def whole(self, weight: Any) -> Tensor:
        found: Tensor = weight.full_tensor().detach().clone()
        return found

    def kept(self) -> int:
        from hybridcomp.patches.torch.fsdp2.fsdp2 import groups_of

        return sum(group._all_gather_comm._frozen.nbytes for group in groups_of(self.model))

    def told(self) -> list[Any]:
        assert self.attached is not None
        return list(self.attached.session.memory)


def made(engine: str, block: dict[str, Any] | None) -> Any:
    return Sharded(block) if engine == "fsdp2" else Zero3(block, 2 if engine == "hpz" else 1)


def values_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(2, WIDTH, generator=generator)


def trained(
    engine: str, block: dict[str, Any] | None, way: str = ""
) -> tuple[list[float], list[int], int]:
    """Return losses, gather bytes by step, kept state; ``way``: a change before step 3."""
    job = made(engine, block)
    losses: list[float] = []
    sent: list[int] = []
    for step in range(STEPS):
        if step == 3 and way == "thaw":
            job.model[1].base.weight.requires_grad_(True)
            job.model[1].base.weight.requires_grad_(False)
        elif step == 3 and way:
            getattr(job, way)()
        losses.append(job.step(values_of(step)))
        if block is not None:
            sent.append(job.wire() - sum(sent))
    if engine != "fsdp2":
        losses.append(job.available())  # which limits what DeepSpeed prefetches
    return losses, sent, job.kept() if block is not None and "frozen" in str(block) else 0


@pytest.mark.parametrize("engine", by_day(ENGINES, ["hpz", "fsdp2"]))
def test_frozen_weights_are_gathered_once(module_ranks: RunRanks, engine: str) -> None:
    """From the second step on only adapters are gathered, plus bits that report no change."""
    native = module_ranks(4, trained, engine, None)
    exact = module_ranks(4, trained, engine, EXACT)
    frozen, adapters = 3 * (WIDTH * WIDTH + WIDTH), 3 * 2 * 4 * WIDTH
    for plain, kept in zip(native, exact, strict=True):
        assert kept[0] == plain[0]
        twice = 2 * 2 * adapters * 3 // 4  # bytes that a rank of four sends
        first, *later = kept[1]
        assert first > 3 * twice and max(later) <= twice + 200
        assert kept[2] < 0.80 * 2 * frozen, "by expcode"


@pytest.mark.parametrize("way", by_day(["merge", "write", "thaw"], ["merge"]))
@pytest.mark.parametrize("engine", by_day(ENGINES, ["zero3", "fsdp2"]))
def test_changes_are_noticed_and_sent_anew(module_ranks: RunRanks, engine: str, way: str) -> None:
    plain = engine.replace("hpz", "zero3")  # hpZ's copy misses values written by hand
    native = module_ranks(4, trained, plain, None, way)
    exact = module_ranks(4, trained, engine, EXACT, way)
    assert [found[0] for found in exact] == [found[0] for found in native]
    for _, sent, _ in exact:
        once = 2 * (WIDTH * WIDTH) * 3 // 4  # bytes of one weight
        anew = way != "thaw"
        share = 0.6 if engine == "hpz" else 0.9  # inside a node: two thirds
        assert (sent[3] - sent[2] > share * once) == anew and sent[4] == sent[2]


@pytest.mark.parametrize("engine", by_day(["zero3", "fsdp2"], ["zero3"]))
def test_four_bits_on_the_host(module_ranks: RunRanks, engine: str) -> None:
    """All passes use the decoded weights, including the first forward pass."""
    native, few = (module_ranks(4, trained, engine, block) for block in (None, FEW))
    frozen = 3 * (WIDTH * WIDTH + WIDTH)
    for plain, kept in zip(native, few, strict=True):
        assert kept[0] != plain[0] and kept[0] == pytest.approx(plain[0], rel=0.05)
        assert kept[2] < 0.32 * 2 * frozen


def told_and_kept(engine: str, block: dict[str, Any]) -> tuple[list[Any], int]:
    job = made(engine, block)
    told = [item for item in job.told() if item.name == "frozen weights"]
    job.step(values_of(0))
    return told, job.kept()


@pytest.mark.parametrize("engine", by_day(["zero3", "fsdp2"], ["fsdp2"]))
def test_what_they_take_is_told_before(module_ranks: RunRanks, engine: str) -> None:
    for (item,), kept in module_ranks(4, told_and_kept, engine, FEW):
        assert item.on_host and item.nbytes == pytest.approx(kept, rel=0.05)
    for (item,), kept in module_ranks(4, told_and_kept, engine, EXACT):
        assert not item.on_host and item.nbytes == pytest.approx(kept, rel=0.2)


def thawed(engine: str, block: dict[str, Any] | None, steps: int = 3) -> tuple[list[float], Any]:
    """Train a frozen weight from some step on; return losses, and its change."""
    job = made(engine, block)
    losses = [job.step(values_of(step)) for step in range(2)]
    before = job.whole(job.model[1].base.weight)
    job.train()
    losses += [job.step(values_of(2 + step)) for step in range(steps)]
    return losses, (job.whole(job.model[1].base.weight) - before).abs().max().item()


@pytest.mark.parametrize("engine", by_day(ENGINES, ["hpz"]))
def test_a_thawed_weight_trains(module_ranks: RunRanks, engine: str) -> None:
    native, exact = (module_ranks(4, thawed, engine, block) for block in (None, EXACT))
    assert exact == native
    assert all(moved > 1e-3 for _, moved in exact)


def loaded(
    engine: str, block: dict[str, Any] | None, folder: str, save: bool, steps: int = 0
) -> list[float]:
    """Return losses after a checkpoint of merged weights: of the saving run, or a loading run."""
    job = made(engine, block)
    if save:
        job.step(values_of(0))
        job.merge()
        job.engine.save_checkpoint(folder, tag="merged")
    else:
        for step in range(steps):
            job.step(values_of(7 + step))
        job.engine.load_checkpoint(folder, tag="merged")
    return [job.step(values_of(1 + step)) for step in range(3)]


#: settings of zero, and steps before the load
LOADS = [
    ({"frozen": "device"}, 0), ({"frozen": "device"}, 2), ({"secondary": "exact"}, 2),
    ({"frozen": "device", "secondary": "exact"}, 0),
    ({"frozen": "device", "secondary": "exact"}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("zero", "steps"), by_day(LOADS, LOADS[-1:]))
def test_loaded_frozen_weights_are_used(
    module_ranks: RunRanks, tmp_path: Any, zero: dict[str, Any], steps: int
) -> None:
    """Upstream's hpZ keeps using its copies of frozen weights from before a load."""
    folder, block = str(tmp_path), {"zero": zero}
    native = module_ranks(4, loaded, "zero3", None, str(tmp_path / "native"), True)
    assert module_ranks(4, loaded, "hpz", block, folder, True) == native
    assert module_ranks(4, loaded, "hpz", block, folder, False, steps) == native
