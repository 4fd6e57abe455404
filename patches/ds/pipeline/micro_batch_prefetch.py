"""Read micro-batches ahead for the first stage of a pipeline that does not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.ds_pipeline import KEY


class ReadAhead:
    """Micro-batches that the first stage has read but whose backward passes are pending.

    From now on upstream reads through ``_next``, even after the patches are reverted: its schedule
    then begins with the micro-batches that were read ahead.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._held: deque[Any] = deque()
        self._again: deque[Any] = deque()
        self._source: Any = None
        self._is_reading = self._is_ahead = self._has_ended = False
        self._is_first = engine.module.stage_id == 0  # the engine itself may be half built
        if self._is_first:
            self._read = engine._next_batch
            engine._next_batch = self._next

    def begin(self, starts: bool) -> None:
        """Begin a batch. Raises ConfigError if its data cannot follow the last batch's."""
        source = self._engine.data_iterator
        if not self._is_first:
            return
        if starts:
            self._has_ended = False
            if source is not self._source:
                self._again.clear()
        elif self._has_ended or source is not self._source:
            found = Shown("an iterator that has ended" if self._has_ended else "another iterator")
            todo = (
                "the first stage reads ahead; pass one iterator that goes on, such as DeepSpeed's "
                "RepeatingLoader, or evaluate or save a checkpoint before another"
            )
            raise ConfigError(KEY, found, todo)
        self._source = source

    @contextmanager
    def reading(self, is_ahead: bool) -> Iterator[None]:
        """Hold the micro-batches read inside this context; ``is_ahead``: for a later batch."""
        self._is_reading, self._is_ahead = True, is_ahead
        try:
            yield
        finally:
            self._is_reading = False

    def _next(self) -> Any:
        if not self._is_reading:  # an evaluation or a flush
            if self._engine.data_iterator is not self._source:
                return self._read()
            self.replay()
            return self._again.popleft() if self._again else self._read()
        if self._has_ended:
            return self._held[-1]
        try:
            batch = self._again.popleft() if self._again else self._read()
        except StopIteration:
            if not self._is_ahead:
                raise
            # training may be over: fill up with micro-batches that will be dropped
            self._has_ended = True
            return self._held[-1]
        self._held.append(batch)
        return batch

    def used(self) -> None:
        """Forget the oldest micro-batch, whose backward pass is done."""
        if self._held:
            self._held.popleft()

    def replay(self) -> None:
        """Queue the pending micro-batches to be read again."""
        self._again.extendleft(reversed(self._held))
        self._held.clear()
        self._has_ended = False
