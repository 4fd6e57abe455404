"""Losses of ours and of the peers, and the comparison at equal or fewer bytes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import loss_study
from benchmarks.training_bench.cells import DELTA
from hybridcomp.tools.compare.statistics import half_width

FEEDBACK = {"codec": "blockint", "error_feedback": True}
#: ours, from many bytes to few
BLOCKS: dict[str, dict[str, Any]] = {
    "8 bits, deltas 8": {
        "dp": {**FEEDBACK, "bits": 8}, "zero": {**DELTA["zero"], "bits": 8},
    },
    "recommended": {"preset": "recommended", "when": "always"},
    "4 bits, deltas 4": DELTA,
    "4 bits, deltas 3": {**DELTA, "zero": {**DELTA["zero"], "bits": 3}},
    "3 bits, deltas 3": {
        "dp": {**FEEDBACK, "bits": 3}, "zero": {**DELTA["zero"], "bits": 3},
    },
    "2 bits, deltas 3": {
        "dp": {**FEEDBACK, "bits": 2}, "zero": {**DELTA["zero"], "bits": 3},
    },
}  # fmt: skip
#: peers that bring an optimizer of their own -> that optimizer without compression
OPTIMIZERS = {"onebit-adam": "onebit-adam-exact"}
PEERS = (
    "powersgd-4", "powersgd-16", "powersgd-32", "qgz", "qgz-qwz", "loco", "onebit-adam", "sdp4bit",
    *OPTIMIZERS.values(),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``--losses``."""
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="of a training for --losses")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of --losses")
    add(
        "--lr",
        type=float,
        default=3e-4,
        help="of --losses; at the 1e-3 of the committed files two runs of a small batch that "
        "differ in one bit end a per cent apart",
    )
    add("--peers", nargs="*", default=list(PEERS), metavar="NAME", help="of --losses")


def main(asked: argparse.Namespace) -> int:
    """Train what is missing through loss_study.py, then the tables. Returns the exit status."""
    out: Path = asked.out / "losses"
    out.mkdir(parents=True, exist_ok=True)
    blocks = out / "blocks.json"
    blocks.write_text(json.dumps(BLOCKS))
    loss_study.main(
        [
            "--steps", str(asked.steps), "--seeds", *map(str, asked.seeds), "--layouts", "dp2",
            "--lr", str(asked.lr),
            "--presets", "--blocks", str(blocks), "--peers", *asked.peers,
            "--divide-batch", str(asked.divide_batch), "--data", str(asked.data), "--out", str(out),
        ]
    )  # fmt: skip
    rows = json.loads((out / "dp2" / "comparison.json").read_text())["runs"]
    duels = duels_of(rows)
    (out / "equal_bytes.json").write_text(json.dumps(duels, indent=1) + "\n")
    print(f"\nat equal or fewer bytes, gaps to the baseline in percent\n\n{table(duels)}")
    print("\n".join(optimizers(duels)))
    return 0


def sent_MB(row: dict[str, Any]) -> float:
    """Return the MB that a run of comparison.json sent: all dimensions, steps and ranks."""
    return float(sum(way["wire_MB"] for ways in row["ledger"].values() for way in ways.values()))


def duels_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pair each peer with that one of ours that sends most without sending more than it.

    Chosen by bytes alone, before a loss is looked at. ``ours`` is None where all of ours send more.
    """
    ours = [row for row in rows if row["label"] in BLOCKS and row["ledger"]]
    peers = {
        row["label"].removeprefix("peer "): row for row in rows if row["label"].startswith("peer ")
    }
    duels = []
    for name, row in peers.items():
        if name in OPTIMIZERS.values():
            continue
        limit = sent_MB(row)
        allowed = [own for own in ours if sent_MB(own) <= limit]
        best = max(allowed, key=sent_MB, default=None)
        duel: dict[str, Any] = {
            "peer": name, "peer_MB": limit, "peer_gap": row["gap"],
            "peer_interval": row["gap_interval"], "ours": None, "steps": row["steps"],
            "seeds": row["seeds"],
        }  # fmt: skip
        if best is not None:
            duel |= {
                "ours": best["label"], "our_MB": sent_MB(best), "our_gap": best["gap"],
                "our_interval": best["gap_interval"], **apart(best, row),
            }  # fmt: skip
        if (exact := peers.get(OPTIMIZERS.get(name, ""))) is not None:
            duel |= {"exact_gap": exact["gap"], "exact_interval": exact["gap_interval"]}
        duels.append(duel)
    return duels


def apart(own: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Compare the gaps of ours and a peer by seed: how much further off it ends, and who wins.

    ``neither`` where the 95 % interval of the difference over the seeds holds 0.
    """
    theirs = dict(zip(peer["seeds"], peer["gaps"], strict=True))
    differences = np.array(
        [theirs[seed] - gap for seed, gap in zip(own["seeds"], own["gaps"], strict=True)]
    )
    mean, half = float(differences.mean()), half_width(differences)
    sided = "ours" if mean > 0 else "peer"
    winner = "one seed" if half is None else "neither" if abs(mean) <= half else sided
    return {
        "further_gap": mean, "further_interval": half, "winner": winner,
        "seeds_ours": int((differences > 0).sum()),
    }  # fmt: skip


def table(duels: Sequence[dict[str, Any]]) -> str:
    """Return the table of the duels."""
    lines = [
        "| peer | MB | gap % | ours | MB | gap % | peer further off by % | smaller loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for duel in duels:
        cells = [duel["peer"], f"{duel['peer_MB']:.0f}", _gap(duel, "peer")]
        if duel["ours"] is None:
            cells += ["all of ours send more", "", "", "", ""]
        else:
            of = f"{duel['winner']} (ours in {duel['seeds_ours']} of {len(duel['seeds'])} seeds)"
            cells += [duel["ours"], f"{duel['our_MB']:.0f}", _gap(duel, "our")]
            cells += [_gap(duel, "further"), of]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def optimizers(duels: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each peer that is another optimizer: what that does without compression."""
    return [
        f"{duel['peer']} is another optimizer than the baseline's AdamW. Uncompressed it ends at "
        f"{_gap(duel, 'exact')} %, so its compression costs "
        f"{duel['peer_gap'] - duel['exact_gap']:+.2f} %."
        for duel in duels
        if "exact_gap" in duel
    ]


def _gap(duel: dict[str, Any], whose: str) -> str:
    half = duel[f"{whose}_interval"]
    return f"{duel[f'{whose}_gap']:+.2f}" + ("" if half is None else f" ± {half:.2f}")
