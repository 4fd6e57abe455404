"""This machine's hipRTC, with the interface of CuPy for ROCm, and a reader of its images."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

#: newest first; since ROCm 6 hipRTC is a separate library
LIBRARIES = (
    "libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so", "libamdhip64.so.5",
    "libamdhip64.so",
)  # fmt: skip
METADATA = 32  # type of a note
RSRC1 = 48  # offset of a kernel descriptor's modes


@cache
def library() -> Any:
    """Return hipRTC; skip the test without it."""
    for name in LIBRARIES:
        try:
            found = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(found, "hiprtcCompileProgram"):
            found.hiprtcGetErrorString.restype = ctypes.c_char_p
            return found
    pytest.skip("no hipRTC here (Debian: apt-get install hipcc libamdhip64-dev)")


@cache
def known_targets() -> frozenset[str]:
    """Return the targets that hipRTC's compiler supports: it crashes for others."""
    comgr = ctypes.CDLL("libamd_comgr.so.2")
    count, name, found = ctypes.c_size_t(), ctypes.c_char_p(), set()
    assert comgr.amd_comgr_get_isa_count(ctypes.byref(count)) == 0
    for index in range(count.value):
        assert comgr.amd_comgr_get_isa_name(ctypes.c_size_t(index), ctypes.byref(name)) == 0
        assert name.value is not None
        found.add(name.value.decode().rpartition("-")[2])
    return frozenset(found)


class HipRtc:
    """``cupy_backends.cuda.libs.nvrtc`` of CuPy for ROCm: its functions, over this library."""

    class NVRTCError(RuntimeError):
        """CuPy's exception class."""

    def __init__(self) -> None:
        self._library = library()

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.hiprtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def createProgram(self, text: str, name: str, headers: Any, names: Any) -> ctypes.c_void_p:
        assert not headers and not names
        program = ctypes.c_void_p()
        made = self._library.hiprtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), 0, None, None
        )
        self._check(made)
        return program

    def compileProgram(self, program: ctypes.c_void_p, options: Sequence[str]) -> None:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._check(self._library.hiprtcCompileProgram(program, len(options), encoded))

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self._bytes("hiprtcGetProgramLog", program)[:-1].decode()

    def getPTX(self, program: ctypes.c_void_p) -> bytes:
        """Return the code object without its last byte, which CuPy drops as a terminator."""
        return self._bytes("hiprtcGetCode", program)[:-1]

    def destroyProgram(self, program: ctypes.c_void_p) -> None:
        self._check(self._library.hiprtcDestroyProgram(ctypes.byref(program)))

    def _bytes(self, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"{function}Size")(program, ctypes.byref(size)))
        found = ctypes.create_string_buffer(size.value + 1)
        self._check(getattr(self._library, function)(program, found))
        return found.raw[: size.value] or b"\0"

    def _check(self, status: int) -> None:
        if status:
            text = self._library.hiprtcGetErrorString(status).decode()
            raise self.NVRTCError(f"{text} ({status})")


@dataclass(frozen=True)
class HipKernel:
    """A kernel's metadata in an image: registers, memory, and its floating-point modes."""

    name: str
    registers: int  # vector registers per lane
    scalars: int
    spills: int  # vector registers spilled to memory
    held: int  # scalar registers kept in lanes of others
    shared: int
    scratch: int
    wave: int
    rounding: int
    subnormals: int


def kernels_of(image: bytes) -> list[HipKernel]:
    """Return all kernels of a code object."""
    msgpack = pytest.importorskip("msgpack", reason="reads what images say of their kernels")
    at = image.index(b"AMDGPU\0")
    _, size, kind = struct.unpack_from("<III", image, at - 12)
    assert kind == METADATA
    found = msgpack.unpackb(image[at + 8 : at + 8 + size], strict_map_key=False)
    symbols = _symbols(image)
    kernels = []
    for kernel in found["amdhsa.kernels"]:
        (modes,) = struct.unpack_from("<I", image, symbols[kernel[".symbol"]] + RSRC1)
        kernels.append(
            HipKernel(
                kernel[".name"], kernel[".vgpr_count"], kernel[".sgpr_count"],
                kernel[".vgpr_spill_count"], kernel[".sgpr_spill_count"],
                kernel[".group_segment_fixed_size"], kernel[".private_segment_fixed_size"],
                kernel[".wavefront_size"], modes >> 12 & 3, modes >> 16 & 3,
            )
        )  # fmt: skip
    return kernels


def _symbols(image: bytes) -> dict[str, int]:
    """Return the positions of an ELF image's symbols in the file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    found = {}
    for _, kind, _, _, offset, nbytes, link, _, _, entry in heads:
        if kind != 11:  # dynamic symbols
            continue
        names = heads[link][4]
        for at in range(offset, offset + nbytes, entry):
            name, _, _, section, address, _ = struct.unpack_from("<IBBHQQ", image, at)
            text = image[names + name : image.index(b"\0", names + name)].decode()
            if 0 < section < count:
                found[text] = heads[section][4] + address - heads[section][3]
    return found


def instructions(image: bytes, folder: Path) -> str | None:
    """Return the image's instructions, or None if no LLVM can disassemble them."""
    folders = sorted(Path("/usr/lib").glob("llvm-*/bin"), reverse=True)
    places = ":".join([*map(str, folders), "/opt/rocm/llvm/bin"])
    tool = shutil.which("llvm-objdump") or shutil.which("llvm-objdump", path=places)
    if tool is None:
        return None
    path = folder / "image.co"
    path.write_bytes(image)
    return subprocess.run([tool, "-d", str(path)], capture_output=True, text=True).stdout


def count(pattern: str, text: str) -> int:
    """Count the instructions with such a prefix."""
    return len(re.findall(rf"^\s+{pattern}\w*", text, re.MULTILINE))
