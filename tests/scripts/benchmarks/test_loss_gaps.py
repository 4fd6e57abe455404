"""training_bench/loss_gaps.py and gap_spread.py: gaps, verdicts, tables of spreads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gap_spread
from benchmarks.training_bench import gpu_losses as losses
from benchmarks.training_bench import loss_gaps, loss_records
from tests.scripts.benchmarks.made_losses import TINY, trained


def log_of(losses_at: dict[int, list[float]]) -> list[dict[str, Any]]:
    return [{"step": step, "valid_losses": found} for step, found in losses_at.items()]


def test_the_gap_of_a_seed_is_the_mean_over_the_evaluations() -> None:
    native = log_of({90: [2.0, 4.0], 100: [1.0, 3.0]})
    own = log_of({90: [2.1, 4.2], 100: [1.0, 3.2]})
    one = loss_gaps.seed_gap(7, native, own)
    assert one.curve == pytest.approx([100 * 0.3 / 6, 100 * 0.2 / 4])
    assert one.gap == pytest.approx(5.0) and one.steps == [90, 100]
    assert one.batches == pytest.approx([100 * 0.05 / 2.5, 100 * 0.2 / 2.5])
    assert one.noise == pytest.approx(float(np.std(one.batches, ddof=1)) / 2**0.5)
    with pytest.raises(loss_gaps.GapError, match=r"evaluated at steps \[90\], native at \[90, 1"):
        loss_gaps.seed_gap(7, native, own[:1])
    with pytest.raises(loss_gaps.GapError, match="not finite"):
        loss_gaps.seed_gap(7, native, log_of({90: [2.0, 4.0], 100: [1.0, float("nan")]}))
    with pytest.raises(loss_gaps.GapError, match="no evaluation on the way"):
        loss_gaps.seed_gap(7, native, [{"step": 1, "loss": 2.0}])


def seeds_of(gaps: list[float], noise: float, batches: int = 64) -> list[loss_gaps.SeedGap]:
    """Seeds with these gaps, whose batches scatter by ``noise``, the same text 0.5 up or down."""
    rng = np.random.default_rng(3)
    text = 0.5 * (-1.0) ** np.arange(batches)
    found = []
    for number, gap in enumerate(gaps):
        scatter = rng.standard_normal(batches)
        values = gap + text + noise * (scatter - scatter.mean())
        found.append(loss_gaps.SeedGap(number, [10], [gap], values))
    return found


def test_the_interval_comes_from_the_seeds_and_the_noise_from_the_batches() -> None:
    found = loss_gaps.found(seeds_of([0.02, 0.04, 0.06, 0.08], noise=0.1))
    assert found.gap == pytest.approx(0.05) and found.spread == pytest.approx(0.02582, rel=1e-3)
    assert found.half == pytest.approx(3.182 * found.spread / 2)
    # 0.1 over the root of 64 batches is 0.0125 of a spread of 0.0258
    assert found.evaluation == pytest.approx((0.0125 / found.spread) ** 2, rel=0.25)
    assert found.text == pytest.approx(0.5 / 63**0.5, rel=0.05)
    assert found.word == "met" and found.more == 0
    assert found.told(100.0).endswith("over 4 seeds; at most 0.1 %: met")
    with pytest.raises(loss_gaps.GapError, match="different text"):
        loss_gaps.found([*seeds_of([0.1], 0.1), *seeds_of([0.1], 0.1, batches=8)])


@pytest.mark.parametrize(
    ("gaps", "word", "more"),
    [
        ([0.30, 0.32, 0.31], "refuted", 0),
        ([-0.30, -0.32, -0.31], "met", 0),
        # spread 0.1, 0.05 below the aim: 18 seeds have an interval of 0.046, 17 one of 0.048
        ([-0.05, 0.05, 0.15], "undecided", 13),
        ([0.05], "undecided", 1),
        ([0.05, 0.15], "undecided", 998),
    ],
)
def test_verdicts(gaps: list[float], word: str, more: int) -> None:
    found = loss_gaps.found(seeds_of(gaps, noise=0.0))
    assert (found.word, found.more) == (word, more)
    told = found.told(120.0)
    if len(gaps) == 1:
        assert told == "gap +0.050 % of one seed: undecided, an interval needs two"
    elif more == 13:
        assert told.endswith("undecided: 13 more seeds would take 26 minutes")
    elif more:
        assert told.endswith("more than 1000 seeds, as the gap lies where the aim does")


def test_seeds_that_an_interval_needs() -> None:
    assert loss_gaps.seeds_for(0.05, 0.1) == 4  # 3.182 x 0.05 / 2 is 0.080, with three 0.124
    assert loss_gaps.seeds_for(0.3, 0.1) == 35 and loss_gaps.seeds_for(0.1, 0.0) == 1000


# ---- by what the gaps of seeds lie apart


def test_tables_of_spreads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two settings whose gaps lie 0.2 and 0.1 apart, of which a part is the text's."""
    for name, samples, apart in (("tiny.256.2e-3", 4, 0.2), ("tiny.2048.2e-3", 32, 0.1)):
        words = vars(TINY) | {"samples": samples, "lr": 2e-3, "steps": 3, "evaluations": 3}
        method = losses.Method(**words)
        for seed, gap in enumerate((0.0, apart, 2 * apart)):
            for arm, factor in (("baseline", 1.0), ("recommended", 1 + gap / 100)):
                case = losses.Case(arm, seed)
                trained(tmp_path / "logs", case, loss=2.0, steps=3)
                log = case.folder(tmp_path / "logs") / "loss.jsonl"
                lines = [json.loads(text) for text in log.read_text().splitlines()]
                for line in lines[1:4]:
                    batches = [2.0 + 1e-3 * (-1) ** n * seed for n in range(32)]
                    own = [factor * (2.0 if arm == "baseline" else x) for x in batches]
                    line |= {"valid_losses": own, "loss": factor * line["loss"]}
                log.write_text("".join(json.dumps(line) + "\n" for line in lines))
                times = {"start": 1.0, "pair": 2.0}
                loss_records.write(tmp_path / name, tmp_path / "logs", case, method, times)
    assert gap_spread.main(["--out", str(tmp_path), "--tables"]) == 0
    said = capsys.readouterr().out
    # twice 0.05 % up or down in a batch is nothing over all of them, and much over every 16th
    assert "| tiny | 256 | 0.002 | log | 3 | +0.200 ± 0.497 | 0.200 | 0.200 | 0.200 | 0." in said
    for tokens, text in (("256", "1.03"), ("2,048", "1.12")):
        assert (
            f"| tiny, {tokens} tokens, 0.002, log | 1.00 | 1.00 | 1.00 | {text} | {text} |" in said
        )
    assert "| tiny, 2,048 tokens, 0.002, log | - | - |" in said  # three steps are fewer than 20
    power = f"{np.log(2) / np.log(8):.2f}"
    assert (
        f"* tiny at 0.002, log: the spread falls with the tokens a step to the power {power}"
        in said
    )
    assert "124 M parameters at 2,048 tokens a step: spread 0.30 % over 3 seeds" in said
    with pytest.raises(SystemExit, match="no setting has two seeds"):
        gap_spread.main(["--out", str(tmp_path / "logs"), "--tables"])
