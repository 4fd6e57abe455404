"""Optimizer states on NVMe in encoded files: identical training, damage, exact resumption."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool, RunRanks
from tests.selection import by_day

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from hybridcomp.errors import CheckpointError, ConfigError, StateFileError
from hybridcomp.tools.commands.cli import main
from tests.training import nvme_trainer
from tests.training.nvme_trainer import NvmeJob, make_engine, step

PIPELINED = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}


def parameters_on(folder: str) -> dict[str, Any]:
    """Return ZeRO keys that keep parameters in files; DeepSpeed prefetches some of them twice."""
    told = {"device": "nvme", "nvme_path": folder, "buffer_count": 12, "buffer_size": 700_000}
    return {"offload_param": {**told, "max_in_cpu": 0}, "stage3_prefetch_bucket_size": 0}


def test_trains_as_on_the_host(module_ranks: RunRanks, tmp_path: Path) -> None:
    """Results are equal bit for bit for every way in which DeepSpeed reads and writes files."""
    host = NvmeJob(None, accumulation=2)
    folders = [str(tmp_path / name) for name in ("plain", "piped", "parameters")]
    jobs = [
        host,
        replace(host, folder=folders[0]),
        replace(host, folder=folders[1], optimizer=PIPELINED),
        replace(host, folder=folders[2], zero=parameters_on(folders[2])),
    ]
    for base, *others in module_ranks(2, nvme_trainer.run, jobs):
        for place, other in enumerate(others):
            assert other["digests"] == base["digests"]
            files = {kind: size / raw for kind, (raw, size) in other["files"].items()}
            assert files["gradient"] < 0.37 and files["exp_avg"] < 0.86
            assert files["exp_avg_sq"] < 0.86
            # masters cannot be encoded relative to parameters on disk
            assert files["master"] < (0.86 if place == 2 else 0.51)
            states = [other["files"][kind] for kind in ("master", "exp_avg", "exp_avg_sq")]
            if place < 2:
                assert sum(size for _, size in states) < 0.74 * sum(raw for raw, _ in states)
            messages, raw, wire = other["ledger"]  # with gradients
            assert messages > 40 and 0.6 < wire / raw < (0.75 if place == 2 else 0.65)


def has_libaio() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible())


@pytest.mark.nightly
def test_trains_through_libaio(tmp_path: Path) -> None:
    """DeepSpeed's handle moves the files; compiling it takes minutes."""
    with RankPool(1) as one:
        if one.run(has_libaio) != [True]:
            pytest.skip("needs libaio-dev")
        host = NvmeJob(None, libaio=True)
        jobs = [host, *(replace(host, folder=str(tmp_path / str(n)), optimizer=told)
                        for n, told in enumerate(({}, PIPELINED)))]  # fmt: skip
        ((base, *others),) = one.run(nvme_trainer.run, jobs, timeout=2400)
    assert all(other["digests"] == base["digests"] for other in others)


def saved(job: NvmeJob, checkpoint: str) -> list[dict[str, str]]:
    """Return digests at the second, saved step, at the fourth, and at that of a resumed run."""
    from tests.training.trainer import digests

    engine = make_engine(job)
    train(engine, job, 0)
    engine.save_checkpoint(checkpoint, tag="two")
    found = [digests(engine)]
    train(engine, job, 2)
    found.append(digests(engine))
    engine.load_checkpoint(checkpoint, tag="two")
    train(engine, job, 2)
    found.append(digests(engine))
    engine.destroy()
    return found


def train(engine: Any, job: NvmeJob, first: int) -> None:
    """Run two steps."""
    for number in (first, first + 1):
        step(engine, job, number)


@pytest.mark.parametrize("optimizer", by_day([{}, PIPELINED], [PIPELINED]), ids=str)
def test_resumes_exactly(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """In the same engine, and in another job with other file locations."""
    job, folder = NvmeJob(str(tmp_path / "one"), optimizer=optimizer), tmp_path / "saved"
    with RankPool(2) as ones:  # parameter numbers, and so file names, begin at 0
        first = ones.run(saved, job, str(folder))
    assert all(straight == again for _, straight, again in first)
    note = json.loads((folder / "two" / "hybridcomp_checkpoint.json").read_text())
    assert "hybridcomp states" in note["README"] and "hybridcomp_states_rank_*.pt" in note["files"]
    with RankPool(2) as others:
        elsewhere = replace(job, folder=str(tmp_path / "two"))
        found = others.run(loaded, elsewhere, str(folder))
    assert found == [[two, four] for two, four, _ in first]


def loaded(job: NvmeJob, checkpoint: str) -> list[dict[str, str]] | str:
    """Return digests after loading and two steps later, or the error."""
    from tests.training.trainer import digests

    engine = make_engine(job)
    try:
        engine.load_checkpoint(checkpoint, tag="two")
        found = [digests(engine)]
        train(engine, job, 2)
        return [*found, digests(engine)]
    except (CheckpointError, StateFileError) as error:
        return str(error)
    finally:
        engine.destroy()


@pytest.mark.nightly
def test_checkpoints_that_cannot_be_read_and_plain_ones(
    module_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = NvmeJob(str(tmp_path / "one")), tmp_path / "saved"
    with RankPool(2) as others:
        first = others.run(saved, job, str(folder))
        for error in others.run(loaded, job, str(folder)):  # numbering continues
            assert "its sub-groups are {" in error and "first engine of its process" in error
    path = next((folder / "two" / "offloaded_tensors" / "rank01").glob("exp_avg-*"))
    data = path.read_bytes()
    path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    with RankPool(2) as others:
        for error in others.run(loaded, job, str(folder)):
            assert "rank 1" in error and str(path) in error and "bits of it have changed" in error
    assert main(["states", str(folder / "two")]) == 2  # checked before the first is replaced
    assert str(path) in capsys.readouterr().err
    path.write_bytes(data)
    for error in module_ranks(2, refused, str(folder / "two")):
        assert f"`hybridcomp states {folder / 'two'}`" in error
    assert main(["states", str(folder / "two")]) == 0
    assert "files of 2 ranks are plain now" in capsys.readouterr().out
    assert path.stat().st_size > len(data)
    note = json.loads((folder / "two" / "hybridcomp_checkpoint.json").read_text())
    assert not note["files"] and "hybridcomp states" not in note["README"]
    with RankPool(2) as others:
        found = others.run(loaded, job, str(folder))
    # files are restored; moments and sub-groups in memory restart, as in DeepSpeed
    for (two, _), (before, _, _) in zip(found, first, strict=True):
        weights = [name for name in two if name.startswith("layers") and name.endswith("weight")]
        assert len(weights) == 3 and all(two[name] == before[name] for name in weights)
    assert main(["states", str(folder / "two")]) == 2
    assert "no encoded optimizer states" in capsys.readouterr().err


def refused(folder: str) -> str:
    """Return the error of a job with DeepSpeed's states, which need no libaio here."""
    from hybridcomp.patches.ds.offload import saved_states

    try:
        saved_states.refuse(Path(folder))
    except CheckpointError as error:
        return str(error)
    return ""


def damaged(job: NvmeJob, pattern: str, rank: int) -> str:
    """Damage a file of ``rank`` after a step; return the error, and whether a weight changed."""
    import torch.distributed as dist

    engine = make_engine(job)
    step(engine, job, 0)
    if dist.get_rank() == rank:
        assert job.folder is not None
        every = (path for path in Path(job.folder).rglob(pattern) if "gradient" not in path.name)
        path = sorted(every)[-1]
        data = bytearray(path.read_bytes())
        data[3000] ^= 1
        path.write_bytes(data)
    try:
        step(engine, job, 1)
    except StateFileError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "states": ({}, {}, "optimizer/rank1/exp_avg_sq-*.swp"),
    "masters": (PIPELINED, {}, "optimizer/rank1/[0-9]*_[0-9]*.tensor.swp"),
    "parameters": ({}, None, "bfloat16params/rank1/*.swp"),
}


@pytest.mark.parametrize("name", by_day(CASES, ["masters"]))
def test_damage_on_one_rank_is_an_error_on_all(
    module_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    optimizer, zero, pattern = CASES[name]
    zero = parameters_on(str(tmp_path)) if zero is None else zero
    job = NvmeJob(str(tmp_path), optimizer=optimizer, zero=zero)
    for error in module_ranks(2, damaged, job, pattern, 1):
        assert error.startswith("optimizer states on NVMe: rank 1: ") and "rank1/" in error
        assert "bits of it have changed" in error and "\n" not in error


def too_large(job: NvmeJob) -> str:
    """Return the error of a start on a disk with 1 MB."""
    import os

    real, found = os.statvfs, ""
    os.statvfs = lambda path: os.statvfs_result((1, 1, *real(path)[2:4], 10**6, *real(path)[5:]))
    try:
        make_engine(job).destroy()
    except ConfigError as error:
        found = str(error)
    finally:
        os.statvfs = real
    return found


def test_a_disk_that_is_too_small_is_told_before_the_first_step(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    for error in module_ranks(2, too_large, NvmeJob(str(tmp_path))):
        assert error.startswith("zero_optimization.offload_optimizer.nvme_path: found ")
        assert "2 ranks of" in error and "1 MB are free; make room, or name another disk" in error
        # 67.7 MB, without the masters there: the largest sub-group counts twice, since a new file
        # stands beside the old one until it is complete
        needed = error.partition("need up to ")[2].partition(" MB more for optimizer states")[0]
        assert float(needed) == pytest.approx(61.3, rel=0.02)


def small(job: NvmeJob) -> list[str]:
    """Return files of a training whose sub-groups are shorter than a disk block."""
    engine = make_engine(job)
    step(engine, job, 0)
    engine.destroy()
    return [path.name for path in Path(job.folder or "").rglob("*.swp")]


def test_sub_groups_that_are_too_small_stay_in_memory(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    job = NvmeJob(str(tmp_path), aio={"block_size": 1 << 25}, optimizer={"buffer_count": 4})
    assert module_ranks(2, small, job) == [[], []]
