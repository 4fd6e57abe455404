#!/usr/bin/env python3
"""Run upstream's tests without hybridcomp, and with its patches armed and all dimensions "none".

    upstream_tests.py deepspeed /path/to/DeepSpeed --out runs/upstream
    upstream_tests.py megatron /path/to/Megatron-LM --files tensor_parallel/test_layers.py

CHECKOUT is an existing clone of the installed version or a close one. Only its tests are used, with
the installed package, on CPUs over gloo. Every file runs both ways. A test that passes only without
hybridcomp is repeated both ways, since some of upstream's tests are flaky; if it then passes less
often with hybridcomp, it is listed and the exit status is 1. Tests that fail both ways are ignored:
most need a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: tests that run on a CPU and use patched functions
FILES = {
    "deepspeed": (
        "unit/v1/zero/test_zero.py",
        "unit/v1/zero/test_zero_user_backward.py",
        "unit/v1/zero/test_zero_coalesce_grad_reduction.py",
        "unit/runtime/zero/test_zero_context.py",
        "unit/runtime/zero/test_zero_tensor_fragment.py",
        "unit/runtime/zero/test_zero_grad_clip.py",
        "unit/runtime/zero/test_ignore_unused_parameters.py",
        "unit/runtime/pipe/test_pipe.py",
        "unit/pipe/test_pipe_module.py",
        "unit/checkpoint/test_zero_optimizer.py",
        "unit/checkpoint/test_pipeline.py",
        "unit/checkpoint/test_latest_checkpoint.py",
        "unit/checkpoint/test_shared_weights.py",
        "unit/checkpoint/test_lr_scheduler.py",
        "unit/checkpoint/test_tag_validation.py",
    ),
    "megatron": (
        "tensor_parallel/test_mappings.py",
        "tensor_parallel/test_layers.py",
        "tensor_parallel/test_cross_entropy.py",
        "tensor_parallel/test_initialization.py",
        "tensor_parallel/test_tensor_parallel_utils.py",
        "pipeline_parallel/test_schedules.py",
        "pipeline_parallel/test_pipeline_layout.py",
        "distributed/test_distributed_data_parallel.py",
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_finalize_model_grads.py",
    ),
}
#: from bad to good: a test gets its worst rank's outcome
OUTCOMES = ("error", "failed", "missing", "skipped", "passed")


@dataclass
class Run:
    """Runs upstream's tests, unpatched or with the patches armed."""

    kind: str
    tests: Path  # a copy of upstream's folder
    folder: Path  # reports and output
    ranks: int
    seconds: float  # time limit per file

    def outcomes(self, file: str, armed: bool, only: Sequence[str] = ()) -> dict[str, str]:
        """Return the outcomes of a file's tests, or of some; empty if pytest never reached them."""
        name = ("armed" if armed else "plain") + ("-again" if only else "")
        reports = self.folder / name / file.replace("/", "-").removesuffix(".py")
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir(parents=True)
        command = self._command(reports, [place(file, name) for name in only] or [file])
        with (reports / "output.txt").open("w") as text:
            try:
                subprocess.run(
                    command, cwd=self._cwd, env=self._environment(armed),
                    stdout=text, stderr=subprocess.STDOUT, timeout=self.seconds, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                text.write(f"\nended after {self.seconds:.0f} s\n")
        return worst([read(path) for path in sorted(reports.glob("*.xml"))])

    @property
    def _cwd(self) -> Path:
        return self.tests if self.kind == "deepspeed" else self.tests.parent

    def _command(self, reports: Path, places: Sequence[str]) -> list[str]:
        if self.kind == "deepspeed":
            report = f"--junitxml={reports / 'report.xml'}"
            options = ["-q", "-p", "no:cacheprovider", "-p", "forked_ranks", report]
            return [sys.executable, "-m", "pytest", *options, *places]
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={self.ranks}", str(HERE / "upstream/megatron_rank.py"),
            str(reports), *(f"tests/unit_tests/{place}" for place in places),
        ]  # fmt: skip

    def _environment(self, armed: bool) -> dict[str, str]:
        block = self.folder / "none.json"
        block.write_text(json.dumps({"preset": "none"}))
        paths = [str(HERE / "upstream"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        paths.insert(1, str(self._cwd))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "LOCAL_SIZE": "4",  # devices of DeepSpeed's CPU accelerator
            # both runs use the same builds of upstream's extensions
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"),
        }
        environment.pop("HYBRIDCOMP_CONFIG", None)
        return {**environment, "HYBRIDCOMP_CONFIG": str(block)} if armed else environment


def read(path: Path) -> dict[str, str]:
    """Return the outcome of every test in a pytest report."""
    try:
        cases = ElementTree.parse(path).iter("testcase")
    except ElementTree.ParseError:  # the process was ended while writing
        return {}
    found = {}
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "passed"
        for tag, word in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
            outcome = word if tag in kinds else outcome
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def worst(by_rank: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return by test the worst outcome over the ranks; "missing" if a rank never reported it."""
    names = dict.fromkeys(name for outcomes in by_rank for name in outcomes)
    return {
        name: min((outcomes.get(name, "missing") for outcomes in by_rank), key=OUTCOMES.index)
        for name in names
    }


def place(file: str, name: str) -> str:
    """Return the pytest id of a test reported as "package.module.Class::test[1]"."""
    owner, _, test = name.partition("::")
    *_, classes = owner.rpartition(f"{Path(file).stem}")
    return "::".join(filter(None, [file, *classes.split("."), test]))


def again(run: Run, file: str, names: Sequence[str], times: int) -> dict[str, tuple[int, int]]:
    """Run tests ``times`` more; count passes without and with hybridcomp."""
    counts = {False: Counter[str](), True: Counter[str]()}
    for _ in range(times if names else 0):
        for armed, count in counts.items():
            found = run.outcomes(file, armed, names)
            count.update(name for name in names if found.get(name) == "passed")
    return {name: (counts[False][name], counts[True][name]) for name in names}


def compared(run: Run, file: str, times: int) -> tuple[dict[str, str], dict[str, str], int]:
    """Return outcomes without and with hybridcomp, and how many tests pass less often with it."""
    start = time.monotonic()
    plain, armed = run.outcomes(file, False), run.outcomes(file, True)
    seconds = time.monotonic() - start
    print(f"{file}: {told(plain)}; armed {told(armed)} ({seconds:.0f} s)", flush=True)
    failed = 0
    for name, (without, with_) in again(run, file, broken(plain, armed), times).items():
        failed += with_ < without
        how = armed.get(name, "missing")
        counts = f"then passed {without} and {with_} of {times} times"
        print(f"  {name}: {how} with hybridcomp, {counts}", flush=True)
    return plain, armed, failed


def broken(plain: dict[str, str], armed: dict[str, str]) -> list[str]:
    """Return the tests that pass without hybridcomp and fail with it."""
    return [
        name
        for name, outcome in plain.items()
        if outcome == "passed" and armed.get(name) != "passed"
    ]


def told(outcomes: dict[str, str]) -> str:
    """Format the number of tests by outcome."""
    counts = Counter(outcomes.values())
    return ", ".join(f"{counts[word]} {word}" for word in reversed(OUTCOMES) if counts[word]) or "-"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(FILES))
    parser.add_argument("checkout", type=Path, help="a clone of the upstream repository")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="others than the usual ones")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="of Megatron's tests")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="a file")
    parser.add_argument("--again", type=int, default=4, metavar="TIMES", help="for what differs")
    parser.add_argument("--out", type=Path, default=Path("runs/upstream"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.again < 1:
        parser.error(f"--again {options.again}: expected 1 or more")
    top = "tests/unit" if options.kind == "deepspeed" else "tests/unit_tests"
    if not (options.checkout / top).is_dir():
        parser.error(f"{options.checkout}: expected a checkout with {top}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if a test passes only without hybridcomp or none passes."""
    options = parse(arguments)
    folder = (options.out / options.kind).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    totals: dict[str, dict[str, str]] = {"plain": {}, "armed": {}}
    bad = 0
    with tempfile.TemporaryDirectory(prefix="upstream") as copy:
        # copy only the tests: beside them upstream's package would hide the installed one
        tests = Path(copy, "tests")
        shutil.copytree(options.checkout / "tests", tests, symlinks=True)
        for package in (tests, tests / "unit_tests"):
            if package.is_dir() and options.kind == "megatron":
                # without this file another package "tests" takes precedence
                (package / "__init__.py").touch()
        run = Run(options.kind, tests, folder, options.ranks, options.timeout)
        for file in options.files or FILES[options.kind]:
            plain, armed, failed = compared(run, file, options.again)
            totals["plain"] |= plain
            totals["armed"] |= armed
            bad += failed
    (folder / "outcomes.json").write_text(json.dumps(totals, indent=1) + "\n", encoding="utf-8")
    print(f"{options.kind}: {told(totals['plain'])}; armed {told(totals['armed'])}")
    print(f"{bad} pass only without hybridcomp; reports in {folder}")
    return 1 if bad or "passed" not in totals["plain"].values() else 0


if __name__ == "__main__":
    sys.exit(main())
