"""vLLM on CPUs, offline and as a server: every version is bit-exact, also after failures.

Checksums show that all weights are equal. Answers also show that no cache keeps keys and values of
an earlier version: offline the last answer equals a new engine's; a server answers a repeated
prompt as an uncached one. Transformers' results are close.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.inference.made import run_module
from tests.inference.vllm_runs import DAMAGED, OTHER
from tests.paths import ROOT

pytestmark = pytest.mark.nightly
#: vLLM's order of bf16 operations differs from transformers', and weights grow with each version:
#: up to 0.07 apart after 20 versions, where answers of two versions are up to 0.3 apart
NEAR = 0.15
#: makes vLLM compute with unpacked weights, as on a GPU
PLAIN = """
import torch
def plugin():
    from vllm.model_executor.layers import utils
    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear
    utils.dispatch_cpu_unquantized_gemm = plain
"""


def run(folder: Path, how: str, family: str, workers: int, versions: int, plain: bool) -> Any:
    """Run ``vllm_runs`` in a separate process; return its results."""
    pytest.importorskip("vllm", reason="vLLM is not installed", exc_type=ImportError)
    plugins = {"hybridcomp": "hybridcomp.inference.vllm_plugin:plugin"}
    if plain:
        (folder / "plain_linear.py").write_text(PLAIN)
        plugins["plain_linear"] = "plain_linear:plugin"
    for name, where in plugins.items():  # this checkout need not be installed
        info = folder / f"{name}-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {where}\n")
    return run_module(
        "vllm_runs", how, family, workers, versions, folder,
        PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_HOST_IP="127.0.0.1", VLLM_LOGGING_LEVEL="WARNING",
        OMP_NUM_THREADS="1", VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_PLUGINS=",".join(plugins),
    )  # fmt: skip


def expect_answers(found: Any) -> None:
    """Compare answers with those of the expected weights; later versions answer differently."""
    assert max(found["off"]) < NEAR, found
    assert max(found["moved"][1:]) > NEAR, found


@pytest.mark.parametrize(
    ("family", "workers", "plain"),
    [("Llama", 2, False), ("Qwen2", 1, False), ("Mixtral", 1, False), ("Llama", 1, True)],
)
def test_an_engine_offline(tmp_path: Path, family: str, workers: int, plain: bool) -> None:
    found = run(tmp_path, "offline", family, workers, 4, plain)
    assert found["wrong"] == []
    assert not plain or found["unknown"] == [{}] * workers
    assert "version 99 was not there" in found["errors"][0]
    assert found["fresh"] == 0.0
    expect_answers(found)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_meets_with_mishaps(tmp_path: Path, workers: int) -> None:
    found = run(tmp_path, "served", "Llama", workers, 20, plain=workers == 2)
    assert found["wrong"] == [] and found["lost"] == 0
    assert set(found["errors"]) == {str(DAMAGED), str(OTHER)}, found["errors"]
    assert found["stale"] == [0.0] * 20 and found["kept"] == [0.0] * 2
    expect_answers(found)
