"""The channels of the process: who lends them, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from hybridcomp import process
from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.session import EngineSession


class Engine:
    """What lends; a cycle holds it, as DeepSpeed's engines are held."""

    def __init__(self) -> None:
        self.own = self


def session(block: dict[str, Any]) -> EngineSession:
    return EngineSession(Channels(CompressionConfig.parse(block)))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    process.configure(None)
    yield
    process.configure(None)


def test_an_engine_lends_while_it_lives() -> None:
    engine, lent = Engine(), session({"tp": "bf16"})
    process.lend(engine, lent)
    assert process.current() is lent.channels
    assert process.borrowed() is lent.channels
    del engine
    gc.collect()
    assert process.borrowed() is None
    assert process.current() is None


def test_a_configured_block_comes_back_after_the_engine() -> None:
    process.configure({"tp": "fp16"})
    engine = Engine()
    process.lend(engine, session({"tp": "bf16"}))
    del engine
    gc.collect()
    assert process.current() is None  # torch.distributed is not up
    config = process.configured()
    assert config is not None
    assert config.tp.codec == "fp16"


def test_the_first_living_engine_lends() -> None:
    first, second = Engine(), Engine()
    lent = session({"preset": "recommended"})
    process.lend(first, lent)
    process.lend(second, session({"preset": "zhybrid"}))  # names tp only by its preset
    assert process.current() is lent.channels
    with pytest.raises(ConfigError, match=r"compression\.tp.*another engine of this process"):
        process.lend(second, session({"tp": "bf16"}))
    del first
    later = session({"tp": "bf16"})
    process.lend(second, later)  # the first is gone, though a cycle holds it
    assert process.current() is later.channels
