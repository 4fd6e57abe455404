"""Messages whose receive is posted before the sender encodes: codecs that support it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridcomp.channels import Channels, Posted, PostReceive, PostSend
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.session import process
from tests.stand_ins.process_groups import fake_group


def posted(kind: Any, codec: str, **block: Any) -> Posted | None:
    """Return how four values travel from rank 0 to rank 1; None: native."""
    channels = Channels(CompressionConfig.parse({"pp": codec, "min_bytes": 0, **block}))
    message = kind(
        numel=4, dtype=torch.float32, group=fake_group(), direction="forward", between=(0, 1),
        values=torch.ones(4),
    )  # fmt: skip
    found: Posted | None = channels["pp"].run(
        message, native=lambda: None, encoded=lambda posted: posted
    )
    return found


@pytest.mark.parametrize("kind", [PostSend, PostReceive])
@pytest.mark.parametrize("codec", ["expcode", "mpc"])
def test_a_size_that_varies_needs_gloo(
    kind: Any, codec: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL a receive waits for the full buffer size, hence forever."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(ConfigError, match=rf"compression.pp: found {codec}, whose size varies"):
        posted(kind, codec)
    process.configure(None)
    for _ in range(2):
        assert posted(kind, codec, on_unsupported="native") is None
    assert capsys.readouterr().out.count(f"pp native: {codec}, whose size varies") == 1
    assert posted(kind, "blockint") is not None
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: "cpu:gloo")
    assert posted(kind, codec) is not None
