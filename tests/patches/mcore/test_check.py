"""megatron-core settings that bypass the seams: every rule raises an error or a warning."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridcomp.channels import Channels, Posted
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.mcore import check as mcore_refuse
from hybridcomp.patches.mcore import ddp, pipeline, pipeline_message
from hybridcomp.patches.rules import mcore
from hybridcomp.session import process
from tests.stand_ins.process_groups import fake_group

B8 = {"codec": "blockint", "bits": 8}
SIZES = {"tp": 2, "pp": 2, "ep": 2, "cp": 2, "dp": 2, "zero": 2}


class DistributedDataParallel:
    """Stand-in for upstream's class: only its name matters."""


class FullyShardedDataParallel:
    """Another wrapper."""


TeLinear = type("TeLinear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch"})


def check(
    monkeypatch: pytest.MonkeyPatch,
    block: dict[str, Any],
    *,
    sizes: dict[str, int] | None = None,
    layer: type[torch.nn.Linear] = torch.nn.Linear,
    wrapper: type = DistributedDataParallel,
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> list[str]:
    """Check a one-layer model; return the messages."""
    said: list[str] = []
    monkeypatch.setattr(mcore_refuse, "sizes", lambda given: {**SIZES, **(sizes or {})})
    monkeypatch.setattr(mcore_refuse, "say_once", said.append)
    if layer is TeLinear and "symmetric_ar_type" in settings:
        monkeypatch.setattr(mcore_refuse, "missing", lambda package: None)
    ddp = SimpleNamespace(use_distributed_optimizer=settings.pop("distributed_optimizer", True))
    for name in ("reduce_scatter_with_fp32_accumulation", "fp8_param_gather", "fp4_param_gather"):
        setattr(ddp, name, settings.pop(name, False))
    model = torch.nn.Sequential(layer(2, 2)).to(dtype)
    config = SimpleNamespace(**settings)
    channels = Channels(CompressionConfig.parse(block))
    mcore_refuse.check(channels, wrapper(), config, ddp, model)
    if any(text.startswith("zero native: a lossy codec") for text in said):
        assert not channels["zero"].active and channels["dp"].active
    return said


ISLANDS = {"sync": {"islands": 1}}
JOBS = {"sync": {"islands": {"rendezvous": "tcp://127.0.0.1:1", "at_start": 2}}}
COUNTED: list[dict[str, Any]] = [
    {"calculate_per_token_loss": True},
    {"moe_router_enable_expert_bias": True},
    {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "num_moe_experts": 2},
    {"qk_clip": True},
]


@pytest.mark.parametrize("settings", COUNTED, ids=lambda found: next(iter(found)))
def test_islands_refuse_what_the_whole_job_counts(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"sync: found {next(iter(settings))}.*of the job there"):
        check(monkeypatch, ISLANDS, **settings)
    check(monkeypatch, JOBS, **settings)


@pytest.mark.parametrize("block", [ISLANDS, JOBS], ids=["parts", "jobs"])
def test_islands_refuse_weights_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, block: dict[str, Any]
) -> None:
    check(monkeypatch, block)
    with pytest.raises(ConfigError, match="that is not DistributedDataParallel; FSDP keeps"):
        check(monkeypatch, block, wrapper=FullyShardedDataParallel)
    with pytest.raises(ConfigError, match="num_distributed_optimizer_instances > 1"):
        check(monkeypatch, block, num_distributed_optimizer_instances=2)
    with pytest.raises(ConfigError, match='found cuda_graph_scope or cuda_graph_impl "full'):
        graphs: dict[str, Any] = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
        check(monkeypatch, block, **graphs)


BYPASSES: list[tuple[str, dict[str, Any], str]] = [
    ("tp", {"layer": TeLinear}, "Transformer Engine"),
    ("tp", {"tp_comm_overlap": True}, "tp_comm_overlap"),
    ("tp", {"cuda_graph_impl": "local"}, "layers in CUDA graphs"),
    ("tp", {"enable_cuda_graph": True}, "layers in CUDA graphs"),
    ("cp", {"layer": TeLinear}, "context parallelism"),
    ("ep", {"moe_token_dispatcher_type": "flex", "num_moe_experts": 4}, "DeepEP"),
    ("pp", {"use_ring_exchange_p2p": True}, "use_ring_exchange_p2p"),
    ("dp", {"wrapper": FullyShardedDataParallel}, "FSDP"),
    ("dp", {"cuda_graph_impl": "full_iteration"}, "full_iteration"),
    ("zero", {"fp8_param_gather": True}, "fp8_param_gather"),
    ("zero", {"fp4_param_gather": True}, "fp4_param_gather"),
    ("zero", {"fp4_param": True}, "fp4_param_gather"),
    ("tp", {"layer": TeLinear, "symmetric_ar_type": "two_shot"}, "symmetric_ar_type"),
    (
        "zero", {"use_layer_wise_distributed_optimizer": True},
        "use_layer_wise_distributed_optimizer",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dimension", "job", "words"), BYPASSES)
def test_bypass_errors_or_is_said(
    monkeypatch: pytest.MonkeyPatch, dimension: str, job: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check(monkeypatch, {dimension: B8}, **job)
    assert caught.value.key == f"compression.{dimension}"
    assert '"on_unsupported": "native"' in str(caught.value)
    said = check(monkeypatch, {dimension: B8, "on_unsupported": "native"}, **job)
    assert len(said) == 1
    assert words in said[0]
    assert said[0].startswith((f"{dimension} native", f"{dimension} partly native"))
    if "full_iteration" in job.values():
        return  # that graph contains every message of the step
    other = "pp" if dimension != "pp" else "dp"
    assert check(monkeypatch, {other: B8}, **{**job, "wrapper": DistributedDataParallel}) == []


def test_weights_that_are_half_of_the_masters_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather writes its decoded values into them, from which the optimizer steps."""

    def made(zero: dict[str, Any], **settings: Any) -> None:
        names = ("use_precision_aware_optimizer", "store_param_remainders", "bf16")
        config = SimpleNamespace(**{**dict.fromkeys(names, True), **settings})
        channels = Channels(CompressionConfig.parse({"zero": zero}))
        monkeypatch.setattr(ddp, "current", lambda: channels)
        init = ddp.make_chained_init(lambda self, every: setattr(self, "chained_optimizers", every))
        init(SimpleNamespace(), [SimpleNamespace(config=config)])

    monkeypatch.setattr(mcore_refuse, "sizes", lambda given: SIZES)
    with pytest.raises(ConfigError, match="a lossy codec with use_precision_aware_optimizer"):
        made(B8)
    made({"codec": "expcode"})
    made(B8, store_param_remainders=False)
    made(B8, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)


@pytest.mark.parametrize("axis", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weights_cut_over_a_further_axis_are_said_or_refused(
    monkeypatch: pytest.MonkeyPatch, axis: str
) -> None:
    cut: dict[str, Any] = {axis: 2}
    whole: dict[str, Any] = {axis: 1}
    for name in ("dp", "zero"):
        with pytest.raises(ConfigError, match="tensor_parallel_num_weight_shards") as caught:
            check(monkeypatch, {name: B8}, **cut)
        assert '"on_unsupported": "native"' in str(caught.value)
        said = check(monkeypatch, {name: B8, "on_unsupported": "native"}, **cut)
        assert len(said) == 1 and said[0].startswith(f"{name}: tensor_parallel_num_weight_shards")
        assert "native, and not in the ledger" in said[0]
        assert check(monkeypatch, {name: B8}, **whole) == []


@pytest.mark.parametrize("scope", ["full_iteration", [SimpleNamespace(name="full_iteration")]])
def test_a_graph_of_a_whole_step_reaches_every_message(
    monkeypatch: pytest.MonkeyPatch, scope: Any
) -> None:
    job: dict[str, Any] = {"cuda_graph_impl": "local", "cuda_graph_scope": scope}
    for dimension in ("dp", "pp"):
        with pytest.raises(ConfigError, match="full_iteration"):
            check(monkeypatch, {dimension: B8}, **job)


DELTAS, SINGLE = {"zero": {**B8, "delta": True}}, {"dtype": torch.float32}
REUSED, SHARDS = {"reuse_grad_buf_for_mxfp8_param_ag": True}, {"gtp_weight_remat_size": 2}
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"dp": B8}, {"reduce_scatter_with_fp32_accumulation": True}, "reduce_scatter_with_fp32"),
    ({"zero": B8}, SINGLE, "a lossy codec for fp32 parameters"),
    ({"dp": {**B8, "accumulate": "node"}}, {}, "adds up its micro-batches itself.*remove accum"),
    (DELTAS, REUSED, "gradients overwrite the gathered parameters"),
    ({"zero": "stepcode"}, REUSED, "gradients overwrite .* to take steps from"),
    ({"zero": "stepcode"}, SINGLE, "stepcode with fp32 parameters"),
    ({"dp": {**B8, "error_feedback": True}}, SHARDS, "tensor_parallel_num_weight_shards"),
    ({"dp": {"codec": "powersgd", "rank": 2}}, SHARDS, "tensor_parallel_num_weight_shards"),
    (ISLANDS, SHARDS, "tensor_parallel_num_weight_shards"),
]
ACTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DELTAS, {}), ({"zero": B8}, REUSED), ({"zero": "stepcode"}, {}), ({"zero": "mpc"}, SINGLE),
    # sums in symmetric memory: of layers of Transformer Engine, and no reduce-scatters
    ({"tp": B8}, {"symmetric_ar_type": "two_shot"}),
    ({"tp": B8}, {"symmetric_ar_type": "two_shot", "layer": TeLinear, "sequence_parallel": True}),
    ({"dp": B8}, {"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"}),
]  # fmt: skip


@pytest.mark.parametrize(("block", "job", "words"), REFUSALS, ids=str)
def test_refused_whatever_the_block_says(
    monkeypatch: pytest.MonkeyPatch, block: dict[str, Any], job: dict[str, Any], words: str
) -> None:
    for behaviour in ("error", "native"):
        with pytest.raises(ConfigError, match=words):
            check(monkeypatch, {**block, "on_unsupported": behaviour}, **job)


@pytest.mark.parametrize(("block", "job"), ACTS, ids=str)
def test_settings_that_act(
    monkeypatch: pytest.MonkeyPatch, block: dict[str, Any], job: dict[str, Any]
) -> None:
    assert check(monkeypatch, block, **job) == []


@pytest.mark.parametrize("dimension", SIZES)
def test_absent_dimensions_are_errors_only_when_written(
    monkeypatch: pytest.MonkeyPatch, dimension: str
) -> None:
    with pytest.raises(ConfigError, match="one rank in each"):
        check(monkeypatch, {dimension: B8}, sizes={dimension: 1})
    assert check(monkeypatch, {"preset": "recommended"}, sizes={dimension: 1}) == []


SHARED = {"pp": {**B8, "scatter_gather": True}}


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"sizes": {"tp": 1}}, "nobody shares"),
        ({"sizes": {"pp": 1}}, "nothing is sent"),
        ({"sequence_parallel": True}, "a part of its own"),
    ],
)
def test_scatter_gather_needs_ranks_that_hold_the_same(
    monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], words: str
) -> None:
    assert check(monkeypatch, SHARED) == []
    with pytest.raises(ConfigError, match=words) as caught:
        check(monkeypatch, SHARED, **job)
    assert caught.value.key == "compression.pp.scatter_gather"
    if "pp" not in job.get("sizes", {}):
        said = check(monkeypatch, {**SHARED, "on_unsupported": "native"}, **job)
        assert len(said) == 1 and words in said[0]


def test_scatter_gather_needs_groups_that_are_known() -> None:
    job = mcore.MegatronJob(SimpleNamespace(), None, "DistributedDataParallel", {})
    assert job.size("tp") > 1, "unknown groups make no dimension absent"
    with pytest.raises(ConfigError, match="parallel_state"):
        mcore.scatter_gather(CompressionConfig.parse(SHARED), job)


def test_lengths_that_scatter_gather_cannot_cut_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With variable lengths a line for each would fill the log."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True, get_tensor_model_parallel_group=fake_group
    )
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(parallel_state=state))
    channels = Channels(CompressionConfig.parse({**SHARED, "min_bytes": 0}))
    process.configure(None)
    for numel in (3, 5, 7):
        config = SimpleNamespace(sequence_parallel=False)
        assert pipeline_message._tensor_group(channels, torch.ones(numel), config) is None
    assert capsys.readouterr().out.count("scatter_gather") == 1


def test_zero_needs_the_distributed_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="use_distributed_optimizer"):
        check(monkeypatch, {"zero": B8}, distributed_optimizer=False)


def test_two_interleaved_stages_need_single_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match="batch_p2p_comm"):
        pipeline._refuse_two_stages(config, None)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 4)
    pipeline._refuse_two_stages(config, None)


def link_of(block: CompressionConfig) -> Posted | None:
    """Return how four values travel to another stage."""
    group = fake_group()
    return pipeline_message.post(Channels(block), torch.ones(4), group, "forward", None, (0, 1))


def test_variable_size_on_the_pipeline_needs_gloo(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(ConfigError, match="size varies"):
        link_of(CompressionConfig.parse({"pp": "mpc", "min_bytes": 0}))
    native = CompressionConfig.parse({"pp": "mpc", "min_bytes": 0, "on_unsupported": "native"})
    process.configure(None)
    for _ in range(2):
        assert link_of(native) is None
    assert capsys.readouterr().out.count("pp native") == 1
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: "cpu:gloo")
    assert link_of(native) is not None


def test_a_preset_stops_no_job_in_fp32_that_may_stay_native(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = {"preset": "recommended", "on_unsupported": "native"}
    said = check(monkeypatch, block, dtype=torch.float32)
    told = [text for text in said if text.startswith("zero native: a lossy codec for fp32")]
    assert len(told) == 1 and told[0].endswith("the preset chose that codec")
    for other in ({"preset": "recommended"}, {**block, "zero": {"codec": "blockint", "bits": 8}}):
        with pytest.raises(ConfigError, match="compression.zero: found a lossy codec for fp32"):
            check(monkeypatch, other, dtype=torch.float32)
