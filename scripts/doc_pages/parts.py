"""Generate sections of hand-written pages: presets, support matrix, conflicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridcomp.config import CompressionConfig
from hybridcomp.config.presets import PRESETS
from hybridcomp.dimensions import IN_PRESETS, ROWS, Dimension, listed
from hybridcomp.patches import registry
from hybridcomp.patches.rules import ds_check, mcore, neox
from hybridcomp.patches.rules.engine import Rule

#: verdict -> its meaning for the user; the page has a list for each, in this order
VERDICTS = {
    "refuse": "Always an error",
    "bypass": "An error, or native",
    "absent": "An error where you wrote it",
    "note": "Works, with a log line",
}


def presets() -> str:
    """Return a row per preset and a column per dimension that presets set."""
    lines = [
        f"| preset | {' | '.join(f'`{name}`' for name in IN_PRESETS)} |",
        "|---" * (len(IN_PRESETS) + 1) + "|",
    ]
    for preset in PRESETS:
        config = CompressionConfig.parse({"preset": preset})
        cells = [_cell(config, name) for name in IN_PRESETS]
        lines.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(config: CompressionConfig, name: Dimension) -> str:
    """Return a dimension's codec in a preset; two codecs if the directions differ."""
    found = config.codecs()
    specs = dict.fromkeys(
        codec.spec if codec else "native"
        for way in ROWS[name].directions
        for codec in [found[name, way]]
    )
    return f"{' / '.join(specs)}{getattr(config, name).remark}"


def dimensions() -> str:
    """Return a row for each dimension, with its description."""
    lines = [
        "| dimension | what | codecs for | native messages | `auto` times it | engines |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        about, ways = (
            row.about.rstrip("."),
            "one direction" if row.one_way else listed(row.directions),
        )
        lines.append(
            f"| `{name}` | {about} | {ways} | `{row.operation}` | {row.timed or 'never'} | "
            f"{listed(row.engines)} |"
        )
    return "\n".join(lines)


def support_matrix() -> str:
    """Return the table that ``hybridcomp seams`` prints."""
    return registry.support_matrix()


def deepspeed_rules() -> str:
    """Return the settings of DeepSpeed and GPT-NeoX that affect the block."""
    return "\n".join(_rows([*ds_check.TABLES, *neox.RULES])).rstrip()


def megatron_rules() -> str:
    """Return the settings of megatron-core that affect the block."""
    return "\n".join(_rows(mcore.RULES)).rstrip()


def _rows(rules: Sequence[Rule[Any]]) -> Iterator[str]:
    """Yield a list for each verdict; entries with the same reason share a line."""
    for verdict, title in VERDICTS.items():
        rows: dict[tuple[str, str], list[str]] = {}
        alike: dict[tuple[str, str], list[str]] = {}
        for rule in rules:
            if rule.verdict == verdict:
                todo = f"; {rule.todo}" if rule.todo else ""
                dimensions = rows.setdefault((rule.found, f"{rule.reason}{todo}"), [])
                dimensions += [f"`{name}`" for name in rule.dimensions]
        yield from (f"**{title}**", "")
        for (found, why), names in rows.items():
            alike.setdefault((", ".join(dict.fromkeys(names)), why), []).append(found)
        for (named, why), every in alike.items():
            yield f"* **{' or '.join(every)}** ({named}): {why}."
        yield ""
