"""Mesh layers against plain ones: values, gradients, bits, bytes, memory, weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.channels import Channels
from hybridcomp.codecs import make_codec
from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import KINDS
from hybridcomp.errors import ConfigError
from hybridcomp.nn import tp2d
from hybridcomp.nn.tp2d.weights import cut_state
from tests.nn.small_gpt import batch, channels_of, gradients, joined, pair
from tests.ranks import RunRanks, run_ranks
from tests.selection import by_day

EIGHT = {"tp2d": {"codec": "blockint", "bits": 8}, "min_bytes": 0}


def relative(values: Tensor, expected: Tensor) -> float:
    """Return the L2 error relative to the expected L2 norm."""
    return float((values - expected).norm() / expected.norm())


def compared(
    dtype: torch.dtype, block: Any, tied: bool, q: int = 2
) -> tuple[dict[str, float], bool]:
    """Return errors of loss and gradients against the plain model, and rank differences."""
    plain, meshed = pair(q, dtype, block, tied)
    tokens, labels = batch(q)
    expected, meshed_loss = plain.loss(tokens, labels), meshed.loss(tokens, labels)
    expected.backward()  # type: ignore[no-untyped-call]
    meshed_loss.backward()  # type: ignore[no-untyped-call]
    errors = {"loss": relative(meshed_loss.detach(), expected.detach())}
    losses = [torch.empty_like(meshed_loss) for _ in range(q * q)]
    dist.all_gather(losses, meshed_loss.detach())
    every = gradients(plain)
    assert tp2d.layouts_of(meshed).keys() == every.keys()
    for name, gradient in joined(meshed, gradients(meshed), q).items():
        errors[name] = relative(gradient, every[name])
    return errors, all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_equals_the_plain_model(
    on_ranks: RunRanks, dtype: torch.dtype, most: float, tied: bool
) -> None:
    for errors, agree in on_ranks(4, compared, dtype, None, tied):
        assert agree and len(errors) == (12 if tied else 13)
        assert max(errors.values()) <= most, errors


def nine() -> list[tuple[dict[str, float], bool]]:
    """Run meshes of 3 x 3: native and with 8 bits, tied or not, lossless compared by bits."""
    native = bits_of(None, torch.float32, 3)
    encoded = bits_of({"tp2d": "mpc", "preset": "none", "min_bytes": 0}, torch.float32, 3)
    assert all(map(torch.equal, encoded, native))
    return [
        compared(torch.float32, None, False, 3),
        compared(torch.float64, None, True, 3),
        compared(torch.float32, EIGHT, False, 3),
    ]


@pytest.mark.nightly
def test_a_mesh_of_nine_ranks() -> None:
    """Sums have two addends from others and blocks two receivers; 50 words are padded to 51."""
    for plain, tied, eight in run_ranks(9, nine):
        assert plain[1] and max(plain[0].values()) <= 1e-6, plain[0]
        assert tied[1] and max(tied[0].values()) <= 1e-12, tied[0]
        assert eight[1] and 1e-4 < max(eight[0].values()) < 0.04, eight[0]


def test_eight_bits_are_close(on_ranks: RunRanks) -> None:
    for errors, agree in on_ranks(4, compared, torch.float32, EIGHT, False):
        assert agree
        assert errors["loss"] < 1e-3 and 1e-4 < max(errors.values()) < 0.03, errors


def bits_of(block: Any, dtype: torch.dtype, q: int) -> list[Tensor]:
    """Return this rank's loss and gradients."""
    _, meshed = pair(q, dtype, block)
    loss = meshed.loss(*batch(q))
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *gradients(meshed).values()]


def lossless(dtype: torch.dtype) -> None:
    native = bits_of(None, dtype, 2)
    for codec in ("none", "mpc", "expcode"):
        block = {"tp2d": codec, "preset": "none", "min_bytes": 0}
        encoded = bits_of(block, dtype, 2)
        assert len(encoded) == len(native)
        assert all(map(torch.equal, encoded, native)), codec


@pytest.mark.parametrize("dtype", by_day([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_lossless_codecs_are_native_to_the_bit(on_ranks: RunRanks, dtype: torch.dtype) -> None:
    on_ranks(4, lossless, dtype)


def one_product(rows: int, inputs: int, outputs: int, block: Mapping[str, Any]) -> dict[str, Any]:
    """Run a linear layer forward and backward: return its error, and this rank's ledger."""
    channels = channels_of(block)
    assert channels is not None
    mesh = tp2d.Mesh(2, lambda: channels)
    torch.manual_seed(0)
    whole = nn.Linear(inputs, outputs, bias=False)
    values, grads = torch.randn(rows, inputs), torch.randn(rows, outputs)
    layer = tp2d.Linear(mesh, whole)
    own = mesh.part(values).chunk(2, dim=1)[mesh.column].clone().requires_grad_()
    out = layer(own)
    after = {kind: channels.ledger.interval["tp2d", kind].wire_nbytes for kind in KINDS}
    out.backward(mesh.part(grads).chunk(2, dim=1)[mesh.column])
    expected = mesh.part(values @ whole.weight.detach().T).chunk(2, dim=1)[mesh.column]
    entries = {kind: channels.ledger.interval["tp2d", kind] for kind in KINDS}
    return {
        "error_sq": float((out.detach() - expected).square().sum()),
        "value_sq": float(expected.square().sum()),
        "forward": after,
        "wire": {kind: entry.wire_nbytes for kind, entry in entries.items()},
        "raw": {kind: entry.raw_nbytes for kind, entry in entries.items()},
        "messages": {kind: entry.messages for kind, entry in entries.items()},
        "native": {kind: entry.native for kind, entry in entries.items()},
        "sampled": {kind: entry.error for kind, entry in entries.items()},
    }


def test_one_product_by_the_ledger(on_ranks: RunRanks) -> None:
    """Error with 8 bits in both broadcasts, and bytes by kind, against the closed form."""
    rows, inputs, outputs, q = 256, 384, 320, 2
    results = on_ranks(4, one_product, rows, inputs, outputs, EIGHT)
    error_sq, value_sq = (sum(f[name] for f in results) for name in ("error_sq", "value_sq"))
    assert (error_sq / value_sq) ** 0.5 <= 1.2 * 6.0e-3
    codec = make_codec("blockint", bits=8)
    numels = {
        "activations": rows * inputs // q**2,
        "weights": inputs * outputs // q**2,
    }
    # each kind has q^2 blocks, sent to q - 1 others, forward and backward; in both backward forms q
    # - 1 addends of each of the q^2 products come from other ranks
    for kind, numel in numels.items():
        once = q**2 * (q - 1) * codec.wire_nbytes(numel, torch.float32)
        assert sum(f["forward"][kind] for f in results) == once
        assert sum(f["wire"][kind] for f in results) == 2 * once
        assert sum(f["raw"][kind] for f in results) == 2 * q**2 * (q - 1) * 4 * numel
        assert sum(f["messages"][kind] for f in results) == 2 * q**2
    sums = [codec.wire_nbytes(numel, torch.float32) for numel in numels.values()]
    assert sum(f["wire"]["gradients"] for f in results) == q**2 * (q - 1) * sum(sums)
    assert sum(f["forward"]["gradients"] for f in results) == 0
    for f in results:
        assert not any(f["native"].values())
        assert all(1e-3 < error < 1e-2 for error in f["sampled"].values())


def test_kinds_have_settings_of_their_own(on_ranks: RunRanks) -> None:
    block = {
        "tp2d": {"codec": "blockint", "bits": 8, "gradients": {"bits": 4}, "weights": "none"},
        "min_bytes": 0,
    }
    for f in on_ranks(4, one_product, 64, 64, 128, block):
        assert f["native"]["weights"] == f["messages"]["weights"] > 0
        assert f["wire"]["weights"] == f["raw"]["weights"]
        ratio = {kind: f["raw"][kind] / f["wire"][kind] for kind in ("activations", "gradients")}
        assert 3.5 < ratio["activations"] < 4 and 7 < ratio["gradients"] < 8


def saved_nbytes(model: Any) -> int:
    """Return the bytes that autograd saves, without parameters."""
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            # a view counts its whole storage, once
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(*batch())
    assert loss.requires_grad
    return sum(nbytes for nbytes, _ in storages.values())


def memory() -> list[int]:
    return [saved_nbytes(model) for model in pair(2, torch.float32, None)]


def test_activations_take_a_share_of_the_memory(on_ranks: RunRanks) -> None:
    for whole, cut in on_ranks(4, memory):
        assert cut / whole == pytest.approx(1 / 4, rel=0.1)


def converted() -> None:
    """Convert plain to mesh and back, also without other ranks; wrong weights raise errors."""
    plain, meshed = pair(2, torch.float32, None)
    mesh = meshed.mesh
    wholes = joined(meshed, meshed.state_dict())
    for name, whole in plain.state_dict().items():
        assert torch.equal(wholes[name], whole), name
    gathered = tp2d.gather_state(meshed, mesh)
    assert (gathered is None) is (dist.get_rank() != 0)
    if gathered is not None:
        assert all(torch.equal(gathered[name], wholes[name]) for name in wholes)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.full_like(parameter, 0.5))
    tp2d.load_state(meshed, mesh, plain.state_dict())
    layouts = tp2d.layouts_of(meshed)
    mine = cut_state(plain.state_dict(), layouts, 2, mesh.row, mesh.column)
    for name, part in meshed.state_dict().items():
        assert torch.equal(part, mine[name])
    assert float(meshed.loss(*batch()).detach()) == pytest.approx(
        float(plain.loss(*batch()).detach()), rel=1e-5
    )
    with pytest.raises(ConfigError, match="only one of the two"):
        tp2d.load_state(meshed, mesh, {"other": torch.zeros(1)})


def test_weights_convert_both_ways(on_ranks: RunRanks) -> None:
    on_ranks(4, converted)


def refused() -> None:
    mesh = tp2d.Mesh(2)
    with pytest.raises(ConfigError, match="multiple of 2"):
        mesh.part(torch.zeros(3, 2))
    with pytest.raises(ConfigError, match="inputs"):
        tp2d.Linear(mesh, nn.Linear(33, 4))
    with pytest.raises(ConfigError, match="multiple of 4"):
        tp2d.LayerNorm(mesh, nn.LayerNorm(6))
    with pytest.raises(ConfigError, match="4 ranks for meshes of 3 x 3"):
        tp2d.Mesh(3)


def test_what_cannot_be_cut_is_refused(on_ranks: RunRanks) -> None:
    on_ranks(4, refused)


def test_presets_leave_it_native_and_digests_as_they_were() -> None:
    recommended = CompressionConfig.parse({"preset": "recommended"})
    assert not recommended.active("tp2d") and not any("tp2d" in key for key in recommended.flat())
    with_layers = CompressionConfig.parse({"preset": "recommended", "tp2d": "mpc"})
    assert with_layers.flat().items() > recommended.flat().items()
    assert Channels(with_layers)["tp2d"].active
