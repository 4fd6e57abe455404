"""What a codec says about itself. Nobody asks which codec one is: they ask what it can do.

A codec module sets these beside its encoder, and the block, the schema, bounded mode, the guard and
the reductions follow them. No other module names a codec, but for those that the registry takes
where none was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from hybridcomp.codecs.low_rank import LowRank
from hybridcomp.codecs.setting import Setting

if TYPE_CHECKING:
    from typing_extensions import Self


class Shortfall(NamedTuple):
    """A bound that no setting keeps: what was asked for, and what to do."""

    error_bound: float
    todo: str


class Capabilities:
    """The answers of a codec that is of variable size, loses something and has no settings."""

    #: name in the block
    name: ClassVar[str]
    #: what it does, as half a sentence for those who choose one: "1-D fixed rate"
    about: ClassVar[str] = ""
    #: what sets it apart from codecs with the same ``about``, as half a sentence
    remark: ClassVar[str] = ""
    #: what its constructor takes, all of it with a default; the block has keys of these names
    settings: ClassVar[tuple[Setting, ...]] = ()
    #: decoding (without adding) gives back exactly the encoded values, bits of NaNs included
    lossless: bool
    #: ``encode`` always writes ``wire_nbytes`` bytes, so no size has to be exchanged
    fixed_size: bool
    #: ``element_bound`` takes the absmax of aligned stretches of this many values
    span: ClassVar[int] = 1
    #: codecs of variable size: aligned stretches of this many values decode to the same wherever a
    #: message is cut between them
    segment: int = 1
    #: limits the error of whole collectives, whose messages are then cut at parameters' borders
    bounded: ClassVar[bool] = False
    #: it is no encoding but a way to reduce gradients: only dp can have it, what it leaves out
    #: always comes with the next step, no bound holds, and its time is not measured
    gradients_only: ClassVar[bool] = False
    #: how gradients that are matrices are reduced instead of being encoded, None: they are encoded
    low_rank: LowRank | None = None

    @classmethod
    def ladder(cls) -> tuple[Self, ...]:
        """Settings among which a bound finds its own, cheapest first; none: it keeps no bound.

        All have ``fixed_size`` and one ``span``, and ``element_bound`` is constant below some
        absmax and grows linearly above it (``budget.worst_ratio``).
        """
        return ()

    def diverges(self) -> str | None:
        """Why residuals and deltas grow without end with it, as a sentence that goes on after
        "diverges"; None where what is left out stays smaller than what was to be sent."""
        return None

    def beyond(self, values: Tensor, decoded: Tensor) -> int:
        """How many of ``values`` are further from ``decoded`` (both 1-D fp32) than was promised.

        0 for codecs whose bound is not checked in samples.
        """
        return 0

    def shortfall(self, *, summed: bool) -> Shortfall | None:
        """Why the bound cannot be kept even in fp32 messages; None where it can, or none is.

        ``summed``: messages are sums, so that a value may be quantized twice.
        """
        return None

    def check_settings(self, **values: Any) -> None:
        """Hold the arguments of the constructor against ``settings``. Raises CodecError."""
        for setting in self.settings:
            if setting.name in values:
                setting.check(self.name, values[setting.name])
