"""Compiled kernels on disk: by several ranks at once, atomically, and without a disk."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridcomp.errors import CodecError, install_hint
from hybridcomp.kernels.cuda import images
from hybridcomp.kernels.cuda.launcher import CudaLauncher
from tests.kernels.cuda.common import fake_cupy
from tests.ranks import RankPool

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason=install_hint("gpu"))
ONE = ("mpc.cu", (), 80)  # the fastest to compile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a test's image cache."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    images._warn.cache_clear()
    return tmp_path / "kept"


@contextmanager
def compiler(*found: bytes) -> Iterator[mock.Mock]:
    """Return a compiler that gives ``found``, call by call."""
    calls = [(image, "") for image in found]
    with mock.patch.object(images, "compiled", side_effect=calls) as replaced:
        yield replaced


def _image(folder: str, compiles: bool) -> tuple[str, int]:
    """Return the digest of a rank's image, and its number of compilations."""
    real, calls = images.compiled, 0

    def counted(*args: Any) -> tuple[bytes, str]:
        nonlocal calls
        assert compiles, "compiled although it is there"
        calls += 1
        return real(*args)

    environment = mock.patch.dict(os.environ, CUPY_CACHE_DIR=folder)
    with environment, mock.patch.object(images, "compiled", counted):
        dist.barrier()
        found = images.image(*ONE)
    return hashlib.sha256(found).hexdigest(), calls


def test_ranks_that_start_together_compile_the_same(folder: Path) -> None:
    pool = RankPool(2)
    try:
        first = pool.run(_image, str(folder), True, timeout=60.0)
        second = pool.run(_image, str(folder), False, timeout=60.0)
    finally:
        pool.close()
    digests = {digest for digest, _ in first}
    assert len(digests) == 1 and sum(calls for _, calls in first) >= 1
    assert second == [(digest, 0) for digest in digests] * 2
    (kept,) = folder.iterdir()
    content = kept.read_bytes()
    assert kept.suffix == ".cubin" and content[32:36] == b"\x7fELF"
    assert hashlib.sha256(content[32:]).digest() == content[:32]


def test_a_reader_sees_whole_files_only(folder: Path) -> None:
    path, contents = folder / "one", [bytes([n]) * 3_000_000 for n in range(2)]
    images._write(path, contents[0])
    done = threading.Event()

    def write() -> None:
        for step in range(40):
            images._write(path, contents[step % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or not reads:
        assert images._read(path) in contents
        reads += 1
    writer.join()
    assert list(folder.iterdir()) == [path]


def test_what_is_there_is_not_compiled_again_unless_it_is_damaged(folder: Path) -> None:
    with compiler(b"first", b"again") as calls:
        assert [images.image(*ONE) for _ in range(2)] == [b"first"] * 2
        (kept,) = folder.iterdir()
        for damaged in (kept.read_bytes()[:-1], b"", b"x" * 40):
            kept.write_bytes(damaged)
            assert images._read(kept) is None
        assert images.image(*ONE) == b"again" == images.image(*ONE)
    assert calls.call_count == 2


def test_images_are_told_apart(folder: Path) -> None:
    others = [ONE, ("mpc.cu", ("A=1",), 80), ("mpc.cu", (), 90), ("zfp.cu", (), 80)]
    with compiler(*(bytes([n]) for n in range(6))):
        assert [images.image(*other) for other in others] == [b"\0", b"\1", b"\2", b"\3"]
        with mock.patch.object(images, "sources_digest", lambda: "changed"):
            assert images.image(*ONE) == b"\4"
        newer = SimpleNamespace(getVersion=lambda: (99, 0))
        with mock.patch.object(images, "_nvrtc", lambda: newer):
            assert images.image(*ONE) == b"\5"
    assert len(list(folder.iterdir())) == 6


def test_a_folder_that_cannot_be_made_is_told_once(folder: Path) -> None:
    folder.write_text("a file")
    with compiler(b"first", b"second"):
        with pytest.warns(UserWarning, match=r"kernels cannot be kept in .*set CUPY_CACHE_DIR"):
            assert images.image(*ONE) == b"first"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert images.image(*ONE) == b"second"


def test_a_full_disk_leaves_nothing_behind(folder: Path) -> None:
    full = mock.patch.object(os, "replace", side_effect=OSError(28, "No space left on device"))
    with compiler(b"first"), full, pytest.warns(UserWarning, match="No space left"):
        assert images.image(*ONE) == b"first"
    assert not list(folder.iterdir())


def test_an_image_is_whole() -> None:
    """CuPy returns one byte less; the tables of sections and segments end with the image."""
    found, _ = images.compiled(*ONE)
    segments, sections = struct.unpack_from("<QQ", found, 32)
    sizes = struct.unpack_from("<4H", found, 54)
    ends = (segments + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
    assert found[:4] == b"\x7fELF" and max(ends) == len(found)


def test_subnormals_are_not_flushed_and_newer_gpus_get_ptx() -> None:
    """CuPy's default compilation flushes them."""
    found, _ = images.compiled("mpc.cu", (), 999)
    assert b"add.f32" in found or b"add.rn.f32" in found
    assert b".target sm_" in found and b".ftz" not in found


def test_what_the_compiler_says_is_told() -> None:
    with pytest.raises(CodecError, match=r"(?s)cannot compile blockint.cu with -arch=sm_80.*error"):
        images.compiled("blockint.cu", ("HC_BITS=oops",), 80)


def test_a_gpu_that_the_compiler_has_forgotten() -> None:
    with pytest.raises(CodecError, match=r"from sm_\d+ on, found one of sm_30; install CuPy"):
        images.compiled("mpc.cu", (), 30)


def test_a_cupy_that_cannot_make_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy.py").write_text("raise PermissionError(13, 'Permission denied')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(CodecError, match=r"CuPy cannot make its folder .*set CUPY_CACHE_DIR"):
        CudaLauncher(torch.device("cuda", 0))


def test_a_kernel_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for CuPy and the driver record loads and launches by device."""
    cupy, extension = fake_cupy(monkeypatch)
    cupy.cuda.Module.return_value.get_function.side_effect = [mock.Mock(ptr=11), mock.Mock(ptr=12)]
    found = CudaLauncher(torch.device("cuda", 1))
    with mock.patch.object(images, "image", return_value=b"image") as image:
        for kernel in ("mpc_encode", "mpc_decode", "mpc_encode"):
            found.launch("mpc.cu", (), kernel, (3, 1), 5, 2**63)
        found.launch("mpc.cu", (), "mpc_encode", (2, 4), threads=64, table=b"12345678")
    image.assert_called_once_with("mpc.cu", (), 90)
    module = cupy.cuda.Module.return_value
    module.load.assert_called_once_with(b"image")
    assert [call.args for call in module.get_function.call_args_list] == [
        ("mpc_encode",), ("mpc_decode",)
    ]  # fmt: skip
    assert [call.args for call in extension.launch.call_args_list] == [
        (11, 99, 3, 1, 256, 1001, None, 5, 2**63), (12, 99, 3, 1, 256, 1001, None, 5, 2**63),
        (11, 99, 3, 1, 256, 1001, None, 5, 2**63), (11, 99, 2, 4, 64, 1001, b"12345678"),
    ]  # fmt: skip
    cupy.cuda.Device.assert_called_with(1)


def test_threads_that_come_at_once_share_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a replaced module would be unloaded while its functions' addresses are cached."""
    (cupy, _), both = fake_cupy(monkeypatch), threading.Barrier(2, timeout=20)

    def image(*args: object) -> bytes:
        both.wait()  # both have seen that there is no module
        return b"image"

    found = CudaLauncher(torch.device("cuda", 0))
    with mock.patch.object(images, "image", image), ThreadPoolExecutor(2) as threads:
        for kernel in ("mpc_encode", "mpc_decode"):
            threads.submit(found.launch, "mpc.cu", (), kernel, (1, 1))
    assert cupy.cuda.Module.call_count == 1
    assert set(found._functions) == {("mpc.cu", (), k) for k in ("mpc_encode", "mpc_decode")}
