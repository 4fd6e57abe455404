"""Ring attention in use: example, DeepSpeed, megatron-core, transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import DIRECTIONS
from hybridcomp.nn import RingAttention, gather, ring_attention, shard
from hybridcomp.nn.context import blocks
from hybridcomp.patches.torch import rules
from hybridcomp.session import process
from tests.nn.dense import Case, inputs, whole
from tests.nn.test_ring import errors, with_block
from tests.ranks import RunRanks, run_ranks
from tests.selection import by_day

EIGHT = {"cp": {"codec": "blockint", "bits": 8}}
VOCABULARY, LENGTH = 61, 64


# ---- the example


def _example(cp: int) -> tuple[float, list[Tensor], int]:
    """Return the example's loss and gradients over ``cp`` ranks, and bytes saved for backward."""
    from gpt import context_parallel
    from gpt.data import Share
    from gpt.model import GPT, lm_loss
    from gpt.weights import ModelConfig

    if cp > 1:
        context_parallel.start(cp, 1, 1)
    model = GPT(ModelConfig(vocabulary=VOCABULARY, layers=2, width=32, heads=2, cp=cp))
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    share = Share(rank=0, world_size=1, micro_batch=2, micro_batches=1)
    if cp > 1:
        share = context_parallel.share(Share(dist.get_rank(), cp, 2, 1))
        assert (share.rank, share.world_size) == (0, 1)
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = lm_loss(model(share.cut(tokens[:, :-1])), share.cut(tokens[:, 1:]))
    loss.backward()  # type: ignore[no-untyped-call]
    total = torch.stack([loss.detach()])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if cp > 1:
        for values in (total, *gradients):
            dist.all_reduce(values)
            values /= cp
    return float(total), gradients, sum(kept.values())


def example() -> list[tuple[float, float, float]]:
    """Return by block errors of loss and gradients, and saved bytes relative to dense."""
    loss, gradients, nbytes = _example(1)
    results = []
    for block in (None, EIGHT):
        with_block(block)
        loss_of_ring, ours, kept = _example(dist.get_world_size())
        squares = [
            ((a - b).square().sum(), b.square().sum()) for a, b in zip(ours, gradients, strict=True)
        ]
        wrong, right = (float(torch.stack(column).sum()) for column in zip(*squares, strict=True))
        results.append((abs(loss_of_ring - loss) / loss, (wrong / right) ** 0.5, kept / nbytes))
    with_block(None)
    return results


@pytest.mark.parametrize("ranks", by_day([2, 4], [2]))
def test_the_example_trains_as_ever(on_ranks: RunRanks, ranks: int) -> None:
    """Loss and gradients equal those of whole sequences; activations shrink with the ranks."""
    for native, encoded in on_ranks(ranks, example):
        assert native[0] <= 1e-6 and native[1] <= 1e-6
        assert encoded[0] <= 1e-4 and 1e-6 < encoded[1] <= 2e-2
        assert native[2] <= 1.1 / ranks and encoded[2] <= 1.1 / ranks


# ---- DeepSpeed: Ulysses inside, a ring outside


def two_dimensions() -> list[tuple[float, dict[str, float]]]:
    """Return by block the largest error of 2 x 2 ranks against the dense model, and messages."""
    from tests.training.in_turn import start_deepspeed

    start_deepspeed()
    return [_two_dimensions(block) for block in (None, EIGHT)]


def _two_dimensions(block: dict[str, Any] | None) -> tuple[float, dict[str, float]]:
    from deepspeed.sequence.layer import DistributedAttention

    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    around = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    channels = with_block(block)
    case = Case(kept=4)
    ring = RingAttention(around, order="bshd")
    layer = DistributedAttention(ring, inside, scatter_idx=2, gather_idx=1)

    def cut(values: Tensor) -> Tensor:
        """Shard for the ring, then for Ulysses, whose ranks then hold consecutive tokens."""
        return shard(shard(values, around, dim=2), inside, dim=2, layout="contiguous")

    q, k, v, grad = (cut(values).transpose(1, 2).contiguous() for values in inputs(case))
    leaves = [values.requires_grad_() for values in (q, k, v)]
    out = layer(*leaves, 0)
    out.backward(grad)
    parts = [t.transpose(1, 2) for t in (out, *(leaf.grad for leaf in leaves)) if t is not None]
    wholes = [gather(gather(t, inside, dim=2, layout="contiguous"), around, dim=2) for t in parts]
    messages: dict[str, float] = {}
    if channels is not None:
        entries = channels.ledger.interval
        messages |= {way: entries["cp", way].messages for way in DIRECTIONS}
    process.use(None)
    return max(errors(case, wholes)), messages


def test_ulysses_inside_and_a_ring_outside() -> None:
    for (native, _), (error, messages) in run_ranks(4, two_dimensions):
        assert native <= 1e-6
        assert 1e-4 < error <= 3e-2
        assert messages == {"forward": 2, "backward": 1}  # the ring's: no seam was applied


# ---- megatron-core


def core_attentions() -> list[tuple[list[float], str, str]]:
    return [core_attention(bits) for bits in (None, 8)]


def core_attention(bits: int | None) -> tuple[list[float], str, str]:
    """Return errors of local core attention over all ranks, and messages of rejected calls."""
    from tests.stand_ins import megatron_on_cpu

    megatron_on_cpu.install()
    import megatron.core  # noqa: F401
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from hybridcomp.patches.mcore import context_parallel
    from hybridcomp.seams.patching import Patch, apply_all, revert_all

    megatron_on_cpu.patch()
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    case = Case(kept=2, width=16)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        context_parallel_size=ranks, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    applied = apply_all(Patch(seam, make) for seam, make in context_parallel.PATCHES)
    said = []
    try:
        process.use(None)
        try:
            DotProductAttention(config, 1, AttnMaskType.causal, "self")
        except AssertionError as error:
            said.append(str(error))
        block = {"cp": "none"} if bits is None else {"cp": {"codec": "blockint", "bits": bits}}
        process.use(Channels(CompressionConfig.parse({**block, "min_bytes": 0})))
        layer = DotProductAttention(config, 1, AttnMaskType.causal, "self")
        try:
            DotProductAttention(config, 1, AttnMaskType.padding, "self")
        except ValueError as error:
            said.append(str(error))
        group = parallel_state.get_context_parallel_group()
        q, k, v, grad = (shard(t, group, dim=2).permute(2, 0, 1, 3) for t in inputs(case))
        leaves = [values.contiguous().requires_grad_() for values in (q, k, v)]
        out = layer(*leaves, None)
        out.backward(grad.flatten(2))
        context = out.unflatten(2, (4, 16))
        parts = [context, *(leaf.grad for leaf in leaves)]
        wholes = [gather(t.permute(1, 2, 0, 3), group, dim=2) for t in parts]
    finally:
        process.use(None)
        revert_all(applied)
        parallel_state.destroy_model_parallel()
    return errors(case, wholes), said[0], said[1]


def test_core_attention_of_megatron() -> None:
    pytest.importorskip("megatron.core")
    for (native, without, padding), (encoded, _, _) in run_ranks(2, core_attentions):
        assert max(native) <= 1e-6
        assert "only supported by TEDotProductAttention" in without
        assert "attn_mask_type" in padding and "use AttnMaskType.causal" in padding
        assert 1e-4 < max(encoded) <= 3e-2


# ---- transformers


def language_model() -> tuple[float, float, float, list[str]]:
    """Return errors of a padded batch's loss and gradients; and the rejected options."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hybridcomp.nn.huggingface import register, shard_batch

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 40:] = 0
    batch = {
        "input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)
    }  # fmt: skip
    results = []
    for name in ("eager", register()):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=name))
        given = batch if name == "eager" else shard_batch(batch)
        loss = model(**given, use_cache=False).loss
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        total = loss.detach().clone()
        if name != "eager":
            for values in (total, gradients):
                dist.all_reduce(values)
                values /= dist.get_world_size()
        results.append((total, gradients))
    (loss, right), (total, ours) = results
    said = []
    try:
        model.train()
        model.model.layers[0].self_attn.attention_dropout = 0.5
        model(**given, use_cache=False)
    except ValueError as error:
        said.append(str(error))
    far = (ours - right).norm() / right.norm()
    return float((total - loss).abs() / loss), float(far), float(loss), said


def test_models_of_transformers() -> None:
    pytest.importorskip("transformers")
    for loss, gradients, value, said in run_ranks(2, language_model):
        assert value > 1 and loss <= 1e-5 and gradients <= 1e-5
        assert "ring attention has no dropout" in said[0]


def test_one_rank_is_the_dense_model(on_ranks: RunRanks) -> None:
    assert on_ranks(1, alone)[0] <= 1e-6


def alone() -> float:
    case = Case()
    q, k, v, _ = inputs(case)
    out = ring_attention(q, k, v)
    expected = whole(case)[0]
    return float((out.double() - expected).norm() / expected.norm())


# ---- torch's own ring


def torch_ring() -> list[tuple[list[float], float, float]]:
    """Return, by setting, errors of torch's ring and numbers of ``cp`` messages: all, native."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    from hybridcomp.patches.torch import context_parallel as torch_context
    from hybridcomp.seams.patching import Patch, apply_all, revert_all

    case, results = Case(kept=4, width=16), []
    q, k, v, grad = (shard(values, dim=2) for values in inputs(case))
    scale = case.width**-0.5
    theirs._cp_options.enable_load_balance = True

    def forward(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, ...]:
        return blocks.forward(query, key, value, blocks.Mask(more["is_causal"]), scale)

    def backward(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, ...]:
        grad, mask = more["grad_out"], blocks.Mask(more["is_causal"])
        delta = (more["out"] * grad).sum(-1)
        return blocks.backward(grad, query, key, value, delta, more["logsumexp"], mask, scale)

    group: Any = dist.group.WORLD
    applied = apply_all(Patch(seam, make) for seam, make in torch_context.PATCHES)
    try:
        for block in (None, {"cp": "none"}, {"cp": "expcode"}, EIGHT):
            channels = with_block(block)
            out, logs = theirs._templated_ring_attention(
                group, 2, forward, q, k, v, is_causal=True
            )[:2]
            grads = theirs._templated_ring_attention_backward(
                group, 2, backward, grad, "grad_out", q, k, v, out, logs, True
            )[:3]
            parts = [gather(t, dim=2) for t in (out, *grads)]
            counted = (0.0, 0.0)
            if channels is not None:
                ways = [channels.ledger.interval["cp", way] for way in DIRECTIONS]
                counted = (sum(w.messages for w in ways), sum(w.native for w in ways))
            results.append((errors(case, parts), *counted))
    finally:
        with_block(None)
        revert_all(applied)
    return results


def test_the_rotation_of_torch(on_ranks: RunRanks) -> None:
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    if Version(torch.__version__) < Version("2.13"):
        pytest.skip("its seam is that of torch 2.13")
    ranks = 3
    messages = 2 * (ranks - 1) + ranks  # keys twice, gradient sums to the ring's end
    for native, none, lossless, lossy in on_ranks(ranks, torch_ring):
        assert max(native[0]) <= 1e-6
        assert none == (native[0], messages, messages)
        assert lossless == (native[0], messages, 0)
        assert lossy[1:] == (messages, 0) and 1e-4 < max(lossy[0]) <= 3e-2


class OwnRing(RingAttention):
    """A ring that a user derives."""


def test_a_ring_of_a_derived_class_cuts_a_sequence() -> None:
    """Else DDP and fully_shard would refuse cp, and advise the class that is there."""
    assert rules.has_ring(torch.nn.Sequential(OwnRing()))
    assert not rules.has_ring(torch.nn.Sequential(torch.nn.Linear(2, 2)))
