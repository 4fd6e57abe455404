"""Quantizers and compressors of other projects; those that are not installed are skipped.

A peer is a function of the values that yields its works. If it raises, the table shows the reason.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_bench import blocks
from benchmarks.gpu_bench.measure import Work, cuda

Peer = Callable[[Tensor], Iterator[Work]]


def both(
    name: str, values: Tensor, payload: int, encode: Callable[[], object],
    decode: Callable[[], object], note: str = "",
) -> Iterator[Work]:  # fmt: skip
    """Yield encoding and decoding of ``values`` to and from ``payload`` bytes."""
    nbytes, bits = values.nbytes + payload, 8 * payload / values.numel()
    yield Work(name, "encode", nbytes, encode, bits, note)
    yield Work(name, "decode", nbytes, decode, bits, note)


def fp8_cast(values: Tensor) -> Iterator[Work]:
    """Yield casts to float8_e4m3fn and back by ``Tensor.copy_``, without a scale."""
    cast, out = torch.empty_like(values, dtype=torch.float8_e4m3fn), torch.empty_like(values)
    encode, decode = partial(cast.copy_, values), partial(out.copy_, cast)
    yield from both("torch fp8 cast", values, cast.nbytes, encode, decode)


@cache
def _compiled() -> tuple[Any, Any]:
    """Compile blocks.py with default settings: torch specializes the first size of a dtype only.

    Its recompile limit of eight would skip later subjects, so it is raised.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    for name in ("recompile_limit", "cache_size_limit"):  # torch 2.6 renamed it
        if hasattr(config, name):
            setattr(config, name, 64)
    encode: Any = torch.compile(blocks.encode, fullgraph=True)
    return encode, torch.compile(blocks.decode, fullgraph=True)


def compiled(bits: int, values: Tensor) -> Iterator[Work]:
    """Yield blocks.py under ``torch.compile``."""
    encode, decode = _compiled()
    levels, scales = encode(values, bits)
    yield from both(
        f"torch.compile int{bits}", values, levels.nbytes + scales.nbytes,
        partial(encode, values, bits), partial(decode, levels, scales, bits, values.dtype),
    )  # fmt: skip


def triton(bits: int, values: Tensor) -> Iterator[Work]:
    """Yield triton_blocks.py."""
    kernels: Any = importlib.import_module("benchmarks.gpu_bench.triton_blocks")
    out = torch.empty_like(values)
    levels, scales = kernels.buffers(values, bits)
    encode = partial(kernels.encode, values, levels, scales, bits)
    encode()
    decode = partial(kernels.decode, levels, scales, out, bits)
    yield from both(f"Triton int{bits}", values, levels.nbytes + scales.nbytes, encode, decode)


def bitsandbytes(bits: int, values: Tensor) -> Iterator[Work]:
    """Yield bitsandbytes' 8-bit dynamic map in blocks of 256, or its NF4 in blocks of 64."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    if bits == 8:
        encode = partial(functional.quantize_blockwise, values, blocksize=256)
        name, undo, note = "bitsandbytes 8 bit", functional.dequantize_blockwise, "blocks of 256"
    else:
        encode = partial(functional.quantize_4bit, values, blocksize=64, quant_type="nf4")
        name, undo, note = "bitsandbytes nf4", functional.dequantize_4bit, "blocks of 64"
    levels, state = encode()
    payload = levels.nbytes + state.absmax.nbytes
    yield from both(name, values, payload, encode, partial(undo, levels, state), note)


#: group size that qgZ and qwZ choose for large tensors
DEEPSPEED_GROUP = 4096
DEEPSPEED_RANKS = 8


@cache
def _deepspeed_built() -> Any:
    """Build ``deepspeed_kernels`` once; keep the failure, since each retry would take a minute."""
    try:
        return _build_deepspeed()
    except Exception as error:  # compiler, header, lock: failures have no common type
        return error


def deepspeed_kernels() -> Any:
    """Return DeepSpeed's extension, built for this GPU if needed (about a minute)."""
    found = _deepspeed_built()
    if isinstance(found, Exception):
        raise found
    return found


def _build_deepspeed() -> Any:
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    # its builder cannot parse 9.0a, which NVIDIA's images list
    one = "{}.{}".format(*cuda.get_device_capability())
    with mock.patch.dict(os.environ, TORCH_CUDA_ARCH_LIST=one):
        return builders.QuantizerBuilder().load()


def deepspeed(values: Tensor) -> Iterator[Work]:
    """Yield qwZ's 8-bit quantizer and qgZ's 4-bit quantizer with its fused reduction.

    The kernels take fp16 only; the time includes the conversion of other dtypes, as in DeepSpeed's
    callers.
    """
    kernels = deepspeed_kernels()
    symmetric, half = kernels.Symmetric, torch.float16
    groups = max(values.numel() // DEEPSPEED_GROUP, DEEPSPEED_RANKS)

    def quantize() -> list[Tensor]:
        found: list[Tensor] = kernels.quantize(values.to(half), groups, 8, symmetric)
        return found

    levels, scales = quantize()
    payload = levels.nbytes + scales.nbytes
    rate, note = 8 * payload / values.numel(), "by way of fp16"
    yield Work("DeepSpeed qwZ 8 bit", "encode", values.nbytes + payload, quantize, rate, note)
    yield Work(
        "DeepSpeed qwZ 8 bit", "decode", 2 * values.numel() + payload,
        lambda: kernels.dequantize(levels, scales, groups, 8, symmetric), rate, "to fp16",
    )  # fmt: skip

    def swizzle() -> list[Tensor]:
        found: list[Tensor] = kernels.swizzle_quant(
            values.to(half), groups, 4, symmetric, 1, 1, DEEPSPEED_RANKS
        )
        return found

    small, small_scales = swizzle()
    payload = small.nbytes + small_scales.nbytes
    rate = 8 * payload / values.numel()
    yield Work("DeepSpeed qgZ 4 bit", "encode", values.nbytes + payload, swizzle, rate, note)
    yield Work(
        "DeepSpeed qgZ 4 bit", "sum_encode", payload + payload // DEEPSPEED_RANKS,
        lambda: kernels.quantized_reduction(
            small, small_scales, groups, groups // DEEPSPEED_RANKS, 4, symmetric, DEEPSPEED_RANKS
        ), rate, f"{DEEPSPEED_RANKS} ranks",
    )  # fmt: skip


@cache
def nvcomp_library() -> Any:
    """Import nvCOMP; some packages put its library beside the module, outside the loader's path."""
    try:
        return importlib.import_module("nvidia.nvcomp")
    except ImportError:
        spec = importlib.util.find_spec("nvidia")
        places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
        found = [lib for place in places for lib in place.glob("*nvcomp/lib*/libnvcomp.so*")]
        if not found:
            raise
        ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module("nvidia.nvcomp")


def nvcomp(algorithm: str, values: Tensor) -> Iterator[Work]:
    """Yield nvCOMP's codecs on the current stream, with integers as wide as the values.

    ANS runs on bytes: its 16-bit type is fp16 and corrupts bf16. The works keep the encoded array
    alive.
    """
    library = nvcomp_library()
    word = "|u1" if algorithm == "ANS" else f"<u{values.itemsize}"
    codec = library.Codec(
        algorithm=algorithm, data_type=word, cuda_stream=cuda.current_stream().cuda_stream
    )
    array = library.as_array(values.view(torch.uint8))
    payload = codec.encode(array)
    used = int(payload.buffer_size)
    back = codec.decode(payload, "|u1")
    if int(back.buffer_size) != values.nbytes:
        raise RuntimeError(f"decoded {back.buffer_size} bytes of {values.nbytes}")
    yield from both(
        f"nvCOMP {algorithm}", values, used, partial(codec.encode, array),
        partial(codec.decode, payload, "|u1"), "lossless, allocates its result",
    )  # fmt: skip


PEERS: dict[str, Peer] = {
    "torch fp8 cast": fp8_cast,
    "torch.compile int8": partial(compiled, 8),
    "torch.compile int4": partial(compiled, 4),
    "Triton int8": partial(triton, 8),
    "Triton int4": partial(triton, 4),
    "bitsandbytes 8 bit": partial(bitsandbytes, 8),
    "bitsandbytes nf4": partial(bitsandbytes, 4),
    "DeepSpeed": deepspeed,
    "nvCOMP ANS": partial(nvcomp, "ANS"),
    "nvCOMP Bitcomp": partial(nvcomp, "Bitcomp"),
    "nvCOMP Cascaded": partial(nvcomp, "Cascaded"),
}


@contextmanager
def prepared(chosen: Collection[str]) -> Iterator[None]:
    """Build slow peers in the background during the ``with`` body; failures show at first use."""
    thread = threading.Thread(target=_build, args=(chosen,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _build(chosen: Collection[str]) -> None:
    if "DeepSpeed" in chosen:
        with suppress(Exception):  # the peer's row shows the error
            deepspeed_kernels()
