"""Select tests: the daily ones, all with ``--nightly``, few with ``--quick``.

Daily tests cover a feature by representatives: one launch for each launcher, one or a few cases of
a sweep. The rest of a sweep has ``pytest.mark.nightly``, directly or through ``by_day``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

#: values of the environment variable that act like ``--nightly``
VARIABLE = "HYBRIDCOMP_NIGHTLY"

#: files and folders of ``--quick``: two minutes on two cores, with the features they cover
QUICK: dict[str, str] = {
    "config": "the block, its presets and mistakes",
    "publishing/test_bad_input.py": "published weights, and what a receiver refuses",
    "patches/rules": "what does not go together",
    "autotune/test_verdicts.py": "whether a dimension pays, on ranks",
    "codecs/test_blockint.py": "a codec of fixed size: bytes, bounds, its reference",
    "codecs/test_expcode.py": "a lossless codec of variable size",
    "codecs/test_radix.py": "a codec within an error bound",
    "codecs/test_bounded.py": "codecs by the error that is asked for",
    "codecs/test_mpc.py": "another lossless codec",
    "codecs/test_zfp.py": "the codec of the paper",
    "kernels/cuda/test_warp_tiles.py": "kernels for CUDA in the emulator",
    "collectives/test_owner_reduction.py": "sums on gloo ranks",
    "collectives/test_all_gather_all_to_all.py": "what is moved between ranks",
    "collectives/test_pair_exchange.py": "what two ranks swap",
    "collectives/test_low_rank.py": "PowerSGD",
    "channels/test_flush.py": "residuals that are given out",
    "channels/test_ledger_file.py": "the ledger's file",
    "channels/test_parameter_deltas.py": "deltas of parameters",
    "channels/test_replicated.py": "replicas",
    "tools/compare/test_compare.py": "runs side by side",
    "tools/commands/test_doctor.py": "a command",
    "digests/test_digests.py": "payloads and results of the version before",
    "docs/test_links.py": "links and anchors of the pages",
    "docs/test_examples.py": "examples of the pages",
    "fuzz/test_bounds.py": "a short search for errors over a bound",
    "job/test_environment.py": "variables of a job",
    "tools/measure/test_channels.py": "what a channel takes",
    "nn/test_layout.py": "layers on a mesh",
    "nn/test_ring.py": "attention around a ring",
    "patches/ds/test_layer_scope.py": "a seam of DeepSpeed on ranks",
    "patches/ds/test_guard.py": "the guard under DeepSpeed",
    "patches/mcore/test_seams.py": "seams of megatron-core",
    "patches/torch/test_streams.py": "a seam of FSDP2",
    "patches/torch/test_dtypes.py": "FSDP2 and DDP on ranks",
    "patches/torch/test_auto.py": "FSDP2 and DDP attached by themselves",
    "tools/plan/test_pays.py": "up to which link a block pays",
    "tools/plan/search/test_planning.py": "plans",
    "scripts/test_example.py": "the example's arguments",
    "session/test_process.py": "the session of a process",
    "training/test_monitor.py": "trainings of DeepSpeed with a block",
    "training/test_cuts.py": "a pipeline of the example",
    "training/test_lowrank.py": "trainings with PowerSGD",
    "test_layout.py": "imports and packages",
    "seams/test_patching.py": "patches that are checked and reverted",
    "test_public.py": "public names",
    "test_selection.py": "this",
}


def add_options(parser: pytest.Parser) -> None:
    """Offer ``--nightly`` and ``--quick``."""
    group = parser.getgroup("hybridcomp")
    group.addoption(
        "--nightly", action="store_true",
        help=f"run the nightly tests too, and longer trainings, as {VARIABLE}=1 does",
    )  # fmt: skip
    group.addoption("--quick", action="store_true", help="two minutes: tests/selection.py, QUICK")


def by_night(config: pytest.Config) -> bool:
    """Return whether nightly tests run: requested by option, variable, ``-m`` or by name."""
    named = any("::" in str(argument) for argument in config.args)
    return bool(
        config.getoption("--nightly")
        or os.environ.get(VARIABLE) == "1"
        or "nightly" in str(config.getoption("markexpr", ""))
        or named
    )


def is_quick(path: Path) -> bool:
    """Return whether ``--quick`` includes this file or folder."""
    chosen = [ROOT / "tests" / name for name in QUICK]
    return any(path == one or one in path.parents or path in one.parents for one in chosen)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep in ``items`` the tests to run, and report the others to pytest."""
    unwanted: set[str] = set()
    if not by_night(config):
        unwanted.add("nightly")
    if config.getoption("--quick"):
        unwanted |= {"nightly", "slow"}
    left_out = [item for item in items if unwanted & marks_of(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not unwanted & marks_of(item)]


def marks_of(item: pytest.Item) -> set[str]:
    """Return the names of a test's marks; its keywords also name the folders it lies in."""
    return {mark.name for mark in item.iter_markers()}


def by_day(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return a test's parameters: the ``chosen`` of ``values`` run by day, the others nightly.

    A tuple holds the parameters of several arguments. Raises AssertionError if a chosen value is
    not among the values.
    """
    values = list(values)
    assert chosen and all(one in values for one in chosen), f"{chosen} are not all in {values}"
    return [
        value
        if value in chosen
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly
        )
        for value in values
    ]
