"""vLLM's weight-transfer engine: two workers with packed, sharded weights, and a trainer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.errors import ConfigError, PublishError, SeamError
from hybridcomp.inference import upstream
from hybridcomp.inference.checks import refuse_configuration
from hybridcomp.inference.layout import LoaderLayout
from hybridcomp.publishing import Publisher
from hybridcomp.publishing.destinations import Folder
from hybridcomp.publishing.quantized import quantized
from tests.inference.made import SHAPES, VERSIONS, Packed, bits, step
from tests.publishing.made import Weights
from tests.publishing.test_quantized import block_fp8
from tests.ranks import run_ranks
from tests.stand_ins import vllm as stand_in_for_vllm

FACTORY = "vllm.distributed.weight_transfer.factory"


@pytest.fixture(params=["stand-in", "vllm"])
def factory(
    request: pytest.FixtureRequest,
    stand_in: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Return vLLM's factories with our engines: the stand-in's, and vLLM's if installed."""
    if request.param == "stand-in":
        stand_in(stand_in_for_vllm)
    else:
        pytest.importorskip("vllm.distributed.weight_transfer")
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    found: Any = importlib.import_module(FACTORY)
    for name in ("WeightTransferEngineFactory", "WeightTransferTrainerFactory"):
        kept = dict(getattr(found, name)._registry)
        monkeypatch.setattr(getattr(found, name), "_registry", kept)
    plugin = importlib.import_module("hybridcomp.inference.vllm_plugin")
    plugin.plugin()
    plugin.register()  # vLLM may load its plugins again
    return found


class Workers:
    """vLLM workers with their shards: a client for the trainer's engine."""

    def __init__(self, factory: Any, models: Sequence[Any], **config: Any) -> None:
        model_config = SimpleNamespace(**{"quantization": None, "dtype": torch.bfloat16, **config})
        vllm_config = SimpleNamespace(model_config=model_config, parallel_config=None)
        self.models, self.weight_version = models, ""
        self.engines = [
            factory.WeightTransferEngineFactory.create_engine(
                SimpleNamespace(backend="hybridcomp"), vllm_config, torch.device("cpu"), model
            )
            for model in models
        ]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        for engine in self.engines:
            engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for engine in self.engines:
            engine.finish_weight_update()
        self.weight_version = weight_version or ""

    def load(self, version: int) -> None:
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update(str(version))


@pytest.fixture
def reloads(factory: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record vLLM's reloads, which support vLLM's layers only."""
    worker, found = importlib.import_module("hybridcomp.inference.vllm_worker"), list[str]()
    monkeypatch.setattr(worker, "initialize_layerwise_reload", lambda _: found.append("begin"))
    monkeypatch.setattr(worker, "finalize_layerwise_reload", lambda *_: found.append("end"))
    return found


@pytest.fixture
def workers(factory: Any, reloads: list[str]) -> Workers:
    """Return two workers."""
    made = Workers(factory, [Packed(0), Packed(1)])
    for model in made.models:
        model.loaded.clear()
    made.reloads = reloads  # type: ignore[attr-defined]
    return made


def test_workers_hold_every_version_bit_by_bit(workers: Any, chain: Path) -> None:
    workers.init_weight_transfer_engine({"source": f"file://{chain}"})
    workers.load(1)
    assert workers.reloads == ["begin", "end"] * 2  # the first version is loaded as a whole
    for version in range(1, VERSIONS + 1):
        workers.load(version)  # never a newer version from the folder
        assert all(model.holds(version) for model in workers.models)
    assert workers.reloads == ["begin", "end"] * 2  # later versions in place, one with a NaN
    assert len(workers.models[0].loaded) == 2 * len(SHAPES)  # learned, then loaded whole


def test_a_version_is_prepared_beside_requests_and_then_switched_to(
    workers: Any, chain: Path
) -> None:
    workers.init_weight_transfer_engine({"source": str(chain), "wait_s": 0})
    workers.load(1)
    workers.update_weights({"version": 3, "prepare": True})
    workers.update_weights({"version": 4, "prepare": True})  # the trainer changed its mind
    for engine in workers.engines:
        engine._beside.end()
        assert engine._follower.version == 1 and engine._follower._receiver.version == 4
    assert all(model.holds(1) for model in workers.models)
    workers.load(4)
    assert all(model.holds(4) for model in workers.models)
    assert all(engine._follower.pause_s > 0 for engine in workers.engines)
    workers.update_weights({"version": 99, "prepare": True})
    with pytest.raises(PublishError, match="version 99 was not there"):
        workers.load(99)
    with torch.no_grad():  # while nothing is prepared
        workers.engines[0]._beside.end()
        workers.models[0].norm[0] = 7
    workers.update_weights({"version": VERSIONS, "prepare": True})
    with pytest.raises(PublishError, match="norm of the engine"):
        workers.load(VERSIONS)
    workers.load(VERSIONS)
    assert all(model.holds(VERSIONS) for model in workers.models)


def test_a_source_that_is_told_again(workers: Any, chain: Path) -> None:
    said = {"source": str(chain), "wait_s": 0.0}
    workers.init_weight_transfer_engine(said)
    workers.load(2)
    first = [engine._follower for engine in workers.engines]
    workers.init_weight_transfer_engine({**said, "wait_s": 1.5, "fresh": False})
    assert [engine._follower for engine in workers.engines] == first and first[0].wait_s == 1.5
    workers.init_weight_transfer_engine(said)  # by another trainer, whose chain may differ
    assert all(engine._follower.version is None for engine in workers.engines)
    workers.load(3)
    assert all(model.holds(3) for model in workers.models)


def test_a_weight_that_is_elsewhere_behind_the_load_is_found(workers: Any, chain: Path) -> None:
    workers.init_weight_transfer_engine({"source": str(chain)})
    workers.load(1)
    model, write = workers.models[0], LoaderLayout.writer

    def turned(*args: Any) -> Callable[[], None]:
        ready = write(*args)

        def both() -> None:
            ready()
            model.qkv.data.copy_(model.qkv.data.flip(0))

        return both

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LoaderLayout, "writer", turned)
        with pytest.raises(PublishError, match="qkv has other values behind the load"):
            workers.load(2)
    assert workers.engines[0]._follower.version is None
    workers.load(2)
    assert all(model.holds(2) for model in workers.models)


def test_names_that_a_loader_does_not_take_are_refused_before_it_loads(
    workers: Any, chain: Path
) -> None:
    workers.init_weight_transfer_engine({"source": str(chain)})
    before = dict(workers.models[0].named_parameters())
    workers.models[0].fail_at = "k_proj"
    with pytest.raises(PublishError, match="k_proj.weight: the engine's loader does not take it"):
        workers.load(1)
    assert not workers.reloads and dict(workers.models[0].named_parameters()) == before
    workers.models[0].fail_at = ""
    workers.load(1)
    assert all(model.holds(1) for model in workers.models)


def fail_to_write(engine: Any) -> None:
    """Make the next write of changed values fail."""
    weights = engine._follower._engine
    prepare = weights.prepare_changes

    def failing(_: Any) -> Callable[[], None]:
        weights.prepare_changes = prepare

        def write() -> None:
            raise RuntimeError("out of memory")

        return write

    weights.prepare_changes = failing


def test_what_workers_refuse(workers: Any, factory: Any, chain: Path) -> None:
    with pytest.raises(PublishError, match="told no source"):
        workers.load(1)
    with pytest.raises(ValueError, match="Invalid init_info"):
        workers.init_weight_transfer_engine({"folder": "x"})
    workers.init_weight_transfer_engine({"source": str(chain), "wait_s": 0})
    workers.load(1)
    with pytest.raises(PublishError, match="version 77 was not there"):
        workers.load(77)
    workers.load(VERSIONS)
    with torch.no_grad():
        workers.models[0].norm[0] = 7
    with pytest.raises(PublishError, match=f"version {VERSIONS}: norm of the engine"):
        workers.load(VERSIONS)
    workers.load(VERSIONS)
    assert all(model.holds(VERSIONS) for model in workers.models)
    with pytest.raises(PublishError, match="the engine's weights are quantized .awq."):
        Workers(factory, [Packed()], quantization="awq")
    halves = Workers(factory, [Packed(dtype=torch.float16)], dtype=torch.float16)
    halves.init_weight_transfer_engine({"source": str(chain)})
    with pytest.raises(PublishError, match=r"published in torch.bfloat16, the engine computes in"):
        halves.load(1)
    workers.engines[0].shutdown()
    with pytest.raises(PublishError, match="told no source"):
        workers.load(1)


def raising(_: object) -> None:
    """Fail as a worker without memory, in many words."""
    raise RuntimeError("out of memory" + 20 * " of a worker")


def worker_of(model: Packed) -> Any:
    """Return a stand-in worker's engine; each rank is a worker of a two-worker server."""
    for name in [one for one in sys.modules if one.startswith("hybridcomp.inference.vllm")]:
        del sys.modules[name]
    stand_in_for_vllm.install(lambda modules, *_: sys.modules.update(modules))
    torch.accelerator.synchronize = lambda *_: None
    upstream.check = lambda _: None  # type: ignore[assignment]
    worker = importlib.import_module("hybridcomp.inference.vllm_worker")
    config = SimpleNamespace(quantization=None, dtype=torch.bfloat16)
    vllm_config = SimpleNamespace(
        model_config=config, parallel_config=SimpleNamespace(world_size=2)
    )
    return worker.HybridcompWeightTransferEngine(None, vllm_config, torch.device("cpu"), model)


def together(folder: Path, fails: str) -> list[Any]:
    """Run two workers as ranks; version 3 fails on rank 0 alone. Return each worker's view."""
    model = Packed(dist.get_rank())
    engine = worker_of(model)
    found: list[Any] = []

    def load(version: int) -> None:
        try:
            engine.update_weights({"version": version})
            found.append("")
        except PublishError as error:
            found.append(str(error))
        found.append(engine._follower.version)

    engine.init_transfer_engine(engine.parse_init_info({"source": str(folder), "wait_s": 0}))
    load(2)
    if dist.get_rank() == 0:
        if fails == "loading":
            fail_to_write(engine)
        else:
            engine._beside.end()
            with torch.no_grad():
                model.norm[0] = 7
    load(3)
    load(99)
    load(VERSIONS)
    return [*found, model.holds(VERSIONS)]


@pytest.mark.parametrize("fails", ["loading", "checks"])
def test_workers_hold_a_version_together_and_one_says_why(chain: Path, fails: str) -> None:
    first, second = run_ranks(2, together, chain, fails)
    held = (None, None) if fails == "loading" else (None, 2)
    assert first[0:2] == second[0:2] == ["", 2]
    assert (first[2], first[3]) == ("", held[0]) and second[3] == held[1]
    failed = "loader has failed (RuntimeError: out of memory)"
    what = failed if fails == "loading" else "norm of the engine"
    assert second[2].startswith("worker 0 of 2: ") and what in second[2]
    assert first[4] == "" and "version 99 was not there" in second[4]
    assert first[6:] == second[6:] == ["", VERSIONS, True]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"tie_word_embeddings": True}, None),
        ({"num_hidden_layers": 3}, "num_hidden_layers: the engine has 3, the trained model 1"),
        ({"num_hidden_layers": 1, "vocab_size": 11}, None),
        ({"vocab_size": 12}, "vocab_size: the engine has 12, the trained model 11"),
    ],
)
@pytest.mark.usefixtures("reloads")
def test_another_configuration_is_refused_before_anything_is_touched(
    factory: Any, chain: Path, config: dict[str, Any], text: str | None
) -> None:
    model = Packed()
    workers = Workers(factory, [model], hf_text_config=SimpleNamespace(**config))
    workers.init_weight_transfer_engine({"source": str(chain)})
    if text is None:
        workers.load(1)
        assert model.holds(1)
    else:
        with pytest.raises(PublishError, match=text):
            workers.load(1)
        assert not model.loaded


def test_names_that_no_engine_of_this_configuration_takes() -> None:
    def refused(config: dict[str, Any], shapes: dict[str, Any], *aliases: str) -> str:
        with pytest.raises(PublishError) as told:
            refuse_configuration(SimpleNamespace(**config), shapes, aliases)
        return str(told.value)

    tie = "tie_word_embeddings"
    head = {"lm_head.weight": (9, 4)}
    text = refused({tie: True}, head)
    assert text.startswith("lm_head.weight is tied to the embedding in the engine and not tied in")
    text = refused({tie: False}, {"model.embed_tokens.weight": (9, 4)}, "lm_head.weight")
    assert text.startswith("lm_head.weight is not tied to the embedding in the engine and tied in")
    assert "a name of PEFT's" in refused({}, {"base_model.model.lora_A.weight": (2, 2)})
    refuse_configuration(None, head, ())


class Experts(torch.nn.Module):
    """A layer whose weights vLLM rearranges."""

    def __init__(self) -> None:
        super().__init__()
        packed: list[Any] = []
        kernel = SimpleNamespace(packed=packed, process_weights_after_loading=packed.append)
        self.quant_method = type("UnquantizedFusedMoEMethod", (), {})()
        self.quant_method.moe_kernel = SimpleNamespace(fused_experts=kernel)


def test_layers_that_vllm_rearranges_are_loaded_whole(workers: Any, chain: Path) -> None:
    model = workers.models[0]
    experts = Experts()
    experts.weight = model.norm
    model.experts = experts
    workers.init_weight_transfer_engine({"source": str(chain)})
    worker = importlib.import_module("hybridcomp.inference.vllm_worker")
    assert worker._is_rearranged(model) and not worker._is_rearranged(workers.models[1])
    workers.load(1)
    before = len(workers.reloads)
    workers.load(2)
    assert len(workers.reloads) == before + 2  # a full load, although a patch would be smaller
    assert all(model.holds(2) for model in workers.models)
    assert experts.quant_method.moe_kernel.fused_experts.packed == [experts] * 2
    empty = Packed()
    empty.norm = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    assert worker._is_rearranged(empty)  # vLLM computes with a packed copy


class EightBits(torch.nn.Module):
    """A layer in FP8 blocks, as in a checkpoint, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"weight": (256, 200), "weight_scale_inv": (2, 2), "norm": (200,)}
        kinds = {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}
        for name, shape in shapes.items():
            kind = kinds.get(name, torch.bfloat16)
            values = torch.zeros(shape).to(kind)
            setattr(self, name, torch.nn.Parameter(values, requires_grad=False))
        self.quant_method = type("Fp8LinearMethod", (), {})()

    @torch.no_grad()
    def load_weights(self, weights: Any) -> set[str]:
        mine, found = dict(self.named_parameters()), set()
        for name, value in weights:
            short = name.rpartition("up_proj.")[2].replace("model.norm.weight", "norm")
            mine[short].copy_(value)
            found.add(short)
        return found


def test_an_engine_in_eight_bits_gets_its_own_quantization(
    workers: Any, factory: Any, chain: Path, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shapes = {"model.layers.0.mlp.up_proj.weight": (256, 200), "model.norm.weight": (200,)}
        weights = Weights(shapes=shapes)
        to = Folder(tmp_path / "to")
        publisher = Publisher(quantized(weights.held(), "fp8", None), to)
        model: Any = EightBits()
        plain = Packed()
        engine = Workers(factory, [model], quantization="fp8")
        engine.init_weight_transfer_engine({"source": str(tmp_path / "to")})
        for version in (1, 2, 3):
            publisher.publish()
            engine.load(version)
            values, scales = block_fp8(weights.values["model.layers.0.mlp.up_proj.weight"])
            assert torch.equal(model.weight.view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(model.weight_scale_inv, scales)
            assert torch.equal(model.norm, weights.values["model.norm.weight"])
            weights.step(version)
        publisher.close()
    finally:
        dist.destroy_process_group()
    sixteen = Workers(factory, [plain])
    sixteen.init_weight_transfer_engine({"source": str(tmp_path / "to")})
    with pytest.raises(PublishError, match="published in 8 bits, with scales .publish.as."):
        sixteen.load(1)
    engine.init_weight_transfer_engine({"source": str(chain)})
    with pytest.raises(PublishError, match="the engine's weights are quantized .fp8."):
        engine.load(1)


@pytest.mark.usefixtures("reloads")
def test_a_weight_that_the_engine_has_and_nobody_publishes(factory: Any, chain: Path) -> None:
    model = Packed()
    model.more = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    workers = Workers(factory, [model])
    workers.init_weight_transfer_engine({"source": str(chain)})
    told = (
        r"more .* is not among the published weights.* do not serve from it; update again: .* then$"
    )
    with pytest.raises(PublishError, match=told):
        workers.load(1)


class Adapted(Packed):
    """An engine for adapters: its loader does not name the wrapper of a layer."""

    def named_parameters(self, *args: Any, **more: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, one in super().named_parameters(*args, **more):
            yield "attention.base_layer.qkv" if name == "qkv" else name, one

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        found = super().load_weights(weights)
        return {"attention.qkv" if name == "qkv" else name for name in found}


@pytest.mark.usefixtures("reloads")
def test_an_engine_for_adapters_takes_versions_of_its_base(factory: Any, chain: Path) -> None:
    model, wanted = Adapted(), Packed().expected(2)
    workers = Workers(factory, [model])
    workers.init_weight_transfer_engine({"source": str(chain)})
    for version in (1, 2):
        workers.load(version)
    assert bits([("qkv", model.qkv)]) == bits([("qkv", wanted["qkv"])])


def test_a_trainer_publishes_and_its_workers_load(
    workers: Any, factory: Any, tmp_path: Path
) -> None:
    trainer = importlib.import_module("hybridcomp.inference.vllm_trainer")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weights = Weights(shapes=dict(SHAPES))
        import hybridcomp.publishing.destinations as to

        publisher = weights.publisher(to.Folder(tmp_path / "to"))
        told = trainer.HybridcompTrainerInfo(
            publisher=publisher, source=str(tmp_path / "to"), rank=0
        )
        make = factory.WeightTransferTrainerFactory.trainer_init
        with pytest.raises(ConfigError, match="source"):
            make(told, client=workers, source=object())
        engine = make(told, client=workers)
        for number in range(1, 4):
            assert engine.send_weights().version == number
            assert workers.weight_version == str(number)
            assert all(model.holds(number) for model in workers.models)
            step(weights, number)
        resets: list[int] = []
        workers.reset_prefix_cache = lambda: resets.append(1)
        for one in workers.engines:  # as after a server restart
            one._follower = None
        assert engine.send_weights().version == 4 and resets == [1]
        assert all(model.holds(4) for model in workers.models)
        step(weights, 4)
        followers = [one._follower for one in workers.engines]
        for one in workers.engines:
            one._open = lambda _: None  # all of it fails
            one._follower = SimpleNamespace(prepare=raising)
        told = "version 5 is published and was not loaded: .*memory( of a worker){20}; the log of"
        with pytest.raises(PublishError, match=told):
            engine.send_weights()
        for one, follower in zip(workers.engines, followers, strict=True):
            del one._open
            one._follower = follower
        step(weights, 5)
        assert engine.prepare_weights().version == 6
        assert all(model.holds(4) for model in workers.models)
        assert workers.weight_version == ""  # vLLM's value after a message without a version
        assert engine.send_weights().version == 6 and workers.weight_version == "6"
        assert all(bits(model.named_parameters()) for model in workers.models)
        engine.shutdown()
        publisher.close()
    finally:
        dist.destroy_process_group()


def test_a_server_drops_all_that_the_version_before_has_computed(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = importlib.import_module("hybridcomp.inference.vllm_trainer")
    asked: list[Any] = []
    answer = SimpleNamespace(text="busy", json=lambda: {"success": len(asked) < 3})
    answer.raise_for_status = lambda: None

    def post(url: str, *, params: Any, timeout: float) -> Any:
        asked.append((url, params))
        return answer

    monkeypatch.setattr(trainer.requests, "post", post)
    client = trainer.ServerClient("http://here")
    client.reset_prefix_cache()
    everything = {"reset_running_requests": "true", "reset_external": "true"}
    assert asked == [  # images before the keys and values computed from them
        ("http://here/reset_encoder_cache", {}), ("http://here/reset_prefix_cache", everything)
    ]  # fmt: skip
    with pytest.raises(PublishError, match="http://here answers busy"):
        client.reset_prefix_cache()


def test_another_version_of_vllm_is_refused(
    stand_in: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stand_in_for_vllm, "VERSION", "0.31.0")
    stand_in(stand_in_for_vllm)
    plugin = importlib.import_module("hybridcomp.inference.vllm_plugin")
    with pytest.raises(SeamError, match=r"needs vllm >= 0.32, found vllm 0.31.0; install a newer"):
        plugin.register()
    plugin.plugin()  # a server that takes no weights from hybridcomp still starts
    assert "vLLM will not know" in capsys.readouterr().err
    assert not stand_in_for_vllm.WeightTransferEngineFactory._registry
