#!/usr/bin/env python3
"""What the schemes would do to GPT-NeoX-20B on 24 to 192 GPUs, by a cost model.

project_scale.py docs/results/speed.json --out runs/projection

The model is fitted to some cells of scripts/bench/bench_training.py and checked on the others; its
error there is printed first. Everything about the large machine that the paper (arXiv 2409.02423)
does not say is an assumption that the options show and change. All figures for it are projections.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from hybridcomp.plan.cost import fitted
from studies.projection import neox

#: gains in samples a second and in TFLOPS a GPU that the paper's abstract gives
PAPER = {"naive-zfp": "+23.6 % (TFLOPS +22.5 %)", "hybrid": "+12.7 % (TFLOPS +17.3 %)"}
GPUS = (24, 48, 96, 192)


def projected(options: argparse.Namespace, model: fitted.Model) -> list[dict[str, Any]]:
    """One row for each width of messages, scheme and number of GPUs."""
    assumed, calibration, rows = assumptions(options), model.calibration(), []
    for width in (32, 16):
        for gpus in options.gpus:
            base = None
            for scheme in neox.SCHEMES:
                found = neox.step(assumed, gpus, scheme, width, calibration)
                samples = assumed.layout(gpus).samples
                rate = samples / found.seconds
                base = rate if base is None else base
                rows.append(
                    {"width": width, "gpus": gpus, "scheme": scheme, "samples_per_second": rate,
                     "gain": rate / base - 1, "seconds": found.seconds, "samples": samples,
                     "compute": found.compute_seconds, "bubble": found.bubble_seconds,
                     "codec": found.codec_seconds, **found.exposed}
                )  # fmt: skip
    return rows


def planned(options: argparse.Namespace, model: fitted.Model) -> list[dict[str, Any]]:
    """The fastest plan of all layouts for each number of GPUs, natively and within the budget."""
    rows = []
    for gpus in options.gpus:
        row: dict[str, Any] = {"gpus": gpus}
        for budget in ("native", "recommended"):
            found = neox.planned(assumptions(options), gpus, budget, model.calibration())
            if not found.plans:
                row["reason"] = found.reason
            for plan in found.plans[:1]:
                samples = plan.layout.samples
                row[budget] = {
                    "layout": str(plan.layout), "block": plan.block,
                    "samples_per_second": samples / plan.prediction.seconds,
                    "device_nbytes": plan.prediction.device_nbytes,
                }  # fmt: skip
        rows.append(row)
    return rows


def assumptions(options: argparse.Namespace) -> neox.Assumed:
    """What the options say of the machine and the job."""
    return neox.Assumed(**{f.name: getattr(options, f.name) for f in fields(neox.Assumed)})


def table(rows: Sequence[dict[str, Any]], width: int, gpus: Sequence[int]) -> str:
    """Gains in samples a second, Markdown."""
    head = ["scheme", *(f"{n} GPUs" for n in gpus), "the paper, up to 192"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    names = dict.fromkeys(row["scheme"] for row in rows)
    for name in names:
        own = [r for r in rows if r["scheme"] == name and r["width"] == width]
        said = PAPER.get("hybrid" if name in ("mzhybrid", "zhybrid") else name, "-")
        if name == "baseline":
            cells = [f"{row['samples_per_second']:.2f} samples/s" for row in own]
        else:
            cells = [f"{100 * row['gain']:+.1f} %" for row in own]
        lines.append("| " + " | ".join([name, *cells, said]) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Gains against GPUs, one panel for each width of messages."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, constrained_layout=True)
    for axes, width in zip(panels, (32, 16), strict=True):
        for name in dict.fromkeys(row["scheme"] for row in rows):
            own = [row for row in rows if row["scheme"] == name and row["width"] == width]
            axes.plot(
                [row["gpus"] for row in own], [100 * row["gain"] for row in own],
                marker="o", color="black" if name == "baseline" else None, label=name,
            )  # fmt: skip
        axes.set_title(f"messages of {width} bits (projected)")
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["gpus"] for row in own], [str(row["gpus"]) for row in own])
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("samples a second, % over baseline")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("measured", type=Path, help="bench_training.json")
    add("--out", type=Path, default=Path("runs/projection"), metavar="FOLDER")
    add("--gpus", type=int, nargs="+", default=list(GPUS))
    for field in fields(neox.Assumed):
        kind = int if isinstance(field.default, int) else float
        add(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    add("--no-plans", action="store_true", help="leave out the search over all layouts")
    add("--target", type=float, default=0.15, help="error that no held-out cell may exceed")
    found = parser.parse_args(arguments)
    if find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib: pip install 'hybridcomp[plot]'")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 where a cell that was held out is missed by more than --target."""
    options = parse(arguments)
    try:
        rows = fitted.usable(json.loads(options.measured.read_text()))
        cells, held = fitted.split(rows)
        model = fitted.fit(cells)
        found = {**fitted.report(model, cells, held), "assumed": asdict(assumptions(options))}
        found["projected"] = projected(options, model)
        found["planned"] = [] if options.no_plans else planned(options, model)
    except (OSError, ValueError) as error:
        print(f"project_scale: {error}", file=sys.stderr)
        return 1
    print(f"compute x {', '.join(f'{k} {v:.2f}' for k, v in model.base.items())}")
    print(f"bytes / rate x {', '.join(f'{k} {v:.2f}' for k, v in model.slowdown.items())}")
    print(
        f"overlap {model.overlap:.0%} of the compute, coding {model.coding:.2f} x the ledger's "
        f"seconds, {1e3 * model.round:.2f} ms a message"
    )
    for name in ("fitted", "held_out"):
        if name in found:
            part = found[name]
            print(
                f"{name.replace('_', ' ')}: {part['cells']} cells, error {part['mean']:.1%} mean, "
                f"{part['p90']:.1%} p90, {part['worst']:.1%} worst ({part['worst_cell']}), "
                f"{part['within_15_percent']} within 15%"
            )
    for width in (32, 16):
        print(f"\nprojected, messages of {width} bits\n")
        print(table(found["projected"], width, options.gpus))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "projection.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found["projected"], options.out / "projection.png")
    print(f"\npicture: {options.out / 'projection.png'}")
    if "held_out" not in found:
        print("project_scale: no cell was held out, the model is unchecked", file=sys.stderr)
        return 2
    return 2 if found["held_out"]["worst"] > options.target else 0


if __name__ == "__main__":
    sys.exit(main())
