"""zfp: the 1-D fixed-rate stream of the zfp library, rates 2.5 to 32 bits a value.

The top of ``kernels/formats/zfp.h`` describes the stream, and where it deviates from zfp's because
zfp would lose data (NaN, Inf, blocks below 2^-98, overflow).
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import ClassVar

import torch

from hybridcomp.codecs.base import FixedCodec, align
from hybridcomp.codecs.checks import check_dtype
from hybridcomp.codecs.setting import Setting
from hybridcomp.kernels import FixedKernels, KernelSet

BLOCK = 4
HEADER_BITS = 9
#: lowest rate for error feedback, which diverges below it: residuals stay bounded only if the norm
#: of the error is less than that of the values. Over random and adversarial blocks of four, the
#: error's norm reached 4x that of the values at rate 4, 1.9x at 5.5 and 0.8x at 6
FEEDBACK_RATE = 6.0


@lru_cache(maxsize=128)
def _whole_planes(bits: int) -> int:
    """Return the bit planes of a block that ``bits`` bits always encode whole.

    A plane that raises the number of significant coefficients from n to m costs at most: n verbatim
    bits; an "any more?" bit per new coefficient, and a "no more" bit if m < 4; and the search bits,
    of which the fourth coefficient needs none. ``worst[n]``: most bits so far of planes that leave
    n coefficients significant.
    """
    worst = {0: 0}
    for planes in range(1, 33):
        found: dict[int, int] = {}
        for n, spent in worst.items():
            for m in range(n, 5):
                tests = (m - n) + (1 if m < 4 else 0)
                searched = min(m, 3) - n
                found[m] = max(found.get(m, 0), spent + n + tests + max(searched, 0))
        if max(found.values()) > bits:
            return planes - 1
        worst = found
    return 32


class Zfp(FixedCodec):
    """Encode ``rate`` bits a value, byte for byte the stream of the zfp library.

    A NaN or Inf makes its block of 4 values NaN. 16-bit values are encoded as fp32, so only rates
    below 16 save anything. The guaranteed error is large at low rates: at rate 8 it is about the
    block's absmax, although a typical error is 5 % of it. zfp does not suit noise.

    Args:
        rate: bits a value, 2.5..32; a block of 4 values has floor(4 * rate + 0.5) bits.

    Raises:
        CodecError: ``rate`` is out of range. Below 2.25 the zfp library itself overruns its buffer.
    """

    name: ClassVar[str] = "zfp"
    about: ClassVar[str] = "1-D fixed rate, bit-exact with the zfp library"
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(
            "rate",
            float,
            "zfp: bits of one value, 2.5 to 32, default 16. Higher: smaller error, larger "
            "messages.",
            least=2.5,
            most=32,
            ramp_step=0.25,  # whole bits for a block of 4 values
        ),
    )
    block_size: int = BLOCK
    kernels = KernelSet[FixedKernels](name)

    def __init__(self, rate: float = 16.0) -> None:
        self.check_settings(rate=rate)
        self.rate = float(rate)

    @cached_property
    def spec(self) -> str:
        return f"zfp(rate={self.rate:g})"

    @classmethod
    def ladder(cls) -> tuple[Zfp, ...]:
        return tuple(cls(quarter / 4) for quarter in range(10, 129))

    def diverges(self) -> str | None:
        if self.rate >= FEEDBACK_RATE:
            return None
        return (
            f"with zfp below rate {FEEDBACK_RATE:g}, and the rate is {self.rate:g}; raise it, or "
            "use blockint, which converges at every setting"
        )

    @property
    def _setting(self) -> int:
        return math.floor(4 * self.rate + 0.5)

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(self.spec, dtype)
        return align(-(-(-(-numel // BLOCK) * self._setting) // 8))

    def element_bound(self, absmax: float, dtype: torch.dtype) -> float:
        """Return the largest error of an element whose aligned block of 4 has this finite absmax.

        With P planes coded whole, the error of a transformed coefficient is less than 5/6 of
        2^(32-P), the weight of the last whole plane: negabinary digits below that plane add up to
        at most 2/3 of it, and the cut plane may have one wrong digit. Rows of the inverse transform
        have absolute sums of at most 15/4. Integers are in units of 2^(e-30) <= absmax * 2^-29.
        """
        check_dtype(self.spec, dtype)
        planes = _whole_planes(self._setting - HEADER_BITS)
        tail = 0.0 if planes == 32 else 2.0 ** (32 - planes) * 5 / 6
        # 24 covers truncation to integers and the halvings of both transforms
        units = 15 / 4 * tail + 24
        return max(absmax * 2.0**-29 * units + absmax * 2.0**-23, 2.0**-98)
