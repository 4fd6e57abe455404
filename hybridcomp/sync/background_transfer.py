"""Send this rank's messages to the rendezvous and fetch other islands', in background threads.

There are two threads, each with its own connection: one posts this rank's messages in order, the
other fetches other islands' messages once the messages are complete. The threads decide nothing:
the training thread decides which islands are present at a meeting (``Rendezvous.decide``), so
time-outs, joins, departures and results are the same as without threads.

* **Memory**: at most one message per island for each meeting that may be pending. * **A failure**
in a thread ends the thread. The next waiting call, or ``check`` at the next step, raises its error,
and so does every later call. * **The end**: ``close`` posts the remaining messages within the given
time, and ends both threads. At the normal end of a process the session closes its meetings and
thereby this object, on every rank.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import util

from hybridcomp.errors import HybridcompError, PeerError
from hybridcomp.job.waits import LOOK_S, NOTICE_S, SELDOM_S, Notices
from hybridcomp.sync.rendezvous import Rendezvous
from hybridcomp.sync.store_line import KEY

#: seconds that closing waits for a request that a thread has just started
REQUEST_ENDS_S = 5.0
#: a message's meeting and island
Place = tuple[int, str]


class BackgroundTransfer:
    """Messages of one rank in transit; only the training thread calls its methods."""

    def __init__(self, meet: Rendezvous, ranks: int) -> None:
        """Start both threads, with connections like that of ``meet``.

        ``ranks``: number of ranks of the island, whose message is complete once all of them have
        posted. Raises PeerError if the rendezvous does not answer.
        """
        self._meet, self._ranks = meet, ranks
        self._changed = threading.Condition()
        self._unsent: deque[tuple[Place, memoryview]] = deque()
        #: messages to fetch; True: a decision counts the message, so it need not be checked for
        #: completeness
        self._wanted: dict[Place, bool] = {}
        self._found: dict[Place, bytearray | None] = {}
        self.problem: Exception | None = None
        self._ended = False
        self._threads = [self._started(self._send, meet), self._started(self._fetch, meet)]
        # a thread that is inside torch when the interpreter ends would abort the process: if
        # nothing has closed this object (priority 0), unsent messages are dropped
        self._net = util.Finalize(None, self.close, (0.0,), exitpriority=-1)

    def send(self, own: str, number: int, message: memoryview) -> None:
        """Queue this rank's message for a meeting after earlier messages, without copying it.

        It never raises, since other ranks of the island may already have posted their messages.
        """
        with self._changed:
            self._unsent.append(((number, own), message))
            self._changed.notify_all()

    def expect(self, number: int, islands: Iterable[str]) -> None:
        """Fetch ``islands``' messages for a meeting as they arrive; some may never come.

        It never raises, like ``send``.
        """
        with self._changed:
            for island in islands:
                if (number, island) not in self._found:
                    self._wanted.setdefault((number, island), False)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of either thread, if there is one."""
        with self._changed:
            self._raise()

    def wait_sent(self, number: int) -> None:
        """Return once this rank's messages up to a meeting are posted."""
        with self._changed:
            self._await(
                lambda: not self._unsent or self._unsent[0][0][0] > number,
                f"for its message of meeting {number} to reach the rendezvous",
            )

    def take(self, number: int, island: str) -> bytearray | None:
        """Return a present island's message for a meeting; None: the store lost it."""
        place = (number, island)
        with self._changed:
            if place not in self._found:
                self._wanted[place] = True
            self._await(
                lambda: place in self._found,
                f"for the message of island {island} of meeting {number} to arrive",
            )
            return self._found.pop(place)

    def forget(self, number: int) -> None:
        """Drop fetched messages and pending fetches for meetings up to ``number``."""
        with self._changed:
            self._wanted = {at: sure for at, sure in self._wanted.items() if at[0] > number}
            self._found = {at: data for at, data in self._found.items() if at[0] > number}

    def flush(self) -> None:
        """Drop fetched messages and requests not yet begun; return once nothing is in transit."""
        with self._changed:
            while len(self._unsent) > 1:
                self._unsent.pop()
            self._await(lambda: not self._unsent, "for a message that is being sent")
            self._wanted, self._found = {}, {}

    def close(self, seconds: float) -> int:
        """Post the remaining messages for at most ``seconds``, and end both threads; never raises.

        Returns how many messages were not posted.
        """
        with self._changed:
            what = f"with the end, {seconds:g} s at most, until its messages are at the rendezvous"
            self._told(lambda: not self._unsent or self.problem or self._ended, what, seconds)
            self._ended, self._wanted, self._found = True, {}, {}
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(REQUEST_ENDS_S)
        self._net.cancel()
        return len(self._unsent)

    # inside

    def _raise(self) -> None:
        if self.problem is not None:
            raise self.problem

    def _await(self, there: Callable[[], bool], what: str) -> None:
        """Wait, with the lock held, until ``there()`` is true; raise a thread's error.

        The wait is limited, since each request of the threads has a time limit. ``what``: words for
        what is waited for.
        """
        self._changed.notify_all()
        self._told(lambda: there() or self.problem, what)
        if not there():
            self._raise()

    def _told(self, there: Callable[[], object], what: str, seconds: float = math.inf) -> None:
        """Wait, with the lock held, until ``there()`` is true; tell the user of a long wait."""
        notices = Notices()
        while (left := seconds - notices.seconds) > 0:
            if self._changed.wait_for(there, min(left, NOTICE_S)):
                return
            if notices.due():
                self._meet.say(
                    f"sync: rank {self._meet.place} of the island has waited "
                    f"{notices.seconds:.0f} s {what}",
                    anywhere=True,
                )

    def _started(self, work: Callable[[Rendezvous], None], meet: Rendezvous) -> threading.Thread:
        name = f"hybridcomp islands {work.__name__.strip('_')}"
        thread = threading.Thread(
            target=self._guarded, args=(work, meet.clone_connection()), name=name, daemon=True
        )
        thread.start()
        return thread

    def _guarded(self, work: Callable[[Rendezvous], None], meet: Rendezvous) -> None:
        """Run the body of a thread, and store the exception that ends it."""
        try:
            work(meet)
        except Exception as error:
            if not isinstance(error, HybridcompError):
                words = f"{KEY}: a thread that carries messages has failed: {error!r}"
                error = PeerError(f"{words}; report it with the lines above")
            with self._changed:
                self.problem = self.problem or error
                self._changed.notify_all()

    def _send(self, meet: Rendezvous) -> None:
        """Post messages until the end; the island's last rank to post announces completeness."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._ended)
                if self._ended:
                    return
                (number, own), message = self._unsent[0]
            meet.post(own, number, message)
            meet.stand(own, number, self._ranks)
            with self._changed:
                self._unsent.popleft()
                self._changed.notify_all()

    def _fetch(self, meet: Rendezvous) -> None:
        """Poll for messages until the end, those of the earliest meeting first."""
        pause = LOOK_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._ended)
                if self._ended:
                    return
                wanted = sorted(self._wanted.items())
            place = next((at for at, sure in wanted if sure or meet.stands(*at)), None)
            if place is None:
                with self._changed:
                    self._changed.wait_for(self._is_urgent, pause)
                pause = min(SELDOM_S, 1.5 * pause)
                continue
            number, island = place
            data, pause = meet.message_of(island, number), LOOK_S
            with self._changed:
                if self._wanted.pop(place, None) is not None:  # unless it was dropped meanwhile
                    self._found[place] = data
                self._changed.notify_all()

    def _is_urgent(self) -> bool:
        return self._ended or any(self._wanted.values())
