"""Stand-in for a GPU driven by the test, with the events that ``DeviceClock`` uses."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Device:
    """A device with one stream: ``given`` seconds of work are queued, ``done`` of them finished."""

    given: float = 0.0
    done: float = 0.0
    synchronized: int = 0
    events: list[Event] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        """Queue more work."""
        self.given += seconds

    def catch_up(self) -> None:
        """Finish all queued work."""
        self.done = self.given

    def event(self) -> Event:
        """Create an event like ``torch.cuda.Event(enable_timing=True)``."""
        self.events.append(Event(self))
        return self.events[-1]


@dataclass(eq=False)
class Event:
    """Methods of ``torch.cuda.Event`` in use here."""

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
        """Return milliseconds, as torch does; both events must be done."""
        assert self.query() and other.query(), "torch raises here"
        assert self.at is not None and other.at is not None
        return (other.at - self.at) * 1e3
