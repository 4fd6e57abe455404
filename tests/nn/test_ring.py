"""Ring attention: the dense model's results, lossless codecs bit for bit, bytes, errors."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hybridcomp.channels import Channels
from hybridcomp.codecs import make_codec
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.headers import HEADER_NBYTES
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import CodecError
from hybridcomp.nn import RingAttention, gather, ring_attention, shard, tp2d
from hybridcomp.session import process
from tests.nn.dense import Case, attention, inputs, whole
from tests.ranks import RunRanks
from tests.selection import by_day

EXACT = (
    Case(),
    Case(dtype=torch.float64, heads=3, kept=3, width=10),
    Case(causal=False, kept=1, batch=1),
    Case(layout="contiguous", value_width=8),
    Case(causal=False, layout="contiguous"),
    Case(documents=((10, 20, 5), (48,))),
    Case(causal=False, documents=((10, 20, 5),)),
)
LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
QUIET: dict[str, Any] = {"min_bytes": 0, "ledger": {"every": 1000, "sample_every": 1}}


def ours(case: Case, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return context and gradients of whole sequences, computed by the ring."""
    q, k, v, grad = (shard(t, group, dim=2, layout=case.layout) for t in inputs(case))
    leaves = q, k, v = tuple(values.requires_grad_() for values in (q, k, v))
    out = ring_attention(
        q, k, v, group, causal=case.causal, layout=case.layout, documents=case.numbers()
    )
    out.backward(grad)  # type: ignore[no-untyped-call]
    parts = [out, *(leaf.grad for leaf in leaves)]
    return [gather(t, group, dim=2, layout=case.layout) for t in parts if t is not None]


def errors(case: Case, results: list[Tensor]) -> list[float]:
    """Return relative L2 errors against the dense model."""
    pairs = zip(results, whole(case), strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


def with_block(block: dict[str, Any] | None) -> Channels | None:
    """Use the channels of ``block`` in this process from now on."""
    channels = None
    if block is not None:
        channels = Channels(CompressionConfig.parse({**QUIET, **block}))
    process.use(channels)
    return channels


def exact() -> list[list[float]]:
    with_block(None)
    return [errors(case, ours(case)) for case in EXACT]


@pytest.mark.parametrize("ranks", by_day([2, 3, 4], [2, 3]))
def test_results_are_the_dense_models(on_ranks: RunRanks, ranks: int) -> None:
    for result in on_ranks(ranks, exact):
        for case, values in zip(EXACT, result, strict=True):
            assert len(values) == 4
            assert max(values) <= LIMITS[case.dtype], (case, values)


def same_bits(dtype: torch.dtype) -> list[bool]:
    """Return whether ``none`` and lossless codecs give the native ring's bits."""
    case, same = Case(dtype=dtype, length=96, width=32), []
    with_block(None)
    native = ours(case)
    for block in ({"cp": "none"}, {"cp": "expcode"}, {"cp": "mpc"}):
        channels = with_block(block)
        same.append(all(torch.equal(a, b) for a, b in zip(native, ours(case), strict=True)))
        assert channels is not None
        entry = channels.ledger.interval["cp", "forward"]
        assert entry.messages == 2 and entry.native == (2 if block["cp"] == "none" else 0)
    with_block(None)
    return same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lossless_is_bit_identical(on_ranks: RunRanks, dtype: torch.dtype) -> None:
    for result in on_ranks(3, same_bits, dtype):
        assert result == [True, True, True]


WIDE = Case(batch=1, heads=4, kept=2, length=512, width=64, dtype=torch.bfloat16)


def eight_bits(causal: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    """Return native and encoded errors against the native run, and the ledger's entries."""
    case = Case(**{**vars(WIDE), "causal": causal})
    with_block(None)
    native = ours(case)
    channels = with_block({"cp": {"codec": "blockint", "bits": 8}})
    encoded = ours(case)
    assert channels is not None
    left = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(encoded, native, strict=True)
    ]
    entries = {way: vars(channels.ledger.interval["cp", way]) for way in ("forward", "backward")}
    with_block(None)
    return errors(case, native), left, entries


@pytest.mark.parametrize("causal", by_day([False, True], [True]))
def test_eight_bits_are_as_close_as_the_study(on_ranks: RunRanks, causal: bool) -> None:
    """Attention has a relative error of 8.1e-3 at 0.516 of the bytes, within 1.2 times."""
    ranks = 4
    codec = make_codec("blockint", bits=8)
    results = on_ranks(ranks, eight_bits, causal)
    local = WIDE.length // ranks * WIDE.kept * WIDE.width  # a rank's keys, and as many values
    for rank, (_, (context, *gradients), entries) in enumerate(results):
        assert 1e-3 < context <= 1.2 * 8.1e-3
        assert max(gradients) <= 3e-2
        # keys and values: round the ring in both passes
        stretches = [local // 2] * 4 if causal else [local] * 2
        parcel = HEADER_NBYTES + sum(codec.wire_nbytes(n, WIDE.dtype) for n in stretches)
        sent = entries["forward"]
        assert sent["messages"] == 2 and sent["native"] == 0
        assert sent["wire_nbytes"] == 2 * (ranks - 1) * parcel
        assert sent["raw_nbytes"] == 2 * (ranks - 1) * 2 * local * 2
        assert sent["wire_nbytes"] / sent["raw_nbytes"] == pytest.approx(0.516, rel=0.02)
        assert 0 < (sent["error_sq"] / sent["value_sq"]) ** 0.5 < 1e-2
        # each owner gets gradients; from ranks after it only those of its nonzero half
        halves = [causal and owner < rank for owner in range(ranks) if owner != rank]
        numels = [local // 2 if half else local for half in halves]
        back = entries["backward"]
        assert back["messages"] == 1 and back["native"] == 0
        assert back["raw_nbytes"] == sum(2 * n * 2 for n in numels)
        expected = [HEADER_NBYTES + 2 * codec.wire_nbytes(n, WIDE.dtype) for n in numels]
        assert back["wire_nbytes"] == sum(expected)


def directions() -> list[list[float]]:
    """Return errors with only keys, or only gradients, encoded; and with a bound."""
    case, results = Case(length=96, width=32, batch=1), []
    coarse = {"codec": "blockint", "bits": 4}
    for block in (
        {"cp": {"forward": coarse, "backward": "none"}},
        {"cp": {"forward": "none", "backward": coarse}},
        {"cp": {"error_bound": 1e-2}},
    ):
        with_block(block)
        results.append(errors(case, ours(case)))
    with_block(None)
    return results


def test_each_direction_has_its_setting(on_ranks: RunRanks) -> None:
    for forward, backward, bounded in on_ranks(3, directions):
        assert min(forward) > 1e-3
        # the context and the queries' gradient do not travel
        assert max(backward[:2]) <= 1e-6 < 1e-3 < min(backward[2:]) <= max(backward[2:]) < 0.2
        assert 1e-4 < max(bounded) < 5e-2


def bounded_gradients() -> float:
    """Return the largest gradient error of keys and values, relative to its bound."""
    case, bound = Case(length=96, width=32, batch=1), 1e-2
    block = {"cp": {"forward": "none", "backward": {"error_bound": bound, "segment": 4096}}}
    with_block(None)
    native = ours(case)
    with_block(block)
    bounded = ours(case)
    with_block(None)
    worst = 0.0
    for exact, left in zip(native[2:], bounded[2:], strict=True):
        # every part's error is within the bound, relative to the largest value of all parts
        limit = 2 * bound * (dist.get_world_size() - 1) * float(exact.abs().max())
        worst = max(worst, float((exact - left).abs().max()) / limit)
    return worst


def test_gradients_keep_their_bound(on_ranks: RunRanks) -> None:
    for worst in on_ranks(4, bounded_gradients):
        assert 0 < worst <= 1


def module() -> float:
    """Check Megatron's layout, inside recomputation, against the dense model."""
    from torch.utils.checkpoint import checkpoint

    case = Case()
    q, k, v, grad = inputs(case)
    layer = RingAttention(order="sbhd")
    layer(*(shard(t, dim=2).permute(2, 0, 1, 3) for t in (q, k, v)), attn_mask=None)
    with pytest.raises(ValueError, match="^dropout_p: ring attention has no such option"):
        layer(q, k, v, dropout_p=0.1)
    leaves = [shard(t, dim=2).permute(2, 0, 1, 3).requires_grad_() for t in (q, k, v)]
    out = checkpoint(layer, *leaves, use_reentrant=False)
    assert isinstance(out, Tensor)
    out.backward(shard(grad, dim=2).permute(2, 0, 1, 3))  # type: ignore[no-untyped-call]
    parts = [t.permute(1, 2, 0, 3) for t in (out, *(leaf.grad for leaf in leaves)) if t is not None]
    return max(errors(case, [gather(t, dim=2) for t in parts]))


def test_module_and_recomputation(on_ranks: RunRanks) -> None:
    assert max(on_ranks(2, module)) <= 1e-6


def copied() -> None:
    """Average the weights of a model that has groups."""
    group, mesh = dist.new_group([0, 1]), tp2d.Mesh(1)
    for layer in (RingAttention(group, order="bshd"), tp2d.Linear(mesh, nn.Linear(4, 4))):
        copy = AveragedModel(layer).module
        given = [torch.ones(1, 2, 2, 4)] * (3 if isinstance(layer, RingAttention) else 1)
        assert torch.equal(copy(*given), layer(*given)) and copy is not layer


def test_models_can_be_copied(on_ranks: RunRanks) -> None:
    on_ranks(2, copied)


def under_autocast() -> None:
    """Give fp32 values under autocast; they become bf16, and so do mixed ones."""
    with_block(None)
    for case in (Case(), Case(documents=((10, 20, 5), (48,)))):
        q, k, v, grad = (shard(t.float(), dim=2) for t in inputs(case))
        found = []
        for cast in (False, True):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            given = [t.bfloat16() for t in leaves]
            query, key = leaves[:2] if cast else given[:2]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                out = ring_attention(query, key, given[2], documents=case.numbers())
                out.backward(grad.bfloat16())  # type: ignore[no-untyped-call]
            assert out.dtype == torch.bfloat16
            found.append([out, *(leaf.grad for leaf in leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_autocast_is_that_of_torchs_attention(on_ranks: RunRanks, ranks: int) -> None:
    on_ranks(ranks, under_autocast)


def nothing() -> None:
    """Pass empty tensors: the results are empty with the same shapes, forward and backward."""
    for batch, length in ((0, 8), (2, 0)):
        q = torch.zeros(batch, 4, length, 6, requires_grad=True)
        k = torch.zeros(batch, 2, length, 6, requires_grad=True)
        v = torch.zeros(batch, 2, length, 5, requires_grad=True)
        out = ring_attention(q, k, v)
        assert out.shape == (batch, 4, length, 5) and out.dtype == q.dtype
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        for leaf in (q, k, v):
            assert leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_of_nothing(on_ranks: RunRanks, ranks: int) -> None:
    on_ranks(ranks, nothing)


def subgroups() -> float:
    """Run two rings at once."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return max(errors(Case(), ours(Case(), pairs[dist.get_rank() % 2])))


def test_groups_are_apart(on_ranks: RunRanks) -> None:
    assert max(on_ranks(4, subgroups)) <= 1e-6


def unequal() -> str:
    with_block(None)
    q = torch.zeros(1, 1, 4, 8) if dist.get_rank() else torch.zeros(1, 1, 8, 8, dtype=torch.half)
    try:
        ring_attention(q, q, q)
    except CodecError as error:
        return str(error)
    return ""


def test_neighbours_with_other_values_are_told(on_ranks: RunRanks) -> None:
    """Equal sizes but different values raise an error instead of garbage."""
    first, second = on_ranks(2, unequal)
    assert "rank 1 sent 64 torch.float32 elements" in first and "rank 0 expects 128" in first
    assert "rank 0 sent 128 torch.float16 elements" in second and "rank 1 expects 64" in second


def test_wrong_shapes_are_told() -> None:
    q = torch.zeros(1, 4, 6, 8)
    for k, text in ((q[:, :3], "multiple of the keys'"), (q[..., :4], "equal batches, tokens")):
        with pytest.raises(ValueError, match=text):
            ring_attention(q, k, k)
    with pytest.raises(ValueError, match="layout"):
        ring_attention(q, q, q, layout="striped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order"):
        RingAttention(order="bhxd")


def test_the_dense_model_is_torchs() -> None:
    case = Case(kept=4)
    q, k, v, _ = inputs(case)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(case, q, k, v), theirs)


def posted() -> tuple[list[str], list[str]]:
    """Return the posts of each pass in order: separate receives and sends over gloo."""
    calls: list[str] = []
    post = transport._between_two

    def noted(out: Tensor | None, values: Tensor | None, *rest: Any) -> Any:
        calls.append("receive" * (out is not None) + "send" * (values is not None))
        return post(out, values, *rest)

    with_block(None)
    q, k, v = (torch.randn(1, 2, 8, 4).requires_grad_() for _ in range(3))
    with patch.object(transport, "_between_two", noted):
        out = ring_attention(q, k, v, causal=False)
        forward = list(calls)
        out.sum().backward()  # type: ignore[no-untyped-call]
    return forward, calls[len(forward) :]


def test_receives_are_posted_ahead_and_what_came_goes_on_at_once(on_ranks: RunRanks) -> None:
    start, hop, last = ["receive", "receive", "send"], ["send", "receive"], ["send"]
    for forward, backward in on_ranks(4, posted):
        assert forward == start + hop + last
        # gradients: the first receive before all posts, the next after each send, and each after
        # the keys that move on a step later
        assert backward == ["receive"] + start + hop + last + hop + hop + last
