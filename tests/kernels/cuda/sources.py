"""Images of all kernels, for tests that run compilers on them."""

from __future__ import annotations

import os

from hybridcomp.kernels.cuda import images

NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
BLOCKINT = ("blockint.cu", "blockint_sum.cu")
OF_KEPT = (*BLOCKINT, "residual.cu")
#: sources with a separate image of kernels for all pieces of a message
OF_PIECES = ("expcode.cu", "mpc.cu", "radix.cu")
WIDTHS = (4, *((2, 3, 5, 6, 7, 8) if NIGHTLY else ()))
ROTATED = (2, 3, 4) if NIGHTLY else ()
#: bits of residuals, whose kernels are separate images
KEPT = (8, 4, 16) if NIGHTLY else (8,)
FEW = tuple(f"HC_KEPT={bits}" for bits in KEPT)
#: all dtypes in one image; a run compiles those it needs
SOURCES: list[tuple[str, tuple[str, ...]]] = [
    *((name, (f"HC_BITS={bits}",)) for name in BLOCKINT for bits in WIDTHS),
    *((name, ("HC_BITS=4", "HC_LEVELS=2")) for name in BLOCKINT if NIGHTLY),
    *((name, ("HC_BITS=4", "HC_ROTATE=1", "HC_LEVELS=1")) for name in BLOCKINT if NIGHTLY),
    *((name, (f"HC_BITS={bits}", "HC_ROTATE=1")) for name in BLOCKINT for bits in ROTATED),
    *((path.name, ()) for path in sorted(images.FOLDER.glob("*.cu")) if path.name not in OF_KEPT),
    *((name, ("HC_PIECES=1",)) for name in OF_PIECES if NIGHTLY),
    *(("residual.cu", (few,)) for few in FEW),
    *((name, ("HC_BITS=4", few)) for name in (*BLOCKINT, "blockint_table.cu") for few in FEW),
    *(
        (name, (f"HC_BITS={b}", "HC_ROTATE=1", f))
        for name in BLOCKINT
        for b in ROTATED
        for f in FEW
    ),
]
#: every kernel, and blockint's with low-bit residuals, rotated, with Gaussian levels
FORMS: list[tuple[str, tuple[str, ...]]] = [
    *((name, ("HC_BITS=4",)) for name in BLOCKINT),
    *((name, ("HC_BITS=4", "HC_KEPT=8")) for name in (*BLOCKINT, "blockint_table.cu")),
    *((name, ("HC_BITS=2", "HC_ROTATE=1", "HC_LEVELS=1")) for name in BLOCKINT),
    *((path.name, ()) for path in sorted(images.FOLDER.glob("*.cu")) if path.name not in OF_KEPT),
    *((name, ("HC_PIECES=1",)) for name in OF_PIECES),
    ("residual.cu", ("HC_KEPT=8",)),
]
