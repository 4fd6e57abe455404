"""Read trainings from the folders that W&B writes without a network: ``wandb/offline-run-*``.

W&B's ``wandb_internal_pb2`` parses the records. The file around them is a LevelDB log
(https://github.com/google/leveldb/blob/main/doc/log_format.md) with a header of seven bytes and
zlib's CRC-32. Not every release of W&B has a Python reader of it
(``wandb.sdk.internal.datastore``), so this module parses the framing.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridcomp.errors import install_hint
from hybridcomp.metric_names import (
    CONFIG_BLOCK,
    CONFIG_CODECS,
    CONFIG_RUN,
    LOSS,
    SPEED,
    TOKENS,
    VALID_LOSS,
)
from hybridcomp.tools.compare.figures import errors_of, ledger_of, sent_until, wire_of
from hybridcomp.tools.compare.runs import CompareError, Curve, LoggedTraining, check_curve, rises
from hybridcomp.tools.compare.wandb_parts import TRAINER_STEP, joined

HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
BLOCK_NBYTES, RECORD_HEADER = 32768, struct.Struct("<IHB")
FULL, FIRST, LAST = 1, 2, 4
#: DeepSpeed's name of the training loss, whose rows it numbers by samples
BY_SAMPLES = "Train/Samples/train_loss"
#: names of the training loss: ours, DeepSpeed's, GPT-NeoX's, Megatron-LM's, the Trainer's
LOSSES = (LOSS, BY_SAMPLES, "train/lm_loss", "lm loss", "train/loss")
VALID_LOSSES = (VALID_LOSS, "validation/lm_loss", "lm loss validation", "eval/loss")
#: tokens of Hugging Face's Trainer
TRAINER_TOKENS = "train/num_input_tokens_seen"
#: keys of model and data in the configs of GPT-NeoX, Megatron-LM and the Trainer
MODEL_KEYS = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "intermediate_size",
    "num_query_groups", "num_kv_heads", "vocab_size", "padded_vocab_size", "num_experts",
    "norm", "normalization", "activation", "pos_emb", "position_embedding_type",
    "model_type", "n_layer", "n_embd", "n_head",
)  # fmt: skip
DATA_KEYS = (
    "data_path", "train_data_paths", "train_data_weights", "split", "seq_length",
    "train_batch_size", "global_batch_size", "tokenizer_type", "vocab_file", "dataset_impl",
    "per_device_train_batch_size", "gradient_accumulation_steps", "data_seed",
)  # fmt: skip
BATCHES = ("train_batch_size", "global_batch_size")


def read_training(*folders: Path) -> LoggedTraining:
    """Read one offline run; if it was resumed, from the folders of all its parts.

    Raises CompareError.
    """
    folder, parts = folders[0], [read(_file(place)) for place in folders]
    config: dict[str, Any] = {}
    for settings, _, _ in parts:
        config.update(settings)
    seeds = {str(identity_of(one, one.get(CONFIG_RUN) or {}).get("seed")) for one, _, _ in parts}
    if len(seeds) > 1:
        listed = ", ".join(sorted(seeds))
        raise CompareError(f"{folder}: one run has the seeds {listed}; give each seed its own run")
    about, history = parts[0][1], joined([rows for _, _, rows in parts])
    rows = {key: found for key in LOSSES if (found := _series(history, key))}
    if not rows:
        raise CompareError(
            f"{folder}: none of its records holds a loss under one of {', '.join(LOSSES)}; log it "
            f'as "{LOSS}"'
        )
    numbers = next(iter(rows.values()))
    counted = _series(history, TRAINER_STEP)
    # if a step was logged twice, the last record counts
    last = {counted.get(row, row): row for row in sorted(numbers)}
    at = [last[step] for step in sorted(last)]
    losses = np.array([numbers[step] for step in at], dtype=np.float64)
    header = config.get(CONFIG_RUN) or {}
    tokens = _tokens(history, config, at)
    # W&B's step numbers come from the trainer: in DeepSpeed's monitors they are samples
    is_ours = any(TOKENS in values for values in history.values())
    steps = np.array(range(1, len(at) + 1) if is_ours else sorted(last), dtype=np.float64)
    if next(iter(rows)) == BY_SAMPLES and len(at) > 1 and not is_ours:
        steps = np.round(steps / np.diff(steps).min())  # DeepSpeed logs every step
    seconds = _at(history, "_runtime", at)
    check_curve(folder, steps, losses)
    return LoggedTraining(
        source=folder,
        steps=steps,
        losses=losses,
        tokens=tokens,
        seconds=_elapsed(history, at, seconds),
        speeds=_speeds(history, at, tokens, seconds),
        identity=identity_of(config, header),
        settings=_settings(config, header),
        valid_loss=_last(history, VALID_LOSSES),
        ledger=ledger_of(history.values(), config.get(CONFIG_CODECS) or {}),
        sent=sent_until(
            ((row, wire_of(values)) for row, values in history.items()),
            np.array(at, dtype=np.float64),
        ),
        errors=errors_of((float(row), values) for row, values in sorted(history.items())),
        project=about.project,
        group=about.run_group,
    )


def _file(folder: Path) -> Path:
    files = sorted(folder.glob("*.wandb"))
    if len(files) != 1:
        raise CompareError(f"{folder}: expected one file *.wandb, found {len(files)}")
    return files[0]


def read(path: Path) -> tuple[dict[str, Any], Any, dict[int, dict[str, Any]]]:
    """Read ``(config, W&B's record of the run, step -> logged values)``. Raises CompareError."""
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        raise CompareError(f"{path}: reading it needs W&B: {install_hint('wandb')}") from None
    config: dict[str, Any] = {}
    about: Any = wandb_internal_pb2.RunRecord()
    history: dict[int, dict[str, Any]] = {}
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            about = record.run
            _update(config, record.run.config)
        elif kind == "config":
            _update(config, record.config)
        elif kind == "history":
            values = {_key(item): json.loads(item.value_json) for item in record.history.item}
            history.setdefault(int(record.history.step.num), {}).update(values)
    return config, about, history


def payloads(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, without one that is cut off at its end. Raises CompareError."""
    data = path.read_bytes()
    if not data.startswith(HEADER):
        raise CompareError(f"{path}: expected a file of W&B, found {data[:7]!r}")
    place, whole = len(HEADER), b""
    while place + RECORD_HEADER.size <= len(data):
        left = BLOCK_NBYTES - place % BLOCK_NBYTES
        if left < RECORD_HEADER.size:
            place += left  # padding: no header fits here
            continue
        checksum, length, kind = RECORD_HEADER.unpack_from(data, place)
        place += RECORD_HEADER.size
        part = data[place : place + length]
        if len(part) < length:
            return
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise CompareError(f"{path}: damaged at byte {place}; compare without this run")
        place += length
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            yield whole


def identity_of(config: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts that compared runs must share, from hybridcomp's header or else the config."""
    from hybridcomp.tools.compare import json_lines

    if header:
        return json_lines.identity_of(dict(header))
    found: dict[str, Any] = {} if config.get("seed") is None else {"seed": config["seed"]}
    for name, keys in (("model", MODEL_KEYS), ("data", DATA_KEYS)):
        found[name] = {key: config[key] for key in keys if config.get(key) is not None}
    return found


def _settings(config: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the DeepSpeed settings: from hybridcomp's header, else from the Trainer's config.

    Other engines have only the block, if any.
    """
    found = header.get("deepspeed", config.get("deepspeed"))
    if isinstance(found, Mapping):
        return dict(found)
    block = config.get(CONFIG_BLOCK)
    return {CONFIG_BLOCK: block} if isinstance(block, Mapping) else None


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _update(config: dict[str, Any], record: Any) -> None:
    for item in record.update:
        path = [item.key] if item.key else list(item.nested_key)
        place = config
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = json.loads(item.value_json)


def _series(history: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, float]:
    return {step: values[name] for step, values in sorted(history.items()) if name in values}


def _at(history: Mapping[int, Mapping[str, Any]], name: str, at: list[int]) -> Curve | None:
    """Return the figure ``name`` at the steps ``at``; None if a step lacks it."""
    if not all(name in history[step] for step in at):
        return None
    return np.array([history[step][name] for step in at], dtype=np.float64)


def _last(history: Mapping[int, Mapping[str, Any]], names: tuple[str, ...]) -> float | None:
    for name in names:
        if found := _series(history, name):
            return float(list(found.values())[-1])
    return None


def _tokens(
    history: Mapping[int, Mapping[str, Any]], config: Mapping[str, Any], at: list[int]
) -> Curve | None:
    """Return the logged tokens, if they rise, else iterations times batch and length."""
    for name in (TOKENS, TRAINER_TOKENS):
        if rises(logged := _at(history, name, at)):
            return logged
    batch = next((config[key] for key in BATCHES if isinstance(config.get(key), int)), None)
    length = config.get("seq_length")
    if batch is None or not isinstance(length, int):
        return None
    return np.array([step * batch * length for step in at], dtype=np.float64)


def _elapsed(
    history: Mapping[int, Mapping[str, Any]], at: list[int], runtime: Curve | None
) -> Curve | None:
    """Return seconds of training: the logged ones, else W&B's clock since the first step."""
    own = _at(history, "seconds", at)
    if own is not None:
        return np.asarray(np.cumsum(own))
    return None if runtime is None else runtime - runtime[0]


def _speeds(
    history: Mapping[int, Mapping[str, Any]],
    at: list[int],
    tokens: Curve | None,
    runtime: Curve | None,
) -> Curve | None:
    logged = _at(history, SPEED, at)
    if logged is not None or tokens is None or runtime is None or len(at) < 2:
        return logged
    return np.diff(tokens) / np.maximum(np.diff(runtime), 1e-9)
