"""Generate the front page's table: savings of each kind of job in bytes and time."""

from __future__ import annotations

from doc_pages import bits, speeds

#: job of bits.JOBS -> its layout in docs/results/speed.csv
ROWS = {
    "zero0": "dp2", "zero1": "zero2", "zero3": "zero3", "fsdp2": "fsdp2", "ddp": "ddp",
    "activations": "pp2",
}  # fmt: skip


def table() -> str:
    """Return a row for each kind of job that was measured at both ratios."""
    lines = ["| job | fewer bytes | speed, r = 1 | speed, r = 4 |", "|---|---|---|---|"]
    found = speeds.measured()
    for name, layout in ROWS.items():
        job = bits.JOBS[name]
        factor = bits.total(job.today) / bits.total(job.recommended)
        words = "pipelines" if name == "activations" else job.words
        near, far = (found[layout, "recommended", r]["speed_up"] for r in speeds.RATIOS)
        lines.append(f"| {words} | {factor:.1f}x | {near:.1f}x | {far:.1f}x |")
    return "\n".join(lines)
