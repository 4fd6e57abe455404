"""Compare megatron-core's losses with 8 bits on tp, pp or dp with the baseline, over seeds.

Run by hand from the root of the repository, with megatron-core installed: ``python -m
tests.training.mcore_losses --seeds 0 1 2``. It takes minutes, too long for a test.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from tests.ranks import run_ranks
from tests.training.mcore_trainer import Job, run

B8: dict[str, Any] = {"codec": "blockint", "bits": 8}
#: job and its compressed dimension
JOBS: dict[str, tuple[Job, str]] = {
    "TP2": (Job(tp=2), "tp"),
    "PP2": (Job(pp=2), "pp"),
    "DP2": (Job(), "dp"),
}
#: final steps that the final loss averages
LAST = 20


def final(losses: list[float]) -> float:
    """Return the mean loss of the last steps."""
    return mean(losses[-LAST:])


def pair(name: str, seed: int, steps: int, lr: float) -> tuple[float, float, float]:
    """Return (first loss, final loss, final loss with 8 bits) of a seed."""
    job, dimension = JOBS[name]
    exact = replace(job, steps=steps, lr=lr, seed=seed)
    lossy = replace(exact, block={dimension: B8, "min_bytes": 0})
    found = run_ranks(2, run, [exact, lossy], timeout=600)[-1]
    return found[0].losses[0], final(found[0].losses), final(found[1].losses)


def main() -> None:
    """Print a row for each job and seed, then the mean of each job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    given = parser.parse_args()
    print(f"{given.steps} steps, lr {given.lr:g}, mean of the last {LAST} losses")
    print("job   seed   first   baseline   8 bits     gap %", flush=True)
    for name in given.jobs:
        rows = [pair(name, seed, given.steps, given.lr) for seed in given.seeds]
        gaps = [100 * (lossy / exact - 1) for _, exact, lossy in rows]
        for seed, (first, exact, lossy), gap in zip(given.seeds, rows, gaps, strict=True):
            print(f"{name:5} {seed:4}  {first:6.4f}   {exact:8.5f}   {lossy:8.5f}  {gap:+.3f}")
        spread = f" ± {stdev(gaps):.3f} between seeds" if len(gaps) > 1 else ""
        print(f"{name:5} mean gap {mean(gaps):+.3f} %{spread}", flush=True)


if __name__ == "__main__":
    main()
