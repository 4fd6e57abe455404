"""FP8 and MXFP8: every value and scale equals an engine's quantization, for all versions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybridcomp
from hybridcomp.patches import published as engines
from hybridcomp.publishing import EngineWeights, Held, Publisher, WeightRange, WeightReceiver
from hybridcomp.publishing.destinations import Folder
from hybridcomp.publishing.quantized import FORMS, packed, quantized, unpacked
from hybridcomp.publishing.weight_ranges import stretch_of_block
from tests.publishing.made import error_of, received
from tests.ranks import RunRanks
from tests.selection import by_day

#: small matrices as in Llama, Qwen and Mixtral: whole blocks, and blocks cut at both ends
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (40, 320),
    "model.layers.0.self_attn.q_proj.weight": (256, 320),
    "model.layers.0.self_attn.q_proj.bias": (256,),
    "model.layers.0.self_attn.k_proj.weight": (64, 320),
    "model.layers.0.mlp.down_proj.weight": (320, 416),
    "model.layers.0.block_sparse_moe.experts.1.w1.weight": (200, 320),
    "model.layers.0.block_sparse_moe.gate.weight": (4, 320),
    "model.norm.weight": (320,),
    "lm_head.weight": (40, 320),
}
QUANTIZED = ("q_proj.weight", "k_proj.weight", "down_proj.weight", "w1.weight")


def block_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as vLLM's ``per_block_cast_to_fp8``."""
    rows, columns = x.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=x.dtype)
    padded[:rows, :columns] = x
    view = padded.view(-1, 128, padded.size(1) // 128, 128)
    scale = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    found = (view * (1.0 / scale)).to(torch.float8_e4m3fn).view_as(padded)
    return found[:rows, :columns].contiguous(), scale.view(view.size(0), view.size(2))


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as vLLM's ``_mxfp8_e4m3_quantize_torch``."""
    blocked = x.float().view(x.shape[0], -1, 32)
    most = blocked.abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (torch.ceil(torch.log2(most / 448.0)) + 127.0).clamp(0, 254)
    found = blocked / torch.exp2(scale - 127.0).unsqueeze(-1)
    return found.view(x.shape).to(torch.float8_e4m3fn), scale.to(torch.uint8)


REFERENCES = {"fp8": block_fp8, "mxfp8": mxfp8}


def values_of(version: int) -> dict[str, Tensor]:
    """Return a version's weights: blocks of very different magnitudes, and zero blocks."""
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator)
        values *= torch.exp2(torch.randint(-9, 4, (shape[0], *[1] * (len(shape) - 1)),
                                           generator=generator))  # fmt: skip
        found[name] = values.to(torch.bfloat16)
    found["model.layers.0.self_attn.k_proj.weight"][:, 128:256] = 0
    for _ in range(1, version):
        for values in found.values():
            moved = torch.rand(values.shape, generator=generator) < 0.2
            values.mul_(1 + moved * 0.01)
    return found


def held(values: dict[str, Tensor], how: str) -> EngineWeights:
    """Return this rank's shard: flat ranges, columns, all as replicas, or a pipeline stage."""
    rank, count = dist.get_rank(), dist.get_world_size()
    found = []
    if how == "stages":  # the last one has no matrix that is quantized
        each = len(values) // count
        values = dict(list(values.items())[each * rank : each * (rank + 1)])
    for name, value in values.items():
        if how == "columns" and value.ndim == 2:
            low, high = (value.shape[1] * (rank + n) // count for n in (0, 1))
            stretch = stretch_of_block(name, value.shape, (0, low), (value.shape[0], high - low))
            assert stretch is not None
            found.append(Held(stretch, partial(value.__getitem__, (slice(None), slice(low, high)))))
            continue
        low, high = (value.numel() * (rank + n) // count for n in (0, 1))
        low, high = (low, high) if how == "ranges" else (0, value.numel())
        flat = value.view(-1)
        found.append(Held(WeightRange(name, low, high - low),
                          partial(flat.__getitem__, slice(low, high))))  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    dtypes = dict.fromkeys(values, torch.bfloat16)
    return EngineWeights(shapes, dtypes, found, tuple(range(count)))


def published(folder: Path, form: str, how: str) -> list[int]:
    """Publish three versions, resuming before the third; return the bytes of each."""
    values, found = values_of(1), []
    for version in (1, 2, 3):
        if version != 2:
            weights = quantized(held(values, how), form, None)
            publisher = Publisher(weights, Folder(folder), bucket=1000)
        found.append(publisher.publish().nbytes)
        with torch.no_grad():
            for name, after in values_of(version + 1).items():
                if version != 2:
                    values[name].copy_(after)
        if version == 2:
            publisher.close()
            dist.barrier()
    for name, after in values_of(4).items():
        values[name].copy_(after)
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("form", "how"),
    by_day(
        [(form, how) for form in FORMS for how in ("ranges", "columns", "replicas", "stages")],
        [("fp8", "columns"), ("fp8", "replicas"), ("mxfp8", "ranges"), ("fp8", "stages")],
    ),
)
def test_values_and_scales_are_those_of_the_engine(
    on_ranks: RunRanks, tmp_path: Path, form: str, how: str
) -> None:
    sizes, *_ = on_ranks(3, published, tmp_path, form, how)
    receiver = WeightReceiver(tmp_path)
    for version in (1, 2, 3):
        applied = receiver.update(version)
        assert applied is not None
        expect(dict(receiver.tensors()), values_of(min(version, 2)), form)
        for name, values in receiver.tensors():
            where, some = receiver.changed_values(name)
            assert torch.equal(bits(values).reshape(-1)[where], bits(some))
    assert applied is not None and applied.changed == 0
    assert sizes[2] < sizes[1] < sizes[0]  # the chain continued


def bits(values: Tensor) -> Tensor:
    """Return the bits of values, which compare equal even for NaN."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()])


def expect(found: dict[str, Tensor], values: dict[str, Tensor], form: str) -> None:
    """Compare a receiver's values with the engine's quantization of all weights."""
    wanted = {}
    for name, value in values.items():
        wanted[name] = value
        if name.endswith(QUANTIZED):
            wanted[name], wanted[name + FORMS[form].suffix] = REFERENCES[form](value)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(bits(found[name]), bits(value)), name


def test_patterns_are_in_the_order_of_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn)
    patterns = packed(values, "fp8")
    assert torch.equal(unpacked(patterns, "fp8").view(torch.uint8), codes)
    rising = values[:127].float().diff()
    assert bool((rising > 0).all())
    assert patterns[:128].view(torch.int16).tolist() == list(range(128))
    assert torch.equal(unpacked(packed(codes, "e8m0"), "e8m0"), codes)
    scales = torch.tensor([[1e-7, 3.0], [0.1, 1e30]])
    assert torch.equal(unpacked(packed(scales, "fp32"), "fp32"), scales)


def refused(folder: Path) -> list[str]:
    """Return errors for weights without a matrix, an unknown format, and one rank's blocks."""
    some = {"model.norm.weight": torch.zeros(4, dtype=torch.bfloat16)}
    weights = quantized(held(some, "replicas"), "fp8", None)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False, dtype=torch.bfloat16))
    model = torch.nn.parallel.DistributedDataParallel(layer)
    torn = replace(engines.weights_of(model), held=[])
    if dist.get_rank():
        torn = replace(torn, held=[Held(WeightRange("0.weight", 60, 8, 2, 64), torch.Tensor)])
    with mock.patch.object(engines, "weights_of", lambda engine: torn):
        return [
            error_of(partial(Publisher, weights, Folder(folder))),
            error_of(partial(hybridcomp.publish, model, folder, as_="int3")),
            error_of(partial(hybridcomp.publish, model, folder, as_="fp8")),
        ]


def test_what_is_refused(on_ranks: RunRanks, tmp_path: Path) -> None:
    for none, unknown, cut in on_ranks(2, refused, tmp_path):
        assert "no matrix of this model is one that engines quantize" in none
        assert "expected one of fp8, mxfp8" in unknown
        assert "0.weight is cut into rows of 8 every 64" in cut


def cannot_measure(folder: Path) -> str:
    """Fail to read rank 1's weights while all ranks measure blocks; then publish a version."""
    fails = [False]

    def read(one: Held) -> Tensor:
        if fails[0]:
            raise RuntimeError("no weights here")
        return one.read()

    weights = held(values_of(1), "ranges")
    parts = [replace(one, read=partial(read, one)) for one in weights.held]
    publisher = Publisher(quantized(replace(weights, held=parts), "fp8", None), Folder(folder))
    publisher.publish()
    fails[0] = dist.get_rank() == 1
    told = error_of(publisher.publish)
    fails[0] = False
    assert publisher.publish().full
    return told


def test_a_rank_that_cannot_read_measures_with_the_others(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    for told in on_ranks(2, cannot_measure, tmp_path):
        assert told == "version 2 was not published: rank 1: RuntimeError: no weights here"


def by_key(folder: Path) -> list[str]:
    """Publish a model by ``hybridcomp.publish``; return the received dtypes."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 128, dtype=torch.bfloat16))
    model = torch.nn.parallel.DistributedDataParallel(layer)
    publisher = hybridcomp.publish(model, folder, as_="mxfp8")
    publisher.publish()
    publisher.close()
    dist.barrier()
    return [f"{name} {value.dtype}" for name, value in received(folder).tensors()]


def test_an_engine_is_published_in_eight_bits(on_ranks: RunRanks, tmp_path: Path) -> None:
    for found in on_ranks(2, by_key, tmp_path):
        assert found == ["0.bias torch.bfloat16", "0.weight torch.float8_e4m3fn",
                         "0.weight_scale torch.uint8"]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_vllm_quantizes_so(form: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed", exc_type=ImportError)
    import importlib

    utils = "vllm.model_executor.layers.quantization.utils.mxfp8_utils"
    own = {"fp8": ("vllm.utils.deep_gemm", "per_block_cast_to_fp8"),
           "mxfp8": (utils, "_mxfp8_e4m3_quantize_torch")}  # fmt: skip
    module, name = own[form]
    theirs = getattr(importlib.import_module(module), name)
    for value in values_of(3).values():
        if value.ndim == 2:
            for mine, engine in zip(REFERENCES[form](value), theirs(value), strict=True):
                assert torch.equal(bits(mine), bits(engine))
