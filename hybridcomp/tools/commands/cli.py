"""Run the command line: ``hybridcomp validate``, ``schema``, ``doctor``, ``pays`` and so on."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridcomp.errors import HybridcompError, installed
from hybridcomp.escaping import message, one_line, printable
from hybridcomp.tools.commands import configs, replan, states, watch
from hybridcomp.tools.plan.answer.arguments import DESCRIPTION as PLAN_DESCRIPTION
from hybridcomp.tools.plan.answer.arguments import add_arguments as add_plan_arguments
from hybridcomp.tools.plan.answer.arguments import split

DESCRIPTION = (
    "hybridcomp compresses the network traffic of distributed training, within error bounds that "
    "the job's configuration sets. These commands check such a configuration, estimate and measure "
    "what it saves, plan a job, and compare finished runs."
)
#: exit status for a configuration that cannot act; argparse uses the same for bad arguments
BAD_INPUT = 2
#: options with the folder or file that a command writes
WRITTEN = ("out", "to", "html", "picture")
#: exit status after Ctrl-C, as a shell reports it
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    if sys.stdout is None:  # the shell has closed it, as `>&-` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # replace characters that the terminal cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    behind: list[str] = []
    if words[:1] in (["plan"], ["replan"]):  # the user's command follows --, with its own options
        words, behind = split(words)
    options = _parser().parse_args(words)
    if behind:
        options.command = behind
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `hybridcomp seams | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("hybridcomp: interrupted", file=sys.stderr)
        return INTERRUPTED
    except HybridcompError as error:
        print(f"hybridcomp: {message(error)}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:  # on a file that a command reads or writes
        print(f"hybridcomp: {_failed_file(error, options)}", file=sys.stderr)
        return BAD_INPUT
    return status


def _failed_file(error: OSError, options: argparse.Namespace) -> str:
    """Say which file could not be read or written; a full disk's error names none, or a source."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        places = (getattr(options, name, None) for name in WRITTEN)
        where = next((place for place in places if place is not None), "output")
        return f"{one_line(where)}: {error.strerror}; make room, or write to another place"
    return f"{one_line(error.filename or 'a file')}: {error.strerror or error}; name another one"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridcomp", description=DESCRIPTION)
    version = installed("hybridcomp") or "hybridcomp is not installed"
    parser.add_argument("--version", action="version", version=version)
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
        "--tensor", action=argparse.BooleanOptionalAction,
        help="the script splits layers over ranks, beside the file's tensor_parallel",
    )  # fmt: skip
    validate.add_argument(
        "--sequence", action=argparse.BooleanOptionalAction,
        help="the script splits sequences over ranks, beside the file's sequence_parallel_size",
    )  # fmt: skip
    validate.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="what a job with FILE takes over from it"
    )
    validate.add_argument(
        "--picture", type=Path, metavar="SVG",
        help="draw the MB of a step on the links inside and between nodes, natively and with the "
        "block; with --parameters, --world-size and --ranks-per-node",
    )  # fmt: skip
    validate.add_argument(
        "--frozen", type=float, default=0.0, metavar="SHARE",
        help="of the parameters that do not train, such as 0.99 under LoRA (0)",
    )  # fmt: skip
    _add_size(validate)
    validate.set_defaults(run=_validate)

    schema = commands.add_parser("schema", help="print the JSON schema of the block")
    schema.add_argument("--cluster", action="store_true", help="of the file of a cluster instead")
    schema.set_defaults(run=_schema)

    seams = commands.add_parser("seams", help="print what is compressed where, for each engine")
    seams.set_defaults(run=_print_seams)

    configs.add_command(commands)
    watch.add_command(commands)
    replan.add_command(commands)
    states.add_command(commands)

    doctor = commands.add_parser("doctor", help="say what this machine has and lacks")
    doctor.add_argument(
        "--cluster", type=Path, metavar="FILE", help="show this measurement (cluster.json, if any)"
    )
    doctor.set_defaults(run=_doctor)

    from hybridcomp.tools.measure import options

    measure = commands.add_parser(
        "measure", help="time links, codecs and devices; started by a launcher",
        description=options.HOW, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    options.add_arguments(measure)
    measure.set_defaults(run=_measure)

    meet = commands.add_parser(
        "rendezvous", help="hold the store at which islands meet that are jobs of their own",
        description="Hold the store at which islands meet that are jobs of their own, until it is "
        "ended. Whoever reaches the port can read and change what they send.",
    )  # fmt: skip
    meet.add_argument("--port", type=int, default=29400, help="to listen on; 0: any (29400)")
    meet.set_defaults(run=_rendezvous)

    _add_pays(commands.add_parser("pays", help="up to which speed of the link compression pays"))

    plan = commands.add_parser(
        "plan",
        help="which layout, stage and codecs for a model on a cluster; files that start it",
        description=PLAN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_plan_arguments(plan)
    plan.set_defaults(run=_plan, command=[])
    from hybridcomp.tools.compare import command

    compare = commands.add_parser(
        "compare",
        help="hold finished runs against a baseline: table, picture, W&B chart, report",
        description=command.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(compare)
    compare.set_defaults(run=command.run)
    return parser


def _add_pays(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``pays`` here: its module imports torch, which takes seconds."""
    add = parser.add_argument
    add("block", nargs="?", default="recommended", metavar="BLOCK",
        help="a preset, a JSON file with a block, or a ds_config.json (recommended)")  # fmt: skip
    add("--ranks", type=int, metavar="N",
        help="that share a message; with a hierarchy: nodes (of the file, else 8)")  # fmt: skip
    add("--stage", type=int, choices=(0, 1, 2, 3), help="of ZeRO (of the file, else 1)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="of messages (of the file, else bf16)")
    add("--device", choices=("cpu", "gpu"), help="what runs the codecs (gpu)")
    add("--codec-gbs", type=float, metavar="GB/s", help="speed of the codecs on your device")
    add("--cluster", type=Path, metavar="FILE",
        help="take the speeds of codecs that hybridcomp measure has written there")  # fmt: skip
    add("--parameters", type=float, metavar="N", help="that a rank reduces, such as 1.3e9")
    add("--compute", type=float, metavar="S", help="seconds of a step without communication")
    add("--link", type=float, metavar="Gb/s", help="of a rank")
    add("--micro-batches", type=int, metavar="N", help="of a step (of the file, else 1)")
    add("--frozen", type=float, default=0.0, metavar="SHARE",
        help="of the parameters that do not train, such as 0.99 under LoRA (0)")  # fmt: skip
    parser.set_defaults(run=_pays)


def _pays(options: argparse.Namespace) -> int:
    from hybridcomp.tools.commands import pays

    return pays.run(options)


def _plan(options: argparse.Namespace) -> int:
    if options.jobs is not None:
        from hybridcomp.tools.plan.jobs.command import run
    else:
        from hybridcomp.tools.plan.answer.command import run
    return run(options)


def _print_seams(options: argparse.Namespace) -> int:
    from hybridcomp.tools.compare.report import aligned

    with _quiet():
        from hybridcomp.patches import registry

        rows = [[text.replace("`", "") for text in row] for row in registry.compressed()]
    print(aligned([["dimension", "what", "upstream"], *rows]))
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Print that loading takes seconds, and silence upstream's warnings at import."""
    print("hybridcomp: importing torch and what is installed ...", file=sys.stderr, flush=True)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _add_size(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memory.JobSize``."""
    parser.add_argument(
        "--parameters", type=float, metavar="N", help="of the model, such as 70e9: print the memory"
    )
    parser.add_argument(
        "--replicas", type=int, metavar="N",
        help="ranks with the same part of the model (world size / tensor and pipeline ranks)",
    )  # fmt: skip
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="GPUs of a node (1)")
    parser.add_argument(
        "--device-memory", type=float, metavar="BYTES", help="of a GPU: refuse what does not fit"
    )
    parser.add_argument(
        "--activation", type=float, metavar="VALUES",
        help="between layers: micro-batch x tokens x width (GPT-NeoX: of the file)",
    )  # fmt: skip
    parser.add_argument(
        "--tensor-ranks", type=int, metavar="N", help="ranks that share every layer (of the file)"
    )


def _validate(options: argparse.Namespace) -> int:
    from hybridcomp.tools.commands import validate
    from hybridcomp.tools.commands.memory import JobSize

    facts = {name: getattr(options, name) for name in ("pipeline", "moe", "tensor", "sequence")}
    for line in validate.lines(
        options.file, facts, options.world_size, options.checkpoint, JobSize.of(options),
        options.picture, options.frozen,
    ):  # fmt: skip
        print(printable(line))
    return 0


def _schema(options: argparse.Namespace) -> int:
    from hybridcomp.config import schema
    from hybridcomp.tools.plan.machines import cluster_file

    print(json.dumps(cluster_file.schema() if options.cluster else schema(), indent=2))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    with _quiet():
        from hybridcomp.tools.commands import doctor

        return doctor.run(options.cluster)


def _measure(options: argparse.Namespace) -> int:
    from hybridcomp.tools.measure import command

    return command.run(options)


def _rendezvous(options: argparse.Namespace) -> int:
    from hybridcomp.tools.commands import rendezvous

    return rendezvous.run(options.port)


if __name__ == "__main__":
    raise SystemExit(main())
