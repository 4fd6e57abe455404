"""Write the page about the machine code of the kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.gpu_bench.machine_code import ROOM, Kernel

#: architecture, source, setting, kernel
Row = tuple[int, str, str, Kernel]
#: a line of a table: what is shown, and its kernels by architecture and dtype
Line = tuple[str, dict[tuple[int, str], Kernel]]

DTYPES = ("fp32", "bf16", "fp16", "")
#: settings of blockint that have lines of their own
SHOWN = ("8", "4", "4 gaussian", "4 rotate")
#: whose instructions are shown
SHOWN_ARCHITECTURE = 90
#: counts of the second table: its title, and what of ``Kernel.counts``
COUNTS = (
    ("all", ("instructions",)), ("global, of these 16 bytes", ("global loads", "global stores")),
    ("shared", ("shared",)), ("barriers", ("barriers",)), ("shuffles", ("shuffles",)),
    ("atomics", ("atomics",)), ("slow", ("slow arithmetic",)), ("local", ("local",)),
)  # fmt: skip
HEAD = """\
# Kernels, read without a GPU

Every CUDA kernel, compiled by NVRTC {nvrtc} for sm_75 (Turing), sm_80 (A100), sm_86 (RTX 30),
sm_90 (H100) and sm_100 (B200) as hybridcomp compiles it at its first use, and read:
`scripts/bench/read_gpu_kernels.py`, which goes on where sources or compiler have changed and with
`--check` fails where something is spilled. {count} kernels in {images} images.

{spills}

Speeds on an H100 are [codecs on a GPU](gpu_codecs.md); [what is proven on a GPU](gpu_proof.md) says
which of them were measured with these very kernels. Kernels of fp32 / bf16 / fp16 share a line.
"""
ABOUT_COUNTS = """\
As they stand in the image, not as often as they run: both sides of a branch count, a loop once.
"Slow" are conversions and functions at a quarter of the rate or less (MUFU, F2F, F2I, I2F)."""


def document(rows: Sequence[Row], facts: dict[str, Any], missing: Sequence[str] = ()) -> str:
    """Return the page of the rows; ``missing``: images that were not read."""
    lines = list(_lines(rows))
    images = len({row[:3] for row in rows})
    problems = spilled(rows)
    told = (
        "In local memory, which caches hold, are values of these kernels, and of no other:\n\n"
        + "\n".join(f"* {problem}" for problem in problems)
    )
    head = HEAD.format(
        nvrtc=facts["nvrtc"], count=len(rows), images=images,
        spills=told if problems else "None of them spills a register, and none has a stack.",
    )  # fmt: skip
    if missing:
        head += f"\n**Not read yet since their sources changed**: {', '.join(missing)}.\n"
    return "\n".join(
        [
            head,
            "## Registers of a thread",
            "",
            "Threads of a block, bytes of its shared memory, and the share of a multiprocessor's "
            "threads that fit at once\n(the least of the dtypes) are those of sm_90.",
            "",
            *_registers(lines),
            "",
            *_others(rows),
            "",
            f"## Instructions, sm_{SHOWN_ARCHITECTURE}",
            "",
            ABOUT_COUNTS,
            "",
            *_instructions(lines),
            "",
        ]
    )


def spilled(rows: Iterable[Row]) -> list[str]:
    """Return a sentence for every kernel that has local memory."""
    return [
        f"{kernel.name} of {source} {setting} for sm_{architecture}: {kernel.stack} bytes of "
        f"stack, {kernel.spill_stores} spilled and {kernel.spill_loads} loaded again"
        for architecture, source, setting, kernel in rows
        if kernel.stack or kernel.spill_stores or kernel.spill_loads or kernel.counts.get("local")
    ]


def _lines(rows: Sequence[Row]) -> Iterator[Line]:
    """Kernels that differ in their dtype and architecture only, in the order of their sources."""
    found: dict[tuple[str, str, str], dict[tuple[int, str], Kernel]] = {}
    for architecture, source, setting, kernel in rows:
        if setting in ("", *SHOWN):
            name, dtype = _parted(kernel.name)
            found.setdefault((source, setting, name), {})[architecture, dtype] = kernel

    def place(key: tuple[str, str, str]) -> tuple[int, str, str]:
        source, setting, name = key
        return ("", *SHOWN).index(setting), source, name

    for source, setting, name in sorted(found, key=place):
        yield f"{name} {setting}".strip(), found[source, setting, name]


def _parted(name: str) -> tuple[str, str]:
    """Split ``blockint_encode_bf16`` into its name and its dtype."""
    match = re.fullmatch(r"(.+)_(fp32|bf16|fp16)", name)
    return (match[1], match[2]) if match and not name.startswith("cast_") else (name, "")


def _each(of: dict[tuple[int, str], Kernel], architecture: int, value: Any) -> str:
    """``value`` of every dtype; one where all are equal, a dash where none was read."""
    found = [str(value(of[architecture, d])) for d in DTYPES if (architecture, d) in of]
    return " / ".join(found if len(set(found)) > 1 else found[:1]) or "-"


def _registers(lines: Sequence[Line]) -> Iterator[str]:
    yield "| kernel | " + " | ".join(f"sm_{a}" for a in ROOM) + " | threads | shared | at once |"
    yield "|---|" + "---|" * (len(ROOM) + 3)
    for name, of in lines:
        cells = [_each(of, a, lambda kernel: kernel.registers) for a in ROOM]
        here = [kernel for (a, _), kernel in of.items() if a == SHOWN_ARCHITECTURE]
        least = min((kernel.occupancy(SHOWN_ARCHITECTURE) for kernel in here), default=None)
        cells += [
            _each(of, SHOWN_ARCHITECTURE, lambda kernel: kernel.threads),
            _each(of, SHOWN_ARCHITECTURE, lambda kernel: kernel.shared),
            "-" if least is None else f"{100 * least:.0f} %",
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _others(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line with the most that settings take which have no row in the table."""
    kernels = [kernel for _, _, setting, kernel in rows if setting not in ("", *SHOWN)]
    settings = list(dict.fromkeys(row[2] for row in rows if row[2] not in ("", *SHOWN)))
    if kernels:
        most = max((kernel.registers for kernel in kernels if kernel.threads > 64), default=0)
        sums = max((kernel.registers for kernel in kernels if kernel.threads <= 64), default=0)
        yield (
            f"`blockint` with other settings ({', '.join(settings)}): {len(kernels)} kernels, at "
            f"most {most} registers{f', in the sums over ranks {sums}' if sums else ''}."
        )


def _instructions(lines: Sequence[Line]) -> Iterator[str]:
    yield "| kernel | " + " | ".join(title for title, _ in COUNTS) + " |"
    yield "|---|" + "---|" * len(COUNTS)
    for name, of in lines:
        cells = []
        for title, kinds in COUNTS:

            def number(kernel: Kernel, kinds: Sequence[str] = kinds, title: str = title) -> str:
                total = sum(kernel.counts.get(kind, 0) for kind in kinds)
                wide = kernel.counts.get("16-byte", 0)
                return f"{total}, {wide}" if title.startswith("global") else str(total)

            cells.append(_each(of, SHOWN_ARCHITECTURE, number))
        yield f"| {name} | " + " | ".join(cells) + " |"
