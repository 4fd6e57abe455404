"""Codecs of other packages: follow the page on writing one, and train with it.

Every process imports hybridcomp anew, which looks up packages once per process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contributing.walk import steps
from tests.paths import ROOT
from tests.scripts_on_ranks import run_script

SETTINGS = {"codec": "toy", "keep": 3}

#: parses the blocks of a file, runs commands, and prints each result
PROBE = """
import contextlib, io, json, sys
from pathlib import Path
from hybridcomp.config import CompressionConfig, describe
from hybridcomp.errors import ConfigError
from hybridcomp.tools.commands import cli
blocks, commands = json.loads(Path("asked.json").read_text())
found = []
for block in blocks:
    try:
        config = CompressionConfig.parse(block)
        found.append({"flat": config.flat(), "told": describe(config)[0]})
    except ConfigError as error:
        found.append(str(error))
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.main(words) == 0
    found.append(said.getvalue())
print(json.dumps(found))
"""

#: two ranks: a DeepSpeed engine whose gradients use the codec
TRAIN = """
import json, os, sys
import deepspeed, deepspeed.ops, torch
import hybridcomp
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a build that takes a minute
hybridcomp.install()
torch.manual_seed(0)
rank, settings = int(os.environ["RANK"]), json.loads(sys.argv[2])
model = torch.nn.Linear(256, 64)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), dist_init_required=True,
    config={
        "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "compression": {
            "dp": settings, "min_bytes": 0, "ledger": {"jsonl": "ledger.jsonl", "every": 4},
        },
    },
)
generator = torch.Generator().manual_seed(rank)
weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(9)) / 16
losses = []
for _ in range(12):
    x = torch.randn(8, 256, generator=generator)
    loss = (engine(x) - x @ weight.T).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if rank == 0:
    print("LOSSES", json.dumps(losses))
"""


def distribution(folder: Path, name: str, points: str, version: str = "1.0") -> None:
    """Write what ``pip install`` leaves of a package: metadata and entry points."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[hybridcomp.codecs]\n{points}\n")


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Create a folder for ``sys.path`` with the page's package."""
    for step in steps("codec.md")[:3]:  # the package's; the others are for a codec with kernels
        (tmp_path / (step.file or "toy_codec.py")).write_text(step.text)
    (point,) = re.findall(
        r'^\[project.entry-points."hybridcomp.codecs"\]\n(.*)$',
        (tmp_path / "pyproject.toml").read_text(), re.MULTILINE,
    )  # fmt: skip
    distribution(tmp_path, "toy-codec", point.replace('"', ""))
    return tmp_path


def run(folder: Path, script: str, *arguments: str, ranks: int = 1) -> str:
    """Run a script in ``folder``, with it on the path; return the output."""
    (folder / "script.py").write_text(script)
    ended = run_script(folder, "script.py", *arguments, ranks=ranks, anew=True)
    assert ended.returncode == 0, ended.output
    return ended.output


def probe(folder: Path, *blocks: Any, commands: Sequence[Sequence[str]] = ()) -> list[Any]:
    (folder / "asked.json").write_text(json.dumps([blocks, commands]))
    found: list[Any] = json.loads(run(folder, PROBE).splitlines()[-1])
    return found


def test_it_acts_in_the_block_and_commands(toy: Path) -> None:
    assert "toy_codec" not in "".join(
        path.read_text() for path in (ROOT / "hybridcomp").rglob("*.py")
    )
    blocks = [
        {"dp": SETTINGS},
        {"pp": {"codec": "toy", "backward": {"keep": 3}}},
        {"dp": {"codec": "toy", "error_bound": 0.05}},
        {"dp": {"codec": "toy", "error_bound": 1e-6}},
        {"tp": {**SETTINGS, "ramp": {"from": 4, "steps": 2}}},
        {"tp": {"codec": "toy", "keep": 2, "ramp": {"from": 3, "steps": 2}}},
        {"dp": {"codec": "toy", "keep": 4}},
        {"dp": {"codec": "toy", "keep": "x"}},
        {"dp": {"codec": "blockint", "keep": 3}},
        {"dp": "tou"},
        {"dp": "bf16"},
    ]
    (toy / "block.json").write_text(json.dumps({"compression": {"dp": SETTINGS}}))
    found = probe(toy, *blocks, commands=[["validate", "block.json"], ["schema"]])
    plain, ways, bound, tight, steep, ramp, large, kind, other, near, ours, valid, schema = found
    assert plain["flat"]["compression.dp.forward"] == "toy(keep=3)"
    assert plain["told"].startswith("dp            toy(keep=3), 24 bits a value: 1.33x less than")
    origin = "the codec 'toy' (toy_codec:Toy of toy-codec 1.0)"
    assert plain["flat"]["compression.codec.toy"] == origin, "ranks compare its version"
    assert ways["flat"]["compression.pp.backward"] == "toy(keep=3)"
    assert ways["flat"]["compression.pp.forward"] == "toy(keep=2)"
    assert "error within 0.05" in bound["told"] and "toy(keep=2)" in bound["told"]
    assert "toy at its finest guarantees" in tight
    assert "compression.tp.ramp.from: found 4" in steep and "from 2 to 3" in steep
    assert ramp["flat"]["compression.tp.forward.ramp"] == [[2, "toy(keep=3)"]]
    assert large == "compression.dp.keep: found 4; toy: keep must be an integer from 2 to 3"
    assert kind.startswith('compression.dp.keep: found "x"; expected an integer')
    assert "blockint takes bits and rotate and levels and rounding; remove keep" in other
    assert "did you mean 'toy'?" in near
    assert not [key for key in ours["flat"] if "codec" in key], "the digest of ours is what it was"
    assert "dp            toy(keep=3)" in valid
    keys = json.loads(schema)["$defs"]
    keep = keys["GradientConfig"]["properties"]["keep"]
    assert keep["description"] == "toy: bytes of a value that are sent, 2 (default) or 3."
    assert "toy" in keys["TensorConfig"]["properties"]["codec"]["enum"]
    assert "toy: the upper bytes" in keys["TensorConfig"]["properties"]["codec"]["description"]


def test_its_own_checks_pass(toy: Path) -> None:
    checks = "import pytest; raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', {!r}]))"
    assert "2 passed" in run(toy, checks.format("test_toy.py"))


def test_what_cannot_be_used_is_told_to_who_names_it(toy: Path) -> None:
    distribution(toy, "broken-codec", "broken = not_there:Codec")
    distribution(toy, "clash", "blockint = toy_codec:Toy")
    distribution(toy, "twin-a", "twin = toy_codec:Toy")
    distribution(toy, "twin-b", "twin = toy_codec:Toy")
    distribution(toy, "alias", "other = toy_codec:Toy")
    (toy / "greedy.py").write_text(
        "from toy_codec import Toy\nfrom hybridcomp.codecs import Setting\n"
        "class Greedy(Toy):\n    name = 'greedy'\n    settings = (Setting('when', int, 'x'),)\n"
        "    def __init__(self, when=1):\n        super().__init__()\n"
    )
    distribution(toy, "greedy", "greedy = greedy:Greedy")
    names = ("broken", "blockint", "twin", "other", "greedy", "toy", "bf16")
    broken, clash, twin, alias, greedy, good, ours = probe(toy, *({"dp": name} for name in names))
    assert "'broken' (not_there:Codec of broken-codec 1.0) cannot be loaded" in broken
    assert "No module named 'not_there'" in broken
    assert "hybridcomp has a codec of that name" in clash and "of clash 1.0" in clash
    assert "twin-a 1.0" in twin and "twin-b 1.0" in twin and "uninstall one" in twin
    assert "its class says name = 'toy'" in alias
    assert "its setting 'when' has a name that the block uses itself" in greedy
    assert good["flat"]["compression.dp.forward"] == "toy(keep=2)", "others are as they were"
    assert ours["flat"]["compression.dp.forward"] == "bf16"


def test_two_ranks_train_with_it(toy: Path) -> None:
    pytest.importorskip("deepspeed")
    output = run(toy, TRAIN, json.dumps(SETTINGS), ranks=2)
    (line,) = [line for line in output.splitlines() if line.startswith("LOSSES ")]
    losses = json.loads(line.removeprefix("LOSSES "))
    assert losses[-1] < 0.7 * losses[0], losses
    records = [json.loads(text) for text in (toy / "ledger.jsonl").read_text().splitlines()]
    found = [r["dimensions"]["dp"]["forward"] for r in records if r.get("dimensions")]
    assert found and {record["codec"] for record in found} == {"toy(keep=3)"}
    # the owners of ZeRO 1 get half the bytes of an all-reduce, in three bytes instead of four
    assert {record["native_messages"] for record in found} == {0}
    assert all(record["ratio"] == pytest.approx(8 / 3) for record in found), found
