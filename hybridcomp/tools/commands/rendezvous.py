"""Hold the store at which islands meet that are jobs of their own, until somebody ends it."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybridcomp.errors import ConfigError


def run(port: int) -> int:
    """Serve on ``port``, 0 for any that is free, until SIGINT or SIGTERM; returns the exit status.

    Raises ConfigError where the port cannot be taken.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    _check_free(port)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    print(f"hybridcomp rendezvous at tcp://{socket.gethostname()}:{store.port}", flush=True)
    while not ended.wait(0.5):  # Python runs handlers of signals between two waits
        pass
    del store
    return 0


def _check_free(port: int) -> None:
    """Raise ConfigError where nobody can listen on ``port``: torch would tell it in a screenful."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or error
        raise ConfigError("--port", port, f"{words}; name another one") from error
