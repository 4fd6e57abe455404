"""``hybridcomp.gathered`` under FSDP2 and DDP: weights, tokens, bytes, restored state."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import ConfigError, PeerError
from hybridcomp.generation.gathered import free_nbytes
from tests.generation.tiny import VOCABULARY, TinyText, greedy, text
from tests.ranks import RunRanks
from tests.selection import by_day

STEPS: dict[str, Any] = {"gathered": "stepcode", "hierarchy": 2, "min_bytes": 0}


def build(block: dict[str, Any] | None, *, bf16: bool = True, replicas: int = 1) -> Any:
    """Return a model under FSDP2 with a group per layer, attached if there is a block."""
    torch.manual_seed(0)
    model = TinyText()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    if replicas > 1:
        mesh = init_device_mesh(
            "cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for layer in model.blocks:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "forward")
    if block is not None:
        hybridcomp.attach(model, block)
    return model


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    tokens = text(dist.get_rank(), number)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def whole(model: Any, bf16: bool = True) -> dict[str, torch.Tensor]:
    """Return the exact weights as torch gathers them, in the compute dtype."""
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.detach().full_tensor()
        found[name] = full.bfloat16() if bf16 else full
    return found


def same(model: nn.Module, want: dict[str, torch.Tensor]) -> bool:
    found = dict(model.named_parameters())
    return found.keys() == want.keys() and all(
        torch.equal(found[name].detach(), value) for name, value in want.items()
    )


def hooks_of(model: nn.Module) -> list[Any]:
    return [
        (list(module._forward_pre_hooks), list(module._forward_hooks), module.training)
        for module in model.modules()
    ]


def sent_of(model: Any) -> int:
    from hybridcomp.patches.torch.attach import channels_of_model

    channels = channels_of_model(model)
    assert channels is not None
    return int(channels.ledger.interval["zero", "forward"].inter_nbytes)


def rolled_out(block: dict[str, Any] | None, steps: int, bf16: bool) -> Any:
    """Return losses; whether weights, tokens and state are right; bytes of gathers by step."""
    model = build(block, bf16=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, right, sent = [], [], []
    for number in range(steps):
        losses.append(step(model, optimizer, number))
        if block is None:
            continue
        want, before = whole(model, bf16), hooks_of(model)
        held = list(model.parameters())
        with torch.random.fork_rng():
            plain = TinyText()
        plain = plain.to(torch.bfloat16 if bf16 else torch.float32).eval()
        plain.load_state_dict(want, strict=False)
        first = sent_of(model)
        with hybridcomp.gathered(model) as inside:
            right.append(same(inside, want) and not any(m.training for m in inside.modules()))
            right.append(greedy(inside, dist.get_rank()) == greedy(plain, dist.get_rank()))
            both = [inside.get_parameter(f"{name}.weight") for name in ("head", "embedding")]
            right.append(both[0] is both[1])
            assert sent_of(model) > first, "gathered by now"
        sent.append(sent_of(model) - first)
        right.append(hooks_of(model) == before)
        right.append(all(a is b for a, b in zip(model.parameters(), held, strict=True)))
    return losses, all(right), sent, sum(p.numel() for p in TinyText().parameters())


@pytest.mark.parametrize("keep", by_day(["device", "host"], ["host"]))
def test_later_gathers_send_steps(module_ranks: RunRanks, keep: str) -> None:
    block = {**STEPS, "gathered": {"keep": keep}}
    native, found = (module_ranks(4, rolled_out, one, 4, True) for one in (None, block))
    assert [one[0] for one in found] == [one[0] for one in native], "trained as without roll-outs"
    assert all(one[1] for one in found)
    numel = found[0][3]
    first, *later = (sum(nbytes) for nbytes in zip(*(one[2] for one in found), strict=True))
    assert first > 0.5 * 2 * numel, "every share crosses once to the other node"
    assert max(later) < 0.3 * 2 * numel, "of the 16 bits of each weight"


#: blocks, and whether parameters are bf16
OTHERS = {
    "expcode": ({**STEPS, "gathered": "expcode"}, True),
    "native": ({**STEPS, "gathered": "none", "zero": "expcode"}, True),
    "ranks alone": ({**STEPS, "hierarchy": 1}, True),  # a single rank per node keeps all shards
    "one node": ({**STEPS, "hierarchy": "none"}, True),
    "fp32": (STEPS, False),  # which has no deltas
}


@pytest.mark.parametrize("name", by_day(OTHERS, ["expcode", "ranks alone", "fp32"]))
def test_other_ways_are_exact(module_ranks: RunRanks, name: str) -> None:
    assert all(module_ranks(4, _two_gathers, *OTHERS[name]))


def _two_gathers(block: dict[str, Any], bf16: bool) -> bool:
    model = build(block, bf16=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    right = []
    for number in range(2):
        step(model, optimizer, number)
        want = whole(model, bf16)
        with hybridcomp.gathered(model) as inside:
            right.append(same(inside, want))
    return all(right)


def test_eight_bits_keep_their_bound(module_ranks: RunRanks) -> None:
    block = {**STEPS, "gathered": {"codec": "blockint", "bits": 8}}
    assert max(module_ranks(4, _error, block)) < 0.01


def _error(block: dict[str, Any]) -> float:
    model = build(block)
    want = whole(model)
    with hybridcomp.gathered(model) as inside:
        errors = [
            float((p.detach().float() - want[n].float()).abs().max() / want[n].float().abs().max())
            for n, p in inside.named_parameters()
        ]
        assert greedy(inside, 0) is not None
    return max(errors)


def _raises(who: int) -> tuple[str, str, bool]:
    model = build(STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer, 0)
    before, held = hooks_of(model), list(model.parameters())
    kind = text_ = ""
    try:
        with hybridcomp.gathered(model) as inside:
            greedy(inside, 0)
            if dist.get_rank() == who:
                raise ZeroDivisionError("a reward")
    except (ZeroDivisionError, PeerError) as error:
        kind, text_ = type(error).__name__, str(error)
    restored = hooks_of(model) == before
    restored &= all(a is b for a, b in zip(model.parameters(), held, strict=True))
    step(model, optimizer, 1)
    return kind, text_, restored


def test_an_error_in_one_body_is_one_on_all_ranks(module_ranks: RunRanks) -> None:
    found = module_ranks(4, _raises, 2)
    assert [kind for kind, *_ in found] == ["PeerError"] * 2 + ["ZeroDivisionError", "PeerError"]
    assert found[2][1] == "a reward"
    assert "rank 2: its roll-out raised an error" in found[0][1]
    assert all(restored for *_, restored in found)


def _too_large(who: int) -> tuple[str, str, int, bool]:
    model = build({**STEPS, "gathered": {"codec": "stepcode", "limit_gb": 0.5}})
    before = hooks_of(model)

    def free(device: torch.device) -> int:
        return 1000 if dist.get_rank() == who else free_nbytes(device)

    try:
        with (
            mock.patch("hybridcomp.generation.rolling_out.free_nbytes", free),
            hybridcomp.gathered(model),
        ):
            raise AssertionError("entered")
    except (ConfigError, PeerError) as error:
        return type(error).__name__, str(error), sent_of(model), hooks_of(model) == before


def test_what_does_not_fit_is_told_before(module_ranks: RunRanks) -> None:
    found = module_ranks(4, _too_large, 1)
    assert [kind for kind, *_ in found] == ["PeerError", "ConfigError", "PeerError", "PeerError"]
    for _, said, sent, restored in found:
        assert re.search(r"compression\.gathered: .* needed", said)
        assert "1 kB are free" in said and "kB of weights" in said
        assert not sent and restored


def _limited() -> str:
    model = build({**STEPS, "gathered": {"limit_gb": 1e-4}})
    with pytest.raises(ConfigError) as caught, hybridcomp.gathered(model):
        pass
    return str(caught.value)


def test_the_limit_of_the_block_counts(module_ranks: RunRanks) -> None:
    (said,) = set(module_ranks(4, _limited))
    assert "100 kB are allowed by compression.gathered.limit_gb" in said


def _written() -> list[bool]:
    """Gather after: nothing, a resync, a foreign write into a rank's copy, an HSDP mesh."""
    model = build(STEPS)
    found, kept = [], []
    for number in range(4):
        if number == 2 and dist.get_rank() == 1:
            hybridcomp.resync(model)
        if number == 3 and dist.get_rank() == 3:
            slices = vars(model)["_hybridcomp_gathered"]._buckets
            slices[0].kept.slice.view(-1)[5] = 1.0
        want, before = whole(model), sent_of(model)
        with hybridcomp.gathered(model) as inside:
            found.append(same(inside, want))
        kept.append(sent_of(model) - before)
    assert kept[1] < 500, "digests alone: nothing has changed"
    assert min(kept[0], kept[2], kept[3]) > 20 * kept[1]
    hybridcomp.detach(model)
    assert vars(model)["_hybridcomp_gathered"]._buckets[0].kept is None, "freed"
    sharded = build({**STEPS, "hierarchy": "auto"}, replicas=2)
    for _ in range(2):
        want = whole(sharded)
        with hybridcomp.gathered(sharded) as inside:
            found.append(same(inside, want))
    bare = build(None)
    want = whole(bare)
    with hybridcomp.gathered(bare) as inside:
        found.append(same(inside, want))
    return found


def test_changes_from_outside_and_other_meshes(module_ranks: RunRanks) -> None:
    assert all(all(found) for found in module_ranks(4, _written))


def _ddp() -> list[str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(TinyText())
    with hybridcomp.gathered(model) as inside:
        assert inside is model.module and not inside.training
    assert model.module.training
    said = []
    for engine in (model, TinyText()):
        with pytest.raises(ConfigError) as caught:
            hybridcomp.attach(model, STEPS) if engine is model else hybridcomp.gathered(engine)
        said.append(str(caught.value))
    return said


def test_ddp_has_all_weights(module_ranks: RunRanks) -> None:
    (said,) = {tuple(one) for one in module_ranks(4, _ddp)}
    assert "compression.gathered" in said[0] and "under DDP; remove it" in said[0]
    assert "expected an engine of DeepSpeed, the root of fully_shard" in said[1]
    assert VOCABULARY > 3
