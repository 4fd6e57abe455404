"""Draw charts of the pages as SVG: readable on a phone, in light and dark, with axes to scale."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from doc_pages import bits, speeds

LOSSES = speeds.SPEEDS.with_name("losses.csv")
#: width in units; a phone shows a unit as 3/4 pixel, text is 15 units high
WIDTH = 480
LEFT, RIGHT, LINE = 12, 66, 20
STYLE = """\
.fore { fill: #1b1f24; } .soft { fill: #5b6470; } .axis { stroke: #9aa4b0; }
.native { fill: #8a8a8a; } .block { fill: #0072b2; } .other { fill: #d55e00; }
@media (prefers-color-scheme: dark) {
  .fore { fill: #e6e9ed; } .soft { fill: #a3adb8; } .axis { stroke: #5b6470; }
  .native { fill: #8a8a8a; } .block { fill: #3f9fdc; } .other { fill: #f08a3c; } }"""


@dataclass(frozen=True)
class Bar:
    """A value from 0 on, with its interval if measured."""

    value: float
    kind: str  # native, block or other: selects the colour
    words: str  # text after the bar
    low: float | None = None
    high: float | None = None


#: title of a group, and its bars
Group = tuple[str, Sequence[Bar]]


def picture(title: str, axis: str, keys: Mapping[str, str], groups: Sequence[Group]) -> str:
    """Return a picture of horizontal bars on a linear axis.

    Args:
        title: alternative text.
        axis: label of the axis, with its unit.
        keys: kind of bar -> legend.
        groups: from top to bottom.
    """
    ends = [end for _, bars in groups for bar in bars for end in (bar.value, bar.low, bar.high)]
    most, least = max(e for e in ends if e is not None), min(e for e in ends if e is not None)
    step = _step(most - min(least, 0.0))
    first = step * math.floor(min(least, 0.0) / step)
    last = step * math.ceil(most / step)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)

    def at(value: float) -> float:
        return round(LEFT + (value - first) * scale, 1)

    lines, y = list(_keys(keys)), 24 + LINE * len(keys)
    top = y
    for words, bars in groups:
        y += LINE + 4
        lines.append(f'<text class="fore" x="{LEFT}" y="{y}">{escape(words)}</text>')
        for bar in bars:
            lines += _bar(bar, y + 5, at)
            y += LINE
    lines[len(keys) * 2 : len(keys) * 2] = _axis(first, last, step, top, y + 12, at)
    lines.append(f'<text class="soft" x="{LEFT}" y="{y + 52}">{escape(axis)}</text>')
    return _svg(title, y + 62, lines)


def _step(span: float) -> float:
    """Return the distance between two ticks: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(span / 3))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= span / 6)


def _keys(keys: Mapping[str, str]) -> Iterator[str]:
    for row, (kind, words) in enumerate(keys.items()):
        y = 10 + LINE * row
        yield f'<rect class="{kind}" x="{LEFT}" y="{y}" width="14" height="14" rx="2"/>'
        yield f'<text class="soft" x="{LEFT + 22}" y="{y + 12}">{escape(words)}</text>'


def _axis(
    first: float, last: float, step: float, top: int, bottom: int, at: Callable[[float], float]
) -> Iterator[str]:
    for number in range(round((last - first) / step) + 1):
        value = first + number * step
        x = at(value)
        yield f'<path class="axis" d="M{x} {top}V{bottom}" stroke-width="{2 if not value else 1}"/>'
        yield f'<text class="soft" x="{x}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>'


def _bar(bar: Bar, y: int, at: Callable[[float], float]) -> Iterator[str]:
    start, end = sorted((at(0.0), at(bar.value)))
    width = max(round(end - start, 1), 1)
    yield f'<rect class="{bar.kind}" x="{start}" y="{y}" width="{width}" height="14" rx="2"/>'
    words_at = end
    if bar.low is not None and bar.high is not None:
        low, high = at(bar.low), at(bar.high)
        yield f'<path class="fore" d="M{low} {y + 6}H{high}v2H{low}z"/>'
        words_at = max(end, high)
    yield f'<text class="fore" x="{words_at + 6}" y="{y + 12}">{escape(bar.words)}</text>'


def _svg(title: str, height: int, lines: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" '
        'font-size="15">'
    )
    return "\n".join(
        [
            head,
            "<style>",
            STYLE,
            "</style>",
            f"<title>{escape(title)}</title>",
            *lines,
            "</svg>",
            "",
        ]
    )


#: legend of charts with native messages beside the preset
BESIDE = {"native": "native messages", "block": '{"preset": "recommended"}'}
#: communication over compute -> description of that link
LINKS = {
    4.0: "slow link: messages take 4 times the compute",
    1.0: "messages take as long as the compute",
    0.25: "fast link: messages take a quarter of the compute",
}


def front(layout: str = "zero1") -> str:
    """Return the front page's picture: two bars for each of three links."""
    found = speeds.measured()
    groups = []
    for r, words in LINKS.items():
        cell = found[layout, "recommended", r]
        groups.append((words, [Bar(1.0, "native", "1"), _speed(cell)]))
    return picture(
        "Tokens a second over three links", "tokens a second, native = 1", BESIDE, groups
    )


def _speed(cell: Mapping[str, float], kind: str = "block") -> Bar:
    ends = (cell.get("low"), cell.get("high"))
    return Bar(cell["speed_up"], kind, f"{cell['speed_up']:.2f}", *ends)


def jobs() -> str:
    """Return the speed of each kind of job over the two slower links."""
    found = speeds.measured()
    keys = {"block": "messages take as long as the compute", "other": "4 times as long"}
    groups = []
    for words, (layout, arm) in speeds.ROWS.items():
        cells = [found[layout, arm, r] for r in speeds.RATIOS if (layout, arm, r) in found]
        if len(cells) == len(speeds.RATIOS):
            bars = [_speed(cell, kind) for cell, kind in zip(cells, keys, strict=True)]
            groups.append((words.replace("`", ""), bars))
    title, axis = "Tokens a second of each kind of job", "tokens a second, native = 1"
    return picture(title, axis, keys, groups)


#: arm in the table of speeds -> label
ARMS = {
    "recommended": "recommended", "recommended when auto": "recommended, measuring the link first",
    "delta": "parameters as differences at 4 bits", "bound": "within an error bound of 0.02",
    "naive-zfp": "naive-zfp (paper)", "zhybrid": "zhybrid (paper)", "mzhybrid": "mzhybrid (paper)",
}  # fmt: skip


def presets(layout: str = "zero1", r: float = 4.0) -> str:
    """Return the speed of each preset over the slow link."""
    found = speeds.measured()
    groups = [
        (words, [_speed(found[layout, arm, r], "block" if "recom" in arm else "other")])
        for arm, words in ARMS.items() if (layout, arm, r) in found
    ]  # fmt: skip
    keys = {"block": "the preset recommended", "other": "others"}
    return picture(f"Tokens a second, {layout}", "tokens a second, native = 1", keys, groups)


def sent() -> str:
    """Return the bits that each kind of job sends, native and with the preset."""
    groups = []
    for job in (job for job in bits.JOBS.values() if job.told):
        cells = [bits.total(part, job.accumulated) for part in (job.today, job.recommended)]
        bars = [Bar(cell, kind, f"{cell:.1f}") for cell, kind in zip(cells, BESIDE, strict=True)]
        groups.append((job.words.replace("`", ""), bars))
    return picture("Bits that a node sends", "bits a parameter and micro-batch", BESIDE, groups)


def losses() -> str:
    """Return loss gaps with intervals, of the studies that resolve them."""
    with open(LOSSES, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["training"], row["layout"], row["run"]): row for row in rows}
    groups = []
    for words, training, layout, run, kind in LOSS_ROWS:
        row = found[training, layout, run]
        gap, half = float(row["gap"]) + 0.0, float(row["interval"])
        groups.append((words, [Bar(gap, kind, f"{gap:+.2f}", gap - half, gap + half)]))
    keys = {"block": "hybridcomp", "other": "torch's PowerSGD hook, the paper's presets"}
    return picture(
        "Gap to the native loss", "% above the native run's loss, 95 % interval", keys, groups
    )


#: label, training, layout and run in losses.csv, kind of bar
LOSS_ROWS = (
    ("recommended, ZeRO 1", "eight seeds", "dp2", "recommended", "block"),
    ("recommended, FSDP2", "eight seeds", "fsdp2", "recommended", "block"),
    ("recommended, DDP", "eight seeds", "ddp2", "recommended", "block"),
    ("recommended, two pipeline stages", "loss", "pp2", "recommended", "block"),
    ("5-bit gradients, DDP", "feedback", "ddp2", "5 bits", "block"),
    ("3-bit gradients, ZeRO 1", "feedback", "dp2", "3 bits", "block"),
    ("error bound of 0.02, ZeRO 1", "loss", "dp2", "bound-2e-2", "block"),
    ("naive-zfp, two pipeline stages", "loss", "pp2", "naive-zfp", "other"),
    ("PowerSGD of rank 4, DDP", "loss_torch", "ddp2", "peer powersgd-4", "other"),
)
#: below docs/
PICTURES: Mapping[str, Callable[[], str]] = {
    "speed.svg": front,
    "results/jobs.svg": jobs,
    "results/presets.svg": presets,
    "results/bytes.svg": sent,
    "results/losses.svg": losses,
}
