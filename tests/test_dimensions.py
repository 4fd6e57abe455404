"""The rows of ``hybridcomp.dimensions`` agree with the block, the seams and the rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from hybridcomp import nn
from hybridcomp.config import CompressionConfig
from hybridcomp.config.dimension_fields import MODELS
from hybridcomp.config.presets import PRESETS
from hybridcomp.dimensions import (
    ALL,
    DDP,
    DEEPSPEED,
    DIMENSIONS,
    FSDP2,
    IN_PRESETS,
    KEYS,
    MEGATRON,
    ROWS,
    Dimension,
    Settings,
    Timed,
    listed,
)
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules import ds_check, engine, mcore
from hybridcomp.patches.rules.engine import Rule
from tests.paths import ROOT

NAMES = frozenset(DIMENSIONS)
QUOTED = re.compile(f"[\"']({'|'.join(DIMENSIONS)})[\"']")
#: package whose functions seams replace -> engines that send their messages
ENGINES = {
    "deepspeed": (DEEPSPEED,),
    "megatron.mpu": (DEEPSPEED,),
    "megatron.training": (DEEPSPEED,),
    "megatron.core": (MEGATRON,),
    "transformer_engine.pytorch": (MEGATRON,),
    "torch.distributed.tensor.experimental._context_parallel._attention": (FSDP2, DDP),
}
#: modules that compare with a dimension's name or list several, for facts outside the rows
OWN_WORDS = {
    "channels/channel.py": "the settings that zero alone has",
    "channels/accounting/ledger.py": "by which dimensions generation sends",
    "channels/engine_channels.py": "the residuals of gradients",
    "channels/online_tuner.py": "what comparing steps takes, and the group of trials",
    "channels/accounting/offload_tuner.py": "the settings that offload alone has",
    "tools/commands/job_files.py": "what a DeepSpeed file shows of a job",
    "tools/commands/link_picture.py": "which dimensions the picture draws",
    "tools/commands/memory.py": "which messages a job of such a file sends",
    "config/codec_settings.py": "which codecs one dimension alone may name",
    "config/generation.py": "which messages generation sends",
    "channels/accounting/memory.py": "which buffers gradients and parameters of ZeRO take",
    "config/other_names.py": "what other tools call a dimension",
    "config/presets.py": "what the paper calls model parallel",
    "tools/commands/pays.py": "which messages are steps of a node's copy",
    "tools/commands/validate.py": "what a file cannot show of a job",
    "tools/measure/channels.py": "what is timed, and how",
    "tools/measure/trainings.py": "what is timed, and how",
    "tools/plan/bits_between.py": "what DeepSpeed's stages send of parameters and gradients",
    "tools/plan/cost/job.py": "Megatron's dtype of gradients",
    "tools/plan/cost/memory.py": "what a device keeps of gradients, parameters and rings",
    "tools/plan/cost/work.py": "where DeepSpeed adds up gradients of offload",
    "tools/plan/layout.py": "the words in which a layout is told",
    "tools/plan/machines/rows.py": "what a cluster's file may hold",
    "tools/plan/meetings.py": "what stays inside of an island",
    "tools/plan/pays.py": "what DeepSpeed's stages send of gradients",
    "session/closing.py": "what is told of meetings apart from messages",
    "session/process.py": "what stands in the names of Megatron's parameters",
}


def test_each_name_has_a_row() -> None:
    assert DIMENSIONS == get_args(Dimension) == tuple(ROWS)
    assert set(MODELS) == set(get_args(Settings))
    timed = {row.timed for row in ROWS.values()} - {None}
    assert timed <= set(get_args(Timed))


@pytest.mark.parametrize("name", DIMENSIONS)
def test_the_block_has_a_key_of_the_row(name: Dimension) -> None:
    row, field = ROWS[name], CompressionConfig.model_fields[name]
    model = MODELS[row.settings]
    assert field.annotation is model and field.description == f"{row.about} Default: native."
    assert row.directions == model.ways
    native = CompressionConfig.parse({"preset": "none"})
    assert getattr(native, name).codec == "none"
    ways = {way for dimension, way in KEYS if dimension == name}
    assert ways == {way for dimension, way in native.codecs() if dimension == name}
    for way in row.directions if not row.one_way else ():
        block = CompressionConfig.parse({name: {"codec": "bf16", way: "mpc"}})
        assert block.codecs()[name, way] != block.codecs()[name, next(w for w in ways if w != way)]


@pytest.mark.parametrize("name", DIMENSIONS)
def test_when_is_a_key_where_the_row_says_that_it_is_timed(name: Dimension) -> None:
    block = {name: {"codec": "bf16", "when": "auto"}}
    if ROWS[name].timed is None:
        with pytest.raises(ConfigError, match="when"):
            CompressionConfig.parse(block)
    else:
        assert getattr(CompressionConfig.parse(block), name).when == "auto"


def test_presets_take_their_settings_from_the_rows() -> None:
    found = CompressionConfig.parse({"preset": "recommended"})
    for name in DIMENSIONS:
        assert found.active(name) == (name in IN_PRESETS)
        named = [preset for preset, settings in PRESETS.items() if name in settings]
        assert bool(named) == (ROWS[name].recommended is not None)


def covered() -> Iterator[tuple[str, str]]:
    """Return engine and dimension of every seam module, and of torch's slots."""
    from hybridcomp.patches import registry
    from hybridcomp.patches.torch.ddp import ddp
    from hybridcomp.patches.torch.fsdp2 import fsdp2

    for package in registry.MODULES:
        for module in registry.modules_of(package):
            for name in registry.covers(module):
                yield from ((one, name) for one in ENGINES.get(package, (package,)))
    yield from ((FSDP2, name) for name in fsdp2.COVERS)
    yield from ((DDP, name) for name in ddp.COVERS)


def test_the_engines_of_a_row_are_those_with_a_seam() -> None:
    found = set(covered())
    for name, row in ROWS.items():
        having = {one for one, dimension in found if dimension == name}
        if row.by_script:  # its layers send by themselves, in a session shared by an engine
            assert not having and any(name == covers for covers, _, _ in nn.rows("torch"))
        else:
            assert having == set(row.engines), name


def tables() -> dict[str, tuple[Rule[object], ...]]:
    from hybridcomp.patches.torch import rules
    from hybridcomp.patches.torch.fsdp2 import rules as fsdp2_rules

    return {
        DEEPSPEED: ds_check.TABLES,
        MEGATRON: mcore.RULES,
        FSDP2: fsdp2_rules.FSDP2,
        DDP: rules.DDP,
    }


@pytest.mark.parametrize("name", ALL)
def test_every_engine_says_which_dimensions_it_has_not(name: str) -> None:
    table = tables()[name]
    told = {one for rule in table if rule.verdict == "absent" for one in rule.dimensions}
    assert {one for one, row in ROWS.items() if name not in row.engines} <= told
    assert engine.without_seam(name, table) == (), "each has words of its own"


def test_an_engine_without_a_seam_for_a_dimension_refuses_it() -> None:
    made = engine.without_seam("another", ())
    assert [rule.dimensions for rule in made] == [(name,) for name in ROWS]
    block = CompressionConfig.parse({"ep": "mpc"})
    with pytest.raises(ConfigError) as caught:
        list(engine.hold(block, [(rule, None) for rule in made]))
    assert str(caught.value) == (
        "compression.ep: found a job under another; its messages are encoded under DeepSpeed and "
        'Megatron only; leave it out, or set "ep": "none", or set "on_unsupported": "native"'
    )
    preset = CompressionConfig.parse({"preset": "recommended"})
    assert list(engine.hold(preset, [(rule, None) for rule in made])) == []


def names_in(node: ast.AST) -> set[str]:
    """Return the dimension names among an expression's constants."""
    constants = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return {value for value in constants if isinstance(value, str)} & NAMES


def asks(path: Path) -> bool:
    """Return whether a module compares with a dimension's name, or lists several."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text if QUOTED.search(text) else "")):
        if isinstance(node, ast.Compare) and names_in(node):
            return True
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and len(names_in(node)) > 1:
            return True
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if len(keys & NAMES) > 1:
                return True
    return False


def test_modules_read_the_rows() -> None:
    """Rules and seams know an upstream's traffic by name; all others use the row."""
    package = ROOT / "hybridcomp"
    rooms = [room for room in package.iterdir() if room.name != "patches"]
    files = [path for room in rooms for path in (room.rglob("*.py") if room.is_dir() else [room])]
    found = {str(path.relative_to(package)) for path in files if path.suffix == ".py" if asks(path)}
    assert found - {"dimensions.py"} <= set(OWN_WORDS), "read hybridcomp.dimensions.ROWS"


def test_names_in_a_sentence() -> None:
    assert listed(["dp"]) == "dp"
    assert listed(["dp", "zero"]) == "dp and zero"
    assert listed(["dp", "zero", "tp"]) == "dp, zero and tp"
