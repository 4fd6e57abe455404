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
codec_ms            time in encoding and decoding, all ranks: of the host, on a GPU of   ms
                    the device, scaled from the steps that are timed
wait_ms             time of waiting for others, all ranks, likewise                      ms
error               sampled relative L2 error of one encoding
inter_ratio         as ratio, for bytes between nodes
native_since        the step from which a guard or "when": "auto" made it native         step
encoded_since       the step from which "when": "auto" encodes it after all              step
residual_norm       L2 norm of the residuals of error feedback, all ranks                as values
time                when the record was written, in JSON lines                           s of 1970
total_raw_MB        since the run began: bytes that native would have sent, all ranks    1e6 bytes
total_wire_MB       since the run began: bytes sent, all ranks                           1e6 bytes
saved_s             since the run began: seconds saved as far as "when": "auto" has      s
                    measured them, less those spent on measuring
version             the last published version of the weights
versions            versions published, full_versions of them whole, raw_versions without a codec
changed_share       changed weights of a version's, on average
bits_per_weight     bits of a version for each weight of the model, on average           bits
compare_ms          time of publishing, of the slowest rank: comparing                   ms
encode_ms           likewise: encoding, with checksums                                   ms
wire_ms             likewise: handing to the folder, stream or group                     ms
apply_ms            likewise: of the slowest receiver; where receivers answer            ms
link_gbps           the link that "codec": "auto" of publish has measured                Gb/s
coded_ms, raw_ms    what the last version was to take on it either way: encoding,        ms
                    sending, decoding
meetings            meetings of islands, by fragment; skipped: those with NaN
meet_wait_ms        time for which rank 0 waited for messages of meetings                ms
drift               norm of what islands have not in common, over that of the weights
staleness           meetings that an island was ahead; of a pipeline that does not wait: the most
                    steps so far by which gradients of the first stage were late
held                versions of the weights that the first stage has held at once, the most so far
drains              how often such a pipeline was emptied so far
islands             islands that the next meeting waits for, where they are jobs of their own
left_out            islands that were left out of meetings, this one included; joined: that came
=================== ==================================================================== =========

The first four keep their names, one record a step. The others are of one dimension and direction,
since the previous report: in JSON lines ``dimensions.<dimension>.<direction>.<figure>``
(``time``, ``residual_norm``, the totals and the rows ``publish``,
``sync`` and ``pipeline`` beside ``dimensions``), elsewhere
``train/compression/<dimension>[/<direction>]/<figure>``, without the direction for dp and zero,
which have one, ``train/compression/publish/<figure>``, and ``train/compression/<figure>``. Hugging
Face's Trainer adds ``train/`` itself: in its log they are ``compression/...``.

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
#: name of the x axis, optimizer steps, in a W&B run whose rows another program numbers
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
    """Format a follower's row for the progress line, leaving out counts of 0."""
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
