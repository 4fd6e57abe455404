"""Print messages to the user through one logger, on rank 0 unless a caller asks otherwise.

The logger is ``logging.getLogger("hybridcomp")``, so that a job can silence or redirect it. By
default every text goes to standard output with the prefix ``[hybridcomp]``, where tools read it.
Modules below ``patches`` return their sentences, and callers print these with this module.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

NAME = "hybridcomp"
PREFIX = f"[{NAME}]"


class _Handler(logging.Handler):
    """Handler that writes to the current ``sys.stdout``, errors to ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
            _write(f"{PREFIX} {record.getMessage()}", stream)
        except Exception:
            self.handleError(record)


def _write(text: str, stream: TextIO) -> None:
    """Write a line of its own, even while tqdm shows progress bars, which end without newline."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None and getattr(bars, "_instances", None):
        bars.write(text, file=stream)  # clears the bars, writes, and draws them again
        stream.flush()
    else:
        print(text, file=stream, flush=True)


def _logger() -> logging.Logger:
    logger = logging.getLogger(NAME)
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        logger.addHandler(_Handler())
        logger.setLevel(logging.INFO)
        logger.propagate = False  # else a job's root logger would repeat every text
    return logger


_LOGGER = _logger()


def rank() -> int:
    """Return the rank of this process: from torch.distributed, else from the launcher, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    try:
        return int(os.environ.get("RANK", "0"))
    except ValueError:
        return 0


def say(*texts: str, anywhere: bool = False) -> None:
    """Print each text on rank 0 only; with ``anywhere``, on every rank that calls this."""
    if anywhere or rank() == 0:
        for text in texts:
            _LOGGER.info("%s", text)


class Once:
    """Print texts like ``say``, but each only once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, *texts: str, anywhere: bool = False) -> None:
        fresh = [text for text in dict.fromkeys(texts) if text not in self._told]
        self._told.update(fresh)
        say(*fresh, anywhere=anywhere)

    def forget(self) -> None:
        self._told.clear()


#: prints each text once in this process
say_once = Once()


def complain(text: str) -> None:
    """Print on standard error, on any rank, since other ranks may not know the problem."""
    _LOGGER.error("%s", text)
