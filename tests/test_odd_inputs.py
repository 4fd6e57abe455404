"""Hundreds of malformed files and options of plan, pays and compare: one line and a status each."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.tools.commands import cli
from tests.selection import by_day
from tests.tools.compare.made import ROW, write_run
from tests.tools.plan.answer.made import plan
from tests.tools.plan.answer.test_command import CLUSTER, CONFIG

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
DEEP = "[" * 5000 + "]" * 5000
#: invalid values for a number
ODD: tuple[Any, ...] = (None, True, "x", "1e9", [], {}, -1, 0, 0.5, NAN, INF, 1e300, HUGE, "\ud800")
#: contents of files of the wrong kind
FILES: dict[str, bytes] = {
    "empty": b"", "space": b" \n", "null": b"null", "list": b"[1]", "text": b'"a"', "number": b"3",
    "binary": bytes(range(256)) * 9, "latin": '{"a": "\xe9"}'.encode("latin-1"),
    "bom": b"\xef\xbb\xbf{}", "utf16": '{"a": 1}'.encode("utf-16"), "deep": DEEP.encode(),
    "deep object": b'{"a":' * 5000 + b"1" + b"}" * 5000, "cut": b'{"a": {"b": ',
    "digits": b'{"version": ' + b"9" * 6000 + b"}", "nul": b'{"a": "\x00"}', "twice": b'{"a":1}{}',
}  # fmt: skip
#: keys and texts that span lines, control a terminal, or are too long
TEXTS = ("x\ny\n", "x\r\x1b[2J\u202e", "x" * 5000, "---\n- `$(y)`\n")
#: a small search space, so that a plan is fast
FEW = ["--fix", "tensor=1", "--fix", "stages=1", "--fix", "context=1", "--fix", "micro_batch=1",
       "--no-recompute"]  # fmt: skip


def changed(whole: dict[str, Any], path: str, value: Any) -> str:
    """Return ``whole`` as JSON with another value at a dotted path."""
    found = copy.deepcopy(whole)
    place: Any = found
    *parts, last = path.split(".")
    for part in parts:
        place = place[part]
    place[last] = value
    return json.dumps(found)


MEASURED: dict[str, Any] = {
    "version": 1, "kind": "measured",
    "ranks": [{"node": 0, "device": "a", "nbytes": 10**10, "flops": {"bf16": [1e12, 1e12, 1e12]}}],
}  # fmt: skip


def with_values(
    whole: dict[str, Any], *places: str, values: Sequence[Any] = ODD
) -> Iterator[tuple[str, bytes]]:
    """Return ``whole`` with each of the ``values`` at each place."""
    for place in places:
        for value in values:
            text = changed(whole, place, value)
            yield f"{place} {str(value)[:9]!r}", text.encode("utf-8", "surrogatepass")


def with_texts(whole: dict[str, Any], *places: str) -> Iterator[tuple[str, bytes]]:
    """Return ``whole`` with each text at each place, as its key, and as an additional key."""
    for text in TEXTS:
        for place in places:
            yield f"{place} {text[:9]!r}", changed(whole, place, text).encode()
            found = copy.deepcopy(whole)
            *parts, last = place.split(".")
            owner = found
            for part in parts:
                owner = owner[part]
            owner[text] = owner.pop(last)
            yield f"key {place} {text[:9]!r}", json.dumps(found).encode()
        yield f"key {text[:9]!r}", json.dumps({**whole, text: text}).encode()


def clusters() -> Iterator[tuple[str, bytes]]:
    yield from FILES.items()
    yield from with_values(CLUSTER, "version", "nodes", "memory_gb", "tflops.bf16",
                           "between.gbytes_per_second", "spread")  # fmt: skip
    speeds = ({"0": 1e300}, {"0": 1e-300}, {"x": 1})
    yield from with_values(CLUSTER, "speeds", values=speeds)
    for name, flops in (("zeros", [0, 0, 0]), ("falling", [3, 2, 1]), ("short", [1]), ("text", "x"),
                        ("infinite", [1e308, 1e308, 1e308])):  # fmt: skip
        ranks = [{**MEASURED["ranks"][0], "flops": {"bf16": flops}}]
        yield f"flops {name}", json.dumps({**MEASURED, "ranks": ranks}).encode()
    yield "no ranks", json.dumps({**MEASURED, "ranks": []}).encode()
    yield "unknown key", json.dumps({**CLUSTER, "gpus": 8}).encode()
    yield from with_texts(CLUSTER, "kind", "device", "nodes", "inside", "codecs.blockint",
                          "inside.gbytes_per_second")  # fmt: skip


def models() -> Iterator[tuple[str, bytes]]:
    yield from FILES.items()
    yield from with_values(CONFIG, "hidden_size", "num_attention_heads", "vocab_size", "model_type")
    yield "a million layers", changed(CONFIG, "num_hidden_layers", 10**9).encode()
    yield from with_texts({**CONFIG, "_name_or_path": "x"}, "_name_or_path", "model_type",
                          "hidden_size", "tie_word_embeddings")  # fmt: skip


def blocks() -> Iterator[tuple[str, bytes]]:
    yield from FILES.items()
    whole = {
        "compression": {"preset": "recommended"}, "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": 2, "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 1},
    }  # fmt: skip
    yield from with_texts(whole, "compression", "compression.preset", "zero_optimization.stage")
    ledger = {**whole, "compression": {"dp": {"codec": "bf16"}, "ledger": {"jsonl": "a"}}}
    yield from with_texts(ledger, "compression.dp.codec", "compression.ledger.jsonl")
    yield from with_texts({"deepspeed_extra_args": whole}, "deepspeed_extra_args")
    yield from with_values(
        whole, "compression", "zero_optimization", "zero_optimization.stage",
        "gradient_accumulation_steps", "train_batch_size", "tensor_parallel.autotp_size",
        "train_micro_batch_size_per_gpu",
    )  # fmt: skip


def logs() -> Iterator[tuple[str, bytes]]:
    yield from FILES.items()
    record = {"step": 1, "loss": 2.0, "tokens": 1, "seconds": 1.0, "tokens_per_second": 1.0}
    after = json.dumps({**record, "step": 2, "tokens": 2}).encode()
    for name, content in with_values(record, *record):
        yield name, b'{"run": {"seed": 0}}\n' + content + b"\n" + after
    for name, content in (
        *with_values({}, "seed", "model", "data", "deepspeed", "tokens_per_step"),
        *with_texts({"model": {"layers": 1}, "deepspeed": {"a": 1}}, "deepspeed", "model.layers"),
    ):
        yield f"header {name}", b'{"run": ' + content + b'}\n{"step": 1, "loss": 2.0}'
    for name, content in with_values({"summary": True}, "valid_loss", values=(*ODD, *TEXTS)):
        yield name, b'{"step": 1, "loss": 2.0}\n' + content
    yield "run of a list", b'{"run": [1]}\n{"step": 1, "loss": 2}'
    yield "same steps", b'{"step": 1, "loss": 2}\n{"step": 1, "loss": 2}'


def ledgers() -> Iterator[tuple[str, bytes]]:
    yield from FILES.items()
    summary = {"summary": True, "step": 9, "dimensions": {"dp": {"forward": ROW}}}
    row = "dimensions.dp.forward"
    figures = ("codec", "raw_MB", "wire_MB", "ratio", "error", "codec_ms")
    yield from with_values(summary, *(f"{row}.{name}" for name in figures))
    yield from with_texts(summary, "summary", "dimensions.dp", row, f"{row}.codec", f"{row}.raw_MB")
    wrong: Sequence[Any] = (3, [], {"dp": 3}, {"dp": {"forward": 3}}, {"dp": [1]})
    yield from with_values({"summary": True}, "dimensions", values=wrong)


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command: no traceback, and a single line on errors."""
    try:
        status: object = cli.main(words)
    except SystemExit as end:  # argparse's
        status = end.code
    shown = capsys.readouterr()
    assert status in (0, 1, 2)
    assert shown.out.replace("\n", "").isprintable()
    if status == 0 or "the plan missed " in shown.out:
        told = shown.out.lower().split()
        assert "nan" not in told and "inf" not in told, shown.out
        return
    assert shown.err.startswith(("hybridcomp: ", "usage: ")), shown.err
    assert shown.err.count("\n") == 1 or shown.err.startswith("usage: "), shown.err
    assert len(shown.err) < 1500 and "Traceback" not in shown.err
    assert shown.err.rstrip("\n").isprintable() or shown.err.startswith("usage: ")


def named(cases: Iterator[tuple[str, bytes]]) -> list[Any]:
    """Return a test's parameters: every tenth by day."""
    return [
        pytest.param(content, id=ascii(name), marks=pytest.mark.nightly if place % 10 else ())
        for place, (name, content) in enumerate(cases)
    ]


@pytest.fixture
def planned(tmp_path: Path) -> list[str]:
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ["plan", str(tmp_path / "config.json"), "--cluster", str(tmp_path / "cluster.json"),
            "--out", str(tmp_path / "plans"), "--samples=8", "--length=128", *FEW]  # fmt: skip


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip pictures, which are tested elsewhere and would dominate here."""
    from hybridcomp.tools.compare import command
    from hybridcomp.tools.plan.answer import picture

    monkeypatch.setattr(picture, "draw", lambda *_: None)
    monkeypatch.setattr(command, "_picture", lambda *_: None)


@pytest.mark.parametrize("content", named(clusters()))
def test_plan_with_an_odd_cluster(
    content: bytes, planned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.json").write_bytes(content)
    said(planned, capsys)


@pytest.mark.parametrize("content", named(models()))
def test_plan_with_an_odd_model(
    content: bytes, planned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    said(planned, capsys)


@pytest.mark.parametrize("content", named(blocks()))
@pytest.mark.parametrize("name", ["ds_config.json", "mine.yml"])
def test_pays_and_validate_with_an_odd_file(
    content: bytes, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    said(["pays", str(tmp_path / name), "--parameters", "1e9", "--compute", "1", "--link", "9"],
         capsys)  # fmt: skip
    said(["validate", str(tmp_path / name)], capsys)


@pytest.mark.parametrize("content", named(logs()))
def test_compare_with_an_odd_log(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_run(tmp_path / "base", 0, 1.0)
    (tmp_path / "odd.jsonl").write_bytes(content)
    more = ["--out", str(tmp_path / "out"), "--wandb", "none", "--last", "1"]
    said(["compare", str(base), str(tmp_path / "odd.jsonl"), *more], capsys)
    (tmp_path / "odd.json").write_bytes(content)
    said(["compare", str(base), str(tmp_path / "odd.json"), *more], capsys)


@pytest.mark.parametrize("content", named(ledgers()))
def test_compare_with_an_odd_ledger(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_run(tmp_path / "base", 0, 1.0)
    run = write_run(tmp_path / "run", 0, 1.0, ledger=True)
    run.with_name("ledger.jsonl").write_bytes(content)
    out = ["--out", str(tmp_path / "out"), "--wandb", "none"]
    said(["compare", str(base), str(run), *out], capsys)


def plans() -> Iterator[tuple[str, bytes]]:
    yield from FILES.items()
    whole = plan().to_json()
    yield from with_values(
        {"blocks": [1, 2], **whole}, "length", "prediction.seconds", "prediction.low",
        "prediction.job_nbytes", "prediction.memory_by_stage", "layout.tensor", "layout.cuts",
        "blocks", values=(*ODD, *TEXTS),
    )  # fmt: skip
    yield "text in a table", changed(whole, "prediction.job_nbytes", {"dp": "x"}).encode()
    yield from with_texts(whole, "hybridcomp_plan", "layout.tensor", "model", "prediction.seconds")


@pytest.mark.parametrize("content", named(plans()))
def test_a_check_with_an_odd_plan(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    run = write_run(tmp_path / "run", 0, 1.0, ledger=True)
    said(["plan", "--check", str(run), "--plan", str(tmp_path / "plan.json")], capsys)


def notes() -> Iterator[tuple[str, bytes]]:
    yield from FILES.items()
    whole = {
        "format": 1, "hybridcomp": "1", "step": 3, "world_size": 2, "digest": "x",
        "files": {"hybridcomp_residuals_rank_*.pt": "what"}, "error_feedback": True,
        "compression": {"dp": "bf16"},
    }  # fmt: skip
    yield from with_values(whole, *whole)
    yield from with_texts(whole, "hybridcomp", "files", "step")


@pytest.mark.parametrize("content", named(notes()))
def test_validate_with_an_odd_checkpoint(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "block.json").write_text('{"preset": "recommended"}')
    words = ["validate", str(tmp_path / "block.json"), "--checkpoint", str(tmp_path)]
    (tmp_path / "hybridcomp_checkpoint.json").write_bytes(content)
    said(words, capsys)
    (tmp_path / "checkpoint-\u00b2").mkdir()
    (tmp_path / "latest").write_bytes(content[:200])
    said(words, capsys)


@pytest.mark.parametrize(
    "place", ["/nowhere/at/all", "", ".", "/dev/null", "\udcff", "a\0b", "a" * 300]
)
def test_places_that_are_no_file(
    place: str, planned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said([planned[0], place, *planned[2:]], capsys)
    for option in ("--cluster", "--base", "--check", "--plan"):
        said([*planned, option, place], capsys)
    said(["pays", place], capsys)
    said(["pays", "--cluster", place], capsys)
    said(["validate", place], capsys)
    base = write_run(tmp_path / "base", 0, 1.0)
    said(["compare", str(base), place, "--out", str(tmp_path / "out"), "--wandb", "none"], capsys)


@pytest.mark.parametrize(
    "value", by_day(["nan", "inf", "-1", "0", "1e300", "x", "", "9" * 400], ["nan", "-1", ""])
)
def test_options_that_are_no_number_of_theirs(
    value: str, planned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--samples", "--length", "--ranks", "--memory", "--most-micro-batch", "--try",
                   "--budget", "--dtype"):  # fmt: skip
        said([*planned, f"{option}={value}"], capsys)
    step = ["--parameters=1e9", "--compute=1", "--link=9"]
    for option in ("--parameters", "--compute", "--link", "--codec-gbs", "--ranks", "--stage",
                   "--micro-batches"):  # fmt: skip
        said(["pays", *step, f"{option}={value}"], capsys)
    config = str(Path(planned[1]))
    for option in ("--parameters", "--world-size", "--replicas", "--ranks-per-node",
                   "--device-memory", "--activation", "--tensor-ranks"):  # fmt: skip
        said(
            ["validate", config, "--parameters=7e9", "--world-size=8", f"{option}={value}"], capsys
        )
    for option in ("--last", "--smooth", "--seeds"):
        said(["compare", "a", "b", f"{option}={value}"], capsys)
