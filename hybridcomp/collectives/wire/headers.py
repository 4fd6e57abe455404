"""Headers of messages that nobody waited for.

The size of a payload of fixed size is known before it comes, so on a GPU nothing has to wait for
its header: once one message of a kind was read and was as expected, the next ones are decoded at
once and their headers are compared later, all together: after every optimizer step those that have
arrived on the host by then, at a report and before a checkpoint all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.codecs import LateRead

#: compared at once when as many wait: a job without optimizer steps must not keep them for ever
MOST = 1024

Kind = tuple[int, int, torch.dtype, str]  # source, elements, dtype, spec
Check = Callable[[bytes], None]


@dataclass
class Unread:
    """Headers on devices, each with what will raise if it is not as expected."""

    kinds: set[Kind] = field(default_factory=set)
    waiting: list[tuple[Tensor, Check]] = field(default_factory=list)
    asked: list[tuple[Tensor, Check]] = field(default_factory=list)  # on their way to the host
    late: LateRead = field(default_factory=LateRead)

    def looks_later(self, kind: Kind, device: torch.device) -> bool:
        """Whether a message of this kind may be decoded before its header is read."""
        return device.type != "cpu" and kind in self.kinds

    def add(self, header: Tensor, check: Check) -> None:
        """Compare ``header`` at the next ``check``."""
        self.waiting.append((header, check))
        if len(self.waiting) >= MOST:
            self.check()

    def check(self) -> None:
        """Wait for the devices and compare; raises what the first wrong header's check raises."""
        waiting, self.waiting, self.asked = self.asked + self.waiting, [], []
        for header, check in waiting:
            check(bytes(header.tolist()))

    def poll(self) -> None:
        """Compare what the call before asked for, as far as it is here; waits for nothing."""
        found = self.late.take()
        if found is not None:
            asked, self.asked = self.asked, []  # empty where ``check`` was quicker
            for header, (_, check) in zip(found.tolist(), asked, strict=False):
                check(bytes(header))
        if self.waiting and not self.late.pending:
            self.asked, self.waiting = self.waiting, []
            self.late.start(torch.stack([header for header, _ in self.asked]))


#: of this process
UNREAD = Unread()


def check_headers() -> None:
    """Raise CodecError if a message since the last check was not what this rank expected."""
    UNREAD.check()


def poll_headers() -> None:
    """Raise as ``check_headers`` does, for headers that are on the host by now."""
    UNREAD.poll()
