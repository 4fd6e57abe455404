"""stepcode for parameter gathers: ``StepCode`` as a codec that a block may name under ``zero``.

The weights of the last gather are the reference. Receivers hold them in the buffer into which they
decode; the sender holds those of its own shard in a copy that
``channels/messages/parameter_deltas.py`` keeps.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.codecs.stepcode import STEP_DTYPES, StepCode
from hybridcomp.codecs.varying_pieces import PieceKernel, varying_pieces

#: integers as wide as the values
_INTEGERS = torch.int16
#: fraction of the weights that ``typical_steps`` changes, as at a learning rate of 1e-4
#: (docs/codecs.md)
MOVED = 0.4

_STEPS = StepCode()


class ExactSteps(ExpCode):
    """Encode bf16 or fp16 values as steps from a reference; lossless, variable size.

    Without a reference (``against`` was not called) the payloads are those of ``expcode``.
    """

    name: ClassVar[str] = "stepcode"
    about: ClassVar[str] = (
        "lossless, for bf16 and fp16: how many units in the last place each weight moved since the "
        "last gather, entropy-coded"
    )
    remark: ClassVar[str] = ""
    references: ClassVar[bool] = True
    #: factor on the length of rounds: each round learns a model, which takes one core 1.5 ms, as
    #: long as coding a million values
    round_scale: ClassVar[int] = 4

    def __init__(self) -> None:
        self._held: Tensor | None = None

    @property
    def spec(self) -> str:
        return "stepcode()"

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in STEP_DTYPES

    def against(self, held: Tensor) -> ExactSteps:
        bound = ExactSteps()
        bound._held = held
        return bound

    def part(self, start: int, stop: int) -> ExactSteps:
        return self if self._held is None else self.against(self._held[start:stop])

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        if self._held is None:
            return super().wire_nbytes(numel, dtype)
        return _STEPS.wire_nbytes(numel, dtype)

    def encode(self, values: Tensor, out: Tensor) -> int:
        if self._held is None:
            return super().encode(values, out)
        return _STEPS.encode(values, self._held, out)

    def encode_into(self, values: Tensor, out: Tensor, size: Tensor) -> None:
        if self._held is None:
            super().encode_into(values, out, size)
        else:
            _STEPS.encode_into(values, self._held, out, size)

    def pieces(self, device: torch.device) -> PieceKernel | None:
        if self._held is None:
            return super().pieces(device)
        return varying_pieces(_STEPS.kernels.on(device), device, (), True, self._held)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decode into ``out``; after ``against``, ``out`` holds the reference before the call."""
        if self._held is None:
            super().decode(payload, out)
        else:
            _STEPS.decode(payload, out, out)

    def decode_add(self, payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
        assert self._held is None, "steps are not added up"
        super().decode_add(payload, out, dtype)


def typical_steps(values: Tensor, seed: int = 0) -> Tensor:
    """Return a copy of ``values`` (1-D, bf16 or fp16) with some changed by one last-place unit.

    It imitates an optimizer step, for timing; the same ``seed`` gives the same values on every
    device.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(values.numel(), generator=generator, dtype=torch.float32, device="cpu")
    moves = (drawn < MOVED / 2).to(_INTEGERS) - (drawn > 1 - MOVED / 2).to(_INTEGERS)
    moved: Tensor = (values.view(_INTEGERS) + moves.to(values.device)).view(values.dtype)
    return moved
