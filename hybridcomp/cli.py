"""The command line: ``hybridcomp validate | schema | seams | doctor | compare``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hybridcomp.errors import HybridcompError

#: exit status of a configuration that cannot act, as argparse uses it for bad arguments
BAD_INPUT = 2


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
    validate.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help="print the JSON schema of the block")
    schema.set_defaults(run=_schema)

    seams = commands.add_parser("seams", help="print what is compressed where, as in the README")
    seams.set_defaults(run=_print_seams)

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
    from hybridcomp import patches

    print(patches.support_matrix())
    return 0


def _validate(options: argparse.Namespace) -> int:
    from hybridcomp.config import BLOCK, CompressionConfig, load_config, read_source
    from hybridcomp.patches.ds import check
    from hybridcomp.patches.neox import rules

    source = read_source(options.file)
    facts: dict[str, Any] = {"pipeline": options.pipeline, "moe": options.moe}
    bare = _is_bare(source)
    if bare:
        source = {BLOCK: source}
    elif BLOCK not in source and rules.EXTRA in source:
        written = {key: value for key, value in facts.items() if value is not None}
        facts = {**rules.facts(source), **written, "neox": source}
        source = rules.ds_settings(source)
    block = CompressionConfig.parse(source[BLOCK]) if bare else load_config(source)
    if block is None or not block.enabled:
        _refuse_elsewhere(source)
        why = "the block is not enabled" if BLOCK in source else f'there is no "{BLOCK}" block'
        print(f"{options.file}: {why}; everything stays native")
        return 0
    notes = [] if bare else block.notes(_dtype(source))
    if not bare:
        notes += check.check(block, source, **facts, world_size=options.world_size)
    print(f"{options.file}: valid{' (a bare block)' if bare else ''}, digest {block.digest()[:16]}")
    for line in block.describe():
        print(f"  {line}")
    for note in notes:
        print(f"  note: {note}")
    return 0


def _refuse_elsewhere(source: Mapping[str, Any], path: str = "") -> None:
    """Raise ConfigError for a block where nobody reads it."""
    from hybridcomp.config import BLOCK
    from hybridcomp.errors import ConfigError
    from hybridcomp.patches.neox.rules import EXTRA

    for key, value in source.items():
        if not isinstance(value, Mapping):
            continue
        if key == BLOCK and path:
            raise ConfigError(
                f"{path}{key}", "a block where nothing reads it",
                f"expected it at the top level of the file (GPT-NeoX: in {EXTRA!r}); move it there",
            )  # fmt: skip
        _refuse_elsewhere(value, f"{path}{key}.")


def _is_bare(source: Mapping[str, Any]) -> bool:
    """Whether a file holds a block and not a ds_config; DeepSpeed has none of these keys."""
    from hybridcomp.config import BLOCK, CompressionConfig

    return BLOCK not in source and not CompressionConfig.model_fields.keys().isdisjoint(source)


def _dtype(ds_json: Mapping[str, Any]) -> Any:
    import torch

    dtypes = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        section = ds_json.get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return dtype
    return torch.float32


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
