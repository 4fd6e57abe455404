"""Load published versions with SGLang's own updater into its own model; print JSON.

``python -m tests.inference.sglang_runs FAMILY VERSIONS FOLDER``. SGLang 0.5.23 builds and loads the
model and calls our loader. Nothing is generated: that needs kernels for a GPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.inference.vllm_runs import Trained, digest, exported
from tests.scripts_on_ranks import free_port

#: operators end with the object that defines them
LIBRARIES: list[torch.library.Library] = []


def without_kernels() -> None:
    """Declare operators that CPUs lack but imports need: of images and positions."""
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    LIBRARIES.append(library)
    vllm, operators = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    vars(operators)["rotary_embedding"] = None
    sys.modules |= {"vllm": vllm, "vllm._custom_ops": operators}


def updater_of(model_folder: Path) -> tuple[Any, Any]:
    """Return SGLang's model of a folder on the CPU and its updater, built as in ``ModelRunner``."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import SpawnRanks, get_model, publish
    from sglang.srt.server_args import ServerArgs

    from hybridcomp.inference.sglang_loader import LOADER

    asked = ServerArgs(
        model_path=str(model_folder), device="cpu", dtype="bfloat16", skip_tokenizer_init=True,
        custom_weight_loader=[LOADER],
    )  # fmt: skip
    publish(asked, role="scheduler", ranks=SpawnRanks(world_rank=0))
    where = f"tcp://127.0.0.1:{free_port()}"
    parallel_state.init_distributed_environment(1, 0, where, 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(asked)
    config = ModelConfig.from_server_args(asked)
    load = LoadConfig(load_format="safetensors")
    model = get_model_loader(load, config).load_model(
        model_config=config, device_config=DeviceConfig("cpu", 0)
    )
    updater = WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, model_config=config,
        custom_weight_loaders=get_model().custom_weight_loader, get_model=lambda: model,
        update_model_fields=lambda **_: None, recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )  # fmt: skip
    return model, updater


def serialize(pipe: Connection) -> None:
    """Serialize tensors as SGLang does, until the pipe ends; a process that loads cannot."""
    from sglang.srt.utils import MultiprocessingSerializer

    kept = []  # the worker maps their memory
    with contextlib.suppress(EOFError):
        while True:
            kept.append([(name, torch.tensor(values, dtype=torch.uint8))
                         for name, values in pipe.recv()])  # fmt: skip
            pipe.send_bytes(MultiprocessingSerializer.serialize(kept[-1]))


class Engine:
    """``sglang.Engine`` in a process of its own, with this process as its worker."""

    def __init__(self) -> None:
        import sglang.srt.utils  # noqa: F401  once for both

        self.updater: Any = None
        context = get_context("fork")
        self._pipe, other = context.Pipe()
        context.Process(target=serialize, args=(other,), daemon=True).start()

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self) -> None: ...

    def update_weights_from_tensor(self, tensors: Any, load_format: str) -> Any:
        """Send tensors, and have SGLang's updater take them."""
        from sglang.srt.utils import MultiprocessingSerializer

        self._pipe.send([(name, one.tolist()) for name, one in tensors])
        sent = MultiprocessingSerializer.deserialize(self._pipe.recv_bytes())
        return self.updater.update_weights_from_tensor(sent, load_format)


def expected(trained: Trained, names: list[str]) -> dict[str, str]:
    """Return checksums of the trained weights as SGLang packs them, experts in one tensor."""
    experts = [name for name in names if ".experts." in name]
    found = trained.held([name for name in names if name not in experts], 0, 1)
    whole = dict(exported(trained.model))
    for name in experts:
        layer, last = name.rsplit(".", 1)
        parts = ("w1", "w3") if last == "w13_weight" else ("w2",)
        found[name] = digest(torch.stack([
            torch.cat([whole[f"{layer}.{number}.{part}.weight"] for part in parts])
            for number in range(4)
        ]))  # fmt: skip
    return found


def main() -> None:
    """Load versions, before the third a missing one; print which weights differ."""
    from hybridcomp.errors import PublishError
    from hybridcomp.inference import sglang_loader

    family, versions, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    without_kernels()
    engine = Engine()
    trained = Trained(family, folder / "weights")
    trained.model.save_pretrained(folder / "model")  # type: ignore[operator]
    model, engine.updater = updater_of(folder / "model")
    found: dict[str, Any] = {"wrong": [], "errors": [], "weights": 0}
    for number in range(1, versions + 1):
        trained.step()
        version = trained.publish()
        for wanted in (99, version) if number == 3 else (version,):
            try:
                sglang_loader.update(engine, str(trained.to), wanted, wait_s=0.3)
            except PublishError as error:
                found["errors"].append(str(error))
        mine = {name: digest(one) for name, one in model.named_parameters()}
        right = expected(trained, list(mine))
        found["wrong"] += [(number, name) for name in mine if mine[name] != right[name]]
        found["weights"] = len(mine)
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
