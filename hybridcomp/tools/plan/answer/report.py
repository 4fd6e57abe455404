"""Print the ranked table of plans, and sentences that say why the first beats the second."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from hybridcomp.channels.accounting.memory import size
from hybridcomp.dimensions import DIMENSIONS, ROWS
from hybridcomp.tools.compare.report import aligned
from hybridcomp.tools.plan import bits_between
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.plan import MEMORY_KINDS, Plan, Prediction
from hybridcomp.tools.plan.request import Found
from hybridcomp.tools.plan.search.search import kind_of

#: plans whose steps differ by less than this fraction are called equally fast
SAME = 0.005
#: differences below this fraction of a step are not given as a reason
TOLD = 0.01


def duration(seconds: float) -> str:
    """Format seconds for people."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-6 else "0 ms"


def codecs(plan: Plan) -> str:
    """Name the encoded dimensions and their codecs: ``dp blockint(bits=4) feedback; pp ...``."""
    parts = []
    for name in DIMENSIONS:
        ways = {way: plan.choices[name, way] for way in ROWS[name].together}
        apart = {way: plan.choices[name, way] for way in ROWS[name].apart}
        apart = {way: choice for way, choice in apart.items() if not choice.native}
        encoded = any(not choice.native for choice in ways.values())
        shown = [f"{way} {one}" for way, one in {**(ways if encoded else {}), **apart}.items()]
        if encoded and not apart and len(set(ways.values())) == 1:
            shown = [str(next(iter(ways.values())))]
        if shown:
            parts.append(f"{name} {', '.join(shown)}")
    return "; ".join(parts) or "nothing"


HEAD = ("plan", "step", "interval", "tokens/s", "memory", "sent", "between nodes", "hidden",
        "layout")  # fmt: skip
#: columns of a terminal that the answer fits
WIDTH = 110


def table(plans: Sequence[Plan], native: Plan | None = None) -> list[str]:
    """Format a row for each plan, the fastest first, in aligned columns; below, what is encoded.

    Memory, and bytes sent in a step, are those of the rank with the most; "hidden" is the fraction
    of message seconds that does not lengthen the step. ``native``: the first plan's layout without
    compression, for the last row.
    """
    named = {str(number): plan for number, plan in enumerate(plans, 1)}
    if native is not None:
        named["1 native"] = native
    rows = [_cells(name, plan) for name, plan in named.items()]
    users: dict[str, list[str]] = {}
    for name, plan in named.items():
        users.setdefault(codecs(plan), []).append(name)
    lines = aligned([HEAD, *rows]).split("\n")
    for encoded, names in users.items():
        text = f"encoded in {', '.join(names)}: {encoded}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def best_of_each(found: Found, cluster: Cluster) -> list[str]:
    """Format the fastest plan of each way to shard the parameters, side by side.

    Bits per parameter of the whole model are those that a node sends to other nodes in a step.
    """
    rows = []
    for plan in sorted(found.best, key=lambda plan: plan.prediction.seconds):
        told, layout = plan.prediction, plan.layout
        of_node = sum(told.between_nbytes.values()) * min(cluster.ranks_per_node, layout.ranks)
        bits = f"{8 * of_node / found.parameters:.2f}" if found.parameters else "-"
        under = " (--engine fsdp2)" if plan.engine != found.plans[0].engine else ""
        rows.append([
            f"{kind_of(layout)}{under}", duration(told.seconds), bits, size(told.device_nbytes),
            str(layout),
        ])  # fmt: skip
    head = ("the best of each", "step", "bits a parameter", "memory", "layout")
    return aligned([head, *rows]).split("\n")


def _cells(name: str, plan: Plan) -> list[str]:
    told = plan.prediction
    between = sum(told.between_nbytes.values())
    return [
        name,
        duration(told.seconds),
        f"{duration(told.low)} to {duration(told.high)}",
        f"{told.tokens_per_second:,.0f}",
        size(told.device_nbytes),
        size(sum(told.nbytes.values())),
        size(between) if sum(told.between_native_nbytes.values()) else "-",
        _hidden(plan),
        str(plan.layout),
    ]


def _hidden(plan: Plan) -> str:
    hidden = sum(plan.prediction.hidden.values())
    whole = hidden + sum(plan.prediction.exposed.values())
    return f"{hidden / whole:.0%}" if whole else "-"


def reasons(first: Plan, second: Plan) -> list[str]:
    """Return why ``first`` beats ``second``: a sentence for each part of the step that differs.

    The largest difference comes first, even if ``second`` is faster in that part.
    """
    mine, theirs = first.prediction, second.prediction
    gain = theirs.seconds / mine.seconds - 1
    if gain < SAME:
        needs = size(mine.device_nbytes), size(theirs.device_nbytes)
        memory = f"; it needs {needs[0]} a rank, the second {needs[1]}"
        found = [f"Their steps are equally long{memory if needs[0] != needs[1] else ''}."]
    else:
        found = [f"Its step is {duration(theirs.seconds - mine.seconds)} ({gain:.1%}) shorter."]
    if mine.low < theirs.high and gain >= SAME and mine.high > theirs.low:
        found.append(
            "The intervals of the two overlap: `--try 2` tells which is faster on the machines."
        )
    parts = sorted(_parts(first, second), key=lambda part: -abs(part[0]))
    found += [text for won, text in parts if abs(won) >= TOLD * mine.seconds]
    return found


def _parts(first: Plan, second: Plan) -> Iterator[tuple[float, str]]:
    """Yield each part of the step with the seconds that ``first`` gains in it (negative: loses)."""
    mine, theirs = first.prediction, second.prediction
    for name in DIMENSIONS:
        own, other = mine.exposed.get(name, 0.0), theirs.exposed.get(name, 0.0)
        sent, their_sent = mine.nbytes.get(name, 0.0), theirs.nbytes.get(name, 0.0)
        if own or other:
            yield (
                other - own,
                (
                    f"Messages of {name} lengthen its step by {duration(own)} ({size(sent)} sent), "
                    f"the second's by {duration(other)} ({size(their_sent)})."
                ),
            )
    for what, own, other in (
        ("compute", mine.compute_seconds, theirs.compute_seconds),
        ("wait for the pipeline", mine.bubble_seconds, theirs.bubble_seconds),
        ("encode and decode", mine.codec_seconds, theirs.codec_seconds),
    ):
        yield (
            other - own,
            (
                f"Its busiest rank's device has to {what} for {duration(own)}, the second's for "
                f"{duration(other)}."
            ),
        )


def against_native(first: Plan, native: Plan) -> str:
    """Return a sentence on how long a step of the ``first`` plan's layout takes natively."""
    own, plain = first.prediction, native.prediction
    told = f"Natively the first plan's layout would take {duration(plain.seconds)} a step"
    return f"{told}: compression makes it {plain.seconds / own.seconds:.2f} times as fast."


def details(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Yield lines with a plan's memory by kind, and its bytes by dimension, encoded and native."""
    told = plan.prediction
    kinds = [f"{kind} {size(told.memory[kind])}" for kind in MEMORY_KINDS if told.memory.get(kind)]
    known = [rank.nbytes for rank in cluster.ranks if rank.nbytes]
    has = f"its device has {size(min(known))}" if known else "nobody knows what its device has"
    yield f"memory of the fullest rank: {', '.join(kinds)} ({has})"
    yield from _tiers(plan.layout)
    for name, sent in told.nbytes.items():
        native = told.native_nbytes.get(name, sent)
        if sent:
            shown = told.exposed.get(name, 0.0), told.hidden.get(name, 0.0)
            yield (
                f"{name}: {size(sent)} a step instead of {size(native)}{_between(told, name)}; "
                f"{duration(shown[0])} seen, {duration(shown[1])} behind compute"
            )
    crossing = sum(told.between_nbytes.values()), sum(told.between_native_nbytes.values())
    if crossing[1]:
        yield (
            f"between nodes in all: {size(crossing[0])} a step of a rank instead of "
            f"{size(crossing[1])}"
        )
    bits = bits_between.of_plan(plan)
    if bits is not None and crossing[1]:
        yield bits_between.told(*bits)


def _tiers(layout: Layout) -> Iterator[str]:
    """Yield how ZeRO 3 divides a device's memory, if the search chose that."""
    if layout.knobs:
        prefetch, live, reuse = layout.knobs
        yield (
            f"ZeRO 3 prefetches {prefetch:.3g} values, with {live:.3g} live, and keeps what is "
            f"used again within {reuse:.3g}"
        )
    if layout.ratio < 1:
        yield (
            f"{1 - layout.ratio:.1%} of the optimizer's sub-groups, of {layout.sub_group:.3g} "
            "values, step on the device"
        )

    if layout.drive:
        yield f"{layout.drive:.1%} of the optimizer's states are on the drive"


def _between(told: Prediction, name: str) -> str:
    """Format a dimension's bytes between nodes; "" if there are none."""
    native = told.between_native_nbytes.get(name, 0.0)
    if not native:
        return ""
    sent = told.between_nbytes.get(name, 0.0)
    return f", between nodes {size(sent)} instead of {size(native)}"


def answer(found: Found, cluster: Cluster) -> Iterator[str]:
    """Yield all lines to print: table, reasons, details of the best plan, counts of the search."""
    yield from table(found.plans, found.native)
    yield ""
    if len(found.best) > 1:
        yield from best_of_each(found, cluster)
        yield ""
    if found.native is not None:
        yield against_native(found.plans[0], found.native)
    if len(found.plans) > 1:
        yield "The first beside the second:"
        yield from (f"  {text}" for text in reasons(*found.plans[:2]))
    yield "The first plan:"
    yield from (f"  {text}" for text in details(found.plans[0], cluster))
    yield f"{found.considered} looked at, {found.simulated} simulated"
    if found.refused:
        yield "Ruled out:"
        yield from (f"  {text}" for text in ruled_out(found.refused))


def ruled_out(refused: Mapping[str, int]) -> Iterator[str]:
    """Yield a line per reason, most frequent first; joins reasons that differ in a number only."""
    counts: dict[tuple[str, str], int] = {}
    numbers: dict[tuple[str, str], list[str]] = {}
    for why, count in refused.items():
        before, number, after = (re.split(r"(\d+)", why, maxsplit=1) + ["", ""])[:3]
        counts[before, after] = counts.get((before, after), 0) + count
        numbers.setdefault((before, after), []).append(number)
    for (before, after), count in sorted(counts.items(), key=lambda entry: -entry[1]):
        *others, last = sorted(numbers[before, after], key=lambda number: int(number or 0))
        listed = f"{', '.join(others)} or {last}" if others else last
        yield f"{count}: {before}{listed}{after}"
