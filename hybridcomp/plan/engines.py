"""What an engine can run of a layout: recomputation as it is asked for, and layers of our own.

Megatron recomputes the first layers of every chunk (``--recompute-method block``), as many in each,
or all of them in segments of one length (``uniform``). GPT-NeoX recomputes every block or none. A
script under DeepSpeed says itself which layers it recomputes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridcomp.plan.layout import Layout

#: cuts of a model that exist in hybridcomp.nn alone, and the field of a layout that says so
OWN_CUTS = {"ring": "context_way", "tp2d": "mesh", "slices": "slices"}
#: why recomputation of a layout is none of its engine's
RECOMPUTE_REASONS = {
    "megatron": "Megatron recomputes the first layers of every chunk, as many in each, or all in "
    "segments of one length",
    "neox": "GPT-NeoX recomputes every block or none",
    "deepspeed": "a slice that ran forward twice would look at the keys of earlier slices twice",
}

Segments = tuple[tuple[int, int], ...]


def block_chunks(layout: Layout, blocks: range) -> list[tuple[int, ...]]:
    """The blocks of every chunk, in the order of the model; ``blocks``: which layers are some."""
    chunks = {
        stage + place * layout.stages: tuple(layer for layer in chunk if layer in blocks)
        for stage in range(layout.stages) for place, chunk in enumerate(layout.chunks(stage))
    }  # fmt: skip
    return [chunks[number] for number in sorted(chunks)]


def recomputations(engine: str, layout: Layout, blocks: range) -> Iterator[Segments]:
    """What ``engine`` can recompute of a layout whose cuts are known, beside nothing.

    ``blocks``: which layers of the model are blocks. For DeepSpeed, whose scripts may recompute any
    layer, this yields nothing.
    """
    chunks = block_chunks(layout, blocks)
    most = max(map(len, chunks), default=0)
    if engine == "neox":
        yield first_blocks(chunks, most)
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
    """The first ``count`` blocks of every chunk, each for itself."""
    return tuple(sorted((block, block + 1) for chunk in chunks for block in chunk[:count]))


def can_recompute(engine: str, layout: Layout, blocks: range) -> bool:
    """Whether ``engine`` recomputes exactly what ``layout`` says; ``blocks`` as above."""
    if not layout.recompute:
        return True
    if engine == "deepspeed":
        return not layout.slices
    return tuple(sorted(layout.recompute)) in recomputations(engine, layout, blocks)
