"""Transformer Engine's layers on stand-ins: encoded messages, directions, rejected settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError, SeamError
from hybridcomp.patches.mcore import transformer_engine
from hybridcomp.patches.registry import patches_of
from hybridcomp.seams import arming, patching
from hybridcomp.seams.arming import missing
from hybridcomp.seams.patching import apply_all, revert_all
from hybridcomp.session import process
from tests.patches.recorded import hold_to_revert
from tests.ranks import RunRanks
from tests.stand_ins import transformer_engine as te_stub

PACKAGE = "transformer_engine.pytorch"
BLOCK = {"tp": {"codec": "blockint", "bits": 4, "backward": {"bits": 8}}, "min_bytes": 0}
ROWS, WIDTH = 8, 64


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(patching, "version", lambda name: "2.8.0")
    te_stub.install()
    yield
    te_stub.remove()


@pytest.mark.parametrize("found", te_stub.RELEASES)
def test_apply_and_revert(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(patching, "version", lambda name: found)
    te_stub.install(te_stub.RELEASES[found])
    hold_to_revert(PACKAGE)


@pytest.mark.parametrize("found", ["1.13.0", "2.21.0", "3.0"])
def test_versions_outside_the_window_name_it(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(patching, "version", lambda name: found)
    for patch in patches_of(PACKAGE):
        with pytest.raises(SeamError, match=r"transformer-engine >= 2\.0, < 2\.21") as caught:
            patch.apply()
        assert f"transformer-engine {found}" in str(caught.value)


def test_other_parameters_of_the_functions_are_refused() -> None:
    later = te_stub.LATER.replace("output_tensor=None", "output_tensor=None, more=None")
    te_stub.install(later)
    with pytest.raises(SeamError, match=r"gather_along_first_dim: needs .* < 2\.21.*more"):
        apply_all(patches_of(PACKAGE))


def test_an_unknown_version_stops_only_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridcomp.patches import registry
    from hybridcomp.patches.rules import engine, mcore

    monkeypatch.setattr(patching, "version", lambda name: "2.30.0")
    monkeypatch.setattr(arming, "UNFIT", {})
    monkeypatch.setattr(registry, "UNFIT", arming.UNFIT)
    registry.ARMED.apply(PACKAGE)
    reason = missing(PACKAGE)
    assert reason is not None and "< 2.21" in reason and "2.30.0" in reason
    with pytest.raises(ConfigError, match=r"2\.30\.0.*transformer-impl local"):
        engine.apply(mcore.out_of_reach(reason), ["tp"], CompressionConfig.parse(BLOCK))


def train(layer: str, sequence_parallel: bool, block: dict[str, Any] | None, fp8: bool) -> Any:
    """Run a column- and a row-parallel layer forward and backward; return values and counts."""
    import sys

    setattr(patching, "version", lambda name: "2.8.0")  # noqa: B010
    te_stub.install()
    module, name = {c: (f"{PACKAGE}.module.{m}", c) for m, c, _ in transformer_engine.LAYERS}[layer]
    function = getattr(sys.modules[module], name)
    patches = []
    if block is not None:
        process.configure(block)
        patches = apply_all(patches_of(PACKAGE))
    group, rank = dist.group.WORLD, dist.get_rank()
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(ROWS, WIDTH, generator=generator)
    one, two = (torch.randn(2, WIDTH // 2, WIDTH, generator=generator) * 0.1 for _ in range(2))
    x = whole.chunk(2)[rank] if sequence_parallel else whole
    x = x.clone().requires_grad_()
    first, second = one[rank].clone().requires_grad_(), two[rank].t().clone().requires_grad_()
    quantizer = "fp8" if fp8 else None
    hidden = function.apply(x, first, group, False, sequence_parallel, quantizer)
    out = function.apply(hidden, second, group, True, sequence_parallel, None)
    out.square().sum().backward()
    channels = process.current() if block is not None else None
    counts = {}
    if channels is not None:
        counts = {
            key: (entry.messages, entry.native, entry.wire_nbytes / entry.raw_nbytes)
            for key, entry in channels.ledger.interval.items()
            if entry.messages
        }
    revert_all(patches)
    process.configure(None)
    te_stub.remove()
    assert x.grad is not None and first.grad is not None
    return out.detach(), x.grad, first.grad, counts


def compare() -> dict[tuple[str, bool], list[Any]]:
    """Compare unpatched, a codec and ``none``: every layer, with sequence parallelism or not."""
    blocks: list[dict[str, Any] | None] = [None, BLOCK, {**BLOCK, "tp": "none"}]
    return {
        (name, sequences): [train(name, sequences, block, False) for block in blocks]
        for _, name, _ in transformer_engine.LAYERS
        for sequences in (False, True)
    }


@pytest.fixture(scope="module")
def compared(module_ranks: RunRanks) -> list[dict[tuple[str, bool], list[Any]]]:
    return module_ranks(2, compare)


@pytest.mark.parametrize("layer", [name for _, name, _ in transformer_engine.LAYERS])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_message_is_encoded_its_way(
    compared: list[dict[tuple[str, bool], list[Any]]], layer: str, sequence_parallel: bool
) -> None:
    for found in compared:
        (*values, _), (*encoded, counts), (*native, _) = found[layer, sequence_parallel]
        for was, now, same in zip(values, encoded, native, strict=True):
            assert torch.equal(was, same)
            error = float((now - was).norm() / was.norm())
            assert 0 < error < 0.3
        # reduce of the output; with sequences also gather of the input, in both passes
        messages, left, ratio = counts["tp", "forward"]
        assert (messages, left) == (3 if sequence_parallel else 1, 0)
        assert ratio == pytest.approx(4.25 / 32, rel=0.15)
        # reduce of the input's gradient; with sequences also gather of the output's
        messages, left, ratio = counts["tp", "backward"]
        assert (messages, left) == (2 if sequence_parallel else 1, 0)
        assert ratio == pytest.approx(8.25 / 32, rel=0.15)


def test_quantized_tensors_arrive_exactly_and_are_counted(module_ranks: RunRanks) -> None:
    for *_, counts in module_ranks(2, train, "_Linear", True, BLOCK, True):
        messages, native, _ = counts["tp", "forward"]
        assert (messages, native) == (3, 1)


def given_outputs() -> dict[str, Any]:
    """Run both functions of 2.19 inside a layer with output tensors, once batched."""
    import sys

    from torch.distributed.distributed_c10d import _coalescing_manager

    said: list[str] = []
    setattr(transformer_engine, "say_once", said.append)  # noqa: B010
    setattr(patching, "version", lambda name: "2.20.2")  # noqa: B010
    te_stub.install(te_stub.LATER)
    process.configure(BLOCK)
    patches = apply_all(patches_of(PACKAGE))
    module, group, rank = (
        sys.modules[transformer_engine.DISTRIBUTED],
        dist.group.WORLD,
        dist.get_rank(),
    )
    assert group is not None
    mine = torch.arange(64.0).view(2, 32) + rank
    both, half = torch.zeros(4, 32), torch.zeros(1, 32)
    with transformer_engine._WAY.inside("forward"):
        gathered, _ = module.gather_along_first_dim(mine, group, output_tensor=both)
        reduced, _ = module.reduce_scatter_along_first_dim(mine, group, output=half)
        channels = process.current()
        assert channels is not None
        encoded = channels.ledger.interval["tp", "forward"].native
        batched = torch.zeros(4, 32)
        with _coalescing_manager(group, async_ops=True) as batch:
            module.gather_along_first_dim(
                mine, group, async_op=True, output_tensor=batched, external_coalescing=True
            )
        batch.wait()
    entry = channels.ledger.interval["tp", "forward"]
    revert_all(patches)
    exact = torch.cat([torch.arange(64.0).view(2, 32) + r for r in range(2)])
    return {
        "same": (gathered is both, reduced is half),
        "errors": [
            float((both - exact).abs().max()),
            float((half - 2 * mine[rank] + (2 * rank - 1)).abs().max()),
        ],
        "batched": torch.equal(batched, exact),
        "native": (encoded, entry.native, entry.messages),
        "said": said,
    }


def test_results_go_where_the_caller_asks_and_batches_stay_native(
    module_ranks: RunRanks,
) -> None:
    for found in module_ranks(2, given_outputs):
        assert found["same"] == (True, True)
        assert all(0 < error < 12 for error in found["errors"])  # 4 bits of up to 127
        assert found["batched"]
        assert found["native"] == (0, 1, 3)
        assert [text.partition(":")[0] for text in found["said"]] == ["tp native"]


def outside() -> dict[Any, Any]:
    """Call the same functions outside any known layer."""
    import sys

    setattr(patching, "version", lambda name: "2.8.0")  # noqa: B010
    te_stub.install()
    process.configure(BLOCK)
    patches = apply_all(patches_of(PACKAGE))
    values = torch.ones(64)
    sys.modules[transformer_engine.DISTRIBUTED].allreduce(values, dist.group.WORLD)
    channels = process.current()
    assert channels is not None and values.tolist() == [2.0] * 64
    revert_all(patches)
    return {key: entry for key, entry in channels.ledger.interval.items() if entry.messages}


def test_calls_from_elsewhere_are_upstreams(module_ranks: RunRanks) -> None:
    assert module_ranks(2, outside) == [{}, {}]
