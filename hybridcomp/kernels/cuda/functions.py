"""Shared parts of all codecs' launches: payload alignment, sizes, damage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda.launcher import THREADS, Launcher
from hybridcomp.kernels.late_read import LateRead

ALIGN = 16


class DamageFlag:
    """Flag on a device that a decoder sets for an invalid payload."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._late = LateRead()

    @cached_property
    def word(self) -> Tensor:
        """Return the flag: one int64 on the device, 0 until a decoder sets it."""
        return self._launcher.zeros(1)

    def check(self) -> None:
        """Wait for the device; raise CodecError if a payload was damaged since the last check."""
        if int(self.word):
            self.word.zero_()
            raise CodecError(
                "a payload decoded on the GPU since the last check is damaged, and so is what this "
                "rank computed from it; go on from the last checkpoint"
            )

    def poll(self) -> None:
        """Raise as ``check``, but only for damage before the previous call; does not wait."""
        copied = self._late.take()
        if copied is not None and int(copied):
            self.check()  # ``check`` may already have reported this damage
        if not self._late.pending:
            self._late.start(self.word)


class CudaFunctions:
    """Functions of one codec on a device; the subclass defines them with the arguments of its
    Protocol (``kernels.FixedKernels``, or one in the codec's module).

    Raises ValueError for a payload that does not begin at a multiple of 16 bytes.
    """

    def __init__(self, launcher: Launcher, damage: DamageFlag) -> None:
        self._launcher = launcher
        self._damage = damage

    def _fixed(
        self, source: str, defines: tuple[str, ...], kernel: str, payload: int, blocks: int,
        words: tuple[int, ...], threads: int = THREADS,
    ) -> None:  # fmt: skip
        """Launch ``kernel`` over ``blocks`` blocks, if there are any."""
        if payload % ALIGN:
            raise ValueError(f"{kernel}: the payload must begin at a multiple of {ALIGN} bytes")
        if blocks:
            self._launcher.launch(source, defines, kernel, (blocks, 1), *words, threads=threads)

    def _stored(self, size: int, encode: Callable[[int], None]) -> int:
        """Let ``encode`` store the bytes used at ``size``; if that is 0, wait and return them."""
        if size:
            encode(size)
            return 0
        word = self._launcher.zeros(1)
        encode(word.data_ptr())
        used = int(word)  # waits for the device
        self._damage.check()
        return used

    def _variable(
        self, source: str, kernel: str, out: int, tiles: int, words: tuple[int, ...], size: int,
        threads: int = THREADS,
    ) -> int:  # fmt: skip
        """Launch an encoder; return the bytes used, or 0 if it stores them at ``size``.

        If ``tiles`` is 0, there are no values: nothing is launched, and ``size`` is not written.
        """
        if not tiles:
            return 0

        def encode(address: int) -> None:
            # words for the ticket, and one for each tile
            work = self._launcher.zeros(1 + tiles)
            arguments = (*words, work.data_ptr(), address)
            self._fixed(source, (), kernel, out, tiles, arguments, threads)

        return self._stored(size, encode)
