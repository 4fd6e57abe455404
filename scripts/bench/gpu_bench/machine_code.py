"""Read the machine code of a kernel without a GPU: registers, memory, instructions.

Registers, stack and shared memory are what ``ptxas -v`` says of an image that NVRTC compiled, the
threads of a block what the image says of itself, instructions those that ``nvdisasm`` shows.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hybridcomp.kernels.cuda import images

#: attribute of ``.nv.info.<kernel>`` with the three sides of the largest block, and its format
MAX_THREADS, SVAL = 0x05, 0x04
#: of one multiprocessor, by architecture: threads, and bytes of shared memory for its blocks
ROOM = {
    75: (1024, 64 << 10), 80: (2048, 164 << 10), 86: (1536, 100 << 10), 90: (2048, 228 << 10),
    100: (2048, 228 << 10),
}  # fmt: skip
#: registers of a multiprocessor, what a warp gets them in, and its most blocks
REGISTERS, UNIT, MOST_BLOCKS = 1 << 16, 256, {75: 16, 86: 16}
#: bytes of shared memory that the system takes of every block, and what blocks get them in
RESERVED, SHARED_UNIT = {75: 0}, {75: 256}
#: kinds of instructions that are counted, by how their names begin
KINDS = {
    "local": ("LDL", "STL"), "global loads": ("LDG", "LD."), "global stores": ("STG", "ST."),
    "shared": ("LDS", "STS"), "barriers": ("BAR",), "shuffles": ("SHFL", "REDUX"),
    "atomics": ("ATOM", "RED"), "slow arithmetic": ("MUFU", "F2F", "F2I", "I2F", "DADD", "DMUL"),
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One kernel of one image.

    Attributes:
        registers: of a thread; ``stack``, ``spill_stores`` and ``spill_loads``: bytes of its local
            memory; ``shared``: static bytes of a block.
        threads: of the largest block that it is compiled for.
        counts: instructions in all, and by kind (``KINDS``; "16-byte" are global loads and stores
            of 16 bytes a thread). Empty without a disassembler.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    threads: int
    counts: dict[str, int] = field(default_factory=dict)

    def occupancy(self, architecture: int) -> float:
        """Give the share of a multiprocessor's threads that may be there at once."""
        most, shared = ROOM[architecture]
        warps = -(-self.threads // 32)
        granted = -(-self.registers * 32 // UNIT) * UNIT
        blocks = min(
            REGISTERS // granted // warps, most // self.threads, MOST_BLOCKS.get(architecture, 32)
        )
        unit = SHARED_UNIT.get(architecture, 128)
        taken = -(-(self.shared + RESERVED.get(architecture, 1024)) // unit) * unit
        if self.shared:
            blocks = min(blocks, shared // taken)
        return blocks * warps * 32 / most


def kernels(
    source: str, defines: tuple[str, ...], architecture: int, disassembler: str | None
) -> list[Kernel]:
    """Compile ``source`` and read its kernels, by name. Raises CodecError as ``compiled`` does."""
    image, log = images.compiled(source, defines, architecture, "--ptxas-options=-v")
    image += b"\0"  # CuPy takes a cubin for a text and cuts its last byte off, which is a zero
    threads = dict(max_threads(image))
    counts = counted(image, disassembler) if disassembler else {}
    found = [
        Kernel(name, *numbers, threads.get(name, 0), counts.get(name, {}))
        for name, numbers in reported(log)
    ]
    return sorted(found, key=lambda kernel: kernel.name)


def reported(log: str) -> Iterator[tuple[str, tuple[int, int, int, int, int]]]:
    """Yield every kernel's name; registers, stack, spill stores, spill loads, shared bytes."""
    for part in log.split("Compiling entry function '")[1:]:
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", part)
        used = re.search(r"Used (\d+) registers", part)
        assert memory and used, f"ptxas says something new:\n{part}"
        shared = re.search(r"(\d+) bytes smem", part)
        stack, stores, loads = map(int, memory.groups())
        in_shared = int(shared[1]) if shared else 0
        yield part.partition("'")[0], (int(used[1]), stack, stores, loads, in_shared)


def max_threads(image: bytes) -> Iterator[tuple[str, int]]:
    """Yield the name and threads of the largest block of the kernels of a cubin (ELF, 64 bits)."""
    for name, content in _sections(image):
        kernel = name.removeprefix(".nv.info.")
        if kernel == name:
            continue
        at = 0
        while at + 4 <= len(content):
            form, attribute, size = struct.unpack_from("<BBH", content, at)
            at += 4
            if form == SVAL and attribute == MAX_THREADS:
                x, y, z = struct.unpack_from("<III", content, at)
                yield kernel, x * y * z
            at += size if form == SVAL else 0


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of the sections of an ELF file of 64 bits."""
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, start + size * i) for i in range(count)]
    texts = headers[names][4]
    for name, _, _, _, offset, length in headers:
        end = image.index(b"\0", texts + name)
        yield image[texts + name : end].decode(), image[offset : offset + length]


def find_disassembler() -> str | None:
    """Find ``nvdisasm``: on the path, or in the package of Triton, which brings one."""
    found = shutil.which("nvdisasm")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin:
        beside = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        found = str(beside) if beside.is_file() else None
    return found


def counted(image: bytes, disassembler: str) -> dict[str, dict[str, int]]:
    """Count the instructions of every kernel of a cubin, by kind. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [disassembler, "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(instructions(text))


def instructions(text: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the kernels of a disassembly and their lines, without padding behind the end."""
    for part in text.split("\n.text.")[1:]:
        found: Counter[str] = Counter()
        names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", part)
        for name in names:
            if name == "NOP":
                continue
            found["instructions"] += 1
            for kind, starts in KINDS.items():
                if f"{name}.".startswith(starts):
                    found[kind] += 1
                    found["16-byte"] += int(kind.startswith("global") and ".128" in name)
        yield part.partition(":")[0], dict(found)
