"""State which recomputation an engine can run, and which parallelism only hybridcomp.nn has.

Megatron recomputes the first layers of every chunk, equally many in each
(``--recompute-method block``), or all layers in segments of one length (``uniform``). GPT-NeoX cuts
the modules of a stage into groups of one length and recomputes only groups that consist of blocks.
Under DeepSpeed the script decides which layers it recomputes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hybridcomp.tools.plan.layout import Layout

#: cuts of a model that only hybridcomp.nn has, and the layout field that selects each
OWN_CUTS = {"ring": "context_way", "tp2d": "mesh", "slices": "slices"}
#: why an engine cannot recompute the segments of a layout
RECOMPUTE_REASONS = {
    "megatron": "Megatron recomputes the first layers of every chunk, as many in each, or all in "
    "segments of one length",
    "neox": "GPT-NeoX recomputes groups of one length that hold nothing but blocks",
    "deepspeed": "a slice that ran forward twice would look at the keys of earlier slices twice",
}

#: modules of GPT-NeoX before the blocks of its first stage, and after the blocks of its last stage
BEFORE, BEHIND = 2, 3

Segments = tuple[tuple[int, int], ...]


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs ``[start, stop)`` of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def block_chunks(layout: Layout, blocks: range) -> list[tuple[int, ...]]:
    """Return the blocks of each chunk, in the order of the model; ``blocks``: layers to count."""
    chunks = {
        stage + place * layout.stages: tuple(layer for layer in chunk if layer in blocks)
        for stage in range(layout.stages) for place, chunk in enumerate(layout.chunks(stage))
    }  # fmt: skip
    return [chunks[number] for number in sorted(chunks)]


def recomputations(engine: str, layout: Layout, blocks: range) -> Iterator[Segments]:
    """Yield each non-empty set of segments that ``engine`` can recompute; cuts must be known.

    ``blocks``: the layers of the model that are blocks. For DeepSpeed, whose scripts may recompute
    any layer, this yields nothing.
    """
    chunks = block_chunks(layout, blocks)
    most = max(map(len, chunks), default=0)
    if engine == "neox":
        found = (interval_segments(chunks, length) for length in range(1, most + 1))
        yield from (segments for segments in found if segments)
    if engine == "megatron":
        yield from (first_blocks(chunks, count) for count in range(1, most + 1))
        yield from (
            tuple(sorted(
                (chunk[at], chunk[min(at + length, len(chunk)) - 1] + 1)
                for chunk in chunks for at in range(0, len(chunk), length)
            ))
            for length in range(2, most + 1)
        )  # fmt: skip


def first_blocks(chunks: Sequence[Sequence[int]], count: int) -> Segments:
    """Return the first ``count`` blocks of every chunk, each as one segment."""
    return tuple(sorted((block, block + 1) for chunk in chunks for block in chunk[:count]))


def interval_segments(chunks: Sequence[Sequence[int]], length: int) -> Segments:
    """Return the segments GPT-NeoX recomputes with ``checkpoint_num_layers`` of ``length``.

    The groups are those of DeepSpeed's ``PipelineModule``, which begin anew on every stage.
    """
    found = []
    for stage, chunk in enumerate(chunks):
        first = BEFORE if stage == 0 else 0
        last = first + len(chunk)
        total = last + (BEHIND if stage == len(chunks) - 1 else 0)
        for start in range(0, total, length):
            stop = min(start + length, total)
            if first <= start and stop <= last:
                found.append((chunk[start - first], chunk[stop - 1 - first] + 1))
    return tuple(sorted(found))


def can_recompute(engine: str, layout: Layout, blocks: range) -> bool:
    """Return whether ``engine`` can recompute exactly the segments of ``layout``."""
    if not layout.recompute:
        return True
    if engine in ("deepspeed", "fsdp2"):
        return not layout.slices
    return tuple(sorted(layout.recompute)) in recomputations(engine, layout, blocks)
