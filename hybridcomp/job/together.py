"""Run multi-step operations on all ranks or on none: an attach, a load, a save, a meeting.

    with together("loading the state", undo):
        ...

A rank that fails reports its failure in the job's store. Other ranks find the report wherever they
would wait for that rank: in ``agreement.tell``, and at a ``gates.gate``, which precedes each
collective and lets all ranks pass or none. The end of the body is also a gate. So every rank raises
an error that names the failed rank, within seconds, and reverts its own changes (``undo``).
Irreversible steps belong after the body.

Where a gate before a message would cost too much, the message is sent inside of ``ending``: a rank
that fails there reports its failure and closes its connections. This ends the waits of the other
ranks, and the job.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from hybridcomp.errors import (
    AgreementError,
    ConfigError,
    HybridcompError,
    PeerError,
    SeamError,
)
from hybridcomp.job import agreement, small_messages
from hybridcomp.job.devices import default_device
from hybridcomp.job.gates import Operation, Ranks, here
from hybridcomp.log import complain

#: maximum characters of hybridcomp's error messages, which may name files, and of other errors'
OWN_WORDS, OTHERS_WORDS = 4096, 200
#: errors that occur on every rank alike
_COMMON = (ConfigError, AgreementError, SeamError)


@contextlib.contextmanager
def together(
    what: str,
    undo: Callable[[], object] = bool,
    *,
    ranks: Sequence[int] | None = None,
    error: type[HybridcompError] = PeerError,
    votes: bool = False,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> Iterator[None]:
    """Complete the body on all ranks, or raise on all of them; every rank enters it.

    An inner operation becomes part of the outer one. All ranks raise an error that begins with
    ``what: rank r:``; on the failing rank a hybridcomp error keeps its type.

    Args:
        what: the operation, for messages.
        undo: reverts this rank's changes; must not fail. It must not send collectives, except with
            ``votes``, to revert changes that all ranks have made after passing a gate.
        ranks: global ranks that enter, this one among them; None: all.
        error: class of the error that the other ranks raise.
        votes: whether gates are sums over the job, which in a large job are faster than the store;
            all ranks must then reach the same gates. For operations in the middle of training.
        group: with ``votes``, the ranks that enter and vote; None: all.
        alone: whether this rank neither waits for others nor reports a failure to them.
    """
    operation: _Stated | None = None
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
    inner = _is_inside()
    if not (inner or alone or not dist.is_initialized() or _is_alone(ranks)):
        part = None if ranks is None else tuple(ranks)
        operation = _Voting(what, part, error, group) if votes else _Stated(what, part, error)
        here.operations.append(operation)
    try:
        yield
        if operation is not None:
            operation.gate()
    except BaseException as problem:
        if operation is not None:
            operation.fail(problem)
            here.operations.remove(operation)  # no gates inside ``undo``
        undo()
        if operation is None and inner:
            raise  # the outer operation reports it
        first = None if operation is None else operation.told_before(problem)
        reported = first or named(problem, what, error)
        raise reported from reported.__cause__
    else:
        if operation is not None:
            here.operations.remove(operation)


@contextlib.contextmanager
def ending(what: str, error: type[HybridcompError] = PeerError) -> Iterator[None]:
    """Make a failure of this rank in the body end the job: no gate precedes its messages.

    For sums at the end of a step and other messages without a gate. It sends nothing unless a rank
    fails. The failing rank reports its failure and closes its connections. This ends the waits of
    other ranks, which raise an error that names it in their own ``ending`` bodies. An error that
    occurs on all ranks, or already names a rank, passes unchanged. An operation inside the body is
    separate.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    operation, inner = _Ending(what, error), _is_inside()
    here.operations.append(operation)
    try:
        yield
    except BaseException as problem:
        is_told = isinstance(problem, HybridcompError) and problem.names_rank
        if is_told or isinstance(problem, _COMMON):
            raise
        first = operation.told_before(problem)
        _close_connections(problem, is_first=first is None)
        if inner:
            raise  # the operation around this one says it
        reported = first or named(problem, what, error)
        raise reported from reported.__cause__
    finally:
        here.operations.remove(operation)


def _is_inside() -> bool:
    """Return whether this rank is in an all-or-none operation."""
    return any(not isinstance(operation, _Ending) for operation in here.operations)


def _is_alone(ranks: Sequence[int] | None) -> bool:
    return (dist.get_world_size() if ranks is None else len(ranks)) == 1


def _close_connections(problem: BaseException, is_first: bool) -> None:
    """Close this rank's connections; report its failure before if it is the first to fail."""
    if is_first:
        for operation in here.operations:
            operation.fail(problem)
        complain(
            f"rank {dist.get_rank()} fails where others wait for its message ({_words(problem)}); "
            "it closes its connections, so that no rank waits for it: the job ends"
        )
    for group in list(dist.distributed_c10d._world.pg_map):
        small_messages.cut_off(group)


def named(problem: BaseException, what: str, error: type[HybridcompError]) -> BaseException:
    """Return ``problem``, or a replacement, with a message that names this rank."""
    if not isinstance(problem, Exception) or isinstance(problem, _COMMON):
        return problem
    if isinstance(problem, HybridcompError) and problem.names_rank:
        return problem
    rank = dist.get_rank() if dist.is_initialized() else 0
    kind = type(problem) if isinstance(problem, HybridcompError) else error
    naming = kind.naming_rank(f"{what}: rank {rank}: {_words(problem)}")
    naming.__cause__ = problem
    return naming


def _words(problem: BaseException) -> str:
    first = (str(problem).strip() or "no text").splitlines()[0]
    if isinstance(problem, HybridcompError):
        return first[:OWN_WORDS]
    return f"{type(problem).__name__}: {first[:OTHERS_WORDS]}"


class _Stated(Operation):
    """An operation whose gates are rounds of statements in the store."""

    def __init__(
        self, what: str, ranks: Ranks | None, error: type[HybridcompError], name: str = ""
    ) -> None:
        if not name:
            among = "all" if ranks is None else ",".join(map(str, ranks))
            name = f"{among}/{agreement.next_number('operations', ranks)}/"
        super().__init__(name)
        self.what, self.ranks, self.error = what, ranks, error
        self._key = agreement.failure_key(self.name)
        self._store = dist.distributed_c10d._get_default_store()

    def takes_in(self, ranks: Sequence[int]) -> bool:
        return self.ranks is None or set(ranks) <= set(self.ranks)

    def check(self, is_there: Callable[[], object] = bool) -> None:
        if self._store.check([self._key]) and not is_there():
            rank, words = json.loads(self._store.get(self._key))
            raise self.error.naming_rank(f"{self.what}: rank {rank}: {words}")

    def gate(self, group: dist.ProcessGroup | None = None) -> None:
        """Return once all ranks of ``group`` have arrived; at once if not all are inside."""
        ranks = self.ranks if group is None else dist.get_process_group_ranks(group)
        if ranks is None or self.takes_in(ranks):
            agreement.tell({}, what=self.what, ranks=ranks)

    def fail(self, problem: BaseException) -> None:
        """Report the failure to the others, unless another failure was already reported."""
        text = json.dumps([dist.get_rank(), _words(problem)])
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store may be gone
            self._store.compare_set(self._key, "", text)

    def told_before(self, problem: BaseException) -> HybridcompError | None:
        known = isinstance(problem, HybridcompError) and not isinstance(problem, PeerError)
        if known or not isinstance(problem, Exception):
            return None  # this rank's own failure, or one that it has already learned of
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store may be gone
            if self._store.check([self._key]):
                rank, words = json.loads(self._store.get(self._key))
                if rank != dist.get_rank():
                    first = self.error.naming_rank(f"{self.what}: rank {rank}: {words}")
                    first.__cause__ = problem
                    return first
        return None


class _Ending(_Stated):
    """Implement ``ending``: it has no gates, and a fixed name, as one failure ends the job."""

    def __init__(self, what: str, error: type[HybridcompError]) -> None:
        super().__init__(what, None, error, agreement.ENDING)

    def takes_in(self, ranks: Sequence[int]) -> bool:
        """Return False: statements in the body belong to the outer operation, or to none."""
        return False

    def gate(self, group: dist.ProcessGroup | None = None) -> None:
        """Return immediately."""


class _Voting(_Stated):
    """An operation whose gates are votes of ``group``; None: of the whole job."""

    def __init__(
        self,
        what: str,
        ranks: Ranks | None,
        error: type[HybridcompError],
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(what, ranks, error)
        self._group, self._is_over = group, False

    def gate(self, group: dist.ProcessGroup | None = None) -> None:
        if not self._vote(True):
            self._is_over = True
            self.check()
            raise self.error(f"{self.what}: another rank has failed")

    def before_message(self) -> None:
        self.gate()

    def fail(self, problem: BaseException) -> None:
        """Report the failure; the others learn of it at the next gate, by this rank's vote."""
        if not self._is_over:
            super().fail(problem)
            with contextlib.suppress(RuntimeError, dist.DistError):  # a rank has ended
                self._vote(False)

    def _vote(self, well: bool) -> bool:
        flag = torch.tensor(int(well), dtype=torch.int32, device=default_device())
        return bool(small_messages.start_least(flag, self._group)())
