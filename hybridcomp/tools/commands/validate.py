"""Check a block for ``hybridcomp validate``: can it act, what it does, how to start the job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridcomp.channels import checkpoint_note
from hybridcomp.channels.ledger_file import unwritable
from hybridcomp.codecs.words import DTYPES
from hybridcomp.collectives.hierarchical.discovery import check_widths
from hybridcomp.config import BLOCK, CompressionConfig, describe, idle_notes, load_config
from hybridcomp.config import notes as dtype_notes
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules import ds_check as check
from hybridcomp.patches.rules import neox as rules
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.planned import hold_to_plan
from hybridcomp.tools.commands import memory
from hybridcomp.tools.commands.job_files import read_job_file

SILENT = "started in another way, the job compresses nothing"
DEEPSPEED_START = """\
start with  deepspeed --module hybridcomp.run SCRIPT ... --deepspeed_config {file}
        or  torchrun ... -m hybridcomp.run SCRIPT ... (accelerate launch likewise)
        or  hybridcomp.install() in the script, before DeepSpeed's engine is built;
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


def lines(
    file: Path,
    facts: Mapping[str, bool | None],
    world_size: int | None = None,
    checkpoint: Path | None = None,
    job: memory.JobSize | None = None,
) -> Iterator[str]:
    """Yield lines about ``file``: a ds_config, a GPT-NeoX configuration, or a bare block.

    Args:
        file: JSON, Hjson or YAML.
        facts: ``pipeline`` and ``moe``, kind of the model; None where unknown.
        world_size: ranks of the job.
        checkpoint: folder of a checkpoint that the job is to resume.
        job: its size, for lines about memory.

    Raises ConfigError where the block cannot act, the checkpoint cannot be resumed, or the memory
    of a device is too small.
    """
    found = read_job_file(file)
    bare, neox = found.whose == "block", found.whose == "neox"
    source = found.settings
    known: dict[str, Any] = dict(facts)
    if neox:
        written = {key: value for key, value in known.items() if value is not None}
        known = {**rules.facts(found.whole), **written, "neox": found.whole}
    block = CompressionConfig.parse(source[BLOCK]) if bare else load_config(source)
    if block is None or not block.enabled:
        why = "the block is not enabled" if BLOCK in source else f'there is no "{BLOCK}" block'
        yield f"{file}: {why}; everything stays native"
        if checkpoint is not None:
            yield from _resumed(None, checkpoint)
        return
    if world_size is not None:
        check_widths(block.widths, world_size)
    notes = [*idle_notes(block), *_ledger_notes(block)]
    if not bare:
        if found.dtype is not None:
            notes += dtype_notes(block, DTYPES[found.dtype])
        notes += check.check(block, source, **known, world_size=world_size)
        hold_to_plan(block, _written_layout(source, world_size))
    if not neox and file.suffix not in (".yml", ".yaml") and not _is_strict(file):
        notes.append(_NOT_STRICT)
    sizes = [] if job is None else list(memory.lines(block, found, job))
    yield f"{file}: valid{' (a bare block)' if bare else ''}, digest {block.digest()[:16]}"
    yield from (f"  {line}" for line in describe(block))
    yield from sizes
    yield from (f"  note: {note}" for note in notes)
    if checkpoint is not None:
        yield from _resumed(block, checkpoint)
    start = BARE_START if bare else NEOX_START if neox else DEEPSPEED_START
    text = json.dumps(str(file), ensure_ascii=False)  # escaped, two halves of a character stay two
    yield start.format(file=shlex.quote(str(file)), text=text, block=BLOCK, silent=SILENT)


def _ledger_notes(block: CompressionConfig) -> Iterator[str]:
    """Say why the ledger's file cannot be written, as seen from here."""
    name = block.ledger.jsonl
    problem = None if name is None else unwritable(Path(name))
    if problem is not None:
        yield (
            f"{BLOCK}.ledger.jsonl: {name} cannot be written here ({problem}); where rank 0 meets "
            "the same, the job ends before its first step"
        )


def _written_layout(source: Mapping[str, Any], world_size: int | None) -> dict[str, int | None]:
    """Return the layout in a ds_config, by the names of a plan; None where it is not given."""
    job = DeepSpeedJob(source, world_size=world_size)
    return {
        "ranks": world_size,
        "zero_stage": job.stage,
        "micro_batch": job.get("train_micro_batch_size_per_gpu"),
        "accumulation": job.get("gradient_accumulation_steps"),
        "offload": int(job.cpu_offload),
    }


_NOT_STRICT = (
    "this is Hjson (comments, commas): DeepSpeed reads it, Hugging Face's Trainer and Accelerate "
    "read JSON only"
)


def _is_strict(file: Path) -> bool:
    """Return whether the file is strict JSON, which all readers take."""
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _resumed(block: CompressionConfig | None, place: Path) -> Iterator[str]:
    """Describe what a job with ``block`` loads from a checkpoint. Raises ConfigError."""
    folder = checkpoint_note.folder_of(place)
    note = checkpoint_note.read(folder)
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
