"""The block's key ``gathered``, unsupported engines, and imports of a job without it."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hybridcomp
from hybridcomp.config import CompressionConfig, describe
from hybridcomp.errors import ConfigError
from hybridcomp.generation.gathered import CutWeight
from hybridcomp.generation.rolling_out import without_hooks


def _same(part: torch.Tensor) -> torch.Tensor:
    return part


@pytest.mark.parametrize(
    ("written", "spec"),
    [
        ("stepcode", "stepcode()"),
        ({"keep": "host"}, "stepcode()"),
        ("none", "none"),
        ({"codec": "blockint", "bits": 8}, "blockint(bits=8)"),
    ],
)
def test_the_key_names_a_codec(written: Any, spec: str) -> None:
    block = CompressionConfig.parse({"gathered": written})
    assert block.flat()["compression.gathered.codec"] == spec
    other = CompressionConfig.parse({"gathered": "expcode"})
    assert block.digest() != other.digest(), "ranks have to agree"
    lines = [line for line in describe(block) if line.startswith("gathered")]
    assert len(lines) == 1 and spec in lines[0]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("powersgd", "compression.gathered.codec: found \"powersgd\""),
        ({"bits": 4}, "compression.gathered.codec: found nothing"),
        ({"codec": "stepcode", "bits": 4}, "compression.gathered.bits: found 4"),
        ({"keep": "disk"}, "compression.gathered.keep: found \"disk\""),
        ({"limit_gb": 0}, "compression.gathered.limit_gb: found 0"),
        ({"where": "host"}, "compression.gathered.where"),
    ],
)  # fmt: skip
def test_wrong_keys_are_named(written: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompressionConfig.parse({"gathered": written})
    assert said in str(caught.value)


def test_nodes_may_be_said_for_it() -> None:
    assert CompressionConfig.parse({"gathered": "stepcode", "hierarchy": 2}).hierarchy == 2
    with pytest.raises(ConfigError, match="neither is compressed"):
        CompressionConfig.parse({"gathered": "none", "hierarchy": 2})


def test_megatron_is_told_what_it_has() -> None:
    model = type("GPTModel", (nn.Module,), {"__module__": "megatron.core.models.gpt"})()
    for engine in (model, [model]):
        with pytest.raises(ConfigError) as caught:
            hybridcomp.gathered(engine)
        assert "found megatron-core's GPTModel" in str(caught.value)
        assert "DynamicInferenceEngine" in str(caught.value)
        assert "hybridcomp.publish" in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("shape", "dim"), [((5, 3), 0), ((2,), 0), ((3, 28 * 3), 1), ((), 0)])
def test_shares_make_the_whole(shape: tuple[int, ...], dim: int, ranks: int) -> None:
    whole = torch.randn(shape)
    if dim:
        parts = [part.reshape(-1) for part in whole.chunk(ranks, dim)]
        numel = len(parts[0])
    else:
        numel = -(-whole.numel() // ranks)
        parts = [whole.reshape(-1)[r * numel : (r + 1) * numel] for r in range(ranks)]
    shares = [
        CutWeight("w", shape, whole.dtype, numel, None, partial(_same, part), dim) for part in parts
    ]
    rows = torch.stack([share.share(torch.device("cpu")) for share in shares])
    wide = torch.cat([rows, torch.ones(ranks, 2)], 1)[:, :numel]  # as beside other weights
    assert torch.equal(shares[0].whole_of(wide), whole)


def test_hooks_come_back_in_their_order() -> None:
    module, called = nn.Linear(2, 2), list[str]()
    handles = {
        name: module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name in "abcd"
    }
    with ExitStack() as undo:
        without_hooks([handles["d"], handles["a"], handles["c"]], undo)
        module(torch.ones(2))
        late = module.register_forward_pre_hook(lambda *_: called.append("late"))
    module(torch.ones(2))
    assert called == ["b", "a", "b", "c", "d", "late"]
    assert isinstance(module._forward_pre_hooks, OrderedDict)
    for handle in (*handles.values(), late):
        handle.remove()
    assert not module._forward_pre_hooks
