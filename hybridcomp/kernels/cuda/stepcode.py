"""Launch stepcode's kernels, each for all pieces of a message."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import WARPS, ceil_div
from hybridcomp.kernels.cuda.pieces import PieceTable, lay_out
from hybridcomp.kernels.pieces import PayloadPiece

SOURCE = "stepcode.cu"
#: values of the smallest tile; one warp encodes a tile, and grids are sized for the smallest
TILE = 8192
#: size of ``Plan`` in stepcode_plan.h in 64-bit words
PLAN_WORDS = 1540
#: 32-bit words of scratch memory of a tile besides its values (ROOM_HEAD, ROOM_SLACK in
#: stepcode_encode.h)
LEAST_ROOM = 34 + 128
#: maximum number of thread blocks that count samples: for one piece, and for all pieces together
BLOCKS, ALL_BLOCKS = 256, 4096
RUN = 512


class StepCodeOnCuda(CudaFunctions):
    """``codecs.stepcode.StepCodeKernels`` on a GPU."""

    def encode(
        self, dtype: int, values: int, reference: int, numel: int, out: int, nbytes: int,
        threads: int, size: int = 0, /,
    ) -> int:  # fmt: skip
        """Encode, one warp for each tile."""
        if not numel:
            return 0

        def encode(address: int) -> None:
            piece = PayloadPiece(values, numel, out, address, reference)
            self.encode_pieces(dtype, pieces=[piece])

        return self._stored(size, encode)

    def decode(
        self, dtype: int, payload: int, nbytes: int, reference: int, out: int, numel: int,
        threads: int, /,
    ) -> None:  # fmt: skip
        """Decode, one warp for each tile. ``check`` reports damage."""
        self.decode_pieces(dtype, pieces=[PayloadPiece(out, numel, payload, nbytes, reference)])

    def encode_pieces(self, dtype: int, /, *, pieces: Sequence[PayloadPiece]) -> None:
        """Encode all non-empty pieces in five launches, storing their sizes."""
        for laid in lay_out(self._launcher, pieces, TILE * WARPS, (LEAST_ROOM, TILE)):
            plans = self._launcher.zeros(PLAN_WORDS * laid.count)
            scratch = self._launcher.empty(ceil_div(laid.scratch, 2))
            # words for the ticket, and one for each block
            work = self._launcher.zeros(1 + laid.blocks)
            head, room = (dtype, plans.data_ptr()), scratch.data_ptr()
            samples = (_sampling(laid), laid.count)
            self._launch("exponents", samples, laid, *head)
            self._launch("count", samples, laid, *head)
            self._launch("model", (1, laid.count), laid, *head)
            self._launch("code", (laid.blocks, 1), laid, *head, room)
            self._launch("place", (laid.blocks, 1), laid, *head, room, work.data_ptr())

    def decode_pieces(
        self, dtype: int, /, *, pieces: Sequence[PayloadPiece], ranks: int = 1, add: bool = False
    ) -> None:
        """Decode all non-empty pieces in two launches. ``check`` reports damage."""
        assert ranks == 1 and not add, "steps are not added up"
        for laid in lay_out(self._launcher, pieces, TILE * WARPS):
            plans = self._launcher.zeros(PLAN_WORDS * laid.count)
            words = (dtype, plans.data_ptr(), self._damage.word.data_ptr())
            self._launch("read", (1, laid.count), laid, *words)
            self._launch("decode", (laid.blocks, 1), laid, *words)

    def _launch(self, kernel: str, grid: tuple[int, int], laid: PieceTable, *words: int) -> None:
        self._launcher.launch(SOURCE, (), f"stepcode_{kernel}", grid, *words, table=laid.table)


def _sampling(laid: PieceTable) -> int:
    """Return the number of thread blocks that count the samples of each piece."""
    most = min(BLOCKS, max(1, ALL_BLOCKS // laid.count))
    return min(most, ceil_div(laid.longest, RUN))
