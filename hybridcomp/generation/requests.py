"""Choose the sequences of each batch's next pass; runs on the first stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hybridcomp.generation.past import PackedPass, SequencePart
from hybridcomp.generation.picking import Picked

#: prompts join a pass until it has this many tokens, or as many as the longest prompt has
JOINED = 2048

Stops = Callable[[Sequence[int], int], int | None]


class Requests:
    """Prompts to answer, in slots: each slot is one batch in flight.

    Finished sequences leave their slot, and waiting prompts enter it in its next pass.

    Attributes:
        answers: tokens of each answer so far.
        slots: number of batches in flight; no more than the prompts can fill.
        most: tokens of the largest possible pass.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], tokens: int, stops: Stops,
        *, batch: int, slots: int, tree: int = 1, wants: int = 1,
    ) -> None:  # fmt: skip
        """Ask for ``tokens`` tokens for each of ``prompts``.

        ``stops``: takes an answer and the index of its first new token; returns the answer's final
        length if it has ended, else None. ``batch``: sequences per slot. ``tree``: maximum tokens
        of a sequence in a pass after the prompt's. ``wants``: number of a prompt's last tokens
        that need logits.
        """
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.slots = min(slots, -(-len(prompts) // batch))
        self.most = max([JOINED, batch * tree, *map(len, prompts)])
        self._prompts, self._tokens, self._stops, self._batch = prompts, tokens, stops, batch
        self._wants = wants
        self._waiting = deque(range(len(prompts)))
        self._live: list[dict[int, SequencePart]] = [{} for _ in range(self.slots)]
        self._ended: list[int] = []

    def next(self, slot: int) -> PackedPass | None:
        """Return the next pass of a slot; None if all its sequences have ended."""
        live, prompts = self._live[slot], self._prompts
        count = sum(len(part.tokens) for part in live.values())
        while self._waiting and len(live) < self._batch:
            first = self._waiting[0]
            if live and count + len(prompts[first]) > self.most:
                break
            count += len(prompts[first])
            live[first] = SequencePart(first, tuple(prompts[first]), wants=self._wants)
            self._waiting.popleft()
        ended, self._ended = self._ended, []
        if not live:
            self._ended = ended
            return None
        return PackedPass(tuple(live.values()), tuple(ended))

    def take(self, slot: int, picked: Sequence[Picked]) -> None:
        """Apply the picked tokens of a slot's last pass."""
        live = self._live[slot]
        for sequence, choice in zip(list(live), picked, strict=True):
            answer = self.answers[sequence]
            known = len(answer)
            answer += choice.answer
            stop = self._stops(answer, known)
            if stop is None and len(answer) < self._tokens:
                live[sequence] = SequencePart(
                    sequence, choice.tokens, len(answer), len(choice.tokens), choice.parents,
                    choice.kept,
                )  # fmt: skip
                continue
            del answer[min(stop or self._tokens, self._tokens) :]
            del live[sequence]
            self._ended.append(sequence)
