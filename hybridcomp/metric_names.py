"""Names of reported figures: one vocabulary for JSON lines, W&B and other monitors.

=================== ==================================================================== =========
figure              meaning                                                              unit
=================== ==================================================================== =========
loss                training loss of a step, mean over its samples                       nats
tokens              tokens trained on until now                                          tokens
tokens_per_second   speed of a step                                                      tokens/s
valid_loss          loss on held-out text                                                nats
ratio               raw_MB / wire_MB, higher is better
raw_MB              bytes that native would have sent, all ranks                         1e6 bytes
wire_MB             bytes sent, all ranks                                                1e6 bytes
codec_ms            encoding and decoding time, all ranks: host time for tensors on a    ms
                    CPU, device time on a GPU, scaled up from the timed steps
wait_ms             time of waiting for other ranks, all ranks, measured as codec_ms     ms
error               sampled relative L2 error of one encoding
inter_ratio         as ratio, but only for bytes between nodes
native_since        first step in which a guard or "when": "auto" made messages native   step
encoded_since       first step in which "when": "auto" encodes them again                step
residual_norm       L2 norm of the residuals of error feedback, all ranks                as values
time                when the record was written, in JSON lines                           s of 1970
total_raw_MB        since the run began: bytes that native would have sent, all ranks    1e6 bytes
total_wire_MB       since the run began: bytes sent, all ranks                           1e6 bytes
saved_s             since the run began: time saved according to the measurements of     s
                    "when": "auto", less the time that these took
version             the last published version of the weights
versions            published versions; full_versions: sent whole; raw_versions: without codec
changed_share       fraction of the weights that a version changes, on average
bits_per_weight     bits of a version for each weight of the model, on average           bits
compare_ms          publishing: time of the slowest rank for comparing weights           ms
encode_ms           publishing: time of the slowest rank for encoding and checksums      ms
wire_ms             publishing: time of the slowest rank for writing to the folder,      ms
                    stream or group
apply_ms            time of the slowest receiver, if receivers send answers              ms
link_gbps           speed of the link, as "codec": "auto" of publish has measured it     Gb/s
coded_ms, raw_ms    expected time of the last version on this link, with and without     ms
                    the codec: encoding, sending, decoding
meetings            meetings of islands, one per fragment; skipped: meetings with NaN
meet_wait_ms        time for which rank 0 waited for messages of meetings                ms
drift               norm of the islands' differences over the norm of the weights
staleness           of islands: meetings by which an island was ahead; of a flushless pipeline:
                    most steps so far by which gradients of the first stage were late
held                most versions of the weights that the first stage has held at once so far
drains              number of times that a flushless pipeline was emptied so far
islands             islands that the next meeting waits for, if each island is its own job
left_out            islands left out of meetings, this one included; joined: islands that joined
=================== ==================================================================== =========

The first four figures keep their names, with one record per step. The other figures cover the time
since the previous report, mostly for one dimension and direction. In JSON lines they are named
``dimensions.<dimension>.<direction>.<figure>``; ``time``, ``residual_norm``, the totals and the
rows ``publish``, ``sync`` and ``pipeline`` are keys at the level of ``dimensions``. Elsewhere they
are named ``train/compression/<dimension>[/<direction>]/<figure>`` (without a direction for dp and
zero, which have one), ``train/compression/publish/<figure>`` and ``train/compression/<figure>``.
Hugging Face's Trainer adds ``train/`` itself, so its log has ``compression/...``.

Imports nothing: programs that only read figures need no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

LOSS, TOKENS, SPEED, VALID_LOSS = "loss", "tokens", "tokens_per_second", "valid_loss"
#: figures of a dimension and direction
FIGURES = (
    "ratio", "raw_MB", "wire_MB", "codec_ms", "wait_ms", "error", "inter_ratio", "native_since",
    "encoded_since",
)  # fmt: skip
RESIDUAL_NORM = "residual_norm"
#: figures of the whole job, since it began
TOTALS, SAVED_S = ("total_raw_MB", "total_wire_MB"), "saved_s"
#: key of a JSON record: seconds since 1970
TIME = "time"
PREFIX = "train/compression/"
#: replaces ``train/`` for trainers that prefix every name with it
TRAINER_PREFIX = "compression/"
#: x axis (optimizer steps) of a W&B run in which another program numbers the rows
STEP = f"{PREFIX}step"
#: keys of a W&B run's config: the block, other facts of the run, and the codecs
CONFIG_BLOCK, CONFIG_RUN, CONFIG_CODECS = "compression", "run", "codecs"

#: units by the ending of a figure's name
UNITS = {"ms": " ms", "MB": " MB", "gbps": " Gb/s"}
#: descriptions of figures whose names are not words
WORDS = {
    "meet_wait": "waited for others", "full_versions": "of them in full", "wire": "sent",
    "raw_versions": "of them without a codec", "bits_per_weight": "bits a weight",
    "compare": "comparing", "encode": "encoding", "apply": "applying", "coded": "estimated encoded",
    "raw": "estimated without a codec", "staleness": "meetings or steps ahead",
    "held": "versions held",
}  # fmt: skip


def event_name(dimension: str, direction: str, figure: str, one_way: bool) -> str:
    """Return the name of a figure outside JSON lines."""
    return f"{PREFIX}{dimension}/{'' if one_way else f'{direction}/'}{figure}"


def trainer_name(event: str) -> str:
    """Return the name of ``event`` in the log of Hugging Face's Trainer."""
    return TRAINER_PREFIX + event.removeprefix(PREFIX)


def split_event(name: str, prefix: str = PREFIX) -> tuple[str, str, str] | None:
    """Return ``(dimension, direction, figure)`` of a name; None for other names."""
    parts = name.removeprefix(prefix).split("/")
    if not name.startswith(prefix) or len(parts) not in (2, 3):
        return None
    return parts[0], "forward" if len(parts) == 2 else parts[1], parts[-1]


def follower_line(named: tuple[str, Mapping[str, float]]) -> str:
    """Format the named row of figures for the progress line, leaving out counts of 0."""
    name, row = named
    words = [_told(figure, value) for figure, value in row.items() if value or figure == "drift"]
    return f"{name}: {', '.join(words)}"


def _told(figure: str, value: float) -> str:
    """Format one figure in words, with its unit: ``waited for others 31.5 ms``."""
    name, _, last = figure.rpartition("_")
    if last == "share":
        return f"{name} {100 * value:.3g} %"
    unit = UNITS.get(last, "")
    name = WORDS.get(name if unit else figure, (name if unit else figure).replace("_", " "))
    return f"{name} {value:.4g}{unit}"
