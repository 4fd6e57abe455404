"""DeepSpeed's universal checkpoints include residuals, references and decisions."""

from __future__ import annotations

import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybridcomp.tools.commands import validate
from tests.ranks import RunRanks, run_ranks
from tests.selection import by_day
from tests.training.in_turn import start_deepspeed
from tests.training.test_checkpoint import WIDTH, add, make_engine, sums, train

pytest.importorskip("deepspeed")

STAGES = (1, 3)
UNIVERSAL = {"checkpoint": {"load_universal": True}}
REFERENCES = {"zero": {"codec": "blockint", "bits": 8, "delta": True}}
Sums = dict[str, torch.Tensor]


def block_of(stage: int) -> dict[str, Any]:
    return REFERENCES if stage == 1 else {}


def state_of(engine: Any, source: str) -> tuple[Sums, bool]:
    """Return residuals by parameter, and if delta references equal those saved in ``source``."""
    import torch.distributed as dist

    from hybridcomp.channels import channels_of
    from hybridcomp.channels.messages import delta_references
    from hybridcomp.patches.ds.checkpoint.exact_weights import flat_groups

    channels = channels_of(engine)
    assert channels is not None
    kept = []
    path = Path(source, f"hybridcomp_parameters_rank_{dist.get_rank():05d}.pt")
    if path.is_file():
        shares = torch.load(path, weights_only=True)["shares"]
        flats = [flat for flat, _, _ in flat_groups(engine.optimizer)]
        for flat, share in zip(flats, shares, strict=True):
            reference = delta_references.reference_of(flat)
            kept.append(reference is not None and torch.equal(reference.own, share))
    return sums(channels.residuals.state_dict()), bool(kept) and all(kept)


def save(folder: str) -> list[Sums]:
    """Run three steps at each stage, then save a checkpoint."""
    import torch.distributed as dist

    found = []
    for stage in STAGES:
        engine = make_engine(stage, block=block_of(stage))
        train(engine, 0, 3, dist.get_rank())
        engine.save_checkpoint(f"{folder}/{stage}")
        found.append(state_of(engine, folder)[0])
        engine.destroy()
    return found


def load(
    folder: str, source: str, stages: tuple[int, ...] = STAGES
) -> list[tuple[Sums, bool, int, str]]:
    """Load each stage's newest universal checkpoint; return residuals, references, step, log."""
    import torch.distributed as dist

    found = []
    for stage in stages:
        engine = make_engine(stage, block=block_of(stage), **UNIVERSAL)
        said = StringIO()
        with redirect_stdout(said):
            engine.load_checkpoint(f"{folder}/{stage}")
        saved = f"{source}/{stage}/global_step3"
        found.append((*state_of(engine, saved), engine.global_steps, said.getvalue()))
        train(engine, 3, 4, dist.get_rank())
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def converted(
    module_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Sums]]:
    """Convert checkpoints of two ranks as upstream's pages say; return their summed residuals."""
    folder = tmp_path_factory.mktemp("universal")
    by_rank = module_ranks(2, save, str(folder))
    for stage in STAGES:
        module_ranks(1, convert, folder / str(stage) / "global_step3")
    return folder, [total(by_stage) for by_stage in zip(*by_rank, strict=True)]


def convert(tag: Path) -> None:
    """Create a universal checkpoint beside ``tag`` as upstream's pages say, without our patches."""
    from deepspeed.checkpoint import ds_to_universal

    words = [
        f"--input_folder={tag}", f"--output_folder={tag}_universal", "--num_extract_workers=1",
        "--num_merge_workers=1", "--inject_missing_state",
    ]  # fmt: skip
    with patch.object(sys, "argv", [ds_to_universal.__file__, *words]):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def total(ranks: Any) -> Sums:
    found: Sums = {}
    for rank in ranks:
        for name, values in rank.items():
            found[name] = add(found[name], values) if name in found else values
    return found


def hold(loaded: list[Any], before: list[Sums], stages: tuple[int, ...] = STAGES) -> None:
    """Check that the sum of residuals over the ranks is unchanged, at every stage."""
    for index, stage in enumerate(stages):
        after = total(rank[index][0] for rank in loaded)
        wanted = before[STAGES.index(stage)]
        assert after.keys() == wanted.keys() and after
        for name, values in wanted.items():
            numel = min(values.numel(), after[name].numel())  # padding may differ
            torch.testing.assert_close(after[name][:numel], values[:numel])
            assert not values[numel:].any() and not after[name][numel:].any()
        assert {rank[index][2] for rank in loaded} == {3}


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_state_is_taken_from_the_checkpoint_that_was_converted(
    module_ranks: RunRanks, converted: tuple[Path, list[Sums]], ranks: int
) -> None:
    folder, before = converted
    assert not list(folder.glob("*/global_step3_universal/hybridcomp_*"))
    loaded = module_ranks(ranks, load, str(folder), str(folder))
    hold(loaded, before)
    for stage, (_, references, _, said) in zip(STAGES, loaded[0], strict=True):
        source = folder / str(stage) / "global_step3"
        assert f"they are taken from {source}, of which it was made" in said
        assert "lacks files" not in said
        assert references == (stage == 1 and ranks == 2)


def pipeline(folder: str, stages: int, is_loaded: bool) -> tuple[Sums, int, str]:
    """Save two stages on four ranks after three steps; load on other layouts."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.pipe import PipelineModule

    import hybridcomp

    start_deepspeed()
    hybridcomp.install()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss)
    block = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, "min_bytes": 0}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000,
        "compression": block,
        **(UNIVERSAL if is_loaded else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    with redirect_stdout(StringIO()) as said:
        if is_loaded:
            engine.load_checkpoint(folder)
            found = state_of(engine, folder)[0]
        for _ in range(1 if is_loaded else 3):
            engine.train_batch(iter([(values, values)] * 2))
        if not is_loaded:
            engine.save_checkpoint(folder)
            found = state_of(engine, folder)[0]
    steps = engine.global_steps
    engine.destroy()
    return found, steps, said.getvalue()


@pytest.mark.parametrize(("ranks", "stages"), by_day([(2, 2), (4, 1)], [(2, 2)]))
def test_residuals_of_a_pipeline_go_to_other_ranks_and_stages(
    module_ranks: RunRanks, tmp_path: Path, ranks: int, stages: int
) -> None:
    before = total(found for found, _, _ in run_ranks(4, pipeline, str(tmp_path), 2, False))
    module_ranks(1, convert, tmp_path / "global_step3")
    loaded = run_ranks(ranks, pipeline, str(tmp_path), stages, True)
    after = total(found for found, _, _ in loaded)
    assert after.keys() == before.keys() and after
    for name, values in before.items():
        numel = min(values.numel(), after[name].numel())
        torch.testing.assert_close(after[name][:numel], values[:numel])
    assert {step for _, step, _ in loaded} == {4}
    assert "they are taken from" in loaded[0][2] and "their sum is kept" in loaded[0][2]


def test_without_the_source_one_line_says_what_is_lost_and_what_brings_it(
    module_ranks: RunRanks, converted: tuple[Path, list[Sums]], tmp_path: Path
) -> None:
    folder, before = converted
    moved = tmp_path / "1" / "global_step3_universal"
    shutil.copytree(folder / "1" / moved.name, moved)
    shutil.copy(folder / "1" / "latest_universal", tmp_path / "1")
    ((_, references, step, said),) = module_ranks(2, load, str(tmp_path), str(folder), (1,))[0]
    (line,) = (text for text in said.splitlines() if "lacks files of hybridcomp" in text)
    assert "residuals of error feedback start at zero" in line
    assert "deltas begin with an exact gather" in line
    assert f"cp INPUT_FOLDER/hybridcomp_* {moved}/" in line
    assert (references, step) == (False, 3)
    for path in (folder / "1" / "global_step3").glob("hybridcomp_*"):  # as the message says
        shutil.copy(path, moved)
    loaded = module_ranks(2, load, str(tmp_path), str(folder), (1,))
    hold(loaded, before, (1,))
    assert "lacks files" not in loaded[0][0][3] and loaded[0][0][1]


def test_a_conversion_in_a_process_with_hybridcomp_copies_the_files(
    converted: tuple[Path, list[Sums]], tmp_path: Path
) -> None:
    from hybridcomp.patches.ds.checkpoint import universal

    made: list[Any] = []
    source, target = converted[0] / "1" / "global_step3", tmp_path
    universal.make_main(made.append)(SimpleNamespace(input_folder=source, output_folder=target))
    names = {path.name for path in source.glob("hybridcomp_*")}
    assert made and names and {path.name for path in target.iterdir()} == names


def test_validate_follows_the_universal_checkpoint(converted: tuple[Path, list[Sums]]) -> None:
    folder, _ = converted
    config = folder / "ds.json"
    config.write_text(
        '{"zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": true}, '
        '"compression": {"dp": {"codec": "blockint", "bits": 4, "error_feedback": true}}}'
    )
    found = "\n".join(validate.lines(config, {}, checkpoint=folder / "1"))
    assert (
        f"{folder}/1/global_step3_universal: universal, made of {folder}/1/global_step3," in found
    )
    assert "takes over: what error feedback has left out" in found
