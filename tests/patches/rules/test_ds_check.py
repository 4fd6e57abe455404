"""The block beside the rest of a ds_config: keys without effect raise errors or warnings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.config import PRESETS, CompressionConfig, load_config
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.ds_check import TABLES, check
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from tests.paths import CONFIGS

FILES = sorted(CONFIGS.glob("ds_*.json"))


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def offload(stage: int = 2, **keys: Any) -> dict[str, Any]:
    return zero(stage, offload_optimizer={"device": "cpu", **keys})


def auto_ep(**keys: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": 2, **keys}}


def compiled(name: str) -> dict[str, Any]:
    return {"compile": {"deepcompile": True, "passes": [name]}}


#: dimension, ds_config, facts about the job, fragment of the message; a row for every rule
CANNOT: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dp", zero(2), {"pipeline": True}, "a PipelineModule with ZeRO stage 2 or 3"),
    ("embed", zero(1), {"tables": False}, "no rows of tables are sent"),
    ("embed", zero(1), {"sparse": True}, "sparse gradients at stage 0 only"),
    ("zero", zero(3, zero_quantized_weights=True), {}, "quantizes the same gathers"),
    ("zero", zero(3, zero_quantized_nontrainable_weights=True), {}, "scales must arrive exactly"),
    ("zero", zero(2, zenflow={"topk_ratio": 0.1}), {}, "ZenFlow copies parameters"),
    ("dp", zero(3, zenflow={"topk_ratio": 0.1}), {}, "remove zenflow"),
    ("zero", zero(3, mics_shard_size=2), {}, "MiCS"),
    ("dp", {**zero(1), "compile": {"deepcompile": True}}, {}, "reduces gradients in C++"),
    ("zero", {**zero(3), "compile": {"deepcompile": True}}, {}, "gathers parameters in C++"),
    ("dp", zero(1, reduce_scatter=False), {}, "all-reduces whole buckets"),
    ("dp", zero(2, reduce_scatter=False), {}, "remove reduce_scatter"),
    ("dp", zero(3, reduce_scatter=False), {}, "remove reduce_scatter"),
    ("dp", zero(2, use_multi_rank_bucket_allreduce=False), {}, "one rank after the other"),
    ("dp", zero(1, contiguous_gradients=False), {}, "without buckets"),
    (  # with a host optimizer DeepSpeed makes no BF16_Optimizer
        "dp",
        {
            **zero(1, reduce_scatter=False, offload_optimizer={"device": "cpu"}),
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        {},
        "all-reduces whole buckets",
    ),
    ("dp", zero(3, zero_quantized_gradients=True), {}, "quantizes the same gradients"),
    ("dp", {"optimizer": {"type": "OneBitAdam"}}, {}, "a 1-bit optimizer"),
    ("zero", zero(3, stage3_use_all_reduce_for_fetch_params=True), {}, "by all-reduce"),
    ("zero", zero(3, use_all_reduce_for_fetch_params=True), {}, "by all-reduce"),
    ("ep", auto_ep(comm_backend="deepep"), {}, "DeepEP moves tokens itself"),
    ("zero", {}, {}, "ZeRO stage 0"),
    ("zero", {"bf16": {"enabled": True}}, {"pipeline": False}, "no parameters are gathered"),
    ("pp", {}, {"pipeline": False}, "build the model as a PipelineModule"),
    ("ep", {}, {"moe": False}, "a model without MoE layers"),
    ("tp", compiled("autotp"), {}, "reduces activations in operators of its own"),
    ("cp", compiled("autosp"), {}, "exchanges heads in operators of its own"),
    ("tp", {}, {"tensor": False}, "set tensor_parallel.autotp_size"),
    ("cp", {}, {"sequence": False}, "use DeepSpeed Ulysses"),
    ("tp2d", {}, {"mesh": False}, "build the model of them"),
    ("dp", {"tensor_parallel": {"autotp_size": 2}}, {"world_size": 2}, "one tensor-parallel group"),
    ("offload", zero(2), {}, "a job without optimizer offload"),
    ("offload", offload(0), {}, "nothing is copied between device and host"),
    ("offload", offload(3, device="nvme"), {}, "go on to NVMe"),
    ("offload", offload(3, super_offload=True), {}, "remove super_offload"),
    (
        "offload",
        zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        {},
        "updated parameters stay on the host",
    ),
    ("offload", {**offload(2), "compile": {"deepcompile": True}}, {}, "copies gradients in C++"),
    ("offload", zero(2, offload_optimizer={"device": "cpu"}, zenflow={}), {}, "remove zenflow"),
]
#: files of optimizer states: ds_config, error
STATES: list[tuple[dict[str, Any], str]] = [
    (offload(3), "set stage 3, the device and nvme_path"),
    (offload(2, device="nvme"), "only ZeRO 3 keeps optimizer states in files"),
    ({**offload(3, device="nvme"), "aio": {"use_gds": True}}, "past the host that encodes them"),
    (zero(3), "a job without optimizer offload"),
    (offload(3, device="nvme", super_offload=True), "remove super_offload"),
]
#: planned memory: ds_config, more keys, error
PLANNED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (zero(2), {}, "below stage 3 every copy is of one flat buffer"),
    (zero(3, zero_hpz_partition_size=2), {}, "its gathers are of two kinds"),
    (zero(3, offload_param={"device": "nvme"}), {}, "offload parameters to the cpu"),
    ({**zero(3), "compile": {"deepcompile": True}}, {}, "a schedule of its own"),
    (offload(3, super_offload=True), {}, "moves states on paths of its own"),
    (zero(3, zenflow={"topk_ratio": 0.1}), {}, "it gathers on paths of its own"),
    (zero(3), {"host_gb": 1}, "device nvme only"),
]
NOTES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dp", {}, {"world_size": 1}, "one rank"),
    ("dp", {}, {"world_size": 4, "replicas": 1}, "one replica of the model"),
    ("dp", zero(2, zero_quantized_gradients=True), {}, "ignores it below stage 3"),
    ("zero", zero(3, zero_hpz_partition_size=2), {}, "encoded twice"),
    ("dp", {"sparse_gradients": True}, {}, "indices and values"),
    ("dp", {**zero(2), "optimizer": {"type": "Muon"}}, {}, "muon"),
    ("zero", {**zero(3), "hybrid_engine": {"enabled": True}}, {}, "for generation"),
]


def block(**settings: Any) -> CompressionConfig:
    return CompressionConfig.parse(settings)


@pytest.mark.parametrize(("ds_json", "fragment"), STATES, ids=str)
def test_states_that_are_not_in_files(ds_json: Mapping[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        check(block(offload={"states": "expcode"}), ds_json)


def test_states_in_files() -> None:
    ds_json = offload(3, device="nvme", ratio=0.5)
    assert check(block(offload={"states": "mpc"}), ds_json) == []


@pytest.mark.parametrize(
    ("settings", "is_enough"),
    [
        ({}, True),
        ({"pipeline_read": True}, False),
        ({"pipeline_write": True, "buffer_count": 8}, True),
        ({"pipeline_read": True, "pipeline_write": True, "buffer_count": 11}, False),
        ({"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}, True),
    ],
)
def test_buffers_of_the_swapper(settings: dict[str, Any], is_enough: bool) -> None:
    said = check(block(offload={"states": "mpc"}), offload(3, device="nvme", **settings))
    assert bool(said) != is_enough
    assert all("set 8 for one of them, 12 for both" in line for line in said)


@pytest.mark.parametrize(("ds_json", "more", "fragment"), PLANNED, ids=str)
def test_memory_that_cannot_be_planned(
    ds_json: Mapping[str, Any], more: dict[str, Any], fragment: str
) -> None:
    planned = block(memory={"policy": "planned", "device_gb": 1, **more})
    with pytest.raises(ConfigError, match=fragment):
        check(planned, ds_json)


@pytest.mark.parametrize(("dimension", "ds_json", "facts", "fragment"), CANNOT, ids=str)
def test_key_that_cannot_act(
    dimension: str, ds_json: Mapping[str, Any], facts: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(block(**{dimension: "blockint"}), ds_json, **facts)
    message = str(caught.value)
    assert caught.value.key == f"compression.{dimension}" and fragment in message
    assert f'set "{dimension}": "none"' in message and "\n" not in message
    assert check(block(**{dimension: "none"}), ds_json, **facts) == []
    lenient = block(**{dimension: "blockint"}, on_unsupported="native")
    job = DeepSpeedJob(ds_json, **facts)
    rules = [rule for rule in TABLES if rule.settings(lenient) and rule.applies(job)]
    try:
        sentences = check(lenient, ds_json, **facts)
    except ConfigError as error:
        assert "on_unsupported" not in str(error), "what does not help must not be offered"
        assert any(rule.verdict == "refuse" for rule in rules)
    else:
        partly = f"{dimension} partly native: "
        assert any(text.startswith((f"{dimension} native: ", partly)) for text in sentences)
        encoded = {name for (name, _), codec in lenient.codecs().items() if codec}
        assert dimension in encoded | lenient.kept_native


BF16 = {"bf16": {"enabled": True}}
#: hpZ's copies: ds_config, facts about the job, fragment of the message
NO_COPIES: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({}, {}, "below ZeRO stage 3.*nodes need no copy"),
    (zero(2), {}, "below ZeRO stage 3.*stepcode"),
    (zero(3, zero_hpz_partition_size=4), {"world_size": 4}, "nothing crosses between nodes"),
    (zero(3, offload_param={"device": "nvme"}), {}, "on a disk.*to the cpu"),
    ({**zero(3), "sequence_parallel_size": 2}, {}, "consecutive ranks.*remove secondary"),
    ({**zero(3), **auto_ep()}, {}, "consecutive ranks"),
    ({**zero(3), "bf16": {"enabled": False}}, {}, "steps are those of bf16 and fp16"),
    (zero(3, mics_shard_size=2), {}, "MiCS"),
    (zero(3, zero_quantized_weights=True), {}, "quantizes the same gathers"),
)
DELTAS, STEPS = {"zero": {"codec": "blockint", "delta": True}}, {"zero": "stepcode"}
FROZEN, LOW_RANK = {"zero": {"frozen": "device"}}, {"dp": {"codec": "powersgd", "rank": 4}}
NODE, COPIES = {"dp": {"codec": "expcode", "accumulate": "node"}}, {"zero": {"secondary": "exact"}}
FOUR = {"gradient_accumulation_steps": 4}
#: settings of the block, ds_config, facts about the job, fragment of the message
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (DELTAS, zero(3), {}, "parameters are released after use.*remove delta"),
    (STEPS, {**zero(3), **BF16}, {}, "stepcode with ZeRO stage 3.*released.*or expcode"),
    (STEPS, zero(1), {}, "fp32 parameters.*bf16 or fp16.*mpc"),
    (STEPS, {**zero(2), "fp16": {"enabled": False}}, {}, "fp32 parameters.*bf16 or fp16.*mpc"),
    *((FROZEN, zero(n), {}, "below ZeRO stage 3.*never gathered; remove frozen") for n in range(3)),
    *((NODE, {**zero(n), **FOUR}, {}, "below ZeRO stage 2.*once a step.*remove accumulate")
      for n in range(2)),
    (LOW_RANK, zero(3), {}, "a piece of a matrix.*stage 0, 1 or 2"),
    *((COPIES, {**BF16, **ds_json}, facts, said) for ds_json, facts, said in NO_COPIES),
    ({"zero": {"secondary": {"bits": 8}}}, {**BF16, **zero(2)}, {}, "below ZeRO stage 3.*stepcode"),
]  # fmt: skip
ACTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DELTAS, zero(1)), (DELTAS, zero(2)), ({"zero": "blockint"}, zero(3)),
    (STEPS, {**zero(1), **BF16}), (STEPS, {**zero(2), "fp16": {"enabled": True}}),
    (STEPS, {**zero(2), "bf16": {"enabled": "auto"}}),
    (FROZEN, zero(3)), ({"zero": {"frozen": "gathered", "codec": "blockint"}}, zero(1)),
    (NODE, {**zero(2), **FOUR}), (NODE, {**zero(3), **FOUR}),
    (LOW_RANK, zero(0)), (LOW_RANK, zero(2)), ({"dp": "blockint"}, zero(3)),
    (COPIES, {**zero(3), **BF16}),  # the launcher knows the ranks of a node
    (COPIES, {**zero(3, zero_hpz_partition_size=2), **BF16}),
]  # fmt: skip


@pytest.mark.parametrize("policy", ["error", "native"])
@pytest.mark.parametrize(("settings", "ds_json", "facts", "fragment"), REFUSED, ids=str)
def test_refused_whatever_may_stay_native(
    settings: dict[str, Any], ds_json: dict[str, Any], facts: dict[str, Any], fragment: str,
    policy: str,
) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=fragment) as caught:
        check(block(**settings, on_unsupported=policy), ds_json, **facts)
    assert caught.value.key == f"compression.{next(iter(settings))}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("settings", "ds_json"), ACTS, ids=str)
def test_settings_that_act(settings: dict[str, Any], ds_json: dict[str, Any]) -> None:
    assert check(block(**settings), ds_json, world_size=4) == []


def test_remarks_about_settings() -> None:
    for stage in (2, 3):
        (told,) = check(block(**NODE), {**zero(stage), "gradient_accumulation_steps": 1})
        assert "one micro-batch a step" in told
    native = block(zero={"secondary": "native", "codec": "blockint"})
    assert "encoded twice" in check(native, zero(3, zero_hpz_partition_size=2))[0]


@pytest.mark.parametrize(("dimension", "ds_json", "facts", "fragment"), NOTES, ids=str)
def test_note(
    dimension: str, ds_json: Mapping[str, Any], facts: dict[str, Any], fragment: str
) -> None:
    (sentence,) = check(block(**{dimension: "blockint"}), ds_json, **facts)
    assert sentence.startswith(f"{dimension}: ")
    assert fragment in sentence
    assert check(block(**{dimension: "none"}), ds_json, **facts) == []


def test_every_rule_is_met_by_a_row() -> None:
    jobs = [DeepSpeedJob(ds_json, **facts) for _, ds_json, facts, _ in CANNOT + NOTES]
    jobs += [DeepSpeedJob(ds_json, **facts) for ds_json, facts, _ in NO_COPIES]
    jobs += [DeepSpeedJob(ds_json) for ds_json, _ in STATES]
    jobs.append(DeepSpeedJob(offload(3, device="nvme", pipeline_read=True)))
    jobs.append(DeepSpeedJob({**zero(2), "gradient_accumulation_steps": 1}))
    assert [rule.reason for rule in TABLES if not any(rule.applies(job) for job in jobs)] == []
    assert [rule.reason for rule in TABLES if all(map(rule.applies, jobs))] == []


#: settings that could seem to bypass a seam but do not
FINE: tuple[dict[str, Any], ...] = (
    offload(2),  # after average_tensor, and parameters are gathered on the device
    zero(3, offload_param={"device": "nvme"}),  # fetched to the device before _dist_allgather_fn
    offload(3, super_offload=True),  # replaces partition_grads, which comes after the reduction
    zero(3, contiguous_gradients=False),  # reduces through reduce_scatter_coalesced all the same
    zero(3, stage3_allgather_sequential=True),  # one _dist_allgather_fn for each parameter
    # BF16_Optimizer reduces through the engine, as stage 0 does
    {**zero(1, reduce_scatter=False), **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    zero(2, round_robin_gradients=True, overlap_comm=True),  # other owners, streams; the same path
    {"prescale_gradients": True},  # stage 0 scales around the sum; other stages refuse it
    {"communication_data_type": "fp32"},  # the cast comes before the seam
    # one bucket for each communication dtype, all of them values
    {**zero(2), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    # DeepCompile falls back to the torch compiler at stage 0
    {**zero(0), "compile": {"deepcompile": True}},
)


@pytest.mark.parametrize("ds_json", FINE, ids=lambda v: str(v)[:60])
def test_what_is_fine_passes(ds_json: Mapping[str, Any]) -> None:
    staged = bool(ds_json.get("zero_optimization", {}).get("stage"))
    dimensions = {"dp": "blockint", **({"zero": "blockint"} if staged else {})}
    assert check(block(**dimensions), ds_json, pipeline=False, moe=False, world_size=8) == []


def test_preset_is_silent_about_what_the_job_does_not_have() -> None:
    preset = block(preset="recommended")
    facts: dict[str, Any] = {"pipeline": False, "moe": False, "tensor": False, "sequence": False}
    assert check(preset, {}, **facts, world_size=2) == []


def test_split_layers_and_sequences_have_traffic() -> None:
    both = block(tp="blockint", cp="blockint")
    sizes = {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
    assert check(both, sizes, tensor=False, sequence=False, world_size=8) == []
    assert check(both, {}, tensor=True, sequence=True, world_size=8) == []
    assert check(both, {}) == []  # nothing is known


def test_preset_does_not_hide_a_bypass() -> None:
    with pytest.raises(ConfigError, match=r"compression\.dp"):
        check(block(preset="recommended"), zero(2, reduce_scatter=False))


def test_explicit_key_in_a_preset_is_explicit() -> None:
    with pytest.raises(ConfigError, match=r"compression\.pp: found a model that is no Pipeline"):
        check(block(preset="recommended", pp={"backward": {"bits": 4}}), {}, pipeline=False)


def test_unknown_facts_and_auto_values_raise_nothing() -> None:
    config = block(dp="blockint", zero="blockint", pp="blockint", ep="blockint")
    auto = zero(2, reduce_scatter="auto", offload_optimizer={"device": "auto"})
    assert check(config, {**auto, "bf16": {"enabled": "auto"}}) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_acts_with_an_optimizer_on_the_host(stage: int) -> None:
    for world_size in (1, 2):  # a single rank also has a device and a host
        assert check(block(offload="blockint"), offload(stage), world_size=world_size) == []
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert check(block(offload="blockint"), old) == []


def test_gradients_are_encoded_beside_parameters_on_the_host() -> None:
    both = zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    config = block(offload={"codec": "blockint", "forward": "none"})
    assert check(config, both, world_size=2) == []


@pytest.mark.parametrize(("key", "value"), [("error_feedback", True), ("delta", True), ("rank", 2)])
@pytest.mark.parametrize("dimension", ["offload", "embed"])
def test_copies_and_rows_keep_nothing(dimension: str, key: str, value: object) -> None:
    """Residuals of rows would take the whole table again, on every sender."""
    with pytest.raises(ConfigError, match=rf"only [\w, ]+ can have {key}; remove it here"):
        block(**{dimension: {"codec": "blockint", key: value}})


def test_presets_leave_the_host_alone() -> None:
    for name in PRESETS:
        assert check(block(preset=name), offload(2), pipeline=False) == []
        assert not block(preset=name).active("offload")


def test_zero_acts_at_stage_0_where_bf16_optimizer_partitions() -> None:
    ds_json = {**zero(0), "bf16": {"enabled": True}}
    assert check(block(zero="blockint"), ds_json, pipeline=True) == []


def test_bf16_optimizer_and_deepcompile_as_deepspeed_chooses_them() -> None:
    bf16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert DeepSpeedJob({**zero(1), **bf16}).bf16_optimizer
    assert not DeepSpeedJob({**offload(1), **bf16}).bf16_optimizer
    for passes, compiles in (([], True), (["autosp"], False), (["autotp"], False)):
        graph = {"compile": {"deepcompile": True, "passes": passes}}
        assert DeepSpeedJob({**zero(2), **graph}).compiled is compiles


def test_old_spellings() -> None:
    assert DeepSpeedJob({"bfloat16": {"enabled": True}}).dtype == "bf16"
    assert DeepSpeedJob({"zero_optimization": True}).stage == 1
    assert DeepSpeedJob({"zero_optimization": {"stage": 2, "cpu_offload": True}}).cpu_offload
    with pytest.raises(ConfigError, match=r'zero_optimization\.stage: found "two"'):
        check(block(zero="blockint"), zero("two"))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_committed_configuration(path: Path) -> None:
    ds_json = json.loads(path.read_text())
    config = load_config(path)
    pipeline = "pipe" in path.stem
    if path.stem.endswith("_baseline"):
        assert config is None
        return
    assert config is not None
    assert check(config, ds_json, pipeline=pipeline, moe=False, world_size=2) == []
    recipe = path.stem.split("_")[1]
    for other in CONFIGS.glob(f"ds_{recipe}_*.json"):
        settings = json.loads(other.read_text())
        assert {**ds_json, "compression": None} == {**settings, "compression": None}, other


def test_every_file_is_described() -> None:
    described = (CONFIGS / "README.md").read_text()
    present = {path.name for path in CONFIGS.glob("*.json")}
    assert len(present) >= 15
    assert [name for name in sorted(present) if f"`{name}`" not in described] == []


@pytest.mark.parametrize(
    ("pipeline", "ds_config", "facts", "text"),
    [
        ({"versions": 2}, {"fp16": {"enabled": True}}, {}, "versions: found fp16"),
        ({"versions": "stash"}, {}, {"pipeline": False}, "versions: found 'stash'; only a Pipe"),
        ({"versions": 1, "correction": "pipemare"}, zero(1), {}, "correction: found 'pipemare'"),
        (
            {"versions": 1, "correction": "spike"}, {"bf16": {"enabled": True}}, {"pipeline": True},
            "correction: found 'spike'",
        ),
    ],
)  # fmt: skip
def test_a_pipeline_without_a_flush_that_the_file_forbids(
    pipeline: dict[str, Any], ds_config: dict[str, Any], facts: dict[str, Any], text: str
) -> None:
    block = CompressionConfig.parse({"pipeline": pipeline})
    with pytest.raises(ConfigError) as caught:
        check(block, ds_config, **facts)
    assert f"compression.pipeline.{text}" in str(caught.value)
    assert check(block, {}, pipeline=True) == []
    assert check(CompressionConfig.parse({"pp": "bf16"}), {"fp16": {"enabled": True}}) == []
