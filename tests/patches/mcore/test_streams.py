"""Stages of megatron-core's pipelines on a fake GPU that checks streams."""

from __future__ import annotations

from typing import Any

import pytest

from hybridcomp.patches.mcore import pipeline
from tests.stand_ins.gpu.common import QUIET, RANK, RANKS, chain, channels, gpu, values_of
from tests.stand_ins.gpu.machine import DEVICE, Gpu
from tests.stand_ins.process_groups import fake_group

__all__ = ["gpu"]  # a fixture
pytestmark = QUIET


@pytest.mark.parametrize("overlaps", [False, True], ids=["1F1B", "overlapped"])
def test_a_stage(gpu: Gpu, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations and gradients in both directions; upstream waits at once, or after a pass."""
    state, group = channels(pp={"codec": "blockint", "bits": 8}), fake_group(RANKS, RANK)
    monkeypatch.setattr(pipeline, "current", lambda: state)

    def _p2p_ops(**tensors: Any) -> dict[str, Any]:
        """Return requests as upstream does: one per tensor, by its key."""
        found: dict[str, Any] = {}
        for key in pipeline.WAYS:
            tensor = tensors[f"tensor_{key}"]
            if tensor is not None:
                sends = key.startswith("send")
                found[key] = gpu.post([tensor] if sends else [], [] if sends else [tensor])
        return found

    post = pipeline.make_operations(_p2p_ops)
    ranks = {"group": group, "prev_pipeline_rank": 0, "next_pipeline_rank": 2}
    for _ in range(3):
        gpu.waits.clear()
        gpu.did.clear()
        for _ in range(2):
            out, back = values_of(4096).add_(1), values_of(4096)
            requests = post(
                tensor_send_prev=values_of(4096), tensor_recv_prev=values_of(4096),
                tensor_send_next=out, tensor_recv_next=back, **ranks,
            )  # fmt: skip
            assert set(requests) == set(pipeline.WAYS)
            if overlaps:
                values_of(8).add_(1)  # another pass
            for request in requests.values():
                request.wait()
            back.add_(1)
        state.step += 1
        state.close_step(False, DEVICE)
    assert not gpu.waits and not gpu.unmet
    work = " ".join(chain(gpu))
    # each micro-batch encodes two and decodes two
    assert work.count("blockint_encode") == work.count("blockint_decode") == 4
