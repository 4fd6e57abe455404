"""Compile all CUDA images of a run at once on all cores, instead of each at its first use."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_bench.measure import Work
from hybridcomp import kernels
from hybridcomp.kernels.cuda import CudaKernels, images
from hybridcomp.kernels.cuda.launcher import Words
from hybridcomp.kernels.cuda.pieces import IMAGE

Image = tuple[str, tuple[str, ...]]
NUMEL = 1 << 15  # length of the messages that discover the launches


class Recorder:
    """Launcher that records the images it would need and launches nothing."""

    def __init__(self, device: torch.device) -> None:
        self.needed: dict[Image, None] = {}
        self._device = device

    def launch(self, source: str, defines: tuple[str, ...], *_: object, **__: object) -> None:
        """See ``launcher.Launcher``."""
        self.needed[source, defines] = None

    def zeros(self, words: int) -> Tensor:
        """See ``launcher.Launcher``."""
        return torch.zeros(words, dtype=torch.int64, device=self._device)

    empty = zeros

    def words(self, values: Words) -> Tensor:
        """See ``launcher.Launcher``."""
        return torch.from_numpy(values.copy()).to(self._device)


def needed(
    sources: Sequence[Callable[[Tensor], Iterator[Work]]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Image]:
    """Return the images that the works of ``sources`` need on ``device``.

    CPU tensors give the same images, since nothing is launched.
    """
    recorder = Recorder(device)
    recording: Any = CudaKernels(recorder)
    patched: Any = mock.patch.object(kernels, "_on_cuda", {device.index or 0: recording})
    if device.type == "cpu":
        patched = mock.patch.object(kernels, "kernels_of", lambda _: recording)
    with patched:
        for source in sources:
            for dtype in dtypes:
                # the skipped encoders return no size, so there is nothing to decode
                with suppress(Exception):
                    for work in source(torch.zeros(NUMEL, dtype=dtype, device=device)):
                        work.run()
    return list(recorder.needed)


def compile_here(architecture: int, version: str = "") -> None:
    """Compile, without a GPU, the images that benchmarks launch on ``architecture``.

    Includes the kernels for pieces of variable-size payloads, whose launches depend on sizes.
    Raises RuntimeError if NVRTC is not of ``version``.
    """
    loaded = ".".join(map(str, images.compiler()[0]))
    if version and not f"{version}.".startswith(f"{loaded}."):
        raise RuntimeError(f"expected NVRTC {version}, CuPy loads {loaded}")
    from benchmarks.gpu_bench import feedback, ours
    from hybridcomp.codecs.words import DTYPES

    mine = [partial(ours.works, name=name, codec=codec) for name, codec in ours.codecs().items()]
    found = needed([*mine, ours.steps, feedback.works], [*DTYPES.values()], torch.device("cpu"))
    pieces = [(source, IMAGE) for source in ("expcode.cu", "mpc.cu", "radix.cu")]
    compile_all(list(dict.fromkeys([*found, *pieces])), architecture)


def compile_all(wanted: Sequence[Image], architecture: int) -> None:
    """Compile into the image cache and print how long it took."""
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(cores, max(len(wanted), 1)), context) as pool:
        list(pool.map(images.image, *zip(*((*one, architecture) for one in wanted), strict=True)))
    took = time.perf_counter() - start
    print(f"{len(wanted)} images of our kernels in {took:.1f} s", file=sys.stderr, flush=True)
