"""Check a block for ``hybridcomp validate``; print its effect and how to start the job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridcomp.channels.accounting.ledger_file import unwritable
from hybridcomp.channels.checkpoint import checkpoint_note
from hybridcomp.codecs.words import DTYPES
from hybridcomp.collectives.hierarchical.discovery import check_widths
from hybridcomp.config import BLOCK, CompressionConfig, describe, idle_notes, load_config
from hybridcomp.config import notes as dtype_notes
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import ConfigError
from hybridcomp.escaping import BYTE_ORDER_MARK
from hybridcomp.patches.rules import ds_check as check
from hybridcomp.patches.rules import neox as neox_rules
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.ds_pipeline import Stages
from hybridcomp.patches.rules.planned import hold_to_plan
from hybridcomp.sync.islands import check_outlier, check_size
from hybridcomp.tools.commands import link_picture, memory
from hybridcomp.tools.commands.job_files import ACCUMULATION, ADD, JobFile, Whose, read_job_file
from hybridcomp.tools.plan import bits_between
from hybridcomp.tools.plan.answer.start_command import BLOCK_FILE

SILENT = "started in another way, the job compresses nothing"
DEEPSPEED_START = """\
start with  deepspeed --module hybridcomp.run SCRIPT ... --deepspeed_config {file}
        or  torchrun ... -m hybridcomp.run SCRIPT ... (accelerate launch likewise)
        or  hybridcomp.install() in the script, before DeepSpeed's engine is built;
            {silent}"""
ACCELERATE_START = """\
start with  accelerate launch --config_file {file} -m hybridcomp.run SCRIPT ...
        or  hybridcomp.install() in the script, before accelerator.prepare;
            {silent}"""
NEOX_START = """\
start with  GPT_NEOX_HOME=CHECKOUT python -m hybridcomp.patches.neox {file}
            in the place of GPT-NeoX's deepy.py train.py;
            {silent}"""
BARE_START = """\
start with  HYBRIDCOMP_CONFIG={file} torchrun ... -m hybridcomp.run SCRIPT ...
        or  hybridcomp.install({text}) in the script, before the model is wrapped;
        or  as "{block}" in the DeepSpeed file;
            {silent}"""
#: by the file's owner
_START: Mapping[Whose, str] = {
    "block": BARE_START, "deepspeed": DEEPSPEED_START, "neox": NEOX_START,
    "accelerate": ACCELERATE_START,
}  # fmt: skip


def lines(
    file: Path,
    facts: Mapping[str, bool | None],
    world_size: int | None = None,
    checkpoint: Path | None = None,
    job: memory.JobSize | None = None,
    picture: Path | None = None,
    frozen: float = 0.0,
) -> Iterator[str]:
    """Yield lines about ``file``: a ds_config, a GPT-NeoX configuration, or a bare block.

    Args:
        file: JSON, Hjson or YAML.
        facts: which of ``pipeline``, ``moe``, ``tensor`` and ``sequence`` the model has; None:
            unknown.
        world_size: ranks of the job.
        checkpoint: folder of a checkpoint that the job is to resume.
        job: its size, for lines about memory.
        picture: an SVG to write, of the bytes on each link; needs ``job``.
        frozen: share of the parameters that do not train.

    Raises ConfigError where the block cannot act, the checkpoint cannot be resumed, or the memory
    of a device is too small.
    """
    bits_between.check_frozen(frozen)
    found = read_job_file(file)
    bare, neox = found.whose == "block", found.whose == "neox"
    source = found.settings
    saving = source.get("checkpoint")
    universal = isinstance(saving, Mapping) and bool(saving.get("load_universal"))
    block = CompressionConfig.parse(source[BLOCK]) if bare else load_config(source)
    if block is None or not block.enabled:
        beside = file.parent / BLOCK_FILE
        why, todo = f'there is no "{BLOCK}" block', ""
        if BLOCK in source:
            why = "the block is not enabled"
        elif "sharding" in source and beside.is_file():  # FSDP2 settings of a plan
            todo = f" unless HYBRIDCOMP_CONFIG names {beside}: hybridcomp validate {beside}"
        else:
            todo = f"; {ADD[found.whose]}"
        yield f"{file}: {why}; everything stays native{todo}"
        if checkpoint is not None:
            yield from _resumed(None, checkpoint, universal)
        return
    if world_size is not None:
        check_widths(block.widths, world_size)
        if isinstance(block.sync.islands, int) and block.sync.acts:
            check_size(block.sync.islands, world_size)
            check_outlier(block.sync.outlier, world_size // block.sync.islands)
        if found.leaves_accumulation:
            split = memory.split_of(found, job or memory.JobSize(1, world_size))
            found = found.among(world_size // split)
            source = found.settings
    notes = [*found.notes, *idle_notes(block), *_ledger_notes(block)]
    absent = unseen = frozenset[Dimension]()
    if not bare:
        if found.dtype is not None:
            notes += dtype_notes(block, DTYPES[found.dtype])
        known = {**_facts(found, facts), "world_size": world_size}
        notes += _checked(block, found, known)
        absent = check.absent(source, **known)
        unseen = _unseen(found, known) - absent
        notes += [_NOT_SHOWN[name] for name in _NOT_SHOWN if name in unseen & block.explicit]
        hold_to_plan(block, _written_layout(found.job, world_size))
        if found.leaves_accumulation and found.job.stage >= 2:
            notes.append(_COMPUTED)
    if not neox and file.suffix not in (".yml", ".yaml"):
        notes += _not_strict(file)
    sizes = [] if job is None else list(memory.lines(block, found, job))
    yield f"{file}: valid{' (a bare block)' if bare else ''}"
    yield from (f"  {line}" for line in describe(block, absent, unseen - block.explicit))
    if not bare and block.sync.codec_of("forward") is None:
        traffic = replace(found.traffic(), frozen=frozen)
        yield from (f"  {line}" for line in bits_between.lines(block, traffic))
    yield from sizes
    yield from (f"  note: {note}" for note in notes)
    if picture is not None:
        yield link_picture.write(picture, block, found, job)
    if checkpoint is not None:
        yield from _resumed(block, checkpoint, universal)
    start = _START[found.whose]
    # escaped, so that a surrogate pair stays two code units
    text = json.dumps(str(file), ensure_ascii=False)
    yield start.format(file=shlex.quote(str(file)), text=text, block=BLOCK, silent=SILENT)


def _ledger_notes(block: CompressionConfig) -> Iterator[str]:
    """Return why the ledger's file cannot be written on this machine."""
    name = block.ledger.jsonl
    problem = None if name is None else unwritable(Path(name))
    if problem is not None:
        yield (
            f"{BLOCK}.ledger.jsonl: {name} cannot be written here ({problem}); where rank 0 meets "
            "the same, the job ends before its first step"
        )


def _facts(found: JobFile, told: Mapping[str, bool | None]) -> dict[str, Any]:
    """Return facts of the model from the options and from a GPT-NeoX file."""
    written = {name: value for name, value in told.items() if value is not None}
    if found.whose != "neox":
        return written
    return {**neox_rules.facts(found.whole), "sequence": False, "mesh": False, **written}


def _checked(block: CompressionConfig, found: JobFile, known: dict[str, Any]) -> list[str]:
    """Check the block against the rest of the file; return notes. Raises ConfigError.

    A key for tensor or sequence parallelism is accepted only if the file or ``known`` shows that
    the job has it.
    """
    neox = found.whole if found.whose == "neox" else None
    stages = None
    if neox is not None:
        stages = Stages(
            neox_rules.stages(neox), tied=not neox.get("no_weight_tying"),
            tensor=neox_rules.tensor_ranks(neox), micro_batches=found.accumulation,
        )  # fmt: skip
    facts = {"tensor": False, "sequence": False, **known}
    try:
        return check.check(block, found.settings, neox=neox, stages=stages, **facts)
    except ConfigError as error:
        option = _OPTIONS.get(error.key)
        if option is None or option in known:
            raise
        todo = f"{error.todo}; --{option} says that the script splits its model itself"
        raise ConfigError(error.key, error.found, todo) from None


def _unseen(found: JobFile, known: Mapping[str, Any]) -> frozenset[Dimension]:
    """Return the dimensions that neither the file nor the user says the job has."""
    words: dict[Dimension, str] = {
        "pp": "pipeline", "zero": "pipeline", "ep": "moe", "tp": "tensor", "cp": "sequence",
    }  # fmt: skip
    return frozenset(name for name, fact in words.items() if not known.get(fact)) - found.shown


#: key of the block -> option that states the fact that the key needs and the file lacks
_OPTIONS = {f"{BLOCK}.tp": "tensor", f"{BLOCK}.cp": "sequence"}
#: error message for a key whose dimension neither the file nor an option shows
_NOT_SHOWN: Mapping[Dimension, str] = {
    "zero": "warning: zero is not in this file: at ZeRO stage 0 only bf16 pipelines gather "
    "parameters; a script whose model is no PipelineModule stops at its start (--pipeline or "
    "--no-pipeline says which it is)",
    "pp": "warning: pp is not in this file; a script whose model is no PipelineModule stops at its "
    "start (--pipeline or --no-pipeline says which it is)",
    "ep": "warning: ep is not in this file; a script whose model has no MoE layers stops at its "
    "start (--moe or --no-moe says which it is)",
}


def _written_layout(job: DeepSpeedJob, world_size: int | None) -> dict[str, int | None]:
    """Return the layout in a ds_config, with the field names of a plan; None if it has none."""
    return {
        "ranks": world_size,
        "zero_stage": job.stage,
        "micro_batch": job.get("train_micro_batch_size_per_gpu"),
        "accumulation": job.get("gradient_accumulation_steps"),
        "offload": int(job.cpu_offload),
    }


_COMPUTED = (
    f"{ACCUMULATION} is not in the file, and is taken as 1: DeepSpeed computes it from the batch "
    "sizes and the ranks; --world-size N counts them"
)
_ELSEWHERE = "DeepSpeed reads it, Hugging Face's Trainer and Accelerate"


def _not_strict(file: Path) -> Iterator[str]:
    """Yield why the file is no strict JSON, which all readers take."""
    text = file.read_text(encoding="utf-8")
    if text.startswith(BYTE_ORDER_MARK):
        yield f"the file begins with a byte order mark: {_ELSEWHERE} do not; save it without"
    try:
        json.loads(text.removeprefix(BYTE_ORDER_MARK))
    except ValueError:
        yield f"this is Hjson (comments, commas): {_ELSEWHERE} read JSON only"


def _resumed(
    block: CompressionConfig | None, place: Path, universal: bool = False
) -> Iterator[str]:
    """Describe what a job with ``block`` loads from a checkpoint. Raises ConfigError.

    ``universal``: whether it loads DeepSpeed's universal checkpoints.
    """
    latest = checkpoint_note.LATEST_UNIVERSAL if universal else checkpoint_note.LATEST
    folder = checkpoint_note.folder_of(place, latest)
    note = checkpoint_note.read(folder)
    if note is None and universal and (source := checkpoint_note.source_of(folder)) is not None:
        yield f"checkpoint {folder}: universal, made of {source}, from where our files are taken"
        folder, note = source, checkpoint_note.read(source)
    if note is None:
        yield f"checkpoint {folder}: no run of hybridcomp's; residuals start at zero"
        return
    yield (
        f"checkpoint {folder}: step {note.get('step')} of {note.get('world_size')} ranks, saved by "
        f"hybridcomp {note.get('hybridcomp')}"
    )
    lacking = checkpoint_note.missing(folder, note)
    if lacking and block is not None:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        todo = "which was saved there; restore it, or remove all of its kind to begin without"
        raise ConfigError(str(folder), f"no {lacking[0]}{more}", todo)
    lost = checkpoint_note.dropped(folder, block)
    yield from (f"  {text}" for text in lost)
    if block is not None:
        yield from (f"  {text}" for text in _differences(block, note))
        taken = [what for what in note["files"].values() if not lost]
        yield from (f"  takes over: {what}" for what in taken)


def _differences(block: CompressionConfig, note: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes about settings that differ from those of the checkpoint's run."""
    if note.get("digest") == block.digest():
        return
    before, now = CompressionConfig.parse(note.get(BLOCK)).flat(), block.flat()
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            yield f"note: {key} is {now.get(key)!r}, and was {before.get(key)!r} in that run"
