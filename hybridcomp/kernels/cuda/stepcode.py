"""Launch stepcode's kernels."""

from __future__ import annotations

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import WARPS, ceil_div

SOURCE = "stepcode.cu"
#: values of the smallest tile, which a warp codes; the grids are for tiles of this size
TILE = 8192
#: size of ``Plan`` in stepcode_plan.h, and of the counts of symbols, in 64-bit words
PLAN_WORDS, COUNT_WORDS = 1540, 256 * 128 // 2
#: thread blocks that count samples, and that copy values which are not encoded
BLOCKS = 256
RUN = 512


class StepCodeOnCuda(CudaFunctions):
    """``codecs.stepcode.StepCodeKernels`` on a GPU."""

    def encode(
        self, dtype: int, values: int, reference: int, numel: int, out: int, nbytes: int,
        threads: int, size: int = 0, /,
    ) -> int:  # fmt: skip
        """Encode, one warp for each tile, in four launches."""
        if not numel:
            return 0
        groups = ceil_div(numel, TILE * WARPS)
        counts, plan = self._launcher.zeros(COUNT_WORDS), self._launcher.zeros(PLAN_WORDS)
        work = self._launcher.zeros(2 + groups)  # the size, the ticket, a word for each block
        found, planned, start = counts.data_ptr(), plan.data_ptr(), work.data_ptr()
        some = min(BLOCKS, ceil_div(numel, RUN))
        launch, model = self._fixed, out + 32
        launch(SOURCE, (), "stepcode_count", out, some, (values, reference, numel, dtype, found))
        launch(SOURCE, (), "stepcode_model", out, 1, (found, numel, dtype, planned, model))
        coded = (values, reference, numel, dtype, planned, out, start + 8)
        launch(SOURCE, (), "stepcode_encode", out, groups, coded)
        finished = (values, numel, dtype, planned, out, size or start)
        launch(SOURCE, (), "stepcode_finish", out, some, finished)
        if size:
            return 0
        used = int(work[0])  # waits
        self._damage.check()
        return used

    def decode(
        self, dtype: int, payload: int, nbytes: int, reference: int, out: int, numel: int,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, one warp for each tile. ``check`` reports damage."""
        if not numel:
            return
        plan, damage = self._launcher.zeros(PLAN_WORDS), self._damage.word.data_ptr()
        planned, groups = plan.data_ptr(), ceil_div(numel, TILE * WARPS)
        head = (payload, nbytes, numel, dtype, planned, damage)
        self._fixed(SOURCE, (), "stepcode_read", payload, 1, head)
        tiles = (payload, numel, dtype, planned, reference, out, damage)
        self._fixed(SOURCE, (), "stepcode_decode", payload, groups, tiles)
