"""The process's channels: who shares them, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.session import process
from hybridcomp.session.engine_session import EngineSession
from tests.ranks import RunRanks
from tests.scripts_on_ranks import run_python


class Engine:
    """Sharing engine; a cycle holds it, as with DeepSpeed's engines."""

    def __init__(self) -> None:
        self.own = self


def session(block: dict[str, Any]) -> EngineSession:
    return EngineSession(Channels(CompressionConfig.parse(block)))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    process.configure(None)
    yield
    process.configure(None)


def test_an_engine_lends_until_it_is_released() -> None:
    """Other ranks may collect a deleted engine later: a message asks no rank before it is sent."""
    process.configure({"tp": "fp16"})
    engine, lent = Engine(), session({"tp": "bf16"})
    process.share_session(engine, lent)
    assert process.current() is lent.channels is process.shared_channels()
    process.release(engine)
    assert process.current() is None  # torch.distributed is not initialized
    config = process.configured()
    assert config is not None and config.tp.codec == "fp16", "the block of before"
    process.share_session(engine, lent)
    del engine
    gc.collect()
    assert process.shared_channels() is None
    assert process.current() is lent.channels
    process.forget_deleted()
    assert process.current() is None


@pytest.mark.parametrize("key", ["compresion", "Compression"])
def test_a_misspelt_block_is_told_as_what_it_is(key: str) -> None:
    """It was taken for a bare block with an unknown key."""
    with pytest.raises(ConfigError, match=f"^{key}: .*; unknown key; did you mean 'compression'"):
        process.configure({key: {"dp": "bf16"}})


def test_the_first_living_engine_lends() -> None:
    first, second = Engine(), Engine()
    lent = session({"preset": "recommended"})
    process.share_session(first, lent)
    process.share_session(second, session({"preset": "zhybrid"}))  # names tp only by its preset
    assert process.current() is lent.channels
    with pytest.raises(ConfigError, match=r"compression\.tp.*another engine of this process"):
        process.share_session(second, session({"tp": "bf16"}))
    del first
    later = session({"tp": "bf16"})
    process.forget_deleted()  # a cycle holds the first
    process.share_session(second, later)
    assert process.current() is later.channels


class Follower:
    """A follower of steps that records its end."""

    name = "noted"

    def __init__(self) -> None:
        self.closed = 0

    def before_step(self) -> None: ...

    def after_step(self, step: int) -> None: ...

    def after_skip(self) -> None: ...

    def row(self) -> dict[str, float] | None: ...

    def close(self) -> None:
        self.closed += 1


def followed(lender: Engine | None) -> Follower:
    """Put a session with a follower in the process's place, or share it."""
    follower, lent = Follower(), session({"tp": "bf16"})
    lent.follow(follower)
    if lender is None:
        process._holder.session = lent
    else:
        process.share_session(lender, lent)
    return follower


def test_followers_are_closed_with_a_session_that_no_engine_closes() -> None:
    """It may be an island's membership, and other islands would wait for this process."""
    own = followed(None)
    process.configure({"tp": "fp16"})
    assert own.closed == 1
    engine = Engine()
    lent = followed(engine)
    process.release(engine)
    assert lent.closed == 0, "the engine closes what it has lent"
    lent = followed(engine)
    del engine
    gc.collect()
    process.configure(None)
    assert lent.closed == 1


def test_groups_and_session_are_dropped_before_the_interpreter_ends() -> None:
    """A thread of gloo that outlives its group may abort the process at exit."""
    code = (
        "import atexit, gc, glob, weakref\n"
        "kept = []\n"
        "def look():\n"
        "    gc.collect()\n"
        "    print('gone' if kept[0]() is None else 'alive')\n"
        "atexit.register(look)\n"  # registered first, called last
        "from hybridcomp.session import process\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "def threads():\n"
        "    names = [open(path).read() for path in glob.glob('/proc/self/task/*/comm')]\n"
        "    print(sum(name.startswith('pt_gloo_runloop') for name in names) > 0)\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "model(torch.ones(4)).sum().backward()\n"
        "threads()\n"
        "del model\n"
        "dist.destroy_process_group()\n"
        "threads()\n"
        "from hybridcomp.channels import Channels\n"
        "from hybridcomp.config import CompressionConfig\n"
        "from hybridcomp.session.engine_session import EngineSession\n"
        "session = EngineSession(Channels(CompressionConfig.parse({'dp': 'bf16'})))\n"
        "process.use(session)\n"
        "kept.append(weakref.ref(session))\n"
        "del session\n"
    )
    done = run_python("-c", code, anew=True, GLOO_SOCKET_IFNAME="lo")  # not yet imported
    assert (done.returncode, done.stdout) == (0, "True\nFalse\ngone\n"), done.stderr


def lent_by() -> bool:
    """Attach a second engine, while only rank 0 still holds the first; return who lends."""
    first, second = Engine(), Engine()
    process.share_session(first, session({"tp": "bf16"}))
    if dist.get_rank():
        del first
    later = session({"tp": "bf16"})
    process.forget_deleted()
    process.share_session(second, later)
    lends = process.current() is later.channels
    process.configure(None)
    return lends


def test_an_engine_that_one_rank_still_holds_lends_no_more(on_ranks: RunRanks) -> None:
    assert on_ranks(2, lent_by) == [True, True]
