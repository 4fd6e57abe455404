"""Leave the run when an island job ends normally; warn if its last messages do not count.

* Each rank waits until its own messages are at the rendezvous, at most ``timeout_s``.
* The island's first rank then waits at most ``OTHERS_S`` for the messages of the island's other
  ranks, which are equally long, and announces from which meeting on the island is absent, so that
  nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridcomp.errors import PeerError
from hybridcomp.job.waits import awaited
from hybridcomp.sync.background_transfer import BackgroundTransfer
from hybridcomp.sync.rendezvous import Rendezvous

#: seconds that the first rank waits at the end for messages of the island's other ranks
OTHERS_S = 30.0


def depart(
    meet: Rendezvous,
    transfer: BackgroundTransfer,
    own: str,
    under_way: range,
    limit_s: float,
    say: Callable[..., object],
) -> None:
    """Post the remaining messages; the first rank then leaves the run. Never raises; no collective.

    Args:
        meet, transfer: rendezvous and transfer of this rank; the transfer is ended.
        own: the island's name in the run; "": it is in no run.
        under_way: pending meetings to which this rank has sent or is sending its message.
        limit_s: seconds for this rank's own messages.
        say: tells the user a sentence.
    """
    unsent = transfer.close(limit_s)
    if unsent:
        why = transfer.problem or f"they were not there within {limit_s:g} s"
        say(
            f"sync: rank {meet.place} of island {own} ends and loses its message for "
            f"{unsent} meeting(s), which the others hold without the island: {why}",
            anywhere=True,
        )
    if not own or meet.place:
        return
    try:
        sent = under_way[: len(under_way) - unsent]
        there = _of_all_ranks(meet, own, sent, min(limit_s, OTHERS_S))
        if there < len(sent):
            say(
                f"sync: island {own} ends and loses {len(sent) - there} meeting(s), which the "
                "others hold without it: another rank of it has not sent its message"
            )
        meet.leave(own, under_way.start + there)
    except PeerError as error:  # other islands wait once, or ended with the store
        say(f"sync: island {own} ends without a word: {error}")


def _of_all_ranks(meet: Rendezvous, own: str, numbers: range, seconds: float) -> int:
    """Wait until all ranks of ``own`` have sent to these meetings, or the meetings are decided.

    Returns, after at most ``seconds``, for how many consecutive meetings ``own`` counts.
    """

    def is_counted(number: int) -> bool | None:
        decided = meet.decision(number)
        if decided is not None:
            return own in decided.present
        return True if meet.stands(number, own) else None

    def notice(waited: float) -> None:
        meet.say(
            f"sync: island {own} ends; its first rank has waited {waited:.0f} s for the others' "
            f"messages, at most {seconds:g} s"
        )

    def look() -> bool | None:
        return all(is_counted(number) is not None for number in reversed(numbers)) or None

    awaited(look, seconds, notice)
    return next((at for at, number in enumerate(numbers) if not is_counted(number)), len(numbers))
