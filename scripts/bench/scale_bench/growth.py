"""Say what grows with the number of ranks, in words and with the numbers of the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridcomp.kernels.stretches import ROW_WORDS

#: by number of ranks and kind: microseconds, multiples of a copy, launches (``bench_host.py``)
Messages = Mapping[str, Mapping[str, Sequence[float]]]
#: times as long as among the fewest ranks, up to which a message does not grow
STAYS = 1.5
#: the kind whose lengths are new in every message
NEW = "all_to_all new splits"
GROWING = """## Messages that grow

Of the messages of channels ([their host time](host_time.md#in-groups-of-up-to-4096-ranks))
{all_but} at most {stays:g} times as long among {most:,} ranks as among {least:,}, with as many
launches{launches}:

{rows}
"""
NEW_LENGTHS = """
An all-to-all whose lengths were never met before makes passes over a number for each rank: it reads
the engine's list and keeps a copy, by which the way back finds its lengths; it adds up the bytes of
every payload, as an array and as the list that `all_to_all_single` takes; and it writes the table
that a GPU's kernels read, {row} bytes for each rank, which a GPU copies from where it was written,
while nobody waits. (`bench_host.py --ranks {most} --profile "{new}"`, beside the
same with `--ranks {least}`: profiles of the processor's time.)
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(line.replace(" --- ", "---") for line in lines)


def growing(found: Messages) -> str:
    """Return the section about messages whose host time grows, from ``bench_host.py --json``."""
    ranks = sorted(found, key=int)
    few, many = found[ranks[0]], found[ranks[-1]]
    times = {kind: many[kind][0] / few[kind][0] for kind in few}
    grown = sorted((kind for kind in few if times[kind] > STAYS), key=times.__getitem__)
    order = sorted(few, key=times.__getitem__, reverse=True)
    body = [[kind, *(f"{found[count][kind][0]:,.0f}" for count in ranks), f"{times[kind]:.2f}"]
            for kind in order]  # fmt: skip
    head = ["µs", *(f"{int(count):,}" for count in ranks), "times"]
    more = [kind for kind in few if many[kind][2] != few[kind][2]]
    launches = ""
    if more:
        launches = f" but for `{'`, `'.join(more)}`, which take two hops where few ranks take one"
    text = GROWING.format(
        all_but=f"all but {len(grown)} take" if grown else "all take", stays=STAYS,
        least=int(ranks[0]), most=int(ranks[-1]), rows=table(head, body),
        launches=launches,
    )  # fmt: skip
    if NEW not in grown:
        return text
    return text + NEW_LENGTHS.format(
        row=8 * ROW_WORDS, new=NEW, least=int(ranks[0]), most=int(ranks[-1])
    )


def grows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what grows of steps, of ``bench_scale.py host``; of engines that were measured."""
    by_engine: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: int(row["ranks"])):
        by_engine.setdefault(row["engine"], []).append(row)
    intro = (
        "What does not grow: launches, messages, and the tensors in a file. Two ranks swap where "
        f"more take two hops{_other_way(by_engine)}. Bytes approach those of an infinite group, "
        "native ones and encoded ones alike. What grows:"
    )
    return "\n".join([*_wrapped(intro, ""), "", *_bullets(by_engine)]) + "\n"


def _other_way(by_engine: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return from how many ranks on buckets go to their owners in another way, if they do."""
    steps = [row for row in by_engine.get("ZeRO 1 and 2", ()) if row["ranks"] > 2]
    other = [row["ranks"] for row in steps if row["launches"] != steps[0]["launches"]]
    if not other:
        return ""
    return f", and short buckets go to their owners in another way among {other[0]:,}"


def _bullets(by_engine: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    texts = {
        "ZeRO 1 and 2": "look at the owner of every slice, once: a rank has as many slices in a "
        "step as there are ranks and buckets together, and upstream makes a tensor of each.",
        "FSDP2": "pads every parameter to an element for each rank, so the short tensors that host "
        "time is measured with become longer, and torch takes longer for them on a CPU.",
        "DDP": _of_ddp(by_engine.get("DDP", ())),
        "ZeRO 3": _of_stage3(by_engine.get("ZeRO 3", ())),
    }
    for name, text in texts.items():
        if name in by_engine and text:
            yield from _wrapped(f"* **{name}** {text}", "  ")
    yield from _wrapped(
        "* A **first step** makes a piece for each part of each parameter that each rank gets; "
        "pauses of Python's garbage collector over these are in its time.", "  ",
    )  # fmt: skip


def _of_ddp(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what padding DDP's tables have at most, and its share of the residuals."""
    from bench.scale_bench.figures import LARGE
    from hybridcomp.collectives.wire.cuts import CHUNK_ALIGN

    if not rows:
        return ""
    most, values = rows[-1], 0
    for _, shape in LARGE.parameters(0):
        numel = 1
        for side in shape:
            numel *= side
        values += numel
    places, ranks = CHUNK_ALIGN * most["ranks"], most["ranks"]
    share = 1 - 4 * values * (1 + 1 / ranks) / most["residuals"]
    return (
        f"pads every parameter to {CHUNK_ALIGN} values for each rank: {places:,} places at "
        f"{ranks:,} ranks, also for a bias of {LARGE.width:,} values. At this width that is "
        f"{100 * share:.1f} % of the residuals; of the short tensors that host time is measured "
        "with it is most of what is sent, and clearing the padding on a CPU is most of the growth."
    )


def _of_stage3(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return from how many ranks on shards take more operations; empty: they do not."""
    more = [row["ranks"] for row in rows if row["operations"] > rows[0]["operations"]]
    if not more:
        return ""
    return (
        "lays shards out in more operations of torch where parameters have fewer values than there "
        f"are ranks, as here from {more[0]:,} ranks on: at most three runs of ranks for a "
        "parameter."
    )


def _wrapped(text: str, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100, subsequent_indent=indent, break_on_hyphens=False)
