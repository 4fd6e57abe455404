"""Compile images of the GPU kernels, once for each architecture, and cache them on disk.

NVRTC, or hipRTC for AMD's GPUs (``hip``), is called through CuPy's binding. ``cupy.RawModule`` is
not used: it appends ``-ftz=true`` to all options, and with subnormals flushed to zero, bytes and
sums would differ from the CPU's; its disk cache also ignores changes of included files. Our cache
is in CuPy's folder.

Ranks that start together may each compile the same image: they write equal bytes, atomically.
A damaged file is recompiled.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import hip

#: 90 for sm_90, or AMD's name of a GPU
Architecture = int | str
FOLDER = Path(__file__).resolve().parent
FORMATS = FOLDER.parent / "formats"
#: options of all kernels: bytes must not depend on fused multiply-add or on flushing to zero
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false")
FOLDERS = (f"-I{FOLDER}", f"-I{FORMATS}")
DIGEST_NBYTES = 32


@cache
def sources_digest() -> str:
    """Return the digest of all kernel sources and of the compiler options."""
    digest = hashlib.sha256(" ".join(OPTIONS + hip.OPTIONS).encode())
    for path in sorted((*FORMATS.glob("*.h"), *FOLDER.glob("*.h"), *FOLDER.glob("*.cu"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the version of NVRTC, and its target architectures (75 for sm_75).

    For hipRTC it returns its version and no targets, since hipRTC does not list them.

    Raises CodecError if CuPy is not installed, cannot be imported or does not find NVRTC.
    """
    try:
        nvrtc = _nvrtc()
        major, minor = nvrtc.getVersion()
        known = () if hip.version() else tuple(sorted(nvrtc.getSupportedArchs()))
        return (major, minor), known
    except Exception as error:  # a missing library can raise many kinds of errors
        reason = " ".join(str(error).split())[:200]
        raise CodecError(f"{type(error).__name__}: {reason}") from error


def compiled(
    source: str, defines: tuple[str, ...], architecture: Architecture, *options: str
) -> tuple[bytes, str]:
    """Compile ``source`` for sm_``architecture``; returns the image and the compiler's log.

    The image is a cubin; for a GPU newer than the compiler, PTX for the newest known architecture;
    for an AMD GPU, whose architecture is a name, hipRTC's code object.

    Raises CodecError with the compiler's log, or for a GPU that is too old for the compiler.
    """
    nvrtc = _nvrtc()
    text = (FOLDER / source).read_text()
    more = (*FOLDERS, *(f"-D{define}" for define in defines), *options)
    if isinstance(architecture, str):
        return hip.compiled(nvrtc, text, source, architecture, more)
    known = nvrtc.getSupportedArchs()
    newest = max(known)
    if architecture < min(known):
        raise CodecError(
            f"NVRTC {nvrtc.getVersion()} compiles for GPUs from sm_{min(known)} on, found one of "
            f"sm_{architecture}; install CuPy and NVRTC of an older CUDA (12 for a V100), or leave "
            "this dimension native"
        )
    real = architecture <= newest
    target = f"-arch=sm_{architecture}" if real else f"-arch=compute_{newest}"
    program = nvrtc.createProgram(text, source, [], [])
    try:
        nvrtc.compileProgram(program, (*OPTIONS, target, *more))
        log: str = nvrtc.getProgramLog(program)
        # CuPy takes the image for a C string and drops its last byte. In a cubin this byte is the
        # highest of the last offset in the segment table, always 0, so it is appended again
        found: bytes = nvrtc.getCUBIN(program) + b"\0" if real else nvrtc.getPTX(program)
        return found, log
    except nvrtc.NVRTCError as error:
        raise CodecError(
            f"NVRTC {nvrtc.getVersion()} cannot compile {source} with {target} ({error}):\n"
            f"{nvrtc.getProgramLog(program)}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def image(source: str, defines: tuple[str, ...], architecture: Architecture) -> bytes:
    """Return the image of ``compiled``, from the cache or stored there.

    If the cache cannot be written, it warns once and continues with the compiled image.
    """
    words = (sources_digest(), source, defines, architecture, _nvrtc().getVersion())
    name = hashlib.sha256(repr(words).encode()).hexdigest()[:40]
    path = cache_folder() / f"hybridcomp-{name}.cubin"
    found = _read(path)
    if found is None:
        found, _ = compiled(source, defines, architecture)
        try:
            _write(path, found)
        except OSError as error:
            _warn(path.parent, str(error))
    return found


def cache_folder() -> Path:
    """Return the folder in which CuPy caches compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _nvrtc() -> Any:
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc


def _read(path: Path) -> bytes | None:
    """Read the image in ``path``; None if it is missing or incomplete."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, found = content[:DIGEST_NBYTES], content[DIGEST_NBYTES:]
    return found if found and hashlib.sha256(found).digest() == digest else None


def _write(path: Path, found: bytes) -> None:
    """Write under another name first, so that a reader sees all or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix="hybridcomp-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(found).digest() + found)
        os.replace(partial, path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise


@cache
def _warn(folder: Path, reason: str) -> None:
    warnings.warn(
        f"compiled GPU kernels cannot be kept in {folder} ({reason}): every start will compile "
        "them again; set CUPY_CACHE_DIR to a folder that can be written",
        stacklevel=3,
    )
