"""SGLang's custom weight loader: two workers with packed, sharded weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridcomp.errors import PublishError, SeamError
from tests.inference.made import SHAPES, VERSIONS, Packed, run_module
from tests.stand_ins import sglang as stand_in_for_sglang

LOADER = "hybridcomp.inference.sglang_loader.load"


@pytest.fixture
def loader(stand_in: Callable[[Any], None]) -> Any:
    """Import the module with the stand-in."""
    stand_in(stand_in_for_sglang)
    return importlib.import_module("hybridcomp.inference.sglang_loader")


def test_workers_hold_every_version_bit_by_bit(loader: Any, chain: Path) -> None:
    assert loader.LOADER == LOADER
    models = [Packed(0), Packed(1)]
    engine = stand_in_for_sglang.Engine(models, [LOADER])
    for version in range(1, VERSIONS + 1):
        loader.update(engine, f"file://{chain}", version)
        assert all(model.holds(version) for model in models)
    count = 2 * len(SHAPES)  # all are loaded, and loaded again to learn their places
    first, later = models[0].loaded[:count], models[0].loaded[count:]
    assert sorted(first) == sorted([*SHAPES] * 2)
    assert "model.norm.weight" not in later and len(later) < VERSIONS * len(SHAPES)


def test_a_mistake_is_one_line_and_loads_nothing(loader: Any, chain: Path) -> None:
    model = Packed()
    engine = stand_in_for_sglang.Engine([model], [LOADER])
    loader.update(engine, str(chain), 2)
    with pytest.raises(PublishError, match="version 44 was not there"):
        loader.update(engine, str(chain), 44, wait_s=0)
    loader.update(engine, str(chain), VERSIONS)
    assert not engine.session and model.holds(VERSIONS)
    with torch.no_grad():
        model.qkv[1, 2] = 3
    with pytest.raises(PublishError, match="qkv of the engine"):
        loader.update(engine, str(chain), VERSIONS)
    loader.update(engine, str(chain), VERSIONS)
    assert model.holds(VERSIONS)
    engine.failure = "no memory"
    with pytest.raises(PublishError, match=f"version {VERSIONS} was not loaded: no memory"):
        loader.update(engine, str(chain), VERSIONS)
    assert not engine.session


def test_settings_of_later_messages_act(loader: Any, chain: Path) -> None:
    model = Packed()
    engine = stand_in_for_sglang.Engine([model], [LOADER])
    loader.update(engine, str(chain), 1, wait_s=30.0, verify=False)
    with pytest.raises(PublishError, match="version 44 was not there after 0 s"):
        loader.update(engine, str(chain), 44, wait_s=0)
    loader.update(engine, str(chain), VERSIONS, verify=False)
    loader.update(engine, str(chain), VERSIONS, verify=True)  # there were no fingerprints before
    with torch.no_grad():
        model.qkv[1, 2] = 3
    loader.update(engine, str(chain), VERSIONS, verify=False)
    with pytest.raises(PublishError, match="qkv of the engine"):
        loader.update(engine, str(chain), VERSIONS)
    for wait_s in ("NaN", "Infinity", "-1", "true"):
        text = f'{{"source": "{chain}", "version": 1, "wait_s": {wait_s}}}'
        message = torch.tensor(list(text.encode()), dtype=torch.uint8)
        with pytest.raises(PublishError, match="expected one tensor __hybridcomp__"):
            loader.load(model, [(loader.MESSAGE, message)])


def test_models_that_cannot_take_the_weights_are_refused(loader: Any, chain: Path) -> None:
    def refused(model: Packed, pattern: str) -> None:
        with pytest.raises(PublishError, match=pattern) as told:
            loader.update(stand_in_for_sglang.Engine([model], [LOADER]), str(chain), 1)
        assert "\n" not in str(told.value) and not model.loaded

    quantized: Any = Packed()
    quantized.quant_config = SimpleNamespace(get_name=lambda: "awq")
    refused(quantized, "quantized .awq.")
    eights = Packed()
    eights.qkv = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    refused(eights, "qkv: expected a weight of 16 bits in the engine, found torch.int8")
    refused(Packed(dtype=torch.float16), "published in bfloat16, in which the engine has none")
    other: Any = Packed()
    other.config = SimpleNamespace(num_hidden_layers=1, vocab_size=12)
    refused(other, "vocab_size: the engine has 12, the trained model 11")
    other = Packed()
    other.config = SimpleNamespace(text_config=SimpleNamespace(num_hidden_layers=3))
    refused(other, "num_hidden_layers: the engine has 3, the trained model 1")


def test_a_draft_keeps_its_weights(loader: Any, chain: Path) -> None:
    class PackedEagle(Packed):
        config = SimpleNamespace(num_hidden_layers=3)

    models = [Packed(), PackedEagle()]
    loader.update(stand_in_for_sglang.Engine(models, [LOADER]), str(chain), 2)
    assert models[0].holds(2) and not models[1].loaded


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"source": "x"}', '{"source": "x", "version": "1"}',
             '{"source": "x", "version": 1, "run": "rm"}', '{"source": "x", "version": -1}'],
)  # fmt: skip
def test_a_message_of_somebody_else_is_refused(loader: Any, text: str) -> None:
    message = torch.tensor(list(text.encode()), dtype=torch.uint8)
    with pytest.raises(PublishError, match="expected one tensor __hybridcomp__") as told:
        loader.load(Packed(), [(loader.MESSAGE, message)])
    assert "\n" not in str(told.value)
    with pytest.raises(PublishError, match="expected one tensor"):
        loader.load(Packed(), [("model.norm.weight", torch.zeros(8))])


def test_another_version_of_sglang_is_refused(
    stand_in: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, chain: Path
) -> None:
    monkeypatch.setattr(stand_in_for_sglang, "VERSION", "0.4.9")
    stand_in(stand_in_for_sglang)
    loader = importlib.import_module("hybridcomp.inference.sglang_loader")
    with pytest.raises(SeamError, match=r"needs sglang >= 0.5.23, found sglang 0.4.9"):
        loader.load(Packed(), loader.Announcement(str(chain), 1).tensors())


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mixtral"])
def test_the_updater_of_sglang_itself_loads_every_version(tmp_path: Path, family: str) -> None:
    """Its model, loader and updater on a CPU (``scripts/lab/sglang_on_cpu``), bit for bit."""
    if find_spec("sglang") is None:  # importing it fails beside torchvision for CUDA
        pytest.skip("SGLang is not installed")
    found = run_module("sglang_runs", family, 6, tmp_path)
    assert found["wrong"] == [] and found["weights"] > 10
    assert len(found["errors"]) == 1 and "version 99 was not there" in found["errors"][0]
