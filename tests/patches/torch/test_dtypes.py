"""Unsupported values travel natively: fp64, complex under FSDP2, sparse gradients."""

from __future__ import annotations

import contextlib
import io
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.channels.messages.kept_weights import NONE_KEPT
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.torch import rules
from hybridcomp.session.engine_session import EngineSession
from tests.patches.torch.trainer import squares
from tests.ranks import RunRanks

WIDTH = 32
B4: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}
#: engine, dtype: DDP sums complex64 as pairs of fp32, which codecs support
NATIVE: list[tuple[Any, torch.dtype]] = [
    (DistributedDataParallel, torch.float64),
    (fully_shard, torch.float64), (fully_shard, torch.complex64),
]  # fmt: skip
#: older DDP with complex parameters is rejected
OLD = Version(torch.__version__) < Version("2.13")
if not OLD:
    NATIVE.append((DistributedDataParallel, torch.complex128))


class Linear(nn.Module):
    """A product with parameters of one dtype and an fp64 result."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 6)

    def forward(self, values: Tensor) -> Tensor:
        made: Tensor = torch.view_as_real((values.to(self.weight.dtype) @ self.weight) * (1 + 0j))
        return made.sum(-1).double()


class Rows(nn.Module):
    """An embedding with sparse gradients, and a product."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        tokens = (values[:, :4] * 10).long().abs() % 50
        head: Tensor = self.head(self.embedding(tokens).mean(1))
        return head


def trained(model: nn.Module, block: dict[str, Any] | None) -> tuple[str, Any]:
    """Return the parameters' digest after three steps, and the attached parts."""
    return squares(model, block, WIDTH)[1:]


def seeded(make: Any, *given: Any) -> Any:
    torch.manual_seed(0)
    return make(*given)


def messages(attached: Any, name: str) -> tuple[int, int]:
    """Return the numbers of all and of native messages."""
    entry = attached.channels.ledger.interval[name, "forward"]
    return entry.messages, entry.native


def with_other_dtypes(when: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for wrap, dtype in NATIVE:
        block: dict[str, Any] = {"dp": {**B4, "when": when}}
        if wrap is fully_shard:
            block["zero"] = {"codec": "fp8", "when": when}
        native = trained(wrap(seeded(Linear, dtype)), None)[0]
        ours, attached = trained(wrap(seeded(Linear, dtype)), block)
        found[f"{wrap} {dtype}"] = [ours == native, *(messages(attached, name) for name in block)]
    return found


@pytest.mark.parametrize("when", ["always", "auto"])
def test_what_no_codec_takes_is_native(module_ranks: RunRanks, when: str) -> None:
    """Bit for bit, and every message counts as native."""
    for found in module_ranks(2, with_other_dtypes, when):
        for name, (identical, *counts) in found.items():
            assert identical and all(every == native > 0 for every, native in counts), name


def of_pairs() -> dict[str, Any]:
    """Train a complex model under DDP."""

    def make() -> Any:
        return DistributedDataParallel(seeded(Linear, torch.complex64))

    native = trained(make(), None)[0]
    found: dict[str, Any] = {}
    for name, codec in (("lossless", {"codec": "mpc"}), ("blockint", B4),
                        ("powersgd", {"codec": "powersgd", "rank": 2})):  # fmt: skip
        digest_, attached = trained(make(), {"dp": codec})
        found[name] = (digest_ == native, messages(attached, "dp"))
    return found


@pytest.mark.skipif(OLD, reason="refused below torch 2.13")
def test_complex_numbers_under_ddp_are_pairs(module_ranks: RunRanks) -> None:
    for found in module_ranks(2, of_pairs):
        for name, (identical, (every, native)) in found.items():
            assert identical == (name == "lossless") and every > native == 0, name


def sparse() -> dict[str, Any]:
    native = trained(DistributedDataParallel(seeded(Rows)), None)[0]
    given = {"on_unsupported": "native"}
    same = trained(DistributedDataParallel(seeded(Rows)), {"dp": {"codec": "mpc"}, **given})[0]
    lossy, attached = trained(DistributedDataParallel(seeded(Rows)), {"dp": B4, **given})
    entry = attached.channels.ledger.interval["dp", "forward"]
    return {
        "identity": same == native, "lossy": lossy != native, "step": attached.step,
        "counts": messages(attached, "dp"), "wire": entry.wire_nbytes / entry.raw_nbytes,
    }  # fmt: skip


def test_sparse_gradients_travel_natively_beside_encoded_ones(module_ranks: RunRanks) -> None:
    for found in module_ranks(2, sparse):
        assert found["identity"] and found["lossy"] and found["step"] == 3
        every, native = found["counts"]
        assert native == 3 and every > native, "the embedding's rows, once in each step"
        assert 0 < found["wire"] < 1


class Adapted(nn.Module):
    """A frozen product in bf16 beside a trained one in fp32, which FSDP2 gathers as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)  # a value of one rank
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.base(values.bfloat16()).float() + self.adapter(values)
        return found * self.scale


def adapters() -> list[bool]:
    native = trained(fully_shard(seeded(Adapted)), None)[0]
    exact: dict[str, Any] = {"codec": "mpc", "frozen": "device"}
    kept, attached = trained(fully_shard(seeded(Adapted)), {"zero": exact})
    plain = trained(fully_shard(seeded(Adapted)), {"zero": {"codec": "mpc"}})[0]
    every, passed = messages(attached, "zero")
    return [kept == native, plain == native, every > passed > 0]


def test_frozen_weights_of_another_dtype_are_kept_beside_trained_ones(
    module_ranks: RunRanks,
) -> None:
    assert module_ranks(2, adapters) == [[True] * 3] * 2


def without_frozen() -> list[str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trained(fully_shard(seeded(Linear, torch.float32)), {"zero": {"frozen": "host"}})
    return [line for line in said.getvalue().splitlines() if NONE_KEPT in line]


def test_a_model_that_keeps_no_frozen_weight_says_so(module_ranks: RunRanks) -> None:
    assert module_ranks(2, without_frozen) == [[f"[hybridcomp] {NONE_KEPT}"], []]


class Begun(nn.Module):
    """A model that begins with a few values of another dtype than all others, maybe integers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        is_trained = dtype.is_floating_point
        self.first = nn.Parameter(torch.zeros(WIDTH, 2, dtype=dtype), requires_grad=is_trained)
        self.inner = nn.Linear(WIDTH, WIDTH)


def sharded(model: Begun) -> Any:
    fully_shard(model.inner)
    return fully_shard(model)


def measured(dtype: torch.dtype) -> list[list[str]]:
    """Return the dtypes in which messages of a model that begins with ``dtype`` are measured."""
    found = []
    for wrap in (sharded, DistributedDataParallel):
        model = wrap(seeded(Begun, dtype))
        with patch.object(EngineSession, "measure", autospec=True) as measure:
            hybridcomp.attach(model, {"dp": {"codec": "mpc"}, "zero": "none", "min_bytes": 0})
        hybridcomp.detach(model)
        found.append([str(call.args[2]) for call in measure.call_args_list])
    return found


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.bfloat16], ids=str)
def test_the_dtype_of_most_values_is_measured(module_ranks: RunRanks, dtype: torch.dtype) -> None:
    for found in module_ranks(2, measured, dtype):
        assert found == [["torch.float32"] * 2, ["torch.float32"]]


def test_complex_numbers_under_ddp_want_torch_213(monkeypatch: pytest.MonkeyPatch) -> None:
    """In older releases their sums differ from native ones, so such a model is rejected."""
    block = CompressionConfig.parse({"dp": "bf16"})
    old = next(rule for rule in rules.DDP if "complex" in rule.found)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert not old.applies(Linear(torch.complex64))
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    assert old.applies(Linear(torch.complex64)) and not old.applies(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="install torch 2.13, or leave dp out"):
        rules.check(block, (old,), Linear(torch.complex64))
