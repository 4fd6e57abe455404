"""Compute parameters, FLOPs, activation bytes and messages of a decoder's layers.

FLOPs are counted as torch's ``FlopCounterMode`` counts them: two a multiplication, attention as if
nothing were masked. Activations are those that torch's autograd keeps with a fused attention
(Korthikanti et al. 2022, section 4, without the products of attention); dropout is not counted.
"""

from __future__ import annotations

from functools import lru_cache

from hybridcomp.tools.plan.models import mesh, weights
from hybridcomp.tools.plan.models.model import BatchShape, Messages, ModelLayer
from hybridcomp.tools.plan.models.sizes import DecoderSizes, padded

#: backward of a fused attention: five products where forward has two
ATTENTION_BACKWARD = 2.5


@lru_cache(maxsize=512)
def layers(model: DecoderSizes, shape: BatchShape) -> tuple[ModelLayer, ...]:
    """Return the chain: embedding, blocks, head."""
    dense, sparse = _block(model, shape, False), None
    if model.experts:
        sparse = _block(model, shape, True)
    blocks = [sparse if sparse and model.is_sparse(index) else dense
              for index in range(model.blocks)]  # fmt: skip
    return (_embedding(model, shape), *blocks, _head(model, shape))


def _stream(model: DecoderSizes, shape: BatchShape) -> float:
    """Return the values of the residual stream that a rank holds."""
    return shape.tokens * model.hidden / (shape.tensor if shape.sequence else shape.mesh)


def _norm_kept(model: DecoderSizes, shape: BatchShape) -> float:
    """Return bytes that a norm keeps: its input, in fp32 where it is composed, and statistics.

    The output counts for the layer that reads it.
    """
    stream = _stream(model, shape)
    rows = stream / model.hidden
    if model.norm == "layernorm":
        return stream * shape.width + 8 * rows
    if model.composed_norm:  # input and normalized values, both in fp32
        return 8 * stream + 4 * rows
    return stream * shape.width + 4 * rows


def _attention(model: DecoderSizes, shape: BatchShape) -> tuple[float, float, float, float, float]:
    """Return attention's cut weights, whole weights, forward FLOPs, backward FLOPs, kept bytes.

    Autograd keeps normed input, q, k and v, output, and the log-sum-exp of each row in fp32.
    """
    n, t, q = shape.tokens, shape.cut, shape.mesh
    wide = model.query + 2 * max(model.keys, t * model.head_width if t > model.kv_heads else 0)
    cut = (model.hidden * (wide + model.query) / t + (wide / t if model.qkv_bias else 0)) / q
    whole = model.hidden / q**2 if model.out_bias else 0
    products = 2 * n * model.hidden * (wide + model.query) / t
    scores = 4 * n * shape.length * model.query / t
    flops, backward = products + scores, 2 * products + ATTENTION_BACKWARD * scores
    fused = (wide + model.query + (wide - model.query) / 2) if model.rotary_copies else wide
    kept = shape.width * n * (fused + model.attention_copies * model.query) / t
    kept += 4 * n * model.heads / t + shape.width * _stream(model, shape)
    kept += _looked_at(model, shape)
    return cut, whole, flops, backward, kept


def _looked_at(model: DecoderSizes, shape: BatchShape) -> float:
    """Return bytes that a slice keeps of earlier tokens: their keys and values, and its mask."""
    if shape.slices == 1:
        return 0.0
    seen = (shape.slices + 1) / 2  # slices, the current one included, on average
    mask = (shape.length / shape.slices) ** 2 * seen * (shape.width + 1)
    return 2 * shape.width * shape.tokens * model.keys / shape.cut * seen + mask


def _mlp(
    model: DecoderSizes, shape: BatchShape, width: float, tokens: float
) -> tuple[float, float, float, float]:
    """Return a feed-forward layer's cut weights, whole weights, FLOPs of forward, kept bytes.

    Autograd keeps input and output of the activation; of a gated one, both factors.
    """
    t, q = shape.cut, shape.mesh
    matrices = 3 if model.gated else 2
    cut = matrices * model.hidden * width / (t * q)
    whole = 0.0
    if model.mlp_bias:
        cut += (matrices - 1) * width / (t * q)
        whole = model.hidden / q**2
    kept = shape.width * tokens * (4 if model.gated else 2) * width / t
    return cut, whole, 2 * tokens * matrices * model.hidden * width / t, kept


def _block(model: DecoderSizes, shape: BatchShape, sparse: bool) -> ModelLayer:
    cut, whole, flops, backward, kept = _attention(model, shape)
    stream = _stream(model, shape)
    n, experts, always = shape.tokens, 0.0, model.intermediate
    of_experts: tuple[float, ...] = ()
    parameters = cut + whole + 2 * model.norm_parameters / shape.mesh**2
    parameters += 2 * model.head_width if model.head_norms else 0
    if sparse:
        width = model.expert_intermediate or model.intermediate
        routed = n * model.per_token
        own, bias, more, held = _mlp(model, shape, width, routed)
        experts = model.experts * (own + bias) / shape.expert
        of_experts = weights.experts(model, shape, width, model.experts / shape.expert, experts)
        always = model.shared_intermediate
        parameters += model.hidden * model.experts
        router = 2 * n * model.hidden * model.experts
        flops, backward = flops + more + router, backward + 2 * (more + router)
        # the router's scores in fp32, and input and output tokens of the experts
        kept += held + 8 * n * model.experts + 2 * shape.width * routed * model.hidden
    if always:
        own, bias, more, held = _mlp(model, shape, always, n)
        parameters += own + bias + (model.hidden if sparse else 0)  # its gate
        flops, backward, kept = flops + more, backward + 2 * more, kept + held
    kept += 2 * _norm_kept(model, shape) + shape.width * stream  # second normed input
    forward, back = _messages(model, shape, sparse)
    return ModelLayer(
        "block with experts" if sparse else "block", "block", flops, backward,
        moved_nbytes=2 * kept, parameters=parameters, expert_parameters=experts, kept_nbytes=kept,
        input_nbytes=shape.width * stream, work_nbytes=_block_work(model, shape),
        output=stream, forward=forward, backward=back, expert_tensors=of_experts,
        tensors=weights.block(model, shape, always, parameters),
    )  # fmt: skip


def _block_work(model: DecoderSizes, shape: BatchShape) -> float:
    """Return the bytes of temporary gradients in the backward pass of a block's widest part."""
    widest = max(2 * model.intermediate, model.query + 2 * model.keys) / shape.cut
    return shape.width * (shape.tokens * widest + 2 * _stream(model, shape))


def _messages(model: DecoderSizes, shape: BatchShape, sparse: bool) -> tuple[Messages, Messages]:
    """Return the messages of forward (outputs of attention and MLP) and backward (their inputs)."""
    if shape.mesh > 1:
        between = [model.intermediate] * (2 if model.gated else 1)
        return mesh.block(shape, model.hidden, model.query, model.keys, between)
    values = shape.tokens * model.hidden
    sums = (values,) * (1 if model.parallel else 2) if shape.tensor > 1 else ()
    moved = shape.tokens / shape.tensor
    context: tuple[float, ...] = ()
    ring: tuple[float, ...] = ()
    if shape.context > 1:
        context = (moved * (model.query + 2 * model.keys), moved * model.query)
        ring = (shape.tokens * max(model.keys / shape.tensor, model.head_width),) * 2
    expert: tuple[float, ...] = ()
    if sparse and shape.expert > 1:
        expert = (moved * model.per_token * model.hidden,) * 2
    # a parallel block all-reduces the input gradients of attention and of MLP separately (NeoX)
    back = (values,) * 2 if shape.tensor > 1 else ()
    return Messages(sums, context, expert, ring), Messages(back, context, expert, ring)


def _embedding(model: DecoderSizes, shape: BatchShape) -> ModelLayer:
    stream = _stream(model, shape)
    table = _table(model, shape)
    places = model.positions * model.hidden / shape.mesh**2
    parameters = table + places
    tokens = 8 * shape.tokens
    sums = (shape.tokens * model.hidden,) if shape.tensor > 1 else ()
    forward, backward = Messages(sums), Messages()
    if shape.mesh > 1:
        forward, backward = mesh.look_up(table)
    return ModelLayer(
        "embedding", "embedding", 0.0, 0.0, moved_nbytes=2 * shape.width * stream,
        parameters=parameters, expert_parameters=0.0, kept_nbytes=tokens, input_nbytes=tokens,
        work_nbytes=shape.width * stream, output=stream, forward=forward, backward=backward,
        tensors=(table, places) if places else (table,),
    )  # fmt: skip


def _table(model: DecoderSizes, shape: BatchShape) -> float:
    """Return values of a rank's part of the vocabulary's weights; a mesh pads the vocabulary."""
    words = padded(model.vocabulary, shape.mesh) if shape.mesh > 1 else model.vocabulary
    return words * model.hidden / (shape.cut * shape.mesh)


def _head(model: DecoderSizes, shape: BatchShape) -> ModelLayer:
    """Return the final norm, the output and the loss, whose logarithms are kept in fp32."""
    stream = _stream(model, shape)
    logits = shape.tokens * model.vocabulary / shape.cut
    flops = 2 * logits * model.hidden
    kept = _norm_kept(model, shape) + shape.width * stream + 4 * logits + 8 * shape.tokens
    # at the peak: the gradient of the loss and of its logarithms in fp32, and the logits
    held = shape.width * logits if model.held_logits else 0.0
    sums = (shape.tokens * model.hidden,) if shape.tensor > 1 else ()
    table, norm = _table(model, shape), model.norm_parameters / shape.mesh**2
    forward, backward = Messages(), Messages(sums)
    if shape.mesh > 1:
        words = padded(model.vocabulary, shape.mesh)
        forward, backward = mesh.output(shape, model.hidden, words, model.tied)
    return ModelLayer(
        "head", "head", flops, 2 * flops, moved_nbytes=(12 + 2 * shape.width) * logits,
        parameters=table + norm, expert_parameters=0.0, kept_nbytes=kept,
        input_nbytes=shape.width * stream, work_nbytes=8 * logits + held, output=1.0,
        forward=forward, backward=backward, tensors=(norm, table),
    )  # fmt: skip
