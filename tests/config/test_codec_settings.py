"""Error feedback is allowed only with codecs for which it stays bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridcomp.codecs import Codec, Zfp
from hybridcomp.codecs.registry import CODECS
from hybridcomp.config.codec_settings import ATTRIBUTES, DIMENSION_KEYS
from hybridcomp.config.dimension_fields import MODELS
from tests.config.common import parse


def feed_back(codec: Codec, steps: int = 60) -> float:
    """Return the residual's largest norm over ``steps``, in norms of one heavy-tailed message."""
    generator = torch.Generator().manual_seed(0)
    residual, worst = torch.zeros(4096), 0.0
    payload = torch.empty(codec.wire_nbytes(4096, torch.float32), dtype=torch.uint8)
    for _ in range(steps):
        message = torch.randn(4096, generator=generator) ** 3
        values, sent = message + residual, torch.empty(4096)
        codec.decode(payload[: codec.encode(values, payload)], sent)
        residual = values - sent
        worst = max(worst, float(residual.norm() / message.norm()))
    return worst


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "blockint", "bits": 2},
        {"codec": "blockint", "bits": 4},
        {"codec": "zfp", "rate": 6.0},
        {"codec": "fp8", "format": "e5m2"},
        {"codec": "bf16"},
    ],
    ids=str,
)
def test_error_feedback_stays_bounded_where_it_is_allowed(settings: dict[str, Any]) -> None:
    codec = parse({"dp": {**settings, "error_feedback": True}}).policy().codecs["dp", "forward"]
    assert codec is not None
    assert feed_back(codec) < 4.0


def test_error_feedback_runs_away_where_it_is_refused() -> None:
    assert feed_back(Zfp(4)) > 1e6


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.__name__)
def test_no_codec_of_another_package_can_take_a_key_of_a_dimension(model: type[Any]) -> None:
    settings = {setting.name for codec in CODECS.values() for setting in codec.settings}
    assert set(model.model_fields) - settings <= DIMENSION_KEYS
    public = {name for name in dir(model) if not name.startswith("_")}
    assert public - set(model.model_fields) <= ATTRIBUTES
