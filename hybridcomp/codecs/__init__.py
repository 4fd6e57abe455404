"""Codecs: deterministic maps between 1-D tensors and bytes; ``base.Codec`` is the contract.

``registry`` lists them and loads those of other packages, ``capabilities`` declares their
properties, ``bounded`` chooses among them to keep an error bound.
"""

from __future__ import annotations

from hybridcomp.codecs.base import PAYLOAD_ALIGN, VALUE_DTYPES, Codec, align
from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.codecs.bounded import Bounded
from hybridcomp.codecs.casts import Bf16, Fp8, Fp16
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.codecs.mpc import Mpc
from hybridcomp.codecs.powersgd import PowerSgd
from hybridcomp.codecs.radix import Radix
from hybridcomp.codecs.registry import CODECS, LOSSLESS, make_codec
from hybridcomp.codecs.setting import Setting
from hybridcomp.codecs.stepcode import StepCode
from hybridcomp.codecs.zfp import Zfp
from hybridcomp.kernels import check_payloads, poll_payloads, require_kernels
from hybridcomp.kernels.late_read import LateRead, read_together

__all__ = [
    "CODECS",
    "LOSSLESS",
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
    "Setting",
    "StepCode",
    "Zfp",
    "align",
    "check_payloads",
    "make_codec",
    "poll_payloads",
    "read_together",
    "require_kernels",
]
