"""Layers offloaded to host memory: same bits, one prefetched layer, everything restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.channels.accounting.ledger import Ledger
from hybridcomp.errors import ConfigError
from hybridcomp.generation import KeyStore, PackedPass, SequencePart, StageRunner
from hybridcomp.generation.host_layers import HostLayers
from tests.generation import generating_jobs as jobs
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


def flat_model(dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor]:
    """Return the model with all weights in one flat buffer with gaps, and the buffer."""
    model = jobs.whole_model().to(dtype)
    params = list(model.parameters())
    flat = torch.full((sum(p.numel() + 3 for p in params),), 7.0, dtype=dtype)
    at = 3
    for param in params:
        place = flat[at : at + param.numel()]
        place.copy_(param.data.view(-1))
        param.data = place.view(param.shape)
        at += param.numel() + 3
    return model, flat


def nbytes(layer: Any) -> int:
    return sum(p.numel() * p.itemsize for p in layer.parameters())


def passes(model: Any, host: HostLayers) -> list[Tensor]:
    """Return logits of two passes, and the resident weights while each layer ran."""
    runner = StageRunner(
        list(model.layers), KeyStore(40), CPU, is_first=True, is_last=True, fetch=host.fetch
    )
    first = (SequencePart(0, (1, 2, 3), wants=3), SequencePart(1, (9,)))
    second = (SequencePart(0, (4,)), SequencePart(1, (5, 6), wants=2))
    return [runner(PackedPass(parts)) for parts in (first, second)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_and_weights_are_the_same_bits(dtype: torch.dtype) -> None:
    model, flat = flat_model(dtype)
    before, block = flat.clone(), nbytes(model.layers[1])
    want = passes(model, HostLayers(model.layers, [model], CPU, None, Ledger()))
    most, ledger = (nbytes(model) - 0.9 * block) / 1e9, Ledger()
    there: list[int] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda *_: there.append(sum(p.numel() > 0 for p in model.layers.parameters()))
        )
    with HostLayers(model.layers, [model], CPU, most, ledger) as host:
        assert flat.untyped_storage().nbytes() == 0, "what the optimizer holds is freed"
        logits = passes(model, host)
    assert all(torch.equal(a, b) for a, b in zip(want, logits, strict=True))
    assert flat.view(torch.uint8).equal(before.view(torch.uint8)), "gaps, too"
    model.layers[1].norm1.weight.data.add_(1)
    assert not flat.equal(before), "weights lie in the buffer again"
    # embedding, norm, output, and one of four blocks at a time
    blocks = [len(list(layer.parameters())) for layer in model.layers[1:5]]
    assert max(there) == len(list(model.parameters())) - sum(blocks) + max(blocks)
    entry = ledger.interval["offload", "forward"]
    assert entry.raw_nbytes == entry.messages * block and entry.messages in (9, 10)
    encoded = dtype != torch.float64
    assert (entry.wire_nbytes < 0.95 * entry.raw_nbytes) == encoded


def test_what_fails_leaves_everything_as_it_was() -> None:
    model, flat = flat_model()
    before, most = flat.clone(), (nbytes(model) - nbytes(model.layers[1]) * 0.9) / 1e9
    with (
        pytest.raises(ValueError, match="a layer cannot"),
        HostLayers(model.layers, [model], CPU, most, Ledger()) as host,
    ):
        host.fetch(2)  # not the prefetched one
        assert model.layers[2].up.weight.numel() and not model.layers[1].up.weight.numel()
        raise ValueError("a layer cannot")
    assert flat.equal(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridcomp.generation.host_layers._new", broken)
        with pytest.raises(MemoryError):
            HostLayers(model.layers, [model], CPU, most, Ledger()).__enter__()
    assert flat.equal(before) and model.layers[1].up.weight.numel()


def broken(nbytes: int, device: torch.device) -> Tensor:
    if nbytes:
        raise MemoryError
    return torch.empty(0, dtype=torch.uint8)


def test_limits_are_told() -> None:
    model, _ = flat_model()
    block = nbytes(model.layers[1])
    with pytest.raises(ConfigError) as caught:
        HostLayers(model.layers, [model], CPU, 2 * block / 1e9, Ledger())
    text = str(caught.value)
    assert text.startswith("generate.weights_gb: found 98.8 kB; the layers of this stage")
    assert "take 213 kB, and no less than 165 kB" in text
    with pytest.raises(ConfigError, match="no less than"):  # a single callable cannot be offloaded
        HostLayers([lambda values: values], [model], CPU, 1e-6, Ledger())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridcomp.generation.host_layers.free_nbytes", lambda device: 1000)
        with pytest.raises(ConfigError, match=r"24 weights would wait in .*1 kB are free"):
            HostLayers(model.layers, [model], CPU, (nbytes(model) - block * 0.9) / 1e9, Ledger())


def generated(most_gb: float | None, pp: int) -> Any:
    """Return answers and weights of a bf16 engine whose optimizer holds them in flat buffers."""
    import hybridcomp
    from hybridcomp.channels import channels_of

    hybridcomp.install()
    generate = {} if most_gb is None else {"weights_gb": most_gb}
    engine = jobs.engine(
        pp=pp, block={"generate": generate}, bf16={"enabled": True}, zero_optimization={"stage": 1}
    )
    answers = hybridcomp.generate(engine, jobs.prompts(6), tokens=5)
    sent = channels_of(engine).ledger.interval["generate", "offload"]  # type: ignore[index,union-attr]
    engine.train_batch(iter([(torch.ones(1, 4, dtype=torch.int64),) * 2] * 2))
    return (
        [ids.tolist() for ids in answers],
        {name: jobs.digest(p) for name, p in engine.module.named_parameters()},
        (sent.messages, sent.raw_nbytes > sent.wire_nbytes),
    )


def twice(most_gb: float) -> Any:
    return generated(None, 1), generated(most_gb, 1)


def test_a_bf16_engine_trains_on() -> None:
    pytest.importorskip("deepspeed")
    block = 2 * (12 * jobs.WIDTH**2 + 2 * jobs.WIDTH)
    most = (3 * block + 2 * (2 * jobs.VOCAB + 1) * jobs.WIDTH + 2000) / 1e9
    (((*want, none), (*limited, sent)),) = run_ranks(1, twice, most)
    assert limited == want and none[0] == 0 and sent[0] > 20 and sent[1]
    for two in run_ranks(2, generated, None, 2):
        assert two[0] == want[0], "stages give the same bits"
