"""``hybridcomp validate`` reports a rank's memory, and rejects a job that does not fit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridcomp.channels.accounting.memory import size
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.quantized_residual import nbytes_of
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.commands import cli

N = 70_000_000_000
FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True}
DELTA = {"codec": "blockint", "bits": 4, "delta": True}
SIZED = ["--no-pipeline", "--no-moe", "--parameters", "70e9", "--world-size", "64"]


def file(folder: Path, stage: int, **block: Any) -> str:
    path = folder / "ds_config.json"
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    path.write_text(json.dumps({**config, "compression": block}))
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line about memory."""
    assert cli.main(["validate", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    (found,) = [line for line in lines if line.strip().startswith("memory ")]
    return found


def test_seventy_billion_parameters_on_a_laptop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, 3, dp=FEEDBACK)
    assert f"residuals {size(4 * N)}," in told(capsys, path, *SIZED)
    # a rank of eight sends an eighth of the node's sum
    assert f"residuals {size(4 * N / 8)}," in told(capsys, path, *SIZED, "--ranks-per-node", "8")
    # a replica has eight ranks
    assert f"residuals {size(4 * N / 8)}," in told(capsys, path, *SIZED, "--replicas", "8")
    # on four nodes of eight ranks: a 32nd if a replica spans several nodes, else an eighth
    deep = file(tmp_path, 3, dp=FEEDBACK, hierarchy=["auto", 4])
    assert f"residuals {size(4 * N / 32)}," in told(capsys, deep, *SIZED, "--ranks-per-node", "8")
    wide = file(tmp_path, 3, dp=FEEDBACK, hierarchy=[8, 8])
    assert f"residuals {size(4 * N / 8)}," in told(capsys, wide, *SIZED)
    few = file(tmp_path, 3, dp={**FEEDBACK, "error_feedback": {"bits": 8}})
    assert f"residuals {size(nbytes_of(8, N))}," in told(capsys, few, *SIZED)


def test_sums_of_micro_batches_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dp = {"codec": "blockint", "bits": 4, "accumulate": "node"}
    for stage in (2, 3):
        line = told(capsys, file(tmp_path, stage, dp=dp), *SIZED, "--ranks-per-node", "8")
        assert f"sums of micro-batches {size(4 * N / 8)}," in line


@pytest.mark.parametrize(("secondary", "held"), [("exact", 2.0), ({"bits": 8}, 33 / 32)])
def test_secondary_copies_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], secondary: Any, held: float
) -> None:
    block = file(tmp_path, 3, zero={"secondary": secondary})
    line = told(capsys, block, *SIZED, "--ranks-per-node", "8")
    found = float(line.partition("secondary copies ")[2].partition(" GB")[0])
    assert found == pytest.approx(held * N / 8 / 1e9, rel=0.005)


def test_buckets_of_a_few_values_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This happens before a list of all buckets fills the memory."""
    path = Path(file(tmp_path, 3, dp=FEEDBACK))
    settings = json.loads(path.read_text())
    settings["zero_optimization"]["reduce_bucket_size"] = 5
    path.write_text(json.dumps(settings))
    assert cli.main(["validate", str(path), *SIZED]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert "zero_optimization.reduce_bucket_size: found 5; 1.4e+10 messages in a step" in said, said


def neox(folder: Path, **block: Any) -> list[str]:
    """Return words for 70 B parameters on 8 x 8 x 16 ranks, in a GPT-NeoX file."""
    config = {
        "model_parallel_size": 8, "pipe_parallel_size": 8, "num_layers": 80, "hidden_size": 8192,
        "num_attention_heads": 64, "seq_length": 4096, "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1}, "precision": "bfloat16",
        "deepspeed_extra_args": {"compression": block},
    }  # fmt: skip
    path = folder / "70B.yml"
    path.write_text(json.dumps(config))
    return [str(path), "--parameters", "70e9", "--world-size", "1024", "--ranks-per-node", "8"]


def test_three_dimensions_of_seventy_billion_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    n, eight = N // 64, {"codec": "blockint", "bits": 8}
    start = time.thread_time()
    line = told(capsys, *neox(tmp_path, dp=FEEDBACK, zero=DELTA, tp=eight, pp=eight))
    assert time.thread_time() - start < 5
    assert f"residuals {size(4 * n)}, residuals of sums {size(4 * n / 16)}, " in line
    assert f"references of deltas {size(2 * n / 16)}, " in line
    # tp alone: payloads of 8 bits of 2 x 4096 x 8192 values, 23 parts of an eighth each
    values = 2 * 4096 * 8192
    (nbytes,) = {make_codec("blockint", bits=8).wire_nbytes(values // 8, torch.bfloat16)}
    assert told(capsys, *neox(tmp_path, tp=eight)).endswith(f": wire buffers {size(23 * nbytes)}")
    sent = make_codec("blockint", bits=8).wire_nbytes(values, torch.bfloat16)
    assert told(capsys, *neox(tmp_path, pp=eight)).endswith(f": wire buffers {size(sent)}")


def test_activations_that_a_file_does_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, 1, tp={"codec": "blockint", "bits": 8}, pp="none")
    words = ["validate", path, "--pipeline", "--no-moe", "--tensor", *SIZED[2:], "--replicas", "4"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "without buffers of tp, whose messages --activation VALUES tells" in said
    assert cli.main([*words, "--activation", "1e6", "--tensor-ranks", "8"]) == 0
    told = capsys.readouterr().out
    nbytes = make_codec("blockint", bits=8).wire_nbytes(125_000, torch.bfloat16)
    assert f"wire buffers {size(23 * nbytes)}" in told and "--activation" not in told


def test_both_hops_and_references(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = told(capsys, file(tmp_path, 1, dp=FEEDBACK, zero=DELTA), *SIZED)
    assert f"residuals {size(4 * N)}, residuals of sums {size(4 * N / 64)}, " in line
    assert f"references of deltas {size(2 * N / 64)}, " in line


@pytest.mark.parametrize(
    ("gathered", "part"),
    [("stepcode", f"{size(2 * N / 4)}"), ({"keep": "host"}, f"{size(2 * N / 4)} (host)")],
)
def test_weights_kept_for_roll_outs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gathered: Any, part: str
) -> None:
    path = file(tmp_path, 3, gathered=gathered)
    line = told(capsys, path, *SIZED, "--ranks-per-node", "4")
    assert f"weights kept for roll-outs {part}" in line
    assert "roll-outs" not in told(capsys, file(tmp_path, 3, gathered="expcode"), *SIZED)


def test_islands_and_published_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path, 2, sync={"islands": 8}, publish={"to": str(tmp_path / "weights")})
    line = told(capsys, path, *SIZED)
    assert f"state of islands {size(2 * 4 * N / 8)}, " in line  # start and momentum
    # sent message, and those of eight islands
    assert f"messages of islands {size((1 + 64 // 8) * 4 * N / 8)}, " in line
    assert f"copies of published weights {size(4 * N / 8)} (host)" in line
    late = {"preset": "streaming", "islands": 8, "every": 8, "delay": 5}  # three in flight
    line = told(capsys, file(tmp_path, 2, sync=late), *SIZED)
    assert f"messages of islands {size(3 * (1 + 64 // 8) * 4 * N / 8 / 4)}" in line
    where = {"rendezvous": "tcp://a:1", "at_start": 5}
    line = told(capsys, file(tmp_path, 2, sync={"islands": where}), *SIZED)
    assert f"messages of islands {size(6 * 4 * N / 64)}, " in line
    assert f"messages of islands {size(5 * 4 * N / 64)} (host)" in line
    assert "nothing" in told(capsys, file(tmp_path, 2, dp="none"), *SIZED)


@pytest.mark.parametrize(
    ("block", "most", "fragments"),
    [
        (
            {"dp": FEEDBACK}, "200e9",
            ["takes 281 GB beside 17.5 GB", '{"bits": 16} under "dp" (141 GB)', '{"bits": 8}'],
        ),
        ({"dp": FEEDBACK}, "80e9", ['{"bits": 4} under "dp" (39.9 GB)', '"error_feedback": false']),
        ({"dp": FEEDBACK}, "10e9", ["do not fit either"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_nearest_that_do(
    block: dict[str, Any],
    most: str,
    fragments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [file(tmp_path, 3, **block), *SIZED, "--device-memory", most]
    assert cli.main(["validate", *words]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert all(fragment in captured.err for fragment in fragments), captured.err


def test_what_is_advised_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SIZED, "--device-memory", "80e9"]
    for advice in ({"bits": 4}, False):
        path = file(tmp_path, 3, dp={**FEEDBACK, "error_feedback": advice})
        assert cli.main(["validate", path, *words]) == 0
    capsys.readouterr()


def test_other_codecs_are_named_where_deltas_cannot_be_switched_off() -> None:
    from hybridcomp.channels.accounting.memory import KeptState

    for codec, words in (
        ("stepcode", "another codec than stepcode"),
        ("blockint", '"delta": false'),
    ):
        zero = {"codec": codec, "delta": True, **({"bits": 4} if codec == "blockint" else {})}
        config = CompressionConfig.parse({"zero": zero})
        (found,) = KeptState.of(config).smaller(config)
        assert words in found[0]


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--device-memory", "80e9"], "--device-memory: found 80000000000.0; memory is computed"),
        (["--parameters", "70e9"], "--parameters: found 70000000000.0; add --world-size"),
        (["--activation", "1e6"], "--activation: found 1000000.0; memory is computed"),
        ([*SIZED, "--tensor-ranks", "7"], "--tensor-ranks: found 7; it does not divide"),
        ([*SIZED, "--replicas", "5"], "--replicas: found 5; it does not divide"),
        (
            [*SIZED, "--ranks-per-node", "0"],
            "--ranks-per-node: found 0; expected a number from 1 to 1e+15",
        ),
    ],
)
def test_options_that_cannot_act(
    words: list[str], fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", file(tmp_path, 3, dp=FEEDBACK), *words]) == cli.BAD_INPUT
    assert fragment in capsys.readouterr().err
