"""Start-up agreement: every rank gets the error, which names ranks and keys."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import time
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybridcomp.errors import AgreementError, PeerError
from hybridcomp.job import agreement, peer_liveness, processes, waits
from hybridcomp.job.agreement import agree
from hybridcomp.job.statements import StatementRound
from hybridcomp.job.together import together
from tests.ranks import LIMIT_S, RankPool, run_ranks


def same() -> str:
    agree({"compression.dp": "blockint(bits=4)"})
    agree({"compression.dp": "another round"})
    return "fine"


def differ() -> str:
    try:
        agree({"compression.dp": f"blockint(bits={4 + dist.get_rank() // 2})", "torch": "2"})
    except AgreementError as error:
        return str(error)
    return "no error"


def restarted() -> list[dict[str, Any]]:
    """Return the ranks' messages after a restart by torchrun, with the first start's store."""
    agree({"compression.dp": "of the start before"})
    dist.barrier()
    agreement._next.here.clear()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if dist.get_rank() == 1:
        time.sleep(0.5)  # rank 0 must not read rank 1's statement from before the restart
    agreement.agree({"compression.dp": "first"})
    return agreement.tell({"rank": dist.get_rank()}, what="rank")


def test_what_was_said_before_a_restart_does_not_count() -> None:
    assert run_ranks(2, restarted) == [[{"rank": 0}, {"rank": 1}]] * 2


def with_a_newcomer(folder: Path) -> list[dict[str, Any]]:
    """Meet on ranks 0 and 1, then with rank 2 in another process group; return what all say."""
    me, made, held = dist.get_rank(), list[Any](), list[Any]()
    c10d: Any = dist
    for ranks in ((0, 1), (0, 1, 2)):
        dist.destroy_process_group()
        assert not any(store() for store in made), "it would hold its port"
        if me not in ranks:
            dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
            continue
        store = c10d.FileStore(str(folder / str(len(ranks))), -1)
        made.append(weakref.ref(store))
        dist.init_process_group("gloo", store=store, rank=me, world_size=len(ranks))
        held.append(dist.group.WORLD)  # as models do until their cycles are collected
        del store
        with together("an operation"):
            agree({"x": 1})
        said = agreement.tell({"rank": me}, what="rank", seconds=LIMIT_S)
    return said


def test_a_process_that_is_new_counts_as_the_others(tmp_path: Path) -> None:
    found = run_ranks(3, with_a_newcomer, tmp_path, timeout=60)
    assert found == [[{"rank": rank} for rank in range(3)]] * 3


def left_out() -> list[dict[str, Any]]:
    """Call on rank 0 alone what ranks may leave out; return what all say in the next round."""
    if not dist.get_rank():
        with pytest.raises(AgreementError, match="detach: rank"):
            agreement.tell({}, what="detach", seconds=0.0)
    return agreement.tell({"rank": dist.get_rank()}, what="rank")


def test_a_round_that_a_rank_leaves_out_shifts_no_other() -> None:
    assert run_ranks(2, left_out, timeout=60) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_equal_ranks_pass() -> None:
    assert run_ranks(3, same) == ["fine"] * 3


def test_every_rank_learns_who_differs() -> None:
    messages = run_ranks(4, differ)
    for message in messages:
        assert "rank(s) 2, 3 differ from rank 0" in message
        assert "compression.dp: 'blockint(bits=4)' against 'blockint(bits=5)'" in message
        assert "torch:" not in message


def silent(_: None) -> str:
    """Keep rank 1 silent; return the others' messages and the outcome."""
    vars(agreement)["NOTICE_S"] = waits.NOTICE_S = 0.2
    waits.REPEAT = 4
    agreement._timeout_s = lambda: 2.0
    # a fake clock: on a busy machine more time would pass
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.02 * next(ticks), sleep=lambda seconds: None)
    said = io.StringIO()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()  # the others' store must outlive them
        return ""
    state = StatementRound.state

    def stated(self: StatementRound, text: str) -> None:
        """State, and start waiting once both have."""
        state(self, text)
        while not (self.has_stated(0) and self.has_stated(2)):
            time.sleep(0.01)
        vars(waits)["time"] = clock

    StatementRound.state = stated  # type: ignore[method-assign]
    with contextlib.redirect_stderr(said), pytest.raises(AgreementError) as caught:
        agree({"compression.dp": "bf16"})
    dist.barrier()
    return f"{said.getvalue()}{caught.value}"


def test_a_silent_rank_is_named_early_by_one_rank_and_ends_the_job() -> None:
    first, nothing, other = run_ranks(3, silent, None)
    *notices, end = first.splitlines()
    assert nothing == "" and other == end
    assert len(notices) == 2  # after 0.2 and 0.8 s
    for notice in notices:
        assert notice.startswith("[hybridcomp] waiting for rank(s) 1 to state their compression")
        assert "-m hybridcomp.run" in notice
    assert "rank(s) 1 never stated theirs, in 2 s" in end


def killed(rank: int) -> str:
    """End ``rank`` silently before a checkpoint; return another rank's error."""
    peer_liveness.announce()
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    waits.NOTICE_S = 3600.0  # waits for the process, not for a time
    with pytest.raises(PeerError) as caught:
        agreement.tell({"rank": dist.get_rank()}, what="checkpoint")
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_died_is_named_at_once(rank: int) -> None:
    with RankPool(3) as pool, pytest.raises(AssertionError) as ended:
        pool.run(killed, rank, grace=60.0)
    assert "exit code -9" in str(ended.value) and "still running" not in str(ended.value)
    # the remaining two got their PeerError and exited normally: one failure is shown
    assert str(ended.value).count("of 3:") == 1


def counted(_: None) -> list[int]:
    """Return the store's keys after a few rounds of all ranks, and of some."""
    store: Any = dist.distributed_c10d._get_default_store()
    counts = []
    for _round in range(4):
        agree({"x": 1})
        if dist.get_rank() != 1:
            agree({"x": 1}, ranks=(0, 2))
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_what_was_said_is_deleted_once_all_have_spoken_again() -> None:
    for counts in run_ranks(3, counted, None):
        assert counts[1] <= counts[0] == counts[-1], counts


def limited(_: None) -> tuple[list[timedelta], float]:
    """Return the time-outs of torch.distributed's shared store, and the group's."""
    store: Any = dist.distributed_c10d._get_default_store()
    before = store.timeout
    with contextlib.suppress(RuntimeError), agreement.waiting(store, 5.0):
        inside = store.timeout
        raise RuntimeError("the rank that holds it has gone")
    return [before, inside, store.timeout], agreement._timeout_s()


def test_the_shared_store_keeps_its_time_out() -> None:
    (((before, inside, after), patience),) = run_ranks(1, limited, None)
    assert before == after != inside == timedelta(seconds=5)
    assert patience == LIMIT_S, "the time-out of the process group"


def test_only_a_store_that_outlives_a_restart_tells_starts_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert agreement.start() == "2"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # rank 0 creates a new store
    assert agreement.start() == "0"


def test_a_store_that_went_with_its_rank_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_told() -> bool:
        raise RuntimeError("Connection reset by peer")

    this: Any = SimpleNamespace(speakers=(0, 1), is_told=is_told)
    for ended, error in (["rank 0"], PeerError), ([], RuntimeError):
        monkeypatch.setattr(processes, "gone", lambda *_, ended=ended: ended)
        words = "checkpoint: rank 0 .* never stated theirs" if ended else "reset by peer"
        with pytest.raises(error, match=words):
            agreement._check_peers(this, "checkpoint")
