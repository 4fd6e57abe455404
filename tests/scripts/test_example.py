"""The example: Megatron's data format, the model, sample order, the comparison."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

# the scripts' folder comes first, as for `python scripts/...`
import prepare_data
import pytest
import torch
from gpt import apex, layouts, loop
from gpt.data import Samples, Share
from gpt.ds_file import SettingsError, report_beside
from gpt.indexed import DatasetError, IndexedTokens, IndexedWriter, paths
from gpt.model import GPT, lm_loss, rotary_table, rotate
from gpt.torch_engines import planned
from gpt.weights import ModelConfig

from hybridcomp.tools.compare.json_lines import read_training
from tests.paths import EXAMPLES

TEXTS = {"a.txt": "first document\n", "b.txt": "déjà vu\n", "c.txt": "x" * 500, "d.txt": "y" * 300}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedTokens:
    with IndexedWriter(tmp_path / "counting") as writer:
        for start in range(0, 1000, 100):
            writer.add(np.arange(start, start + 100))
    return IndexedTokens(tmp_path / "counting")


def test_trainer_knows_nothing_of_hybridcomp() -> None:
    names = ("train_gpt.py", "prepare_data.py")
    sources = [*(EXAMPLES / name for name in names), *(EXAMPLES / "gpt").glob("*.py")]
    assert len(sources) > 6
    # no upstream has attention over ranks, mesh layers, token slices or answers
    own = ("context_parallel.py", "two_dimensional.py", "token_slices.py", "answers.py")
    need_it = {EXAMPLES / "gpt" / name for name in own}
    for path in sources:
        assert path in need_it or not re.search(
            r"^\s*(import|from) hybridcomp", path.read_text(), re.MULTILINE
        ), path


# ---- the dataset


def test_text_comes_back(texts: Path, tmp_path: Path) -> None:
    assert prepare_data.main([str(texts), "--output", str(tmp_path / "out" / "text")]) == 0
    found = set()
    for part in ("train", "valid"):
        data = IndexedTokens(tmp_path / "out" / f"text_{part}")
        assert len(data) >= 1
        for document in data:
            assert document[-1] == prepare_data.END_OF_DOCUMENT
            found.add(document[:-1].astype(np.uint8).tobytes().decode("utf-8"))
    assert found == set(TEXTS.values())


def test_same_files_give_the_same_dataset(texts: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert prepare_data.main([str(texts / "*.txt"), "--output", str(tmp_path / name)]) == 0
    for part in ("train", "valid"):
        for ending in (".bin", ".idx"):
            one, two = (tmp_path / f"{name}_{part}{ending}" for name in ("one", "two"))
            assert one.read_bytes() == two.read_bytes() != b""


def test_megatron_core_reads_it(dataset: IndexedTokens) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns of optional packages
        indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs = indexed_dataset.IndexedDataset(str(dataset.prefix))
    assert len(theirs) == len(dataset)
    for own, other in zip(dataset, theirs, strict=True):
        assert np.array_equal(own, other)


def test_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "half") as writer:
        writer.add(np.array([1]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _overwrite(path: Path, offset: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b, i: i.unlink(), "no such file"),
        (lambda b, i: _cut(b), "expected 2000 bytes as its index says, found 1997"),
        (lambda b, i: _cut(i), "document boundaries, found"),
        (lambda b, i: _overwrite(i, 0, b"PK"), "expected an index that begins with"),
        (lambda b, i: _overwrite(i, 9, b"\x02"), "found version 2"),
        (lambda b, i: _overwrite(i, 17, b"\x63"), "dtype 99"),
    ],
)
def test_damaged_files_are_named(dataset: IndexedTokens, damage: Any, message: str) -> None:
    damage(*paths(dataset.prefix))
    with pytest.raises(DatasetError, match=message):
        IndexedTokens(dataset.prefix)


def test_bad_input_is_one_line(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = texts / "e.bin"
    binary.write_bytes(b"\x00\x01\xff")
    output = ["--output", str(tmp_path / "out")]

    def message(*inputs: str) -> str:
        assert prepare_data.main([*inputs, *output]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "found no file" in message(str(tmp_path / "nowhere"))
    assert "found no file ending with '.rst'" in message(str(texts), "--suffix", ".rst")
    assert f"{binary}: expected UTF-8 text" in message(str(binary))
    (tmp_path / "blank").write_text("")
    assert "found none in the files given" in message(str(tmp_path / "blank"))
    # in a folder binary files are skipped, with a message
    assert prepare_data.main([str(texts), *output]) == 0
    assert f"left out 1 empty or binary files: {binary}" in capsys.readouterr().out


def test_max_bytes_says_what_it_leaves_out(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert prepare_data.main([str(texts), "--max-bytes", "8", "--output", str(output)]) == 0
    assert "--max-bytes is reached: 3 files are left out" in capsys.readouterr().out
    parts = [IndexedTokens(tmp_path / f"out_{part}") for part in ("train", "valid")]
    assert sum(len(data.tokens) for data in parts) == 9  # eight bytes and the end


def test_standard_library_without_tests() -> None:
    files = prepare_data.standard_library()
    assert len(files) > 200 and any(path.name == "argparse.py" for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:-1]) for path in files)


# ---- the order of the data


def test_every_token_is_predicted_once_an_epoch(dataset: IndexedTokens) -> None:
    samples = Samples(dataset, length=16, seed=3)
    assert samples.per_epoch == 999 // 16
    for epoch in range(2):
        begin = epoch * samples.per_epoch
        tokens, labels = samples.batch(range(begin, begin + samples.per_epoch))
        assert torch.equal(labels, tokens + 1)
        assert torch.equal(labels.flatten().sort().values, torch.arange(1, 16 * 62 + 1))


def test_epochs_and_seeds_differ(dataset: IndexedTokens) -> None:
    samples = Samples(dataset, 16, seed=3)
    first = samples.batch(range(62))[0]
    assert not torch.equal(first, samples.batch(range(62, 124))[0])
    assert not torch.equal(first, Samples(dataset, 16, seed=4).batch(range(62))[0])
    assert torch.equal(first, Samples(dataset, 16, seed=3).batch(range(62))[0])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_a_batch_without_overlap(world_size: int) -> None:
    """For any number of ranks, a step of 16 samples is the same 16 samples."""
    shares = [Share(rank, world_size, 2, 8 // world_size) for rank in range(world_size)]
    assert {share.global_batch for share in shares} == {16}
    taken = [index for share in shares for part in share.indices(32) for index in part]
    assert sorted(taken) == list(range(32, 48))


def test_resumed_run_sees_what_the_unbroken_one_sees(dataset: IndexedTokens) -> None:
    share, device = Share(1, 2, 2, 3), torch.device("cpu")
    unbroken = Samples(dataset, 16, seed=0)
    expected = [
        list(share.batches(unbroken, step * share.global_batch, device)) for step in range(8)
    ]
    resumed = Samples(dataset, 16, seed=0)
    for step in range(4, 8):  # over the end of the first epoch, after 62 samples
        found = list(share.batches(resumed, step * share.global_batch, device))
        for own, other in zip(found, expected[step], strict=True):
            assert torch.equal(own[0], other[0]) and torch.equal(own[1], other[1])


def test_too_little_text_is_an_error(dataset: IndexedTokens) -> None:
    with pytest.raises(DatasetError, match="expected at least 2001 tokens"):
        Samples(dataset, 2000, seed=0)


# ---- the model

CONFIG = ModelConfig(vocabulary=50, layers=2, width=32, heads=2)


def test_shapes_and_first_loss() -> None:
    logits = GPT(CONFIG)(torch.randint(50, (3, 10)))
    assert logits.shape == (3, 10, 50)
    loss = float(lm_loss(logits, torch.randint(50, (3, 10))).detach())
    assert abs(loss - np.log(50)) < 0.1  # small weights know nothing yet


def test_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    one = GPT(CONFIG).state_dict()
    torch.manual_seed(2)
    two = GPT(CONFIG).state_dict()
    other = GPT(ModelConfig(vocabulary=50, layers=2, width=32, heads=2, seed=1)).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["layers.0.weight"], other["layers.0.weight"])
    assert not torch.equal(one["layers.1.qkv.weight"], one["layers.2.qkv.weight"])


def test_attention_is_causal() -> None:
    model = GPT(CONFIG)
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    one, two = model(tokens), model(changed)
    assert torch.equal(one[:, :7], two[:, :7])
    assert not torch.allclose(one[:, 7:], two[:, 7:])


def test_rotary_sees_relative_positions_only() -> None:
    """The product of a query and a key depends on their distance."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 16, generator=generator)
    cos, sin = rotary_table(300, 16, torch.device("cpu"))
    queries = rotate(query.expand(300, 16), cos, sin)
    keys = rotate(key.expand(300, 16), cos, sin)
    products = queries @ keys.T
    for distance in (-40, -1, 0, 1, 17, 255):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(products.diagonal(1)[0], products.diagonal(2)[0], atol=1e-2)
    assert torch.allclose(queries.norm(dim=-1), query.norm().expand(300))


def test_tied_weight_is_one_parameter() -> None:
    tied = GPT(ModelConfig(vocabulary=50, layers=1, width=32, heads=2, tied=True))
    assert tied.layers[-1].weight is tied.layers[0].weight
    names = [name for name, _ in tied.named_parameters()]
    assert "layers.0.weight" in names and "layers.3.weight" not in names


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_norms(norm: Any) -> None:
    config = ModelConfig(vocabulary=50, layers=1, width=32, heads=2, norm=norm)
    assert GPT(config)(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of twice the heads"):
        ModelConfig(vocabulary=50, width=36, heads=4)
    with pytest.raises(ValueError, match="layers: expected at least 1"):
        ModelConfig(vocabulary=50, layers=0)


# ---- apex


@pytest.mark.parametrize(
    ("files", "verdict"),
    [
        ((), "none"),
        (("apex/__init__.py",), "not NVIDIA's"),
        (("apex/__init__.py", "apex/optimizers/fused_adam.py"), "without its CUDA extensions"),
        (("apex/__init__.py", "apex/optimizers/fused_adam.py", "amp_C.py"), "nvidia"),
    ],
)
def test_only_nvidias_apex_is_taken(
    files: tuple[str, ...], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise AssertionError('imported before it was checked')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    apex.what_is_apex.cache_clear()
    try:
        assert verdict in apex.what_is_apex()
    finally:
        apex.what_is_apex.cache_clear()


# ---- the log of a run


def _record(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens": step, "tokens_per_second": 100.0, "seconds": 1.0}


def test_resumed_log_keeps_the_steps_before(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    log = loop.Log(path, {"seed": 0})
    for step in range(1, 7):
        log.step(_record(step, float(step)))
    log.write({"summary": True, "steps": 6, "final_loss": 3.5})
    resumed = loop.Log(path, {"seed": 0}, start=4)
    resumed.step(_record(5, 9.0))
    found = read_training(path, "ledger.jsonl")
    assert found.losses.tolist() == [1.0, 2.0, 3.0, 4.0, 9.0]
    assert resumed.losses == [1.0, 2.0, 3.0, 4.0, 9.0]
    assert resumed.final_loss() == 3.8


def test_tensor_parallel_without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)  # not installed
    monkeypatch.delitem(sys.modules, "gpt.tensor_parallel", raising=False)
    monkeypatch.delattr("gpt.tensor_parallel", raising=False)
    with pytest.raises(layouts.ParallelismError, match=r"--tp 2: .* pip install 'megatron-core"):
        layouts.lay_out(2, 2)
    with pytest.raises(layouts.ParallelismError, match=r"--tp 3 --pp 2: .* 6 ranks, found 4"):
        layouts.lay_out(3, 2)
    assert layouts.lay_out(1, 2) is None


def test_a_mesh_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    import train_gpt

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
    with pytest.raises(layouts.ParallelismError, match=r"--tp2d 2: .* multiple of 4 ranks"):
        layouts.lay_out(1, 1, 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(layouts.ParallelismError, match="no --tp, --pp or --cp"):
        layouts.lay_out(1, 2, 2)
    for words, settings, told in (
        ("--tp2d 2", {"zero_optimization": {"stage": 3}}, "stage 0, 1 or 2, found 3"),
        ("--tp2d 2", {"train_micro_batch_size_per_gpu": 3}, "found 3; change it"),
        ("--pp 2 --weights-from x", {}, "--weights-from: .* no --tp or --pp"),
        ("--engine ddp --weights-to x", {}, "--weights-to: .* leave it out"),
    ):
        arguments = train_gpt.parse([*words.split(), "--deepspeed_config", "x.json"])
        with pytest.raises(layouts.ParallelismError, match=told):
            layouts.check(arguments, settings)


@pytest.mark.parametrize(
    ("block", "jsonl"),
    [
        ({"preset": "recommended"}, "runs/rec/ledger.jsonl"),
        ({"preset": "recommended", "ledger": {"every": 5}}, "runs/rec/ledger.jsonl"),
        ({"preset": "recommended", "ledger": {"jsonl": "other.jsonl"}}, "other.jsonl"),
        ({"preset": "recommended", "ledger": {"jsonl": None}}, None),
    ],
)
def test_a_run_with_a_log_has_its_ledger_beside_it(block: dict[str, Any], jsonl: Any) -> None:
    """Getting started's commands compare two runs by their folders."""
    settings = {"compression": block}
    report_beside(settings, Path("runs/rec/loss.jsonl"))
    assert settings["compression"]["ledger"]["jsonl"] == jsonl
    plain: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    report_beside(plain, Path("runs/rec/loss.jsonl"))
    assert plain == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "FileNotFoundError"),
        ("def shard(model", "SyntaxError: '\\(' was never closed"),
        ("def shard(): pass", "KeyError: 'syncs'"),
    ],
)
def test_a_plan_that_is_damaged_is_one_line(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "sharding.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=f"sharding.py: {why}.*hybridcomp plan"):
        planned(str(path))
