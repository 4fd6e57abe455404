"""The block: its resolved configuration, and one-line errors that name the key."""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import pytest
import torch

from hybridcomp.codecs import BlockInt, Zfp, make_codec
from hybridcomp.config import PRESETS, describe, load_config, notes
from hybridcomp.config.policy import Traffic
from hybridcomp.errors import ConfigError
from tests.config.common import parse

BLOCKINT = {"codec": "blockint", "bits": 8}

#: block, key of the error below "compression", fragments of its message
BROKEN: list[tuple[Any, ...]] = [
    (True, "", "found true", "expected an object", "recommended"),
    ({}, "", "names no dimension", '"preset": "none" where that is meant'),
    ({"preset": "recomended"}, "preset", "did you mean 'recommended'"),
    ({"preset": 3}, "preset", "found 3", "zhybrid"),
    ({"zer": "bf16", "dp": "bf16"}, "zer", "unknown key", "did you mean 'zero'"),
    ({"Min_Bytes": 1, "dp": "bf16"}, "Min_Bytes", "did you mean 'min_bytes'"),
    ({"warp": 9, "dp": "bf16"}, "warp", "unknown key", "known keys are"),
    ({"dp": {"codec": "bf16", "offload": True}}, "dp.offload", "unknown key"),
    ({"bits": 4, "dp": "blockint"}, "bits", "belongs inside dp"),
    ({"dp": None}, "dp", "found null", '"none"'),
    ({"dp": 4}, "dp", "found 4", "expected a codec name"),
    ({"dp": {"bits": 4}}, "dp.codec", "found nothing", "blockint"),
    ({"dp": {"codec": 4}}, "dp.codec", "found 4", "expected a string"),
    ({"dp": "blokint"}, "dp.codec", "did you mean 'blockint'"),
    ({"dp": "radix"}, "dp.error_bound", "found nothing", "radix needs error_bound"),
    ({"dp": "auto"}, "dp.error_bound", "found nothing", "auto needs error_bound"),
    ({"dp": {"error_bound": 1}}, "dp.error_bound", "found 1.0;", "below 1"),
    ({"dp": {"error_bound": 0.0}}, "dp.error_bound", "found 0.0", "greater than 0"),
    ({"dp": {"error_bound": float("inf")}}, "dp.error_bound", "a finite number"),
    ({"dp": {"codec": "expcode", "error_bound": 0.01}}, "dp.error_bound", "never used",
     "expcode is lossless"),
    ({"dp": {**BLOCKINT, "segment": 64}}, "dp.segment", "only with error_bound"),
    ({"dp": {**BLOCKINT, "error_bound_mode": "abs"}}, "dp.error_bound_mode",
     "only with error_bound"),
    ({"dp": {"error_bound": 0.01, "segment": 100}}, "dp.segment", "found 100",
     "multiple of 16 from 64 to 4096"),
    ({"dp": {"codec": "blockint", "error_bound": 0.1, "segment": 512}}, "dp.segment",
     "multiple of 1024 for blockint"),
    ({"dp": {"error_bound": 0.01, "bits": 8}}, "dp.bits", "means auto"),
    ({"gathered": {**BLOCKINT, "keep": "host"}}, "gathered.keep", "only stepcode keeps"),
    ({"dp": {"codec": "zfp", "error_bound": 0.1, "error_bound_mode": "abs"}}, "dp.error_bound_mode",
     "must be rel for zfp", "radix keeps absolute"),
    ({"dp": {"codec": "blockint", "error_bound": 0.005}}, "dp.error_bound",
     "blockint at its finest guarantees 0.00839 over the two", '"auto"'),
    ({"zero": {"codec": "blockint", "bits": 6, "error_bound": 0.01}}, "zero.error_bound",
     "blockint(bits=6) guarantees 0.0171", "blockint(bits=7)"),
    ({"pp": {"error_bound": 0.1, "backward": {"codec": "fp8", "error_bound": 0.01}}},
     "pp.backward.error_bound", "fp8 at its finest guarantees 0.0357"),
    ({"tp": {"error_bound": 0.1, "forward": "mpc", "backward": {"error_bound": 0.2}}},
     "tp.error_bound", "never used"),
    ({"dp": {"codec": "blockint", "bits": 9}}, "dp.bits", "found 9", "from 2 to 8"),
    ({"dp": {"codec": "blockint", "bits": 4.5}}, "dp.bits", "4.5", "an integer"),
    ({"tp": "powersgd"}, "tp.codec", "only dp can have it", "blockint"),
    ({"tp": {**BLOCKINT, "rank": 4}}, "tp.rank", "only dp can have rank"),
    ({"dp": {"codec": "powersgd", "rank": 0}}, "dp.rank", "found 0", "from 1 up"),
    ({"dp": {"codec": "powersgd", "error_feedback": False}}, "dp.error_feedback", "found false",
     "does not converge"),
    ({"dp": {"codec": "powersgd", "error_bound": 0.01}}, "dp.error_bound",
     "powersgd bounds no error", "radix"),
    ({"dp": "powersgd", "hierarchy": 2}, "hierarchy", "in one level", "remove it"),
    ({"tp": {"codec": "blockint", "bits": 5, "rotate": True}}, "tp.rotate", "found true",
     "4 bits and fewer"),
    ({"tp": {"codec": "blockint", "bits": 4, "rotate": True, "error_bound": 0.5}}, "tp.rotate",
     "keeps no bound", "error_bound"),
    ({"tp": {"codec": "blockint", "levels": "gaussian"}}, "tp.levels", '"gaussian"',
     "for 4 bits and not 8"),
    ({"dp": {"codec": "blockint", "bits": 4, "levels": "gaussian", "rounding": "random"}},
     "dp.rounding", '"random"', "evenly spaced"),
    ({"dp": {**BLOCKINT, "bits": 4, "rounding": "random", "error_feedback": {"bits": 8}}},
     "dp.error_feedback", "leaves nothing out in the mean", "remove it"),
    ({"zero": {**BLOCKINT, "bits": 4, "rounding": "random", "delta": True}}, "zero.delta",
     "leaves nothing out in the mean", "remove it"),
    ({"dp": {"codec": "zfp", "bits": 8}}, "dp.bits", "takes rate", "remove bits"),
    ({"dp": {"codec": "zfp", "rate": 2}}, "dp.rate", "found 2", "from 2.5 to 32"),
    ({"tp": {"codec": "fp8", "format": "e3m4"}}, "tp.format", "'e4m3' or 'e5m2'"),
    ({"pp": {"codec": "mpc", "dim": 0}}, "pp.dim", "from 1 to 32"),
    ({"pp": {"codec": "none", "dim": 1}}, "pp.dim", "none has no settings"),
    ({"zero": {**BLOCKINT, "error_feedback": True}}, "zero.error_feedback",
     "only dp, sync can have error_feedback"),
    ({"dp": {**BLOCKINT, "delta": True}}, "dp.delta", "only zero can have delta"),
    ({"zero": {"codec": "none", "delta": True}}, "zero.delta", "none sends exact parameters"),
    ({"zero": {"codec": "zfp", "rate": 4, "delta": True}}, "zero.delta",
     "diverges with zfp below rate 6"),
    ({"zero": {**BLOCKINT, "resync_every": 5}}, "zero.resync_every", "found 5", "add delta"),
    ({"zero": {"codec": "stepcode", "delta": False}}, "zero.delta", "found false",
     "stepcode always sends what changed", "remove it"),
    ({"dp": "stepcode"}, "dp.codec", "only zero can have it"),
    ({"zero": {"secondary": {"bits": 4}}}, "zero.secondary", 'found {"bits": 4}',
     'expected "exact", "native" or {"bits": 8}'),
    ({"zero": {"secondary": "int8"}}, "zero.secondary", 'expected "exact"'),
    ({"zero": {"secondary": "exact", "codec": "blockint"}}, "zero.codec", 'found "blockint"',
     "sent by expcode and steps by stepcode", "remove the codec"),
    ({"zero": {"secondary": {"bits": 8}, "bits": 4, "codec": "blockint"}}, "zero.codec",
     "sent by blockint", "remove the codec"),
    ({"zero": {"secondary": "exact", "delta": True}}, "zero.delta", "remove it"),
    ({"dp": {"codec": "blockint", "secondary": "exact"}}, "dp.secondary"),
    ({"zero": {"frozen": "disk"}}, "zero.frozen", '"device", "host" or an object'),
    ({"zero": {"frozen": {"bits": 5}}}, "zero.frozen", "4 or 8"),
    ({"tp": {"codec": "expcode", "backward": {"codec": "stepcode"}}}, "tp.backward.codec",
     "only zero can have it"),
    ({"zero": {**BLOCKINT, "delta": True, "resync_every": -1}}, "zero.resync_every", "found -1"),
    ({"tp": {**BLOCKINT, "scatter_gather": True}}, "tp.scatter_gather",
     "only pp can have scatter_gather"),
    ({"dp": "bf16", "ledger": {"every": 0}}, "ledger.every", "found 0"),
    ({"dp": {"codec": "mpc", "error_feedback": True}}, "dp.error_feedback", "leaves nothing out"),
    ({"dp": {"codec": "none", "error_feedback": True}}, "dp.error_feedback", "leaves nothing out"),
    ({"dp": {"codec": "zfp", "rate": 4, "error_feedback": True}}, "dp.error_feedback",
     "diverges with zfp below rate 6", "the rate is 4"),
    ({"dp": {**BLOCKINT, "error_feedback": 1}}, "dp.error_feedback", "true or false"),
    ({"dp": {"codec": "none", "accumulate": "node"}}, "dp.accumulate", "expcode"),
    ({"dp": {"codec": "powersgd", "accumulate": "node"}}, "dp.accumulate", "in one level"),
    ({"dp": {**BLOCKINT, "accumulate": "rank"}}, "dp.accumulate", "'node'"),
    *(({"dp": {**BLOCKINT, "accumulate": "node"}, "hierarchy": hierarchy}, "hierarchy",
       "nodes of several ranks", "remove dp.accumulate") for hierarchy in ("none", 1)),
    ({"dp": {**BLOCKINT, "backward": "none"}}, "dp.backward", "only tp, pp, ep, cp"),
    ({"tp": {**BLOCKINT, "backward": {"bits": 9}}}, "tp.backward.bits", "found 9"),
    ({"tp": {**BLOCKINT, "backward": "zpf"}}, "tp.backward.codec", "'zfp'"),
    ({"tp": {"backward": "bf16"}}, "tp.codec", "found nothing"),
    ({"tp": {**BLOCKINT, "forward": "bf16", "backward": "mpc"}}, "tp.codec", "never used",
     "forward and backward both"),
    ({"dp": "bf16", "min_bytes": -1}, "min_bytes", "found -1", "equal to 0"),
    ({"dp": "bf16", "start_step": 1.5}, "start_step", "expected an integer"),
    ({"dp": {**BLOCKINT, "bits": 4, "ramp": {"from": 3, "steps": 9}}}, "dp.ramp.from",
     "above bits, which is 4"),
    ({"dp": {"error_bound": 1e-3, "ramp": {"from": 1e-2, "steps": 9}}}, "dp.ramp.from",
     "below error_bound"),
    ({"dp": {**BLOCKINT, "bits": 4, "ramp": {"from": 9, "steps": 9}}}, "dp.ramp.from", "found 9",
     "bits 9"),
    ({"dp": {**BLOCKINT, "bits": 4, "ramp": {"from": 5.5, "steps": 9}}}, "dp.ramp.from",
     "bits are whole"),
    ({"pp": {"codec": "mpc", "ramp": {"from": 8, "steps": 9}}}, "pp.ramp", "none of"),
    ({"dp": {**BLOCKINT, "ramp": {"from": 8, "stps": 9}}}, "dp.ramp.steps", "required"),
    ({"dp": {"codec": "none", "when": "auto"}}, "dp.when", "none is native"),
    ({"dp": {"codec": "powersgd", "when": "auto"}}, "dp.when", "not measured"),
    ({"zero": {"codec": "bf16", "when": "fast"}}, "zero.when", "'auto'"),
    ({"pp": {"codec": "none", "when": "auto"}}, "pp.when", "none is native"),
    ({"dp": "bf16", "remember": False}, "remember", "no dimension has it"),
    ({"preset": "recommended", "remember": "x"}, "remember", "true or false"),
    ({"ep": "bf16", "when": "auto"}, "when", "dp, zero, tp, pp can be measured"),
    ({"offload": {"codec": "none", "when": "auto"}}, "offload.when", "none is native"),
    ({"offload": {"codec": "bf16", "backward": "none", "sums": "host"}}, "offload.sums",
     "as DeepSpeed does"),
    ({"ep": {"codec": "bf16", "when": "auto"}}, "ep.when", "dp, zero, tp, pp, offload can"),
    ({"dp": "bf16", "hierarchy": "nodes"}, "hierarchy", '"auto", "none" or the'),
    ({"dp": "bf16", "hierarchy": 0}, "hierarchy", "found 0"),
    ({"pp": "bf16", "hierarchy": 2}, "hierarchy", "only dp and zero"),
    *(({"dp": "bf16", "hierarchy": hierarchy}, "hierarchy", "found [", "such as [8, 4]")
      for hierarchy in ([8], [8, 1], [8, True], [2, 2.0], ["auto", [2]])),
    ({"dp": "bf16", "on_unsupported": "warn"}, "on_unsupported", "'native'"),
    ({"dp": "bf16", "ledger": None}, "ledger", "found null", "expected an object"),
    ({"dp": "bf16", "ledger": {"json": "a"}}, "ledger.json", "'jsonl'"),
    ({"dp": "bf16", "ledger": {"jsonl": ""}}, "ledger.jsonl", "not empty"),
    ({"dp": "bf16", "ledger": {"sample_every": -1}}, "ledger.sample_every", "-1"),
    ({"preset": "zhybrid", "dp": {"bits": 4}}, "dp.bits", "zfp takes rate"),
]  # fmt: skip


@pytest.mark.parametrize("row", BROKEN, ids=lambda row: str(row[:2])[:50])
def test_broken_block(row: tuple[Any, ...]) -> None:
    block, below, *fragments = row
    key = f"compression.{below}".removesuffix(".")
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 8, "compression": block})
    message = str(caught.value)
    assert message.startswith(f"{key}: found ")
    assert caught.value.key == key
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_several_errors_name_every_key() -> None:
    block = {"dp": "rdx", "tp": {"codec": "blockint", "bits": 9}, "min_bytes": -1}
    with pytest.raises(ConfigError) as caught:
        parse(block)
    assert caught.value.key == "compression.dp.codec"
    assert "(also wrong: compression.tp.bits, compression.min_bytes)" in str(caught.value)


def test_long_values_are_cut_and_errors_travel() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"dp": list(range(1000))})
    assert len(str(caught.value)) < 250
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_shorthand_is_the_object() -> None:
    short = parse({"dp": "none", "pp": "mpc", "tp": {**BLOCKINT, "backward": "bf16"}})
    long = parse(
        {
            "tp": {"bits": 8, "codec": "blockint", "backward": {"codec": "bf16"}},
            "pp": {"codec": "mpc", "dim": 1},
        }
    )
    assert short.digest() == long.digest()
    assert short.policy().codecs == long.policy().codecs
    assert short.explicit == {"dp", "pp", "tp"}
    assert long.explicit == {"pp", "tp"}


def test_digest_tells_blocks_apart_and_ignores_what_is_local() -> None:
    blocks: list[dict[str, Any]] = [
        {"dp": {"codec": "blockint", "bits": 4}},
        {"dp": {"codec": "blockint", "bits": 5}},
        {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}},
        {"dp": {"codec": "blockint", "bits": 4}, "min_bytes": 1},
        {"dp": {"codec": "blockint", "bits": 4}, "start_step": 1},
        {"dp": {"codec": "blockint", "bits": 4}, "tp": {**BLOCKINT, "backward": {"bits": 7}}},
    ]
    digests = [parse(block).digest() for block in blocks]
    assert len(set(digests)) == len(blocks)
    assert all(len(digest) == 64 for digest in digests)
    local = {**blocks[0], "ledger": {"jsonl": "runs/x.jsonl"}}
    assert parse(local).digest() == digests[0]
    assert parse({"preset": "naive-zfp"}).digest() == parse(dict(PRESETS["naive-zfp"])).digest()


def test_policy_resolves_directions_sizes_and_steps() -> None:
    config = parse(
        {
            "dp": {"codec": "blockint", "bits": 4},
            "pp": {"forward": "bf16", "backward": {"codec": "zfp", "rate": 8}},
            "tp": {**BLOCKINT, "forward": "none"},
            "min_bytes": 4096,
            "start_step": 5,
        }
    )
    policy = config.policy()

    def choose(dimension: Any, direction: Any = "forward", numel: int = 1024, step: int = 5) -> Any:
        return policy.choose(Traffic(dimension, direction, torch.float32, numel, 2, step))

    assert choose("dp") == BlockInt(4)
    assert choose("dp", numel=1023) is None
    assert choose("dp", step=4) is None
    assert choose("pp") == make_codec("bf16")
    assert choose("pp", "backward") == Zfp(8)
    assert choose("tp") is None
    assert choose("tp", "backward") == BlockInt(8)
    assert choose("zero") is None
    assert config.active("tp")
    assert not config.active("zero")


def test_flat_names_every_dimension() -> None:
    flat = parse({"dp": {"codec": "blockint", "bits": 4}}).flat()
    assert flat["compression.dp.forward"] == "blockint(bits=4)"
    assert flat["compression.pp.backward"] == "none"
    assert "compression.dp.backward" not in flat
    json.dumps(flat)


#: block -> a key of ``flat`` that differs from the block beside it, and the line of ``describe``
AGREED: list[tuple[dict[str, Any], dict[str, Any], str, Any, str]] = [
    ({"dp": "powersgd"}, {"dp": "none"}, "dp.error_feedback", True, "dp .*no bound on the error"),
    (
        {"tp": {**BLOCKINT, "bits": 4, "rotate": True, "levels": "gaussian"}}, {"tp": BLOCKINT},
        "tp.backward", "blockint(bits=4, rotate=True, levels=gaussian)", "tp ",
    ),
    (
        {"pp": {"codec": "none", "scatter_gather": True}}, {"pp": "none"},
        "pp.scatter_gather", True, "native .*pp, cut among tensor ranks",
    ),
    (
        {"preset": "recommended", "zero": {"delta": True, "resync_every": 100}},
        {"preset": "recommended"}, "zero.resync_every", 100,
        "zero .*blockint.*, of what changed, exact every 100 steps$",
    ),
    (
        {"dp": {"codec": "expcode", "accumulate": "node"}, "hierarchy": 2},
        {"dp": {"codec": "expcode", "accumulate": "native"}, "hierarchy": 2},
        "dp.accumulate", "node", "dp .*micro-batches summed in the node",
    ),
    (
        {"dp": "powersgd", "zero": BLOCKINT, "hierarchy": 2}, {"dp": "powersgd", "zero": BLOCKINT},
        "hierarchy", 2, "nodes .*every 2 consecutive ranks",
    ),
    ({"dp": "bf16", "ledger": {"every": 3}}, {"dp": "bf16"}, "ledger.every", 3, "dp "),
    (
        {"memory": {"policy": "planned", "device_gb": 40}}, {"memory": {"policy": "planned"}},
        "memory.device_gb", 40, "native ",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("block", "other", "key", "value", "line"), AGREED)
def test_ranks_agree_on(block: Any, other: Any, key: str, value: Any, line: str) -> None:
    config, beside = parse(block), parse(other)
    assert config.flat()[f"compression.{key}"] == value != beside.flat().get(f"compression.{key}")
    assert config.digest() != beside.digest()
    assert [text for text in describe(config) if re.match(line, text)]


def test_states_of_offload_are_apart_from_copies() -> None:
    """They never use the dimension's codec, which may be lossy, and ranks agree on them."""
    codecs = parse({"offload": "blockint"}).codecs()
    assert codecs["offload", "forward"] == codecs["offload", "backward"] == BlockInt(8)
    assert codecs["offload", "states"] is None
    alone = parse({"offload": {"states": "expcode"}})
    named = {way: codec for (name, way), codec in alone.codecs().items() if name == "offload"}
    assert named["forward"] is named["backward"] is None and named["states"] is not None
    assert alone.digest() != parse({"offload": {"states": "mpc"}}).digest()
    with pytest.raises(ConfigError, match="states: found .*kept without loss: expcode or mpc"):
        parse({"offload": {"states": "blockint"}})
    with pytest.raises(ConfigError, match="never used: forward and backward both name"):
        parse({"offload": {"codec": "bf16", "forward": "mpc", "backward": "mpc", "states": "mpc"}})


def test_memory_is_planned_by_its_own_key() -> None:
    """Needs no dimension; sizes need the policy."""
    assert parse({"memory": {"policy": "planned", "device_gb": 40}}).memory.planned
    with pytest.raises(ConfigError, match='only "policy": "planned" reads it'):
        parse({"dp": "none", "memory": {"device_gb": 40}})
    with pytest.raises(ConfigError, match="device_gb"):
        parse({"memory": {"policy": "planned", "device_gb": 0}})


def test_when() -> None:
    assert parse({"dp": "bf16"}).measured() == ()
    config = parse({"preset": "recommended", "when": "always", "zero": {"when": "auto"}})
    assert config.measured() == ("zero",) and config.zero.codec == "blockint"
    assert config.flat()["compression.zero.when"] == "auto"
    assert config.flat()["compression.dp.when"] == "always"
    assert "measured      zero: native where that is faster, timed at start-up" in describe(config)
    config = parse({"pp": {"codec": "none", "backward": "bf16", "when": "auto"}, "tp": "bf16"})
    assert config.measured() == ("pp",)
    lines = [line for line in describe(config) if line.startswith("measured")]
    assert lines == ["measured      pp: native where that is faster, timed after the first step"]
    config = parse({"offload": {"codec": "bf16", "when": "auto", "sums": "host"}})
    assert config.measured() == () and config.flat()["compression.offload.sums"] == "host"
    lines = [line for line in describe(config) if line.startswith("measured")]
    assert lines == ["measured      offload: native where that is faster, timed in real steps"]


def test_when_of_the_whole_block() -> None:
    """The preset measures; explicit dimensions do not; a dimension's own key wins."""
    preset = parse({"preset": "recommended", "tp": "none", "zero": {"when": "always"}})
    assert preset.measured() == ("dp", "pp") and not preset.insists("dp")
    assert preset.flat()["compression.pp.when"] == "auto"
    assert parse({"preset": "recommended", "dp": {"codec": "powersgd"}}).measured() == (
        "zero", "tp", "pp",
    )  # fmt: skip
    assert parse({"preset": "zhybrid"}).measured() == ()
    assert parse({"preset": "recommended", "when": "always"}).measured() == ()
    assert "compression.remember" not in preset.flat()
    forgets = parse({"preset": "recommended", "remember": False})
    assert forgets.flat()["compression.remember"] is False
    asked = parse({"dp": "bf16", "ep": "bf16", "pp": {"codec": "bf16", "when": "always"},
                   "when": "auto"})  # fmt: skip
    assert asked.measured() == ("dp",) and asked.insists("dp") and not asked.insists("pp")


def test_hierarchy() -> None:
    assert parse({"dp": "bf16"}).hierarchy == "auto"
    nodes_of_8 = parse({"dp": "bf16", "hierarchy": 8})
    assert nodes_of_8.flat()["compression.hierarchy"] == 8
    assert any("every 8 consecutive ranks" in line for line in describe(nodes_of_8))
    assert parse({"pp": "bf16", "hierarchy": "none"}).hierarchy == "none"
    sites = parse({"dp": "bf16", "hierarchy": [8, 4]})
    assert sites.flat()["compression.hierarchy"] == [8, 4]
    assert any("nodes of 8 ranks, units of 4 nodes: native" in line for line in describe(sites))
    digests = {
        parse({"dp": "bf16", "hierarchy": each}).digest() for each in (8, [8, 4], ["auto", 4])
    }
    assert len(digests) == 3, "ranks agree on levels"


def test_frozen_weights_need_no_codec() -> None:
    for written, kept in (
        ("host", {"on": "host", "bits": None}),
        ({"bits": 4}, {"on": "device", "bits": 4}),
    ):
        config = parse({"zero": {"frozen": written}})
        assert config.active("zero") and config.codecs()["zero", "forward"] is None
        assert config.flat()["compression.zero.frozen"] == kept
        assert config.zero.remark == ", frozen ones once"
    both = parse({"preset": "recommended", "zero": {"frozen": "device"}})
    assert str(both.codecs()["zero", "forward"]) == "blockint(bits=8)"
    gathered = parse({"zero": {"codec": "expcode", "frozen": "gathered"}})
    assert gathered.digest() == parse({"zero": "expcode"}).digest()


def test_secondary_copies_have_codecs_of_their_own() -> None:
    """Preset settings that cannot take effect are dropped, and ranks agree on the kind of copy."""
    for written, spec in (("exact", "expcode()"), ({"bits": 8}, "blockint(bits=8)")):
        for preset in ({}, {"preset": "recommended"}):
            config = parse({**preset, "zero": {"secondary": written}})
            assert str(config.codecs()["zero", "forward"]) == spec
            assert ("zero" in config.measured()) == bool(preset)
            assert config.flat()["compression.zero.secondary"] == written
    native = parse({"zero": {"codec": "expcode", "secondary": "native"}})
    assert native.digest() == parse({"zero": "expcode"}).digest()
    assert "zero" in parse({"zero": {"secondary": "exact", "when": "auto"}}).measured()
    every = parse({"zero": {"secondary": "exact", "resync_every": 9}})
    assert "whole every 9 steps" in every.zero.remark


@pytest.mark.parametrize("zero", ["stepcode", {"codec": "stepcode", "delta": True}])
def test_stepcode_implies_deltas(zero: Any) -> None:
    config = parse({"zero": zero})
    assert config.zero.delta and config.zero.steps
    assert config.digest() == parse({"preset": "none", "zero": {"codec": "stepcode"}}).digest()
    assert any(
        line.startswith("zero") and line.endswith(", size varies with the values, of what changed")
        for line in describe(config)
    )
    (note,) = notes(config, torch.float32)
    assert note == "zero: stepcode does not take float32; such messages stay native"
    assert notes(config, torch.bfloat16) == []
    assert not parse({"zero": {"codec": "mpc", "delta": True}}).zero.steps
    assert not parse({"zero": {"error_bound": 0.1}}).zero.steps


def test_block_is_frozen() -> None:
    config = parse({"dp": "bf16"})
    with pytest.raises(ValueError, match="frozen"):
        config.min_bytes = 1  # type: ignore[misc]


LEVELS = [8, {"size": 4, "codec": "blockint", "bits": 8}]
ENCODED = {"dp": {"codec": "blockint", "bits": 4}}


def test_a_level_may_have_a_codec_on_which_ranks_agree() -> None:
    config = parse({**ENCODED, "hierarchy": LEVELS})
    assert config.widths == [8, 4]
    assert [codec and codec.spec for codec in config.level_codecs] == [None, "blockint(bits=8)"]
    plain = parse({**ENCODED, "hierarchy": [8, 4]})
    same = parse({**ENCODED, "hierarchy": [8, {"size": 4}]})
    assert plain.level_codecs == same.level_codecs == (None, None)
    assert plain.flat() == same.flat() != config.flat()
    levels = "nodes of 8 ranks, units of 4 nodes with blockint(bits=8): native inside but for these"
    assert any(levels in line for line in describe(config))


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"zero": "blockint", "hierarchy": LEVELS}, "only sums of dp are encoded on a level"),
        ({"dp": {"error_bound": 0.01}, "hierarchy": LEVELS}, "not in the error_bound of dp"),
        ({**ENCODED, "hierarchy": [8, {"size": 4, "error_bound": 0.1}]}, "fixed bits"),
        ({**ENCODED, "hierarchy": [8, {"codec": "blockint"}]}, "size"),
        ({**ENCODED, "hierarchy": [8, {"size": 1, "codec": "blockint"}]}, "size"),
        ({**ENCODED, "hierarchy": [8, {"size": 4, "codec": "mpc", "bits": 3}]}, "remove bits"),
    ],
    ids=str,
)
def test_codecs_of_levels_that_are_refused(block: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        parse(block)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250
    assert error.value.key.startswith("compression.hierarchy"), error.value
