"""All messages between ranks go through two modules, one of which counts them."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.handle import Meter
from tests.paths import ROOT

#: torch.distributed functions that send
SENDERS = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce",
    "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "send",
    "send_object_list",
}  # fmt: skip
#: counted traffic, and messages in which ranks agree
THROUGH = {"hybridcomp/collectives/wire/transport.py", "hybridcomp/job/small_messages.py"}
#: the native side of measurements, which must use torch directly
MEASURED = {
    "hybridcomp/autotune/sum_trials.py", "hybridcomp/autotune/trials.py",
    "hybridcomp/tools/measure/channels.py", "hybridcomp/tools/measure/links.py",
    "hybridcomp/nn/slices/timing.py",
}  # fmt: skip
#: workers of an inference engine agree on a version; no job trains there
ENGINES = {"hybridcomp/inference/together.py"}
#: weights for inference engines: counted in a separate row
PUBLISHED = {"hybridcomp/publishing/groups.py", "hybridcomp/publishing/streams.py"}
#: uncompressed weights of islands; meetings' messages through channels are counted there
ISLANDS = {"hybridcomp/sync/exact_sends.py"}
#: upstream's messages, sent as upstream would
UPSTREAM = {"patches/ds/pipeline/tied_weights.py", "patches/torch/ddp/slot.py"}


def _sends(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text if any(f"dist.{name}" in text for name in SENDERS) else "")
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in SENDERS
        and isinstance(node.value, ast.Name)
        and node.value.id == "dist"
        and isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )


def test_no_call_of_torch_is_bound_at_import() -> None:
    """Later replacements, which count, delay or encode messages, then also apply to our calls."""
    counted: list[str] = []
    values = torch.zeros(4)
    for name in (transport.GATHER, transport.SCATTER):
        with patch.object(dist, name, lambda *_, name=name, **__: counted.append(name)):
            if name == transport.SCATTER:
                transport.reduce_scatter_single(values[:2], values)
                continue
            transport.all_gather_single(values, values[:2])
            group = SimpleNamespace(size=2, ring=0.0, process_group=None, backends={"cpu": "other"})
            transport.all_gather(values, values[:2], cast(Any, group), Meter())
    assert counted == [transport.GATHER, transport.GATHER, transport.SCATTER]


def test_only_transport_and_small_messages_send() -> None:
    files = [*(ROOT / "hybridcomp").rglob("*.py"), *(ROOT / "patches").rglob("*.py")]
    found = {path.resolve().relative_to(ROOT).as_posix() for path in files if _sends(path)}
    assert found == THROUGH | MEASURED | PUBLISHED | ENGINES | ISLANDS | UPSTREAM
