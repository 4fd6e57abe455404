"""Launch blockint's kernels: for one tensor here, for several in ``fused`` and ``table``."""

from __future__ import annotations

from hybridcomp.kernels.cuda.functions import CudaFunctions, DamageFlag
from hybridcomp.kernels.cuda.fused import FusedBlockInt, blockint_image
from hybridcomp.kernels.cuda.launcher import DTYPES, WARPS, WHOLE, Launcher, ceil_div
from hybridcomp.kernels.cuda.planned import PlannedBlockInt
from hybridcomp.kernels.cuda.table import EachBlockInt


class BlockIntOnCuda(CudaFunctions):
    """``FixedKernels``, and kernels for several chunks or tensors at once."""

    def __init__(self, launcher: Launcher, damage: DamageFlag) -> None:
        super().__init__(launcher, damage)
        # kernels by setting, cached because every message asks
        self._fused: dict[int, FusedBlockInt] = {}
        self._planned: dict[int, PlannedBlockInt] = {}

    def encode(
        self, setting: int, dtype: int, values: int, numel: int, out: int, nbytes: int,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Encode, one warp for each tile of 1024 values."""
        self._fixed(
            "blockint.cu", blockint_image(setting, dtype), f"blockint_encode_{DTYPES[dtype]}", out,
            ceil_div(numel, 1024 * WARPS), (values, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def encode_kept(
        self, setting: int, dtype: int, values: int, numel: int, out: int, nbytes: int, bits: int,
        levels: int, steps: int, threads: int, /,
    ) -> None:  # fmt: skip
        """Encode with a residual of ``bits``, one warp for each tile."""
        self._fixed(
            "blockint.cu", blockint_image(setting, dtype, bits),
            f"blockint_encode_feedback_{DTYPES[dtype]}", out, ceil_div(numel, 1024 * WARPS),
            (values, numel, numel, 0, WHOLE, out, levels, steps),
        )  # fmt: skip

    def decode(
        self, setting: int, dtype: int, payload: int, nbytes: int, out: int, numel: int,
        add: bool, threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, one warp for each tile."""
        self._fixed(
            "blockint.cu", blockint_image(setting, 0 if add else dtype),
            "blockint_add" if add else f"blockint_decode_{DTYPES[dtype]}", payload,
            ceil_div(numel, 1024 * WARPS), (payload, numel, numel, 0, WHOLE, out),
        )  # fmt: skip

    def fused(self, setting: int) -> FusedBlockInt:
        """Return kernels for all chunks of a collective."""
        found = self._fused.get(setting)
        if found is None:
            found = self._fused[setting] = FusedBlockInt(self._launcher, setting)
        return found

    def planned(self, setting: int) -> PlannedBlockInt:
        """Return kernels for slices of one tensor."""
        found = self._planned.get(setting)
        if found is None:
            found = self._planned[setting] = PlannedBlockInt(self._launcher, setting)
        return found

    def each(self, setting: int) -> EachBlockInt:
        """Return kernels for several tensors with one payload each."""
        return EachBlockInt(self._launcher, setting)
