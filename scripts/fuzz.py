#!/usr/bin/env python3
"""Fuzz decoders, codec bounds and checkpoints.

    python scripts/fuzz.py                               # all of it, 15 to 30 minutes
    python scripts/fuzz.py payloads --only radix --cases 5000000
    python scripts/fuzz.py bounds --values 3000000000
    python scripts/fuzz.py replay fuzz-failures/radix-1-4711.payload

Prints the number of cases. A failing case is stored in ``--keep`` with the command that repeats it,
and makes the exit status 1. A seed gives the same cases everywhere. ``scripts/chaos.py`` tests
killed and stopped ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fuzzing import bounds, payloads  # noqa: E402

#: damaged payloads per codec of variable size and of fixed size
VARIABLE_CASES, FIXED_CASES = 5_000_000, 1_000_000


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def fuzz_payloads(args: argparse.Namespace) -> int:
    """Decode damaged payloads with every codec; return the number of codecs that failed."""
    codecs = args.only or list(payloads.SOURCES)
    say(f"payloads: building {', '.join(codecs)} with sanitizers")
    driver = payloads.build(codecs)
    failed = 0
    for codec in codecs:
        cases = args.cases or (VARIABLE_CASES if codec in payloads.VARIABLE else FIXED_CASES)
        result = payloads.run(driver, codec, cases, args.seed, args.keep, say, args.first)
        say(
            f"payloads {codec}: {result.tried:,} tried, {result.refused:,} refused, "
            f"{result.decoded:,} decoded, at most {result.largest:.2f} times the payload allocated"
        )
        if result.failure:
            failed += 1
            print(f"{result.failure}\nagain: python scripts/fuzz.py replay {result.reproducer}")
    return failed


def fuzz_bounds(args: argparse.Namespace) -> int:
    """Check codecs, messages and sums of messages against their bounds on hostile values."""
    result = bounds.hunt(args.values, args.seed, args.keep, say)
    for line in result.lines():
        say(line)
    for text, path in zip(result.outside, result.files, strict=True):
        print(f"{text}\nagain: python scripts/fuzz.py replay {path}")
    return len(result.outside)


def fuzz_checkpoints(args: argparse.Namespace) -> int:
    """Resume two ranks from damaged hybridcomp files of a checkpoint."""
    from fuzzing import checkpoints
    from tests.ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        said = run_ranks(2, checkpoints.try_all, folder, args.seed)
    wrong = [(rank, *case) for rank, found in enumerate(said) for case in found if case[1]]
    say(f"checkpoints: {len(said[0])} damaged, {len(wrong)} not told by all ranks")
    for rank, title, problem in wrong:
        print(f"rank {rank}, {title}: {problem}")
    return len(wrong)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all", choices=["all", "replay", *PARTS])
    parser.add_argument("file", nargs="?", type=Path, help="of replay: what was kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=0, metavar="N", help="payloads of each codec")
    parser.add_argument("--values", type=int, default=3_000_000_000, metavar="N", help="of bounds")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with case N")
    parser.add_argument("--only", action="append", choices=list(payloads.SOURCES), metavar="CODEC")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), metavar="FOLDER")
    found = parser.parse_args(argv)
    if (found.what == "replay") != (found.file is not None):
        parser.error("replay, and nothing else, takes a file")
    return found


PARTS = {
    "checkpoints": fuzz_checkpoints, "bounds": fuzz_bounds, "payloads": fuzz_payloads,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    args = arguments(argv)
    if args.what == "replay":
        replay: Callable[[Path], int] = (
            bounds.replay if args.file.suffix == ".pt" else payloads.replay
        )
        return replay(args.file)
    failed = 0
    for name, part in PARTS.items():
        if args.what in ("all", name):
            failed += part(args)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
