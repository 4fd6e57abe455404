"""Do on all ranks or on none what takes several steps: an attach, a load, a save, a meeting.

    with together("loading the state", undo):
        ...

A rank that fails says so in the job's store. The others find it there wherever they would wait for
that rank: in ``agreement.tell`` and at a ``gates.gate``, which stands in front of each collective
and lets all ranks pass or none. The end of the body is a gate, too. So a failure anywhere is an
error on all ranks within seconds, which names the rank, and each puts back (``undo``) what it has
changed. What cannot be put back is done behind the body.

Where a gate in front of a message would cost too much, ``ending`` stands around it: a rank that
fails there says so and closes its connections, which ends the waits of all others, and the job.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
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

#: operations so far among the ranks of a part of the job; None: all ranks
_numbers: Counter[Ranks | None] = Counter()
#: most characters of a message of ours, which may name files, and of anybody else's
OWN_WORDS, OTHERS_WORDS = 4096, 200
#: errors of a mistake that every rank meets
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
    """Have the body end on all ranks, or raise on all of them; every rank enters it.

    One operation inside of another is a part of it. All ranks raise an error that begins with
    ``what: rank r:``; on the rank that fails it keeps its type where that is one of hybridcomp.

    Args:
        what: the operation, for messages.
        undo: puts back what this rank has changed; must not fail. No collective, but with ``votes``
            for what all have done that passed a gate.
        ranks: global ranks that enter, this one among them; None: all.
        error: what other ranks raise.
        votes: gates are sums over the job, which take a large job less time than the store; all
            ranks come to the same gates then. For what is done in the middle of training.
        group: with ``votes``, the ranks that enter and vote; None: all.
        alone: this rank waits for no other: a failure is an error here, and others miss the rank.
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
            here.operations.remove(operation)  # no gates in front of what ``undo`` does
        undo()
        if operation is None and inner:
            raise  # the operation around this one says it
        first = None if operation is None else operation.told_before(problem)
        told = first or named(problem, what, error)
        raise told from told.__cause__
    else:
        if operation is not None:
            here.operations.remove(operation)


@contextlib.contextmanager
def ending(what: str, error: type[HybridcompError] = PeerError) -> Iterator[None]:
    """Have a failure of this rank in the body end the job: no gate stands in front of its messages.

    For sums at the end of a step and other messages without a gate. Sends nothing where all goes
    well. A rank that fails states it, and closes its connections, so that the others' waits for it
    end: in a body of their own with an error that names it. An error that all ranks have, or have
    been told, passes as it is, and an operation inside of the body is one of its own.
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
        told = first or named(problem, what, error)
        raise told from told.__cause__
    finally:
        here.operations.remove(operation)


def _is_inside() -> bool:
    """Return whether this rank is in an operation that its ranks do or leave together."""
    return any(not isinstance(one, _Ending) for one in here.operations)


def _is_alone(ranks: Sequence[int] | None) -> bool:
    return (dist.get_world_size() if ranks is None else len(ranks)) == 1


def _close_connections(problem: BaseException, is_first: bool) -> None:
    """End the waits of others for this rank, which states its failure where it is the first."""
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
    """Return ``problem``, or one in its place, with a message that names this rank."""
    if not isinstance(problem, Exception) or isinstance(problem, _COMMON):
        return problem
    if isinstance(problem, HybridcompError) and problem.names_rank:
        return problem
    rank = dist.get_rank() if dist.is_initialized() else 0
    kind = type(problem) if isinstance(problem, HybridcompError) else error
    told = kind.naming_rank(f"{what}: rank {rank}: {_words(problem)}")
    told.__cause__ = problem
    return told


def _words(problem: BaseException) -> str:
    first = (str(problem).strip() or "no text").splitlines()[0]
    if isinstance(problem, HybridcompError):
        return first[:OWN_WORDS]
    return f"{type(problem).__name__}: {first[:OTHERS_WORDS]}"


class _Stated(Operation):
    """An operation whose gates are rounds of statements."""

    def __init__(
        self, what: str, ranks: Ranks | None, error: type[HybridcompError], name: str = ""
    ) -> None:
        if not name:
            among = "all" if ranks is None else ",".join(map(str, ranks))
            name = f"{among}/{_numbers[ranks]}/"
            _numbers[ranks] += 1
        super().__init__(name)
        self.what, self.ranks, self.error = what, ranks, error
        self._key = agreement.failure_key(self.name)
        self._store = dist.distributed_c10d._get_default_store()

    def takes_in(self, ranks: Sequence[int]) -> bool:
        """Return whether all of these global ranks take part."""
        return self.ranks is None or set(ranks) <= set(self.ranks)

    def check(self, is_there: Callable[[], object] = bool) -> None:
        """Raise where a rank has failed, unless ``is_there`` says true."""
        if self._store.check([self._key]) and not is_there():
            rank, words = json.loads(self._store.get(self._key))
            raise self.error.naming_rank(f"{self.what}: rank {rank}: {words}")

    def gate(self, group: dist.ProcessGroup | None = None) -> None:
        """Return once all ranks of ``group`` have come here; at once where others are in it."""
        ranks = self.ranks if group is None else dist.get_process_group_ranks(group)
        if ranks is None or self.takes_in(ranks):
            agreement.tell({}, what=self.what, ranks=ranks)

    def fail(self, problem: BaseException) -> None:
        """Tell the others, unless somebody has told them of another failure."""
        text = json.dumps([dist.get_rank(), _words(problem)])
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store may have gone
            self._store.compare_set(self._key, "", text)

    def told_before(self, problem: BaseException) -> HybridcompError | None:
        """Return the failure of another rank that ``problem`` follows from, if one was told."""
        told = isinstance(problem, HybridcompError) and not isinstance(problem, PeerError)
        if told or not isinstance(problem, Exception):
            return None  # a failure of this rank's own, or one that was told
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store may have gone
            if self._store.check([self._key]):
                rank, words = json.loads(self._store.get(self._key))
                if rank != dist.get_rank():
                    found = self.error.naming_rank(f"{self.what}: rank {rank}: {words}")
                    found.__cause__ = problem
                    return found
        return None


class _Ending(_Stated):
    """The body of ``ending``: no gates, and one name, as the first failure ends the job."""

    def __init__(self, what: str, error: type[HybridcompError]) -> None:
        super().__init__(what, None, error, agreement.ENDING)

    def takes_in(self, ranks: Sequence[int]) -> bool:
        """Return False: statements inside are those of the operation around it, or of none."""
        return False

    def gate(self, group: dist.ProcessGroup | None = None) -> None:
        """Return at once."""


class _Voting(_Stated):
    """An operation whose gates are votes of ``group``, None: of the whole job."""

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
        """Return once all ranks have come here; raise where one has failed."""
        if not self._vote(True):
            self._is_over = True
            self.check()
            raise self.error(f"{self.what}: another rank has failed")

    def before_message(self) -> None:
        """Pass a gate, as a message of training is about to be posted."""
        self.gate()

    def fail(self, problem: BaseException) -> None:
        """Tell the others, at the gate to which they come next."""
        if not self._is_over:
            super().fail(problem)
            with contextlib.suppress(RuntimeError, dist.DistError):  # a rank has ended
                self._vote(False)

    def _vote(self, well: bool) -> bool:
        flag = torch.tensor(int(well), dtype=torch.int32, device=default_device())
        return bool(small_messages.start_least(flag, self._group)())
