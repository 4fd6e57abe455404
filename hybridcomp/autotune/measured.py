"""Decide by a table of ``hybridcomp measure`` from the same machines instead of long trials.

The table lies in the user's cache: seconds of messages of growing size, native and encoded. A run
without verdicts of an earlier run (``remembered``) reads it. If it shows a clear difference for a
dimension, and short messages timed now agree with it, the dimension has its verdict without longer
messages and without compared steps. Otherwise the usual trial runs.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.autotune import remembered_file
from hybridcomp.autotune.remembered import hashed, transport
from hybridcomp.autotune.trials import StepTraffic
from hybridcomp.job.agreement import tell

#: factor, up or down, by which a short message may differ from the table
OFF = 1.5
#: factor between encoded and native seconds from which the table decides
SURE = 3.0


@dataclass(frozen=True)
class MeasuredRow:
    """Seconds of messages among all ranks, by their number of values.

    Attributes:
        how: as in ``StepTraffic``.
        codec: ``spec`` of the codec.
        dtype: of the values, such as ``bf16``.
        levels: 2 where ranks sum or gather natively inside nodes of several ranks; else 1.
        numels: values, as ``StepTraffic`` counts them, ascending.
        native_s, coded_s: seconds of a message of each size in ``numels``.
    """

    how: str
    codec: str
    dtype: str
    levels: int
    numels: tuple[int, ...]
    native_s: tuple[float, ...]
    coded_s: tuple[float, ...]


@dataclass(frozen=True)
class MeasuredLinks:
    """A table of ``hybridcomp measure``: each rank's host, rows, time written (s since 1970)."""

    hosts: tuple[str, ...]
    rows: tuple[MeasuredRow, ...]
    written: float

    def seconds(
        self, sent: StepTraffic, codec: str, dtype: str, levels: int
    ) -> tuple[float, float] | None:
        """Return the seconds of all messages of ``sent``, native and encoded; None: unknown."""
        for row in self.rows:
            if (row.how, row.codec, row.dtype, row.levels) == (sent.how, codec, dtype, levels):
                native, coded = (
                    sum(_between(row.numels, column, numel) for numel in sent.numels)
                    for column in (row.native_s, row.coded_s)
                )
                return native, coded
        return None

    def describe(self, names: Sequence[str]) -> str:
        """Return a sentence on the verdicts on ``names``, which short messages confirmed."""
        day = time.strftime("%d %b %Y", time.localtime(self.written))
        return (
            f"{', '.join(names)}: by what hybridcomp measure found here on {day}, which short "
            'messages confirmed; "remember": false measures all'
        )


def _between(numels: Sequence[int], seconds: Sequence[float], numel: int) -> float:
    """Interpolate between two sizes; beyond the largest, seconds are proportional to the size."""
    if numel >= numels[-1]:
        return seconds[-1] * numel / numels[-1]
    if numel <= numels[0]:
        return seconds[0]
    (low, low_s), (high, two) = next(
        (a, b) for a, b in pairwise(zip(numels, seconds, strict=True)) if b[0] >= numel
    )
    return low_s + (two - low_s) * (numel - low) / (high - low)


def path_of(device: torch.device, group: dist.ProcessGroup | None = None) -> Path | None:
    """Return the file of these machines on rank 0; None where there is no folder for it."""
    name = hashed([platform.node(), dist.get_world_size(), *transport(device, group)])
    folder = remembered_file.folder()
    return None if folder is None else folder / remembered_file.LINKS.replace("*", name)


def recall(device: torch.device, group: dist.ProcessGroup | None) -> MeasuredLinks | None:
    """Return the table of these machines, the same on all ranks; a collective over the job.

    Returns None if there is no table, if it is older than ``remembered_file.DAYS`` or from other
    hosts, or if the ``group`` of any rank lacks ranks of the job.
    """
    whole = dist.get_world_size(group) == dist.get_world_size()
    path = path_of(device, group) if dist.get_rank() == 0 and whole else None
    table = None if path is None else remembered_file.read_links(path)
    said = tell({"host": platform.node(), "found": table, "whole": whole}, what="measured links")
    if said[0]["found"] is None or not all(row["whole"] for row in said):
        return None
    links = of_json(said[0]["found"])
    here = tuple(row["host"] for row in said)
    return links if links is not None and links.hosts == here else None


def of_json(table: Any) -> MeasuredLinks | None:
    """Read a table; None where it is damaged."""
    try:
        rows = tuple(_row(row) for row in table["rows"])
        return MeasuredLinks(tuple(map(str, table["hosts"])), rows, float(table["written"]))
    except (KeyError, TypeError, ValueError):
        return None


def _row(row: Mapping[str, Any]) -> MeasuredRow:
    """Read a row. Raises KeyError, TypeError or ValueError where it is damaged."""
    numels = tuple(int(numel) for numel in row["numels"])
    native, coded = (tuple(map(float, row[name])) for name in ("native_s", "coded_s"))
    if not numels or list(numels) != sorted(set(numels)) or numels[0] < 1:
        raise ValueError("numels")
    if not len(native) == len(coded) == len(numels):
        raise ValueError("columns")
    if not all(math.isfinite(seconds) and seconds > 0 for seconds in (*native, *coded)):
        raise ValueError("seconds")
    how, codec, dtype = (str(row[name]) for name in ("how", "codec", "dtype"))
    return MeasuredRow(how, codec, dtype, int(row["levels"]), numels, native, coded)


def write(path: Path, hosts: Sequence[str], rows: Sequence[MeasuredRow], written: float) -> str:
    table = MeasuredLinks(tuple(hosts), tuple(rows), written)
    return remembered_file.write_text(path, json.dumps(asdict(table)))
