"""Other tools' names in the block: every error suggests the block's name."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from hybridcomp.codecs.registry import AUTO
from hybridcomp.config import BLOCK, CompressionConfig, other_names
from hybridcomp.config.error_messages import _model_in
from hybridcomp.dimensions import DIMENSIONS
from hybridcomp.errors import ConfigError
from tests.config.common import parse

INTEGER = "expected an integer;"


def said(block: Any) -> ConfigError:
    """Return the error of a rejected block."""
    with pytest.raises(ConfigError) as caught:
        parse(block)
    return caught.value


@pytest.mark.parametrize(
    ("codec", "written"),
    [
        ("int4", '"codec": "blockint", "bits": 4'),
        ("uint8", '"codec": "blockint", "bits": 8'),
        ("q4_0", '"codec": "blockint", "bits": 4'),
        ("8-bit", '"codec": "blockint", "bits": 8'),
        ("int1", '"codec": "blockint", "bits": 2'),
        ("nf4", '"codec": "blockint", "bits": 4, "levels": "gaussian"'),
        ("1-bit", '"codec": "blockint", "bits": 2'),
        ("OneBitAdam", '"codec": "blockint", "bits": 2'),
        ("float8_e5m2", '"codec": "fp8", "format": "e5m2"'),
        ("fp32", '"codec": "none"'),
        ("PowerSGD_hook", '"codec": "powersgd"'),
        ("sz3", '"error_bound": 0.01'),
    ],
)
def test_a_codec_of_other_tools(codec: str, written: str) -> None:
    for block in ({"dp": codec}, {"dp": {"codec": codec}}):
        error = said(block)
        assert error.key == "compression.dp.codec"
        assert error.todo == f"no such codec; for {codec} write {written}"
    assert parse({"dp": json.loads(f"{{{written}}}")})


def test_every_answer_about_a_codec_is_a_codec_of_some_dimension() -> None:
    for ours in set(other_names.CODECS.values()):
        settings = json.loads(f"{{{ours}}}")
        home = {"topk": "sync"}.get(settings.get("codec", AUTO), "dp")
        assert parse({home: settings})


def test_a_codec_that_this_dimension_cannot_have() -> None:
    assert "dgc is topk here" in said({"dp": "dgc"}).todo
    assert "only sync can have it" in said({"dp": "dgc"}).todo
    assert "only dp can have it" in said({"tp": "power_sgd"}).todo
    assert '"preset": "diloco"' in said({"sync": "diloco"}).todo
    assert '"preset": "recommended"' in said({"dp": "recommended"}).todo


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("gradients", "dp"), ("all-reduce", "dp"), ("Fsdp", "zero"), ("rollout", "publish"),
        ("warmup_steps", "start_step"),
    ],
)  # fmt: skip
def test_a_key_of_other_tools(word: str, key: str) -> None:
    error = said({word: {"bits": 4}, "dp": "bf16"})
    assert error.key == f"compression.{word}"
    assert error.todo == f'unknown key; for {word} write "{key}"'


def test_words_of_the_tables_lead_to_keys_that_are_there_and_are_none_themselves() -> None:
    keys = set(CompressionConfig.model_fields)
    assert set(other_names.KEYS.values()) <= keys
    assert not set(other_names.KEYS) & keys
    dimension = set(CompressionConfig.model_fields["dp"].annotation.model_fields)  # type: ignore[union-attr]
    assert set(other_names.SETTINGS.values()) <= dimension
    assert not set(other_names.SETTINGS) & (dimension - {"rank"})


@pytest.mark.parametrize(
    ("settings", "key", "todo"),
    [
        ({"type": "int8"}, "type", 'for type write "codec"'),
        ({"codec": "blockint", "num_bits": 4}, "num_bits", 'for num_bits write "bits"'),
        ({"tolerance": 0.01}, "tolerance", 'for tolerance write "error_bound"'),
        ({"codec": "blockint", "residual": True}, "residual", 'write "error_feedback"'),
        ({"codec": "bf16", "start_step": 5}, "start_step", 'stands beside "dp", not in it'),
        ({"codec": "bf16", "ledger": {}}, "ledger", 'stands beside "dp", not in it'),
        ({"weights": "int8"}, "weights", '"zero" stands beside "dp", not in it'),
    ],
)
def test_a_setting_of_other_tools(settings: Any, key: str, todo: str) -> None:
    error = said({"dp": settings})
    assert error.key == f"compression.dp.{key}" and todo in error.todo


def test_what_stands_at_the_wrong_place() -> None:
    for key, home in {"guard": "dp or", "keep": "publish or", "states": "offload"}.items():
        assert f"it belongs inside {home}" in said({"dp": "bf16", key: 1}).todo
    assert said({BLOCK: {"preset": "recommended"}}).todo.startswith("the block stands in itself")
    assert 'beside "compression"' in said({"dp": "bf16", "zero_optimization": {}}).todo
    assert 'for type write "codec", in a dimension' in said({"dp": "bf16", "type": "int8"}).todo
    for word, preset in {"default": "recommended", "off": "none"}.items():
        assert f"did you mean '{preset}'?" in said({"preset": word}).todo


def test_a_bound_without_a_codec_means_auto_and_says_so() -> None:
    error = said({"dp": {"bits": 4, "error_bound": 0.1}})
    assert str(error) == (
        "compression.dp.bits: found 4; an error_bound without a codec means auto, which sets bits; "
        'remove bits or add "codec": "blockint"'
    )
    assert (
        "without a codec"
        not in said({"dp": {"codec": "auto", "bits": 4, "error_bound": 1e-2}}).todo
    )
    assert "(for rank: powersgd)" in said({"dp": {"rank": 4}}).todo
    assert "(for bits: blockint)" in said({"dp": {"bits": 4}}).todo


@pytest.mark.parametrize(
    ("block", "todo"),
    [
        ({"publish": "file:///x"}, 'expected an object; write {"to": "file:///x"}'),
        ({"publish": True}, 'expected an object; write {"to": "runs/weights"}'),
        ({"dp": "bf16", "ledger": "a.jsonl"}, 'expected an object; write {"jsonl": "a.jsonl"}'),
        ({"dp": {"bits": "int4", "codec": "blockint"}}, f"{INTEGER} write 4, without quotes"),
        ({"dp": {"error_bound": "1%"}}, "expected a number; write 0.01, without quotes"),
        ({"dp": "bf16", "enabled": "False"}, "expected true or false; write false, without quotes"),
        ({"dp": "bf16", "min_bytes": "64k"}, "expected an integer"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type(block: Any, todo: str) -> None:
    assert said(block).todo == todo


def objects(model: type[BaseModel], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all keys that take only an object."""
    paths = []
    for name, field in model.model_fields.items():
        key = (*path, field.alias or name)
        inner = _model_in(field.annotation)
        if inner is not None and len(key) < 3:
            only = [member for member in get_args(field.annotation) if member is not type(None)]
            if field.annotation is inner or only == [inner]:
                paths.append(key)
            paths += objects(inner, key)
    return paths


def test_every_key_that_takes_an_object_shows_one_that_is_valid() -> None:
    """Includes dimensions: the message's example can be pasted as the value."""
    for path in objects(CompressionConfig):
        if path[-1] in DIMENSIONS:
            continue
        settings: Any = {"codec": "blockint", "bits": 4} if path[0] in DIMENSIONS else {}

        def block(value: Any, path: tuple[str, ...] = path, settings: Any = settings) -> Any:
            if len(path) == 1:
                return {"dp": "bf16", path[0]: value}
            return {path[0]: {**settings, path[1]: value}}

        error = said(block(3.5))
        assert error.key == ".".join((BLOCK, *path))
        start = error.todo.index("{")
        parse(block(json.JSONDecoder().raw_decode(error.todo[start:])[0]))
