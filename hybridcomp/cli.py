"""The command line: ``hybridcomp validate | schema | configs | seams | doctor | compare``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from hybridcomp.errors import HybridcompError
from hybridcomp.exits import BAD_INPUT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `hybridcomp seams | head`: who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except HybridcompError as error:
        print(f"hybridcomp: {error}", file=sys.stderr)
        return BAD_INPUT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridcomp", description=__doc__)
    installed = _version("hybridcomp") or "hybridcomp is not installed"
    parser.add_argument("--version", action="version", version=installed)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    validate = commands.add_parser("validate", help="check a ds_config.json, or a bare block")
    validate.add_argument("file", type=Path, help="JSON or Hjson file")
    validate.add_argument("--world-size", type=int, metavar="N", help="ranks of the job")
    validate.add_argument(
        "--pipeline", action=argparse.BooleanOptionalAction, help="the model is a PipelineModule"
    )
    validate.add_argument(
        "--moe", action=argparse.BooleanOptionalAction, help="the model has MoE layers"
    )
    validate.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="what a job with FILE takes over from it"
    )
    validate.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help="print the JSON schema of the block")
    schema.set_defaults(run=_schema)

    seams = commands.add_parser("seams", help="print what is compressed where, as in the README")
    seams.set_defaults(run=_print_seams)

    from hybridcomp.config import examples

    examples.add_command(commands)

    doctor = commands.add_parser("doctor", help="say what this machine has and lacks")
    doctor.set_defaults(run=_doctor)

    from hybridcomp.compare import command

    compare = commands.add_parser(
        "compare",
        help="hold finished runs against a baseline: table, picture, W&B chart, report",
        description=command.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(compare)
    compare.set_defaults(run=command.run)
    return parser


def _print_seams(options: argparse.Namespace) -> int:
    from hybridcomp.patches import registry

    print(registry.support_matrix())
    return 0


def _validate(options: argparse.Namespace) -> int:
    from hybridcomp import validate

    facts = {"pipeline": options.pipeline, "moe": options.moe}
    for line in validate.lines(options.file, facts, options.world_size, options.checkpoint):
        print(line)
    return 0


def _schema(options: argparse.Namespace) -> int:
    from hybridcomp.config import schema

    print(json.dumps(schema(), indent=2))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from hybridcomp import doctor

    return doctor.run()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
