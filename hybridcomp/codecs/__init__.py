"""Codecs: deterministic maps between 1-D tensors and bytes; ``base.Codec`` is the contract."""

from __future__ import annotations

from hybridcomp.codecs.base import PAYLOAD_ALIGN, VALUE_DTYPES, Codec, align
from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.codecs.bounded import Bounded
from hybridcomp.codecs.casts import Bf16, Fp8, Fp16
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.codecs.mpc import Mpc
from hybridcomp.codecs.powersgd import PowerSgd
from hybridcomp.codecs.radix import Radix
from hybridcomp.codecs.zfp import Zfp
from hybridcomp.errors import CodecError
from hybridcomp.kernels import check_payloads, poll_payloads
from hybridcomp.kernels.late_read import LateRead

#: every codec that a block may name
CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (Bf16, Fp16, Fp8, BlockInt, Radix, Zfp, Mpc, ExpCode, PowerSgd)
}


def make_codec(name: str, **settings: object) -> Codec:
    """The codec called ``name`` with ``settings`` as keyword arguments.

    Raises:
        CodecError: the name or a setting is unknown, or the value of a setting is out of range.
    """
    if name not in CODECS:
        raise CodecError(f"unknown codec {name!r}; expected one of {', '.join(sorted(CODECS))}")
    try:
        return CODECS[name](**settings)
    except TypeError as error:
        raise CodecError(
            f"codec {name!r} does not take the settings {settings}: {error}"
        ) from error


__all__ = [
    "CODECS",
    "PAYLOAD_ALIGN",
    "VALUE_DTYPES",
    "Bf16",
    "BlockInt",
    "Bounded",
    "Codec",
    "ExpCode",
    "Fp16",
    "Fp8",
    "LateRead",
    "Mpc",
    "PowerSgd",
    "Radix",
    "Zfp",
    "align",
    "check_payloads",
    "make_codec",
    "poll_payloads",
]
