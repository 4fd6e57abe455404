"""Stand-in for a GPU that a test drives by hand, with the events that ``DeviceClock`` asks for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Device:
    """One stream: what it is given takes ``busy`` seconds each, and it is ``done`` so far."""

    given: float = 0.0
    done: float = 0.0
    synchronized: int = 0
    events: list[Event] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        """Give the stream more to do."""
        self.given += seconds

    def catch_up(self) -> None:
        """The stream has done all that it was given."""
        self.done = self.given

    def event(self) -> Event:
        """As ``torch.cuda.Event(enable_timing=True)``."""
        self.events.append(Event(self))
        return self.events[-1]


@dataclass(eq=False)
class Event:
    """What ``torch.cuda.Event`` is used for here."""

    device: Device
    at: float | None = None

    def record(self) -> None:
        self.at = self.device.given

    def query(self) -> bool:
        assert self.at is not None, "never recorded"
        return self.at <= self.device.done

    def synchronize(self) -> None:
        self.device.synchronized += 1
        self.device.catch_up()

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, as torch's; neither may be under way."""
        assert self.query() and other.query(), "torch raises here"
        assert self.at is not None and other.at is not None
        return (other.at - self.at) * 1e3
