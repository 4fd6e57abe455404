"""Properties that codecs declare, so that other code asks for a property instead of a name.

A codec module sets these beside its encoder, and the block, the schema, bounded mode, the guard and
the reductions follow them. No other module names a codec, except for the registry's defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from hybridcomp.codecs.low_rank import LowRank
from hybridcomp.codecs.setting import Setting

if TYPE_CHECKING:
    from typing_extensions import Self


class Shortfall(NamedTuple):
    """Bound that no setting keeps, with advice for the user."""

    error_bound: float
    todo: str


class Capabilities:
    """Properties with defaults for a lossy codec of variable size without settings."""

    #: name in the block
    name: ClassVar[str]
    #: its method as half a sentence, for users who choose a codec: "1-D fixed rate"
    about: ClassVar[str] = ""
    #: its difference from codecs with the same ``about``, as half a sentence
    remark: ClassVar[str] = ""
    #: arguments of its constructor, all with a default; the block's keys have these names
    settings: ClassVar[tuple[Setting, ...]] = ()
    #: decoding (without adding) gives back exactly the encoded values, bits of NaNs included
    lossless: bool
    #: ``encode`` always writes ``wire_nbytes`` bytes, so no size has to be exchanged
    fixed_size: bool
    #: values that share a scale: ``element_bound`` takes the absmax of aligned ranges of this many.
    #: A subclass sets its own, in its constructor where it is a setting
    block_size: int = 1
    #: codecs of variable size: aligned ranges of this many values decode to the same wherever a
    #: message is cut between them
    segment: int = 1
    #: factor on the length of its rounds, if long messages are split into rounds: above 1 if each
    #: call has a constant cost
    round_scale: ClassVar[int] = 1
    #: satisfies an error bound of whole collectives; its segments then end at parameter borders
    bounded: ClassVar[bool] = False
    #: reduces gradients instead of encoding: for dp only, always with error feedback, without a
    #: bound, and its time is not measured
    gradients_only: ClassVar[bool] = False
    #: encodes the change since the last gather of parameters relative to the receivers' copies: for
    #: zero only, always with deltas
    references: ClassVar[bool] = False
    #: drops most values, which error feedback sends later: for sync only
    sparse: ClassVar[bool] = False
    #: has kernels for all chunks of a reduction at once on GPUs, residuals included, and on CPUs
    #: for residuals of few bits
    fuses: ClassVar[bool] = False
    #: its errors have a mean of zero, so residuals and deltas, which carry an error into the next
    #: message, would only carry noise
    unbiased: bool = False
    #: low-rank reduction of matrix gradients; None: gradients are encoded
    low_rank: LowRank | None = None

    @classmethod
    def ladder(cls) -> tuple[Self, ...]:
        """Return the settings among which an error bound chooses, cheapest first; maybe none.

        All have ``fixed_size`` and one ``block_size``, and ``element_bound`` is constant below some
        absmax and grows linearly above it (``budget.worst_ratio``).
        """
        return ()

    def diverges(self) -> str | None:
        """Return why error feedback diverges with this codec, phrased to follow "diverges".

        None where the error of an encoding is smaller than the encoded values.
        """
        return None

    def beyond(self, values: Tensor, decoded: Tensor) -> int | Tensor:
        """Count the ``values`` further from ``decoded`` (both 1-D fp32) than the bound permits.

        Returns 0 for codecs whose bound is not checked in samples. A count computed on a device is
        returned as a tensor () there, so that the host does not wait.
        """
        return 0

    def unreachable_bound(self, *, summed: bool) -> Shortfall | None:
        """Return why the bound cannot be kept even in fp32; None if it can be, or without a bound.

        ``summed``: messages are sums, so that a value may be quantized twice.
        """
        return None

    def check_settings(self, **values: Any) -> None:
        """Check arguments of the constructor against ``settings``. Raises CodecError."""
        for setting in self.settings:
            if setting.name in values:
                setting.check(self.name, values[setting.name])
