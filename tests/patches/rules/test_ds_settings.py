"""A ds_config is read as by DeepSpeed's parser, with DeepSpeed and without."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.config import load_config
from hybridcomp.errors import ConfigError
from hybridcomp.patches.ds import settings as by_deepspeed
from hybridcomp.patches.rules import ds_settings, neox
from hybridcomp.patches.rules.ds_check import check
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.ds_settings import SECTIONS, parsed, removed
from hybridcomp.tools.commands import cli
from tests.patches.rules.test_ds_check import CANNOT, block
from tests.selection import by_day

owner = pytest.importorskip("deepspeed.runtime.config")

#: values as people write them: DeepSpeed reads some as true, some as false, some as 2
ODD: tuple[Any, ...] = (
    True, "true", 1, 1.0, "1", False, "false", 0, 0.0, "0", "on", "Off", "maybe", 2, 2.0, "2",
    "2.0", 2.5, -1, "5e8", 5e8, 1e30, 10**30, float("inf"), float("nan"), None, "", [], [3], {},
    {"a": 1}, "auto", "cpu", "none",
)  # fmt: skip


def keys() -> Iterator[tuple[str, ...]]:
    """Return every key of the table, including a section's keys."""
    for name, model in SECTIONS.items():
        yield (name,)
        for field, info in model.model_fields.items():
            if field == "mics_shard_size":  # only in releases older than any tested
                continue
            choices = getattr(info.validation_alias, "choices", [field])
            yield from ((name, spelling) for spelling in choices)
    yield "zero_optimization", "offload_param", "device"
    for part in ("device", "ratio", "super_offload"):
        yield "zero_optimization", "offload_optimizer", part


def written(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found: Any = value
    for name in reversed(path):
        found = {name: found}
    if path[-1] == "ratio":
        found["zero_optimization"]["stage"] = 3
    settings: dict[str, Any] = found
    return settings


def told(read: Any, settings: dict[str, Any]) -> Any:
    """Return a reader's settings by the table's keys; None if it rejects them."""
    try:
        values = read(settings)
    except ConfigError:
        return None
    known = parsed({name: values[name] for name in SECTIONS if name in values})
    job = DeepSpeedJob(known)
    return {**known, "stage": job.stage, "offload": job.cpu_offload}


@pytest.mark.parametrize("step", by_day([1, 3], [3]))
@pytest.mark.parametrize("path", list(keys()), ids=".".join)
def test_the_table_is_the_owners_parser(path: tuple[str, ...], step: int) -> None:
    """Both reject the same values, and read the others alike."""
    own_rule = path[-1] == "autotp_size"  # a string stops deepspeed.initialize, -1 does nothing
    for value in ODD[::step]:
        if value == {"a": 1} or own_rule and (isinstance(value, str) or value == -1):
            continue
        settings = written(path, value)
        mine, theirs = told(parsed, settings), told(by_deepspeed.of_file, settings)
        assert (mine is None) == (theirs is None), (path, value)
        if mine is not None:
            for name, section in mine.items():
                if isinstance(section, dict):
                    wanted = {key: theirs[name][key] for key in section if key in theirs[name]}
                    have = {key: section[key] for key in wanted}
                    _same(have, wanted, (path, value))
                elif name in ("stage", "offload"):
                    assert section == theirs[name], (path, value)


def _same(mine: Any, theirs: Any, what: object) -> None:
    for key, found in mine.items():
        if isinstance(found, dict) and isinstance(theirs[key], dict):
            _same({k: v for k, v in found.items() if k in theirs[key]}, theirs[key], what)
        elif key not in ("cpu_offload", "cpu_offload_param", "a"):  # DeepSpeed drops old names
            assert repr(found) == repr(theirs[key]), (what, key)


def test_rules_apply_to_what_the_owner_has_parsed() -> None:
    for dimension, ds_json, facts, fragment in CANNOT:
        if not removed(ds_json):
            settings = by_deepspeed.of_file(ds_json) or {}
            with pytest.raises(ConfigError, match="compression") as caught:
                check(block(**{dimension: "blockint"}), settings, **facts)
            assert fragment in str(caught.value)


def test_a_running_job_takes_what_its_engine_has_parsed() -> None:
    written = {
        "train_batch_size": 4, "zero_optimization": {"stage": "2", "reduce_scatter": "false"},
        "bf16": {"enabled": "true"}, "compression": {"dp": "blockint"},
    }  # fmt: skip
    found = by_deepspeed.of_config(owner.DeepSpeedConfig(written))
    job = DeepSpeedJob(found)
    assert (job.stage, job.dtype, job.zero("reduce_scatter")) == (2, "bf16", False)
    assert found["compression"] == {"dp": "blockint"}
    assert found["train_micro_batch_size_per_gpu"] == 4
    read = by_deepspeed.of_file(written) or {}  # the file has no number of ranks
    assert DeepSpeedJob(read).get("train_micro_batch_size_per_gpu") is None
    ranks = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert by_deepspeed.of_file({"train_batch_size": 64, **ranks}) is not None  # of 8 ranks
    assert logging.root.manager.disable < logging.CRITICAL, "logs are silent in the parser alone"
    with pytest.raises(ConfigError, match='"zero_optimization.reduce_scatter": false'):
        check(block(dp="blockint"), found)


def test_auto_in_the_block_is_the_block_s_own_word() -> None:
    """The Trainer fills in "auto" elsewhere; ``"when": "auto"`` measures."""
    for written in ({"dp": {"codec": "blockint", "when": "auto"}}, "auto"):
        settings = {"train_batch_size": "auto", "compression": written}
        for read in (by_deepspeed.of_file(settings) or {}, parsed(settings)):
            assert read["compression"] == written
            assert read.get("train_batch_size") is None


NEOX = {"num_layers": 4, "hidden_size": 64, "zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ({}, "fp32"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"precision": "bfloat16", "bf16": {"enabled": False}}, "fp32"),  # as GPT-NeoX leaves it
        ({"precision": "FP16"}, "fp32"),  # GPT-NeoX compares the word literally
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "fp16"),
        ({"fp16": {"enabled": "false"}}, "fp16"),  # a word, which is truthy in Python
        ({"deepspeed_extra_args": {"bf16": {"enabled": 1}}}, "bf16"),
    ],
)
def test_precision_as_gpt_neox_derives_it(lines: dict[str, Any], dtype: str) -> None:
    assert DeepSpeedJob(neox.ds_settings({**NEOX, **lines})).dtype == dtype


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"precision": "fp32", "bf16": {"enabled": True}}, 'precision: found "fp32"; GPT-NeoX ref'),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "GPT-NeoX refuses it beside"),
        ({"zero_optimization": {}}, "zero_optimization.stage: found nothing; GPT-NeoX expects"),
        ({"zero_optimization": {"stage": "1"}}, 'zero_optimization.stage: found "1"; GPT-NeoX'),
        ({"model_parallel_size": 2.0}, "model_parallel_size: found 2.0; expected a whole number"),
        ({"model_parallel_size": 2, "te_mha": "true"}, 'te_mha: found "true"; expected true or f'),
        ({"deepspeed_extra_args": {"compression": {"sync": {"every": 4}}}}, "groups of its own"),
        ({"deepspeed_extra_args": {"compression": {"cp": "blockint"}}}, "without sequence paral"),
        ({"pipe_parallel_size": 2, "deepspeed_extra_args": {"compression": {"pipeline": {
            "versions": "stash"}}}}, "compression.pipeline.versions: found tied layers"),
        ({"pipe_parallel_size": 1, "deepspeed_extra_args": {"compression": {"pipeline": {
            "versions": "stash"}}}}, "compression.pipeline.versions: found one stage"),
        ({"pipe_parallel_size": 4, "no_weight_tying": True, "gradient_accumulation_steps": 2,
          "zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 1,
          "deepspeed_extra_args": {"compression": {"pipeline": {"versions": 2}}}},
         "2 with 2 micro-batches"),
    ],
)  # fmt: skip
def test_what_gpt_neox_or_its_job_refuses(
    lines: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "neox.json"
    extra = {"deepspeed_extra_args": {"compression": {"dp": "blockint", "tp": "blockint"}}}
    if lines.get("model_parallel_size") is None:
        extra["deepspeed_extra_args"]["compression"].pop("tp")
    file.write_text(json.dumps({**NEOX, **extra, **lines}))
    assert cli.main(["validate", str(file)]) == cli.BAD_INPUT
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, None),  # that of the parameters
        ({"communication_data_type": "FP16"}, "fp16"),
        ({"sequence_parallel_size": 2, "communication_data_type": "fp16"}, "fp32"),
        ({"sequence_parallel_size": 2, ds_settings.SUMMED_IN_SEQUENCE: "bf16"}, "bf16"),
        ({"sequence_parallel_size": 2, ds_settings.SUMMED_IN_SEQUENCE: "bf16",
          "zero_optimization": {"stage": 2}}, "fp32"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"},
          "zero_optimization": {"stage": 1}}, "bf16"),
    ],
)  # fmt: skip
def test_dtype_in_which_gradients_are_summed(settings: dict[str, Any], dtype: str | None) -> None:
    assert DeepSpeedJob(settings).summed_dtype == dtype


def test_raw_keys_are_what_python_takes_them_for() -> None:
    """DeepSpeed reads expert_parallel without a type: every nonempty string is true."""
    for value, truth in (("false", True), (0, False), ("", False), (1, True)):
        raw = {"expert_parallel": {"enabled": value, "comm_backend": "deepep"}}
        for settings in (raw, by_deepspeed.of_file(raw) or {}):
            assert bool(DeepSpeedJob(settings).get("expert_parallel.enabled")) is truth


def test_counts_are_numbers_of_one_or_more() -> None:
    assert parsed({"train_batch_size": 2.0})["train_batch_size"] == 2
    for count in (0, -1, 2.5, "8"):
        with pytest.raises(ConfigError, match="expected a whole number of 1 or more"):
            parsed({"train_batch_size": count})


def test_removed_keys_are_those_of_the_owner() -> None:
    assert set(ds_settings.REMOVED) == set(owner._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(ds_settings.REMOVED_OF_ZERO) == set(owner._REMOVED_ZERO_CONFIG_KEYS)


REMOVED = [*ds_settings.REMOVED, *ds_settings.REMOVED_OF_ZERO]


@pytest.mark.parametrize("key", by_day(REMOVED, [REMOVED[0], REMOVED[-1]]))
def test_validate_says_what_deepspeed_refuses(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = key in ds_settings.REMOVED_OF_ZERO
    path = f"zero_optimization.{key}" if inner else key
    content = {"zero_optimization": {"stage": 3, key: 2}} if inner else {key: {"enabled": False}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**content, "compression": {"preset": "recommended"}}))
    table = owner._REMOVED_ZERO_CONFIG_KEYS if inner else owner._REMOVED_TOP_LEVEL_CONFIG_KEYS
    assert cli.main(["validate", str(file)]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith(f"hybridcomp: {path}: found ") and said.count("\n") == 1
    assert f'refuses it: "{" ".join(table[key].split())}"' in said.replace("\\n", "")
    monkeypatch.setattr(by_deepspeed, "of_file", lambda settings: None)
    if not inner:
        assert cli.main(["validate", str(file)]) == 0
        assert f"note: {path}: DeepSpeed 0.19.8 has removed this key" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"zero_optimization": [3]}, "zero_optimization: found [3]; expected an object"),
        ({"zero_optimization": {"stage": 9}}, "zero_optimization.stage: found 9; DeepSpeed"),
        ({"zero_optimization": {"stage": -1}}, "zero_optimization.stage: found -1; DeepSpeed"),
        ({"zero_optimization": {"reduce_bucket_size": float("inf")}},
         'reduce_bucket_size: found Infinity; DeepSpeed 0.19.8 refuses it: "Input should be a fin'),
        ({"tensor_parallel": {"autotp_size": -64}}, "tensor_parallel.autotp_size: found -64; exp"),
        ({"tensor_parallel": {"autotp_size": "2"}}, 'found "2"; expected a whole number, without'),
        ({"tensor_parallel": {"autotp_size": 3}}, "autotp_size: found 3; it does not divide the 6"),
        ({"sequence_parallel_size": 5}, "sequence_parallel_size: found 5; it does not divide the"),
        ({"train_batch_size": "8"}, 'train_batch_size: found "8"; expected a whole number'),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}, "Check batch related"),
        ({"fp16": {"enabled": 1}, "bf16": {"enabled": "on"}}, "cannot be simultaneously enabled"),
        ({"compression": {"sync": {"islands": 7}}}, "islands: found 7; the job has 64 ranks, no m"),
        ({"compression": {"sync": {"islands": 100}}}, "islands: found 100; the job has 64 ranks"),
        ({"compression": {"sync": {"islands": 64}}}, "found one island of 64 rank(s); it has nobo"),
        ({"compression": {"tp": "blockint"}}, "compression.tp: found a job without tensor paral"),
        ({"compression": {"cp": "blockint"}}, "compression.cp: found a job without sequence par"),
        ({"zero_optimization": {"stage": 2, "reduce_scatter": "false"},
          "compression": {"dp": "blockint"}}, '"zero_optimization.reduce_scatter": false'),
    ],
)  # fmt: skip
def test_validate_refuses_what_the_job_refuses(
    content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    whole = {"compression": {"preset": "recommended"}, **content}
    file.write_text(json.dumps(whole))
    words = ["validate", str(file), "--world-size", "64"]
    assert cli.main(words) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    if "compression" in content and "zero_optimization" not in content:
        whole["zero_optimization"] = {"stage": 2}
        told = {"tp": ["--tensor"], "cp": ["--sequence"]}.get(next(iter(content["compression"])))
        if told is not None:
            assert f"; {told[0]} says that the script splits its model itself" in error
            assert cli.main([*words, *told]) == 0


def test_what_a_file_does_not_show_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    content: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    file.write_text(json.dumps({**content, "compression": {"preset": "recommended"}}))
    assert cli.main(["validate", str(file)]) == 0
    out = capsys.readouterr().out
    assert "  not in this file: tp, pp, ep, cp (used if the script has them)" in out
    lines = [line.split()[0] for line in out.splitlines()]
    assert "dp" in lines and not {"tp", "pp", "ep", "cp"} & set(lines)
    assert cli.main(["validate", str(file), "--pipeline", "--no-moe", "--tensor"]) == cli.BAD_INPUT
    capsys.readouterr()  # a pipeline with ZeRO 2
    content["zero_optimization"]["stage"] = 1
    content["tensor_parallel"] = {"autotp_size": 2}
    named = {"pp": "expcode", "ep": "blockint", "tp": "blockint"}
    file.write_text(json.dumps({**content, "compression": named}))
    assert cli.main(["validate", str(file)]) == 0
    out = capsys.readouterr().out
    assert "warning: pp is not in this file" in out and "warning: ep is not in this file" in out
    assert cli.main(["validate", str(file), "--pipeline", "--moe"]) == 0
    assert "not in this file" not in capsys.readouterr().out
    assert load_config(file) is not None
    whole = {"bf16": {"enabled": True}, "compression": {"zero": "expcode"}}
    file.write_text(json.dumps(whole))
    assert cli.main(["validate", str(file)]) == 0
    assert "warning: zero is not in this file" in capsys.readouterr().out
    file.write_text(json.dumps({**whole, "compression": {"preset": "recommended"}}))
    assert cli.main(["validate", str(file)]) == 0
    assert "  not in this file: zero, tp, pp, ep, cp" in capsys.readouterr().out


#: keys that commands read from other programs' files
FOREIGN = [
    *(".".join(path) for path in keys()),
    *(f"zero_optimization.{name}" for name in ("zenflow", "mics_shard_size", "overlap_comm")),
    *ds_settings.COUNTS, *ds_settings.RAW_SECTIONS, *ds_settings.REMOVED,
    "optimizer.type", "expert_parallel.enabled", "expert_parallel.comm_backend", "compile.passes",
    "data_types.grad_accum_dtype", "communication_data_type", "bfloat16", "bfloat16.enabled",
    "pipeline", "pipeline.stages", "pipe_parallel_size", "model_parallel_size", "moe_num_experts",
    "precision", "seq_length", "hidden_size", "te_mha", "checkpoint_activations",
    "deepspeed_extra_args", "no_weight_tying", "compression.sync", "compression.pipeline",
]  # fmt: skip


@pytest.mark.parametrize(
    ("has_owner", "count"),
    by_day([(True, 10), (False, 10), (True, 1), (False, 1)], [(True, 1), (False, 1)]),
)
def test_no_value_of_a_key_ends_in_a_traceback(
    has_owner: bool, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not has_owner:
        monkeypatch.setattr(by_deepspeed, "of_file", lambda settings: None)
    file, draw = tmp_path / "ds.json", random.Random(7)
    odd = [*ODD, -(10**400), 10**400, 1e-300, [[]], {"enabled": "auto"}, "\ud800", "x" * 300]
    for name in FOREIGN if count > 1 else FOREIGN[has_owner::2]:
        for value in draw.sample(odd, count):
            content: dict[str, Any] = {
                "zero_optimization": {"stage": draw.randrange(4)},
                "train_micro_batch_size_per_gpu": 4, "compression": {"preset": "recommended"},
            }  # fmt: skip
            part = content
            *above, last = name.split(".")
            for one in above:
                part = part.setdefault(one, {})
            part[last] = value
            file.write_text(json.dumps(content))
            words = [str(file), "--parameters", "7e9"]
            command = ["pays", *words[:1]] if draw.random() < 0.2 else [
                "validate", *words, "--world-size", "64", "--ranks-per-node", "8"
            ]  # fmt: skip
            assert cli.main(command) in (0, cli.BAD_INPUT), (name, value)
            assert capsys.readouterr().err.count("\n") <= 1, (name, value)
