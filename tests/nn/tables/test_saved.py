"""Checkpoints of tables: other numbers of ranks, damage, a save that is killed, ``state_dict``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.nn import CachedEmbedding, RowOptimizer
from hybridcomp.nn.tables import host_rows, saved
from tests.nn.tables.made import ranks, zipf
from tests.paths import ROOT
from tests.ranks import RunRanks
from tests.scripts_on_ranks import run_script
from tests.selection import by_day

ROWS, WIDTH = 203, 6


def fresh(method: Any = "adagrad") -> tuple[CachedEmbedding, RowOptimizer]:
    table = CachedEmbedding(ROWS, WIDTH, resident=90)
    return table, RowOptimizer([table], method, lr=0.1)


def step(table: CachedEmbedding, optimizer: RowOptimizer, seed: int) -> None:
    """Step with the same rows on every rank, so that any number of ranks steps alike."""
    table(zipf(ROWS, 60, seed)).square().sum().backward()
    optimizer.step()


def first(folder: str) -> list[Tensor | None]:
    """Train, save and train on; return the weights at the save and at the end."""
    host_rows.PIECE_NBYTES = 256  # several pieces a file
    table, optimizer = fresh()
    for seed in range(3):
        step(table, optimizer, seed)
    table.save(folder)
    weight = table.full_weight()
    table.save(folder)  # again, in place of the first
    step(table, optimizer, 3)
    return [weight, table.full_weight()]


def then(folder: str, save_again: bool) -> list[Tensor | None]:
    host_rows.PIECE_NBYTES = 256
    table, optimizer = fresh()
    step(table, optimizer, 9)
    table.load(folder)
    weight = table.full_weight()
    if save_again:
        dist.barrier()
        table.save(folder)
    step(table, optimizer, 3)
    return [weight, table.full_weight()]


def test_four_ranks_then_two_then_three(on_ranks: RunRanks, tmp_path: Path) -> None:
    folder = str(tmp_path / "table")
    expected = on_ranks(4, first, folder)[0]
    assert len(list(Path(folder).iterdir())) == 1 + 2 * 4
    for world in (2, 3):
        weights = on_ranks(world, then, folder, True)[0]
        assert torch.equal(weights[0], expected[0])
        assert torch.allclose(weights[1], expected[1], atol=1e-6)
        assert len(list(Path(folder).iterdir())) == 1 + 2 * world


def damaged(folder: str, states: bool) -> str:
    host_rows.PIECE_NBYTES = 256  # as the save that is read
    table, _ = fresh()
    before = table.full_weight()
    try:
        table.load(folder, states=states)
    except CheckpointError as error:
        after = table.full_weight()
        same = before is None or after is None or torch.equal(before, after)
        return str(error) if same else "changed"
    return ""


@pytest.mark.parametrize(
    "case", ["bit", "short", "long", "gone", "manifest", "no manifest", "number", "other"]
)
def test_damage_is_named_on_all_ranks(on_ranks: RunRanks, tmp_path: Path, case: str) -> None:
    on_ranks(2, first, str(tmp_path))
    file = next(tmp_path.glob("*.sum.1-of-2.bin"))
    manifest, data = tmp_path / "rows.json", bytearray(file.read_bytes())
    expected = file.name
    if case == "bit":
        data[700] ^= 4
        file.write_bytes(data)
    elif case in ("short", "long"):
        file.write_bytes(data[:-8] if case == "short" else data + b"12345678")
    elif case == "gone":
        file.unlink()
    elif case == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-30])
        expected = "rows.json"
    elif case == "no manifest":
        manifest.unlink()
        expected = "rows.json"
    elif case == "number":
        manifest.write_text(manifest.read_text().replace('"rows":203', '"rows":"203"'))
        expected = "'rows' is damaged"
    else:
        manifest.write_text(manifest.read_text().replace('"rows":203', '"rows":204'))
        expected = "expected (203, 6) rows and values, found (204, 6)"
    said = on_ranks(2, damaged, str(tmp_path), True)
    assert said[0] == said[1] and expected in said[0] and "\n" not in said[0]
    if case in ("bit", "short", "long", "gone"):
        assert on_ranks(2, damaged, str(tmp_path), False) == ["", ""], "weights alone are whole"


def test_states_of_another_method(tmp_path: Path) -> None:
    table, optimizer = fresh("adagrad")
    step(table, optimizer, 0)
    table.save(tmp_path)
    weight = table.full_weight()
    assert weight is not None
    for method, words in (("adam", "expected exp_avg of"), ("sgd", r"found states \['sum'\]")):
        other, _ = fresh(method)
        with pytest.raises(CheckpointError, match=words):
            other.load(tmp_path)
        other.load(tmp_path, states=False)
        assert torch.equal(other.full_weight(), weight)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the folder of another table"):
        other.save(tmp_path)
    table.circle = table  # alive only by a reference cycle, which owns no folder
    del table, optimizer
    other.save(tmp_path)


def taken_on_one(folder: str) -> None:
    other, _ = fresh()
    if ranks()[0] == 1:
        saved._folders[Path(folder).resolve()] = other
    with pytest.raises(ConfigError, match="the folder of another table"):
        fresh()[0].save(folder)


def test_a_folder_taken_on_one_rank_is_refused_on_all(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(2, taken_on_one, str(tmp_path))


def killed(folder: str) -> int:
    """Save, step, and fail in the second save on rank 1; return the number of files."""
    host_rows.PIECE_NBYTES = 256  # as ``damaged`` reads it
    table, optimizer = fresh()
    table.save(folder)
    step(table, optimizer, 1)
    write = saved._write

    def full(path: Path, values: Tensor) -> list[int]:
        sums = write(path, values)
        if ranks()[0] == 1:
            raise OSError(28, "No space left on device")
        return sums

    saved._write = full
    try:
        table.save(folder)
    except CheckpointError as error:
        assert "No space left on device; nothing was replaced" in str(error)
    else:
        raise AssertionError("no error")
    finally:
        saved._write = write
    dist.barrier()
    return len(os.listdir(folder))


def test_a_save_that_fails_leaves_the_one_before(on_ranks: RunRanks, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    assert max(on_ranks(2, killed, str(folder))) == 1 + 2 * 2
    # files of a save that was killed are not named by the manifest, and go with the next save
    (folder / "rows.00000000.weight.0-of-2.bin").write_bytes(b"half")
    assert on_ranks(2, damaged, str(folder), True) == ["", ""]
    on_ranks(2, first, str(folder))
    assert not (folder / "rows.00000000.weight.0-of-2.bin").exists()


def test_state_dict_is_that_of_torchs_table(capsys: pytest.CaptureFixture[str]) -> None:
    table, optimizer = fresh()
    step(table, optimizer, 0)
    state = table.state_dict()
    assert set(state) == {"anchor", "weight"} and state["weight"].shape == (ROWS, WIDTH)
    theirs = nn.Embedding(ROWS, WIDTH)
    theirs.load_state_dict({"weight": state["weight"]})
    model = nn.ModuleDict({"table": fresh()[0]})
    model.load_state_dict({f"table.{name}": value for name, value in theirs.state_dict().items()})
    assert torch.equal(model["table"].full_weight(), theirs.weight)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"table.weight: expected \(203, 6\), found \(9, 6\)"):
        model.load_state_dict({"table.weight": torch.zeros(9, 6)})
    model.load_state_dict({})
    assert "state_dict has none of its rows; call load(folder)" in capsys.readouterr().out


def cut_state() -> set[str]:
    table, _ = fresh()
    return set(table.state_dict())


def test_state_dict_of_several_ranks_has_no_rows(on_ranks: RunRanks) -> None:
    assert on_ranks(2, cut_state) == [{"anchor"}] * 2


@pytest.mark.parametrize("other", by_day([1, 3], [3]))
def test_the_example_goes_on_on_other_ranks(other: int, tmp_path: Path) -> None:
    """Another number of ranks continues from the checkpoint of two."""
    script = str(ROOT / "scripts" / "examples" / "train_ngrams.py")
    (tmp_path / "text").write_text("the same line, again and again and again; " * 60)
    options = {"text": "text", "rows": 900, "row-width": 4, "resident": 890, "steps": 20,
               "batch": 4, "length": 16, "width": 16, "block": '{"embed": "expcode"}'}  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    ended = run_script(tmp_path, script, *words, "--save", "saved")
    assert ended.returncode == 0, ended.output
    further = run_script(tmp_path, script, *words, "--load", "saved", ranks=other)
    assert further.returncode == 0, further.output
    first, second = (
        float(run.output.partition("step 20: loss ")[2].split(",")[0]) for run in (ended, further)
    )
    assert second < first - 0.2
