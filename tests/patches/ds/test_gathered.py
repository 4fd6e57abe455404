"""``hybridcomp.gathered`` on DeepSpeed's engines: weights, tokens, bytes, restored state."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hybridcomp
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError, PeerError
from hybridcomp.patches.rules import ds_check
from tests.generation.tiny import TinyText, greedy, text
from tests.ranks import RunRanks

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training.trainer import Job, make_engine

STEPS: dict[str, Any] = {"gathered": "stepcode", "hierarchy": 2, "min_bytes": 0}
ZERO: dict[str, Any] = {"stage3_param_persistence_threshold": 100}


def engine_of(block: dict[str, Any] | None, *, stage: int = 3, **zero: Any) -> Any:
    torch.manual_seed(0)
    job = Job(stage, "bf16", lr=1e-4, zero={**ZERO, **zero} if stage == 3 else {}, block=block)
    return make_engine(job, TinyText())


def step(engine: Any, number: int) -> float:
    tokens = text(dist.get_rank(), number)
    logits = engine(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def whole(engine: Any) -> dict[str, Tensor]:
    """Return the weights as DeepSpeed gathers them, as TRL does for a roll-out."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def state_of(module: nn.Module) -> list[Any]:
    """Return the state that a roll-out must preserve: hooks, modes, and each parameter's state."""
    hooks = [
        (list(one._forward_pre_hooks), list(one._forward_hooks), one.training)
        for one in module.modules()
    ]
    every: list[Any] = list(module.parameters())
    return [hooks, [(id(p), p.ds_status.name, p.data_ptr(), p.shape) for p in every]]


def sent_of(engine: Any) -> int:
    from hybridcomp.channels import channels_of

    channels = channels_of(engine)
    assert channels is not None
    return int(channels.ledger.interval["zero", "forward"].inter_nbytes)


def rolled_out(block: dict[str, Any] | None, steps: int, zero: dict[str, Any]) -> Any:
    engine = engine_of(block, **zero)
    losses, right, sent = [], [], []
    for number in range(steps):
        losses.append(step(engine, number))
        if block is None:
            continue
        want, before, first = whole(engine), state_of(engine.module), sent_of(engine)
        with torch.random.fork_rng():
            plain = TinyText()
        plain.to(torch.bfloat16).eval().load_state_dict(want, strict=False)
        with hybridcomp.gathered(engine) as inside:
            assert inside is engine.module
            found = dict(inside.named_parameters())
            right.append(all(torch.equal(found[name], want[name]) for name in want))
            right.append(greedy(inside, dist.get_rank()) == greedy(plain, dist.get_rank()))
            sent.append(sent_of(engine) - first)
            right.append(not any(m.training for m in inside.modules()))
        right.append(state_of(engine.module) == before and sent_of(engine) - first == sent[-1])
    engine.destroy()
    return losses, right, sent


@pytest.mark.parametrize(
    "zero",
    [{}, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}],
    ids=["device", "offload_param"],
)
def test_later_gathers_send_steps(module_ranks: RunRanks, zero: dict[str, Any]) -> None:
    native, found = (module_ranks(4, rolled_out, block, 3, zero) for block in (None, STEPS))
    assert [one[0] for one in found] == [one[0] for one in native], "trained as without roll-outs"
    assert all(all(one[1]) for one in found)
    numel = sum(p.numel() for p in TinyText().parameters())
    first, *later = (sum(nbytes) for nbytes in zip(*(one[2] for one in found), strict=True))
    assert first > 0.5 * 2 * numel, "every share crosses once to the other node"
    assert max(later) < 0.3 * 2 * numel, "of the 16 bits of each weight"


def _raises() -> tuple[str, list[bool]]:
    engine = engine_of(STEPS)
    step(engine, 0)
    before = state_of(engine.module)
    with pytest.raises((ZeroDivisionError, PeerError)) as caught:  # noqa: SIM117
        with hybridcomp.gathered(engine) as inside:
            greedy(inside, 0)
            if dist.get_rank() == 1:
                raise ZeroDivisionError("a reward")
    restored = [state_of(engine.module) == before]
    step(engine, 1)
    engine.destroy()
    return f"{caught.type.__name__}: {caught.value}", restored


def test_an_error_in_one_body_is_one_on_all_ranks(module_ranks: RunRanks) -> None:
    found = module_ranks(4, _raises)
    assert found[1][0] == "ZeroDivisionError: a reward"
    assert "PeerError: hybridcomp.gathered: rank 1: its roll-out raised" in found[0][0]
    assert all(all(restored) for _, restored in found)


def _below_three() -> list[str]:
    engine = engine_of({"dp": "bf16"}, stage=2)
    with hybridcomp.gathered(engine) as inside:
        assert inside is engine.module and not inside.training
    assert engine.module.training
    engine.destroy()
    said = []
    with pytest.raises(ConfigError) as caught:
        engine_of(STEPS, stage=2)
    said.append(str(caught.value))
    return said


def test_below_stage_three_nothing_is_gathered(module_ranks: RunRanks) -> None:
    (said,) = {tuple(one) for one in module_ranks(4, _below_three)}
    assert 'compression.gathered: found "stepcode()"; every rank has all weights' in said[0]


@pytest.mark.parametrize(
    ("settings", "facts", "why"),
    [
        ({"zero_optimization": {"stage": 1}}, {"pipeline": True}, "stages of a pipeline"),
        ({"zero_optimization": {"stage": 1}}, {}, "every rank has all weights"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, {},
            "weights on a disk",
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, {}, "weights that MiCS cuts"),
    ],
)  # fmt: skip
def test_where_the_key_cannot_act(
    settings: dict[str, Any], facts: dict[str, Any], why: str
) -> None:
    written = {"train_batch_size": 4, **settings}
    block = CompressionConfig.parse({"gathered": "stepcode"})
    with pytest.raises(ConfigError, match=why):
        ds_check.check(block, written, **facts)
    native = CompressionConfig.parse({"gathered": "stepcode", "on_unsupported": "native"})
    assert any(why in note for note in ds_check.check(native, written, **facts))
    stage3 = {"train_batch_size": 4, "zero_optimization": {"stage": 3}}
    assert not any("gathered" in note for note in ds_check.check(block, stage3))


def _refused() -> list[str]:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    pipeline = PipelineEngine.__new__(PipelineEngine)
    nn.Module.__init__(pipeline)
    pipeline.module = TinyText()
    pipeline.device = torch.device("cpu")
    engine = engine_of(STEPS)
    first = next(engine.module.parameters())
    said = []

    def tried(one: Any) -> None:
        with pytest.raises(ConfigError) as caught, hybridcomp.gathered(one):
            pass
        said.append(str(caught.value))

    tried(pipeline)
    status = first.ds_status
    first.ds_status = type(status).INFLIGHT
    tried(engine)
    first.ds_status = status
    first.ds_tensor.status = type(first.ds_tensor.status).NOT_AVAILABLE
    tried(engine)
    first.ds_tensor.status = type(first.ds_tensor.status).AVAILABLE
    engine.destroy()
    return said


def test_engines_whose_weights_are_not_at_hand(module_ranks: RunRanks) -> None:
    (said,) = {tuple(one) for one in module_ranks(4, _refused)}
    assert "a PipelineEngine" in said[0] and "hybridcomp.generate" in said[0]
    assert "a gather of DeepSpeed is under way; call it between two steps" in said[1]
    assert "offload_param to nvme" in said[2]
