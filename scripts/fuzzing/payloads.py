"""Decode damaged payloads on the CPU under the address and undefined-behaviour sanitizers.

``damage.cpp`` generates and decodes the cases, a hundred thousand in a few seconds; this module
builds and watches it and extracts a failing case.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuzzing.private_folder import private_folder

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "hybridcomp" / "kernels"
#: sources of a codec's loops; where there are any, damage.cpp gets the macro WITH_<CODEC>
SOURCES: dict[str, tuple[str, ...]] = {
    "radix": ("radix_decode", "radix_encode"),
    "expcode": ("expcode_decode", "expcode_encode"),
    "mpc": ("mpc",),
    "stepcode": (
        "stepcode_decode", "stepcode_decode_256", "stepcode_decode_512", "stepcode_encode",
        "stepcode_encode_256", "stepcode_encode_512", "stepcode_model",
    ),
    "blockint": ("blockint",),
    "zfp": ("zfp",),
    "bf16": (), "fp16": (), "fp8": (),
}  # fmt: skip
#: codecs whose decoders read lengths from the payload
VARIABLE = ("radix", "expcode", "mpc", "stepcode")
FLAGS = (
    "-std=c++17", "-g1", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-w",
    "-DHC_CLONES=", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)  # fmt: skip
#: CPU seconds after which a case counts as a hang; a case without CPU time, as on a busy machine,
#: gets WAITS times as long
HANG_S, WAITS = 60.0, 10
_STATE = struct.Struct("<4Q")


class BuildError(RuntimeError):
    """No compiler with sanitizers is installed, or it rejected the sources."""


@dataclass
class Result:
    """Result of a codec's cases."""

    codec: str
    tried: int
    decoded: int  # cases decoded to garbage, or whose damage missed the values
    refused: int  # with an error message
    largest: float  # largest allocation of a call, over its payload's size
    failure: str = ""  # output of the sanitizer or the driver
    reproducer: Path | None = None


def build(
    codecs: Iterable[str], optimize: str = "-O1", native: bool = True, folder: Path | None = None
) -> Path:
    """Build the driver with these codecs; the build is reused until a source changes.

    Raises:
        BuildError: The compiler is missing or failed.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("no C++ compiler with sanitizers: install g++, or set CXX")
    flags = [
        *FLAGS,
        f"-I{KERNELS / 'formats'}",
        f"-I{KERNELS / 'cpu'}",
        optimize,
        *(["-march=native"] if native else []),
    ]
    parts = ["casts", *(part for codec in codecs for part in SOURCES[codec])]
    defines = [f"-DWITH_{codec.upper()}" for codec in codecs if SOURCES[codec]]
    folder = folder or private_folder("hybridcomp-fuzz")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256(repr((compiler, flags)).encode())
    for source in sorted([*KERNELS.glob("formats/*.h"), *KERNELS.glob("cpu/*"), *HERE.glob("*.*")]):
        digest.update(source.read_bytes() if source.suffix in (".h", ".cpp") else b"")
    stem = digest.hexdigest()[:16]
    jobs = {
        folder / f"{stem}-{part}.o": [*flags, "-c", str(KERNELS / "cpu" / f"cpu_{part}.cpp")]
        for part in dict.fromkeys(parts)
    }
    main = folder / f"{stem}-damage-{'-'.join(sorted(codecs))}.o"
    jobs[main] = [*flags, *defines, "-c", str(HERE / "damage.cpp")]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda job: _compile(compiler, job[1], job[0]), jobs.items()))
    driver = main.with_suffix("")
    _compile(compiler, [*flags, *map(str, jobs)], driver)
    return driver


def _compile(compiler: str, arguments: Sequence[str], out: Path) -> None:
    if out.is_file():
        return
    part = out.with_name(f"{out.name}.{os.getpid()}")  # another run may build it at the same time
    found = subprocess.run(
        [compiler, *arguments, "-o", str(part)], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise BuildError(f"{compiler} failed:\n{found.stderr[-2000:]}")
    part.rename(out)


def run(
    driver: Path,
    codec: str,
    cases: int,
    seed: int,
    keep: Path,
    say: Callable[[str], None] = lambda text: None,
    first: int = 0,
    hang: float = HANG_S,
) -> Result:
    """Run cases ``first`` to ``first + cases - 1`` of ``seed``; stop at the first failure.

    ``keep``: folder for a reproducer, created on demand.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        path.write_bytes(bytes(_STATE.size))
        process = subprocess.Popen(
            [str(driver), "run", codec, str(seed), str(first), str(cases), str(path)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_environment(),
        )  # fmt: skip
        with path.open("r+b") as file, mmap.mmap(file.fileno(), _STATE.size) as state:
            failure = _watch(process, state, codec, first, cases, hang, say)
            index, decoded, refused, largest = _STATE.unpack(state[: _STATE.size])
    result = Result(codec, index - first, decoded, refused, largest / 16, failure)
    if failure:
        keep.mkdir(parents=True, exist_ok=True)
        result.reproducer = keep / f"{codec}-{seed}-{index}.payload"
        dump = [str(driver), "dump", codec, str(seed), str(index), str(result.reproducer)]
        subprocess.run(dump, check=True, env=_environment())
    return result


def _watch(
    process: subprocess.Popen[str], state: mmap.mmap, codec: str, first: int, cases: int,
    hang: float, say: Callable[[str], None],
) -> str:  # fmt: skip
    """Wait for the driver; return its error, "" on success."""
    before, told = -1, time.monotonic()
    since = (time.monotonic(), 0.0)  # wall time, CPU time
    while True:
        try:
            _, text = process.communicate(timeout=0.5)
            return "" if process.returncode == 0 else text[-4000:] or _status(process.returncode)
        except subprocess.TimeoutExpired:
            index, now = _STATE.unpack(state[: _STATE.size])[0], time.monotonic()
        computed = _computed(process.pid)
        if index != before:
            before, since = index, (now, computed)
        elif computed - since[1] > hang or now - since[0] > WAITS * hang:
            process.kill()
            process.communicate()
            return f"hangs: one case took more than {hang:.0f} s"
        if now - told > 20:
            told = now
            say(f"payloads {codec}: {index - first:,} of {cases:,}")


def _computed(pid: int) -> float:
    """Return the CPU seconds of a process; 0.0 where the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"exit status {code}"


def replay(path: Path) -> int:
    """Decode a stored case again; return the driver's exit status."""
    codec = path.read_bytes().split(b"\n", 1)[0].decode(errors="replace").split(" ")[2]
    driver = build([codec])
    return subprocess.run([str(driver), "replay", str(path)], env=_environment()).returncode


def _environment() -> dict[str, str]:
    # leaks do not matter here, and detecting them needs ptrace
    options = {
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return {**os.environ, **options}


if __name__ == "__main__":
    sys.exit("run scripts/fuzz.py payloads")
