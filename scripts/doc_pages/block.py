"""Generate docs/block.md: every key of the block, from its schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridcomp.config import schema
from hybridcomp.config.block import BLOCK, CompressionConfig
from hybridcomp.dimensions import DIMENSIONS, DIRECTIONS, KINDS

Schema = Mapping[str, Any]
HEAD = f"""\
# The block, key by key

This page is made from the JSON schema that `hybridcomp schema` prints, which editors can use.
Write the block into the DeepSpeed file under `"{BLOCK}"`, or, for jobs without such a
file, into [a separate file](engines/megatron.md). A setting without effect is an
[error](errors.md) that names the key.

A dimension is an object, or the bare name of a codec: `"zero": "mpc"` is short for
`"zero": {{"codec": "mpc"}}`. Beside a `preset`, a dimension with a codec (or an `error_bound`)
replaces the preset's; without them it changes only the settings that it names. The same holds for
`forward` and `backward` inside a dimension; there a bound keeps a codec that the block names.
"""
#: sections after the block's top-level keys: title, schema model, text above the table
PARTS = (
    ("ledger", "LedgerConfig", 'Reports and their file: `"ledger": {"jsonl": "ledger.jsonl"}`.'),
    ("pipeline", "AsyncPipelineConfig",
     'DeepSpeed\'s pipeline without a flush: `"pipeline": {"versions": 2}` '
     "([asynchronous pipelines](async_pipelines.md))."),
    ("memory", "MemoryPolicy",
     'Which parameters ZeRO 3 keeps gathered: `"memory": {"policy": "planned", "device_gb": 40}` '
     "([planned memory](offload.md#planned-memory))."),
    ("publish", "PublishConfig",
     'Versions of the weights for inference engines: `"publish": {"to": "runs/weights"}` '
     "([publishing](publishing.md))."),
    ("gathered", "GatheredConfig",
     'All weights on every rank for a roll-out: `"gathered": "stepcode"` '
     "([gathered weights](gathered.md))."),
    ("generate", "GenerateConfig",
     'Messages and memory of `hybridcomp.generate`: `"generate": {"pp": {"codec": "blockint", '
     '"bits": 8}}` ([generation](generation.md)).'),
    ("outer", "OuterConfig",
     'The outer optimizer of `sync`: `"outer": {"lr": 0.7, "momentum": 0.9}`.'),
    ("islands that are jobs", "RendezvousConfig",
     'Islands of `sync` that are jobs of their own: `"islands": {"rendezvous": '
     '"tcp://10.0.0.1:29400"}` ([islands](sync.md#islands-that-are-jobs-of-their-own)).'),
    ("guard", "GuardConfig",
     'Limits above which a dimension becomes native: `"guard": {"error": 0.5}`, or `"none"`.'),
    ("ramp", "RampConfig",
     'A start with more bits: `"ramp": {"from": 8, "steps": 1000}`. Both keys are needed.'),
)  # fmt: skip


def page() -> str:
    """Return the whole page in Markdown."""
    whole = schema()
    models: Schema = whole["$defs"]
    block = models[CompressionConfig.__name__]["properties"]
    common = models["DirectionConfig"]["properties"]
    lines = [HEAD, "## Keys of the block", "", *keys(block), ""]
    lines += [
        "## Codec settings", "",
        "Every dimension has these keys, as have `forward` and `backward`, and `activations`, "
        "`weights` and `gradients` of `tp2d`. A setting that the codec does not have is an error. "
        "[Codecs](codecs.md) describes each codec.", "", *table(common), "",
    ]  # fmt: skip
    seen: dict[tuple[str, str], str] = {}
    for name in DIMENSIONS:
        lines += [*dimension(name, block[name], models, common, seen), ""]
    for title, model, words in PARTS:
        lines += [f"## {title}", "", words, "", *part(models[model]["properties"], common), ""]
    return "\n".join(lines).rstrip() + "\n"


def keys(block: Schema) -> Iterator[str]:
    """Yield the lines of the top-level keys; keys with a section take one line."""
    titles = (*DIMENSIONS, *(title for title, _, _ in PARTS))
    yield from table({key: entry for key, entry in block.items() if key not in titles})
    sections = ", ".join(f"[`{key}`](#{key})" for key in block if key in titles)
    yield f"* {sections}: sections of this page."


def part(properties: Schema, common: Schema) -> Iterator[str]:
    """Yield the lines of a section; codec settings shared with others take one line."""
    shared = [key for key in properties if properties[key] == common.get(key)]
    own = {key: dict(entry) for key, entry in properties.items() if key not in shared}
    where = "[codec settings](#codec-settings)"
    if shared:
        words = str(common["codec"]["description"])
        own["codec"]["description"] = str(own["codec"]["description"]).replace(
            words, f"As in {where}."
        )
    yield from table(own)
    if shared:
        yield f"* {', '.join(f'**`{key}`**' for key in shared)}: as in {where}."


def dimension(
    name: str, entry: Schema, models: Schema, common: Schema, seen: dict[tuple[str, str], str]
) -> Iterator[str]:
    """Yield a dimension's section: its codecs, and the keys that not all dimensions have.

    ``seen`` maps a key's lines to the first dimension that has them and is extended. Keys of an
    earlier dimension become one line that refers to it.
    """
    model = models[_reference(entry)]["properties"]
    names = next(part["enum"] for part in entry["anyOf"] if "enum" in part)
    more = [f"`{codec}`" for codec in names if codec not in common["codec"]["enum"]]
    yield f"## {name}"
    yield ""
    yield entry["description"] + (f" Further codecs: {', '.join(more)}." if more else "")
    yield ""
    again: dict[str, list[str]] = {}
    for key, part in model.items():
        if key in common:
            continue
        first, second = table({key: part})
        where = seen.setdefault((first, second), name)
        if where == name:
            yield from (first, second)
        else:
            again.setdefault(where, []).append(f"**`{key}`**")
    for where, keys in again.items():
        yield f"* {', '.join(keys)}: as in [{where}](#{where})."


def table(properties: Schema) -> Iterator[str]:
    """Yield two lines for each key: a list, since phones cut tables off."""
    for key, entry in properties.items():
        words = " ".join(str(entry.get("description", "")).split())
        words = words.removesuffix(" Default: native.")
        given = [kind(key, entry), f"default {found}" if (found := default(entry)) else ""]
        yield f"* **`{key}`**: {', '.join(text for text in given if text)}  "
        yield f"  {words}"


def kind(key: str, entry: Schema) -> str:
    """Describe the values that a key takes."""
    for section in (*DIMENSIONS, *(title for title, _, _ in PARTS)):
        if key == section:
            return f"[see below](#{section})"
    if key in (*DIRECTIONS, *KINDS):
        return "[codec settings](#codec-settings)"
    if "enum" in entry:
        return ", ".join(_code(value) for value in entry["enum"] if value is not None)
    ways = [part for part in entry.get("anyOf", (entry,)) if part.get("type") != "null"]
    return " or ".join(_kind(part) for part in ways)


def _kind(part: Schema) -> str:
    if "$ref" in part:
        return "an object"
    if "enum" in part:
        return ", ".join(_code(value) for value in part["enum"])
    if part.get("type") == "array":
        items = part["items"]
        return f"list of ({' or '.join(map(_kind, items.get('anyOf', (items,))))})"
    if "const" in part:
        return _code(part["const"])
    found = {"integer": "whole number", "boolean": "`true`, `false`"}.get(
        str(part.get("type")), str(part.get("type"))
    )
    limits = {"minimum": "from {:g}", "exclusiveMinimum": "above {:g}"}
    return ", ".join([found, *(text.format(part[k]) for k, text in limits.items() if k in part)])


def default(entry: Schema) -> str:
    """Return the default; "native" for dimensions, "" for sections."""
    found = entry.get("default")
    if isinstance(found, Mapping):
        return "native" if found.get("codec") == "none" else ""
    return "" if found is None else _code(found)


def _code(value: Any) -> str:
    text = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    return f"`{text}`"


def _reference(entry: Schema) -> str:
    return next(str(part["$ref"]).rpartition("/")[2] for part in entry["anyOf"] if "$ref" in part)
