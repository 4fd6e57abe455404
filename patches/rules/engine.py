"""Check a block against the rules that apply to a job: an error, a sentence, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import Shown, idle
from hybridcomp.dimensions import DIMENSIONS, ROWS, Dimension, listed
from hybridcomp.errors import ConfigError

#: type that holds a job's facts for the rules of one upstream
J = TypeVar("J")

#: refuse   results would be wrong: an error for a key that the user wrote, even with
#:          ``on_unsupported`` native; with it, a codec that only the preset chose is left out
#: bypass   upstream sends this traffic on a path that no seam covers
#: absent   this job has no such traffic: an error for a key that the user wrote, nothing for a
#:          preset, which is made for every kind of job
#: note     acts, with a remark for the user
Verdict = Literal["refuse", "bypass", "absent", "note"]

#: message, under any engine, about a key for embedding tables in a job without such tables
NO_TABLES = "a job without tables: CachedEmbedding of hybridcomp.nn, or Embedding(sparse=True)"
NO_ROWS, TABLES_TODO = "no rows of tables are sent", "make the tables before the engine"


def _any_block(block: CompressionConfig) -> bool:
    return True


@dataclass(frozen=True)
class Rule(Generic[J]):
    """A behaviour of upstream, and its consequence for some dimensions."""

    verdict: Verdict
    dimensions: tuple[Dimension, ...]
    found: str  # as the user would write it in upstream's configuration
    reason: str
    todo: str
    applies: Callable[[J], bool] = field(repr=False)
    #: returns whether the rule applies to these settings of the dimension
    settings: Callable[[CompressionConfig], bool] = field(default=_any_block, repr=False)
    is_part: bool = False  # of "bypass": the rest of the dimension's messages is encoded

    def __str__(self) -> str:
        return f"{self.found}: {self.reason}"


def hold(block: CompressionConfig, rules: Iterable[tuple[Rule[J], J]]) -> Iterator[str]:
    """Check ``block`` against ``rules``; each rule comes with the job whose facts it reads.

    Yields sentences for the user. Raises ConfigError at the first dimension that cannot act, unless
    the block says ``"on_unsupported": "native"``; then a sentence says what stays native and why.
    In that case refused dimensions that only the preset chose, and bypassed ones, stay native in
    ``block``.
    """
    active = [name for name in DIMENSIONS if block.active(name)]
    for rule, job in rules:
        names = [name for name in active if name in rule.dimensions]
        if rule.verdict == "absent":
            names = [name for name in names if name in block.explicit]
        if not names or not rule.settings(block) or not rule.applies(job):
            continue
        chosen = [name for name in names if name not in block.explicit]
        if rule.verdict == "refuse" and chosen and block.on_unsupported == "native":
            if asked := [name for name in names if name in block.explicit]:
                apply(rule, asked, block)
            block.keep_native(chosen)
            active = [name for name in active if name not in chosen]
            yield f"{', '.join(chosen)} native: {rule}; the preset chose that codec"
            continue
        yield apply(rule, names, block)
        if rule.verdict == "bypass" and not rule.is_part:
            block.keep_native(names)
            active = [name for name in active if name not in names]


def apply(rule: Rule[J], names: Sequence[Dimension], block: CompressionConfig) -> str:
    """Return a sentence for the user about a rule that applies to ``names``.

    Raises ConfigError for the first of ``names`` if the rule or the block asks for an error.
    """
    if rule.verdict == "note":
        return f"{', '.join(names)}: {rule}"
    if rule.verdict != "refuse" and block.on_unsupported == "native":
        return f"{', '.join(names)} {'partly ' if rule.is_part else ''}native: {rule}"
    native = "" if rule.verdict == "refuse" else ', or set "on_unsupported": "native"'
    raise ConfigError(
        f"{BLOCK}.{names[0]}",
        Shown(rule.found),
        f'{rule.reason}; {rule.todo}, or set "{names[0]}": "none"{native}',
    )


def without_seam(engine: str, table: Sequence[Rule[Any]]) -> tuple[Rule[Any], ...]:
    """Return a rule for each dimension that has no seam under ``engine``, from its row.

    ``table``: the engine's rules; dimensions that it declares absent get no second rule.
    """
    words = {name for rule in table if rule.verdict == "absent" for name in rule.dimensions}
    return tuple(
        Rule(
            "absent", (name,), f"a job under {engine}",
            f"its messages are encoded under {listed(row.engines)} only", "leave it out",
            lambda job: True,
        )
        for name, row in ROWS.items()
        if engine not in row.engines and name not in words
    )  # fmt: skip


def ungathered(block: CompressionConfig, why: str) -> list[str]:
    """Return the message that ``gathered`` cannot act because of ``why``; [] if the key is not set.

    Raises ConfigError unless ``on_unsupported`` is "native".
    """
    if block.gathered is None:
        return []
    found, todo = block.gathered.agreed()["codec"], f"{why}; remove it"
    return [idle(f"{BLOCK}.gathered", found, todo, block.on_unsupported)]


def no_generation(block: CompressionConfig, found: Shown) -> str:
    """Return the message that this job cannot generate, or raise it as the block says."""
    todo = "hybridcomp.generate takes DeepSpeed's pipelines and token slices; remove it"
    return idle(f"{BLOCK}.generate", found, todo, block.on_unsupported)


def lossy(block: CompressionConfig) -> frozenset[Dimension]:
    """Return the dimensions whose codec changes values, in one direction at least."""
    codecs = block.codecs().items()
    return frozenset(name for (name, _), codec in codecs if codec and not codec.lossless)


def absent(rules: Iterable[tuple[Rule[J], J]]) -> frozenset[Dimension]:
    """Return the dimensions without traffic in a job."""
    return frozenset(
        name
        for rule, job in rules
        if rule.verdict == "absent" and rule.applies(job)
        for name in rule.dimensions
    )
