"""Damaged payloads under the address and undefined-behaviour sanitizers, short version.

blockint and zfp, which take half a minute to build, are in the long version. stepcode runs nightly.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from fuzzing import payloads
from tests.selection import by_day, wanted

CODECS = ("radix", "mpc", "fp16", "fp8")
CASES = 20_000

needs_sanitizers = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("g++") is None, reason="needs g++'s sanitizers"
)


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = dict.fromkeys(["radix", *wanted(request, "codec")])
    return payloads.build([*built], native=False, folder=tmp_path_factory.mktemp("sanitized"))


@needs_sanitizers
@pytest.mark.parametrize("codec", by_day(CODECS, ["radix"]))
def test_damaged_payloads_are_garbage_or_refused(driver: Path, tmp_path: Path, codec: str) -> None:
    result = payloads.run(driver, codec, CASES, seed=7, keep=tmp_path)
    assert result.failure == ""
    assert result.tried == CASES
    assert result.decoded > CASES / 10 and result.refused > CASES / 20
    assert result.largest <= 16


@needs_sanitizers
@pytest.mark.nightly
def test_damaged_steps_are_garbage_or_refused(tmp_path: Path) -> None:
    """stepcode with each instruction set, against a shared reference."""
    driver = payloads.build(["stepcode"], native=False, folder=tmp_path)
    result = payloads.run(driver, "stepcode", CASES, seed=7, keep=tmp_path)
    assert result.failure == ""
    assert result.tried == CASES
    assert result.decoded > CASES / 10 and result.refused > CASES / 20


@needs_sanitizers
def test_a_case_that_stops_the_driver_is_kept(driver: Path, tmp_path: Path) -> None:
    """A driver without the codec stands in for a crashing one."""
    broken = tmp_path / "driver"
    broken.write_text(
        "#!/bin/sh\n"
        '[ "$1" = run ] && { echo "runtime error: here" >&2; exit 1; }\n'
        f'exec {driver} "$@"\n'
    )
    broken.chmod(0o755)
    result = payloads.run(broken, "radix", 10, seed=7, keep=tmp_path / "kept", first=4)
    assert "runtime error: here" in result.failure
    assert result.reproducer is not None
    assert result.reproducer.read_bytes().startswith(b"hybridcomp-damaged-payload 1 radix ")


@needs_sanitizers
@pytest.mark.parametrize(("does", "hangs"), [("while :; do :; done", True), ("sleep 1.2", False)])
def test_a_hang_is_a_case_that_computes_without_end(
    driver: Path, tmp_path: Path, does: str, hangs: bool
) -> None:
    """On a busy machine a driver may get no core for longer than any case takes."""
    slow = tmp_path / "driver"
    slow.write_text(f'#!/bin/sh\n[ "$1" = run ] && {{ {does}; }}\nexec {driver} "$@"\n')
    slow.chmod(0o755)
    result = payloads.run(slow, "radix", 10, seed=7, keep=tmp_path / "kept", hang=0.4)
    assert result.failure.startswith("hangs") == hangs
    assert (result.reproducer is not None) == hangs
