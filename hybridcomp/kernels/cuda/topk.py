"""Launch topk's kernels."""

from __future__ import annotations

from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.launcher import DTYPES, WARPS, ceil_div

SOURCE = "topk.cu"
CHUNK = 4096
#: words of 32 bits of a chunk's ``Head`` in topk_encode.h
HEAD_WORDS = 6
#: bits of encoded position gaps that a thread block decodes (BLOCK_BITS in topk_decode.h)
BLOCK_BITS = 8192


class TopKOnCuda(CudaFunctions):
    """``VariableKernels`` on a GPU; the settings are ``TopK._settings_for``."""

    def encode(
        self, bits: int, rice: int, most: int, last: int, dtype: int, values: int, numel: int,
        out: int, nbytes: int, threads: int, size: int = 0, /,
    ) -> int:  # fmt: skip
        """Encode in three launches: one thread block, then one warp for each chunk."""
        if not numel:
            return 0
        chunks, settings = ceil_div(numel, CHUNK), (bits, rice, most, last)
        # positions and codes take 3 bytes per kept value
        room = self._launcher.empty(ceil_div(4 * HEAD_WORDS * chunks + 3 * chunks * most, 8))
        scratch = room.data_ptr()
        message = (*settings, numel, scratch, out)
        chosen = (*settings, values, numel, scratch, out, nbytes)

        def encode(address: int) -> None:
            self._fixed(SOURCE, (), f"topk_choose_{DTYPES[dtype]}", out, chunks, chosen)
            self._fixed(SOURCE, (), "topk_add_up", out, 1, (*message, address))
            self._fixed(SOURCE, (), "topk_write", out, ceil_div(chunks, WARPS), message)

        return self._stored(size, encode)

    def decode(
        self, bits: int, rice: int, most: int, last: int, dtype: int, payload: int, nbytes: int,
        out: int, numel: int, add: bool, threads: int, /,
    ) -> None:  # fmt: skip
        """Decode in two launches: one thread block per chunk, or per range of positions.

        ``check`` reports damage.
        """
        if not numel:
            return
        chunks, settings, name = ceil_div(numel, CHUNK), (bits, rice, most, last), DTYPES[dtype]
        name = "add" if add else name
        blocks = ceil_div(chunks * most + (numel >> rice), BLOCK_BITS)
        work = self._launcher.zeros(1 + 2 * blocks)  # the ticket, two words for each block
        message, damage = (*settings, payload, nbytes, numel, out), self._damage.word.data_ptr()
        self._fixed(SOURCE, (), f"topk_clear_{name}", payload, chunks, (*message, damage))
        words = (*message, work.data_ptr(), damage)
        self._fixed(SOURCE, (), f"topk_values_{name}", payload, blocks, words)
