"""Files of optimizer states: round trip, errors on damage, and the state after a kill."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridcomp.channels.offload.state_files import FORMS, NEW, SIZE, Footer, StateFiles, sweep
from hybridcomp.channels.offload.state_io import StateHandle
from hybridcomp.codecs import make_codec
from hybridcomp.errors import StateFileError
from tests.ranks import fork_server, run_ranks
from tests.selection import by_day
from tests.stand_ins.aio_handle import AioHandle

NUMEL, MANY = 40_000, 2_000_000


def files(**more: object) -> StateFiles:
    return StateFiles(make_codec("expcode"), 0, **more)  # type: ignore[arg-type]


def handle(kind: str, of: StateFiles) -> StateHandle:
    return StateHandle(of, AioHandle() if kind == "aio" else None)


def put(one: StateHandle, values: Tensor, path: Path) -> None:
    one.async_pwrite(values, str(path), 0)
    assert one.wait() == 1


def get(one: StateHandle, like: Tensor, path: Path) -> Tensor:
    found = torch.full_like(like, -7)
    one.async_pread(found, str(path), 0)
    assert one.wait() == 1
    return found


def form_of(path: Path) -> str:
    footer = Footer.of(path.read_bytes()[-SIZE:])
    assert footer is not None
    return FORMS[footer.form]


def some() -> dict[str, tuple[Tensor, str]]:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (NUMEL,), dtype=torch.int64).to(torch.int32)
    return {
        "fp32": (torch.randn(NUMEL), "expcode"),
        "bf16": (torch.randn(NUMEL).bfloat16(), "expcode"),
        "fp16": (torch.randn(NUMEL).half(), "expcode"),
        "zeros": (torch.zeros(NUMEL), "expcode"),
        "not finite": (torch.full((NUMEL,), float("nan")), "expcode"),
        "bits": (bits.view(torch.float32), "raw"),
        "few": (torch.randn(256), "raw"),
    }


@pytest.mark.parametrize("kind", ["threads", "aio"])
@pytest.mark.parametrize("name", some())
def test_every_bit_comes_back(tmp_path: Path, kind: str, name: str) -> None:
    values, form = some()[name]
    one, path = handle(kind, files()), tmp_path / "exp_avg-1_2.tensor.swp"
    put(one, values, path)
    assert form_of(path) == form
    assert torch.equal(get(one, values, path).view(torch.uint8), values.view(torch.uint8))
    assert path.stat().st_size % 4096 == 0 and path.stat().st_size != values.nbytes
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    shorter = values[: NUMEL // 2].contiguous()
    put(one, shorter, path)  # the file shrinks with its values
    assert torch.equal(get(one, shorter, path).view(torch.uint8), shorter.view(torch.uint8))


@pytest.mark.parametrize("kind", ["threads", "aio"])
def test_several_at_once(tmp_path: Path, kind: str) -> None:
    one = handle(kind, files())
    every = [torch.randn(NUMEL + 256 * place) for place in range(7)]
    for place, values in enumerate(every):
        one.async_pwrite(values, str(tmp_path / f"{place}.tensor.swp"), 0)
    assert one.wait() == 7 and one.wait() == 0
    found = [torch.empty_like(values) for values in every]
    for place, values in enumerate(found):
        one.async_pread(values, str(tmp_path / f"{place}.tensor.swp"), 0)
    assert one.wait() == 7 and all(map(torch.equal, found, every))


def test_buffers_are_known() -> None:
    for one in (handle("threads", files()), handle("aio", files())):
        made = one.new_cpu_locked_tensor(1000, torch.zeros(1))
        assert made.numel() == 1000 and one.is_pinned(made[10:]) and not one.is_pinned(made.clone())
        assert one.free_cpu_locked_tensor(made) and not one.is_pinned(made)


def test_masters_lie_beside_their_parameters(tmp_path: Path) -> None:
    master, path = torch.randn(NUMEL), tmp_path / "1_2.tensor.swp"
    half = master[:-100].bfloat16()
    one = handle("threads", files(halves=lambda name: half))
    put(one, master, path)
    assert form_of(path) == "beside" and path.stat().st_size < 0.6 * master.nbytes
    assert torch.equal(get(one, master, path), master)
    half[0] += 1
    with pytest.raises(StateFileError, match="parameters that it was written beside were changed"):
        get(one, master, path)
    put(one, master, path)  # the parameters are no longer its rounding
    assert form_of(path) == "expcode" and torch.equal(get(one, master, path), master)


def older(path: Path, one: StateHandle) -> None:
    data = path.read_bytes()
    put(one, torch.randn(NUMEL), path)
    path.write_bytes(data)


def another(path: Path, one: StateHandle) -> None:
    put(one, torch.randn(NUMEL), path.with_name("other.tensor.swp"))
    path.write_bytes(path.with_name("other.tensor.swp").read_bytes())


def of_another_dtype(path: Path, one: StateHandle) -> None:
    put(handle("threads", files()), torch.randn(NUMEL).bfloat16(), path)
    kept = StateFiles.known.pop(str(path))
    assert kept
    values = torch.randn(NUMEL)
    put(one, values, path)
    footer, data = StateFiles.known[str(path)], path.read_bytes()
    put(handle("threads", files()), values.half(), path)
    assert path.read_bytes() != data
    StateFiles.known[str(path)] = footer


def flipped(place: int) -> Callable[[Path, StateHandle], None]:
    def flip(path: Path, one: StateHandle) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 4
        path.write_bytes(data)

    return flip


DAMAGE: dict[str, tuple[Callable[[Path, StateHandle], object], str]] = {
    "wrong size": (lambda path, one: path.write_bytes(bytes(NUMEL * 4)), "expected a file of"),
    "longer": (lambda path, one: path.write_bytes(path.read_bytes() + b"more"), "found .* bytes"),
    "short": (lambda path, one: os.truncate(path, path.stat().st_size - 4096), "in its footer"),
    "empty": (lambda path, one: path.write_bytes(b""), "missing or empty"),
    "a bit of the payload": (flipped(5000), "bits of it have changed"),
    "a bit of the footer": (flipped(-30), "ends in its footer"),
    "swapped": (another, "the file of another state or rank"),
    "older": (older, "it is an older version, written"),
    "another dtype": (of_another_dtype, "values of float32, found 40000 values of float16"),
    "missing": (lambda path, one: path.unlink(), "cannot be read|missing"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["threads", "aio"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_and_nothing_read(tmp_path: Path, name: str, kind: str) -> None:
    damage, text = DAMAGE[name]
    one, path = handle(kind, files()), tmp_path / "exp_avg-1_2.tensor.swp"
    put(one, torch.randn(NUMEL), path)
    damage(path, one)
    found = torch.full((NUMEL,), -7.0)
    one.async_pread(found, str(path), 0)
    with pytest.raises(StateFileError, match=text) as caught:
        one.wait()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert bool((found == -7).all()) and one.wait() == 0


def test_a_rank_that_others_wait_for_reads_nan_and_holds_the_error(tmp_path: Path) -> None:
    kept = files(poisons=True)
    one, path = handle("threads", kept), tmp_path / "7_param.tensor.swp"
    put(one, torch.randn(NUMEL), path)
    flipped(100)(path, one)
    assert bool(get(one, torch.zeros(NUMEL), path).isnan().all())
    with pytest.raises(StateFileError, match="7_param"):
        kept.hold()


def test_a_file_of_deepspeed_alone_is_read_as_it_is(tmp_path: Path) -> None:
    values, path = torch.randn(NUMEL), tmp_path / "1_2.tensor.swp"
    path.write_bytes(bytes(values.view(torch.uint8).tolist()))
    one = handle("threads", files())
    assert torch.equal(get(one, values, path), values)
    with pytest.raises(StateFileError, match="ends in its footer"):
        get(one, values[:-1], path)


def written_within_a_limit(path: Path) -> list[str]:
    """Fail to write a second version; return what a reader is told."""
    kept = files()
    one = handle("threads", kept)
    put(one, torch.randn(NUMEL), path)
    data = path.read_bytes()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    put(one, torch.randn(NUMEL), path)
    assert path.read_bytes() == data and len(list(path.parent.iterdir())) == 1
    said = []
    for call in (kept.hold, lambda: get(one, torch.zeros(NUMEL), path)):
        with pytest.raises(StateFileError) as error:
            call()
        said.append(str(error.value))
    return said


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    """The next reader gets an error, as the file is not the last version written."""
    ((first, second),) = run_ranks(1, written_within_a_limit, tmp_path / "1_2.tensor.swp")
    assert "1_2.tensor.swp cannot be written (File too large): it needs" in first
    assert "the file before is still there" in first and "an older version" in second


def version(number: float) -> Tensor:
    """Return 8 MB of values that all encode the version."""
    return number + torch.arange(MANY) % 97


def write_versions(path: Path, kind: str, told: Connection) -> None:
    """Write one version after the other, and print each number."""
    torch.set_num_threads(1)
    one = handle(kind, files())
    for number in itertools.count():
        put(one, version(float(number)), path)
        told.send(number)


def killed(path: Path, count: int) -> int:
    """Kill writers at random moments, half of them during a write; return how many left a part."""
    context, new, partly = fork_server(), path.with_name(path.name + NEW), 0
    for trial in range(count):
        ours, theirs = context.Pipe(duplex=False)
        kind = ("threads", "aio")[trial // 2 % 2]
        child = context.Process(target=write_versions, args=(path, kind, theirs))
        child.start()
        theirs.close()
        while ours.recv() < trial % 3:
            pass
        while trial % 2 and not new.exists():
            pass
        time.sleep(0.002 * (trial % 17) if trial % 2 == 0 else 0)
        child.kill()
        child.join()
        partly += new.exists()
        sweep(str(path.parent))
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        values = get(handle("threads", files()), torch.zeros(MANY), path)
        assert values[0] >= trial % 3 and torch.equal(values, version(float(values[0])))
    return partly


@pytest.mark.parametrize("writers", by_day([4, 100], [4]))
def test_killed_writers_leave_a_whole_file(tmp_path: Path, writers: int) -> None:
    assert killed(tmp_path / "1_2.tensor.swp", writers) or writers < 100, "none met a write"


def test_footers_that_are_none() -> None:
    footer = Footer(0, 1, 3, 10, 20, 5, 6, 7, 8)
    data = footer.pack()
    assert len(data) == SIZE and Footer.of(data) == footer
    for place in range(SIZE):
        other = bytearray(data)
        other[place] ^= 1
        assert Footer.of(bytes(other)) is None
    assert Footer.of(data[1:]) is None and Footer.of(b"") is None
