"""Make ``report.html``: the comparison as one page with charts, to open or mail."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hybridcomp import escaping
from hybridcomp.tools import pages
from hybridcomp.tools.compare import report
from hybridcomp.tools.compare.draw import FALL, SETTLED, style_of
from hybridcomp.tools.compare.figures import named
from hybridcomp.tools.compare.reading import APART
from hybridcomp.tools.compare.report import Result
from hybridcomp.tools.compare.runs import Curve, Run
from hybridcomp.tools.compare.statistics import gap_curves, percent, running_mean, thin
from hybridcomp.tools.pages import links

#: matplotlib's line style -> Plotly's dash, and CSS's border style
DASHES = {"-": ("solid", "solid"), "--": ("dash", "dashed"), ":": ("dot", "dotted"),
          "-.": ("dashdot", "dashed")}  # fmt: skip
#: layout that all charts share; the page sets the colours of text and grid
LAYOUT: dict[str, Any] = {
    "hovermode": "x unified", "showlegend": False, "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)", "margin": {"l": 60, "r": 10, "t": 10, "b": 45},
    "font": {"family": "system-ui, sans-serif", "size": 13}, "barmode": "group",
    "uirevision": "kept",  # keep the zoom when a run is hidden
}  # fmt: skip


def page(result: Result, title: str, smooth: int, command: str) -> str:
    """Return the page. ``smooth``: points of the running mean, 0: 1/20 of the run.

    Raises HybridcompError where a package is missing.
    """
    from plotly.offline import get_plotlyjs

    library = gzip.compress(get_plotlyjs().encode(), mtime=0)
    return pages.render(
        "report.html.jinja",
        title=escaping.one_line(title),
        about=report.about(result),
        losses=_table(report.losses(result)),
        bytes=_table(report.bytes_of(result.runs)),
        links=[
            {"label": escaping.one_line(run.label), "picture": svg}
            for run in result.runs
            if (svg := _links(run)) is not None
        ],
        runs=[_run(result, number) for number in range(len(result.runs))],
        charts=list(charts(result, smooth or max(1, len(result.aligned.axis) // 20))),
        notes=[escaping.one_line(note, escaping.SENTENCE) for note in result.notes],
        differing=_table(differences(result), text=True),
        command=escaping.printable(command),
        comparison=json.loads(report.as_json(result)),
        library=base64.b64encode(library).decode(),
    )


def _table(
    rows: Sequence[Sequence[str]], text: bool = False
) -> tuple[list[list[str]], list[bool]] | None:
    """Return the arguments of the macro ``table``: rows, and which columns are right-aligned.

    Returns None for a head without rows. ``text``: whether to treat every column as text.
    """
    shown = [[escaping.one_line(cell) for cell in row] for row in rows]
    right = [False] * len(rows[0]) if text else report.numeric(rows)
    return (shown, right) if len(rows) > 1 else None


def _run(result: Result, number: int) -> dict[str, Any]:
    run, style = result.runs[number], style_of(number)
    settings = run.trainings[0].settings
    return {
        "label": escaping.one_line(run.label),
        "colour": style["color"],
        "border": DASHES[style.get("linestyle", "-")][1],
        "sources": [escaping.one_line(training.source) for training in run.trainings],
        "settings": settings and escaping.printable(json.dumps(settings, indent=1, default=str)),
    }


def _links(run: Run) -> str | None:
    """Draw the ledger's figures of links; None if no encoded message left a node."""
    rows = [row for _, row in run.rows()]
    native, sent = (
        sum(row.get(name) or 0.0 for row in rows) for name in ("inter_raw_MB", "inter_MB")
    )
    if not native:
        return None
    steps = float(run.trainings[0].steps[-1])
    inside = [sum(row[name] for row in rows) - out
              for name, out in (("raw_MB", native), ("wire_MB", sent))]  # fmt: skip
    return links.draw(
        f"{run.label}: MB of all ranks in a step",
        [links.LinkMB("Inside the nodes, such as NVLink", *(mb / steps for mb in inside)),
         links.LinkMB("Between nodes, such as Ethernet", native / steps, sent / steps)],
    )  # fmt: skip


def differences(result: Result) -> list[list[str]]:
    """Return a head, and a row for each setting that differs between runs, the block's included."""
    known = [flat(run.trainings[0].settings or {}) for run in result.runs]
    apart = tuple(f"{name}." for name in (*APART - {"compression"}, "compression.ledger"))
    keys = [key for key in dict.fromkeys(key for one in known for key in one)
            if not f"{key}.".startswith(apart)]  # fmt: skip
    rows = [[key, *(one.get(key, "") for one in known)] for key in keys]
    return [
        ["setting", *(run.label for run in result.runs)],
        *(row for row in rows if len(set(row[1:])) > 1),
    ]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested settings as JSON, by dotted keys."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = json.dumps(value, default=str)
    return found


def charts(result: Result, window: int) -> Iterator[dict[str, Any]]:
    """Yield the charts: title, and Plotly's ``data`` and ``layout``."""
    aligned = result.aligned
    smoothed = [running_mean(found, window) for found in aligned.losses]
    gaps = [gap_curves(result.runs, aligned, n, window) for n in range(len(result.runs))]
    axes = [(aligned.unit, "tokens" if aligned.unit == "tokens" else "optimizer steps",
             [aligned.axis] * len(result.runs), gaps)]  # fmt: skip
    if aligned.seconds is not None:
        clocks = [found.mean(axis=0) for found in aligned.seconds]
        axes.append(("time", "seconds of training", clocks, _gaps_at(clocks, smoothed)))
    moved = [found.mean(axis=0) for found in aligned.sent if found is not None]
    if len(moved) == len(result.runs):
        axes.append(("bytes", "MB sent by all ranks", moved, _gaps_at(moved, smoothed)))
    for name, unit, places, over in axes:
        lines = [trace for n, one in enumerate(smoothed) for trace in _line(result, n, places, one)]
        yield _chart(f"Loss by {name}", lines, unit, "loss (nats per token)", _ends(smoothed, FALL))
        lines = [trace for n, one in enumerate(over) for trace in _line(result, n, places, one)]
        yield _chart(f"Gap to {escaping.one_line(result.runs[0].label)} by {name}", lines, unit,
                     "gap (%)", _ends([np.zeros((1, 1)), *over], SETTLED))  # fmt: skip
    yield from _of_dimensions(result)


def _gaps_at(places: Sequence[Curve], curves: Sequence[Curve]) -> list[Curve]:
    """Return each run's gap, in percent, between its mean loss and the baseline's: (1, points).

    Losses are compared at equal ``places``, such as seconds. Places that the baseline did not reach
    have a gap of NaN, which ends the line.
    """
    base = curves[0].mean(axis=0)
    found = []
    for at, curve in zip(places, curves, strict=True):
        other = np.interp(at, places[0], base, left=np.nan, right=np.nan)
        found.append(percent(curve.mean(axis=0), other)[None])
    return found


def _ends(curves: Sequence[Curve], skipped: float) -> dict[str, list[float]]:
    """Return an axis range for curves (seeds, points), without their first ``skipped`` fraction."""
    parts = [curve[:, int(curve.shape[1] * skipped) :] for curve in curves]
    values = np.concatenate([part[np.isfinite(part)] for part in parts])
    pad = max(0.1 * float(np.ptp(values)), 0.01)
    return {"range": [float(values.min()) - pad, float(values.max()) + pad]}


def _line(
    result: Result, number: int, places: Sequence[Curve], curves: Curve
) -> list[dict[str, Any]]:
    """Return the mean of curves (seeds, points) as a line, over a band of their range."""
    style, x = style_of(number), _drawn(places[number])
    shared = {"x": x, "meta": number, "name": _name(result.runs[number].label)}
    line = {
        **shared, "y": _drawn(curves.mean(axis=0)), "mode": "lines",
        "line": {"color": style["color"], "width": style["lw"],
                 "dash": DASHES[style.get("linestyle", "-")][0]},
        "hovertemplate": "%{y:.4f}",
    }  # fmt: skip
    if len(curves) < 2:
        return [line]
    edge = {**shared, "mode": "lines", "line": {"width": 0, "color": style["color"]},
            "hoverinfo": "skip"}  # fmt: skip
    low, high = _drawn(curves.min(axis=0)), _drawn(curves.max(axis=0))
    return [
        {**edge, "y": low},
        {**edge, "y": high, "fill": "tonexty", "fillcolor": f"{style['color']}2E"},
        line,
    ]


def _drawn(curve: Curve) -> list[float | None]:
    """Return the points to draw, to six digits; NaN becomes null, which ends a line."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in thin(curve)]


def _name(label: str) -> str:
    """Escape a label for Plotly, which reads some tags of HTML in texts."""
    return html.escape(escaping.one_line(label), quote=False)


def _of_dimensions(result: Result) -> Iterator[dict[str, Any]]:
    """Yield bars of bytes and seconds by dimension, and errors by step, if runs have them."""
    if not any(run.ledger() for run in result.runs):
        return
    native = _bars(result, lambda row: row["raw_MB"], "native", faint=True)
    sent = _bars(result, lambda row: row["wire_MB"], "sent")
    yield _chart("MB by dimension: native (pale) and sent", native + sent, "", "MB of all ranks")
    both = _bars(result, lambda row: _seconds(row, "codec_ms", "wait_ms"), "with waiting", True)
    codec = _bars(result, lambda row: _seconds(row, "codec_ms"), "codec")
    yield _chart("Seconds by dimension: codec, and waiting (pale)", both + codec, "",
                 "s of all ranks")  # fmt: skip
    lines = [
        {"x": [at for at, _ in points], "meta": number,
         "y": [error if np.isfinite(error) else None for _, error in points],
         "name": f"{_name(run.label)}: {_name(name)}", "mode": "lines+markers",
         "line": {"color": style_of(number)["color"], "width": 1.5}, "marker": {"size": 4},
         "hovertemplate": "%{y:.2e}"}
        for number, run in enumerate(result.runs)
        for name, points in run.trainings[0].errors.items()
    ]  # fmt: skip
    if lines:
        yield _chart("Relative error of one encoding", lines, "optimizer steps", "error",
                     {"type": "log", "exponentformat": "power", "dtick": 1})  # fmt: skip


def _seconds(row: Mapping[str, Any], *names: str) -> float:
    return sum(row.get(name) or 0.0 for name in names) / 1e3


def _bars(
    result: Result, value: Callable[[Mapping[str, Any]], float], what: str, faint: bool = False
) -> list[dict[str, Any]]:
    """Return a bar for each run and dimension; ``faint``: behind the run's other bars."""
    return [
        {"type": "bar", "meta": number, "offsetgroup": str(number),
         "x": [named(dimension, way) for dimension, ways in run.ledger().items() for way in ways],
         "y": [value(row) for _, row in run.rows()],
         "name": f"{_name(run.label)}: {what}", "hovertemplate": "%{y:,.2f}",
         "marker": {"color": style_of(number)["color"], "opacity": 0.3 if faint else 1.0}}
        for number, run in enumerate(result.runs)
        if run.ledger()
    ]  # fmt: skip


def _chart(
    title: str,
    data: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    ends: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    axes = {"xaxis": {"title": {"text": x}, "automargin": True, "zeroline": False,
                      "spikethickness": 1, "spikecolor": "#888888", "spikedash": "solid"},
            "yaxis": {"title": {"text": y}, "automargin": True, **(ends or {})}}  # fmt: skip
    return {"title": title, "data": data, "layout": {**LAYOUT, **axes}}
