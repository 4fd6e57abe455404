"""``hybridcomp validate`` reports a rank's memory, and rejects a job that does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridcomp.channels.accounting.memory import KeptState, size
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.quantized_residual import nbytes_of
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.commands import cli

N = 70_000_000_000
FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True}
DELTA = {"codec": "blockint", "bits": 4, "delta": True}
SIZED = ["--no-pipeline", "--no-moe", "--parameters", "70e9", "--world-size", "64"]


def job(stage: int, **block: Any) -> dict[str, Any]:
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    return {**config, "compression": block}


def memory_line(shown: str) -> str:
    (found,) = [line for line in shown.splitlines() if line.strip().startswith("memory ")]
    return found


@pytest.fixture
def told(said_of: Callable[..., str]) -> Callable[..., str]:
    """Return a function that returns the line about memory of a job of 70 B parameters."""

    def run(stage: int, *words: str, **block: Any) -> str:
        return memory_line(said_of("validate", job(stage, **block), *SIZED, *words))

    return run


def test_seventy_billion_parameters_on_a_laptop(told: Callable[..., str]) -> None:
    assert f"residuals {size(4 * N)}," in told(3, dp=FEEDBACK)
    # a rank of eight sends an eighth of the node's sum
    assert f"residuals {size(4 * N / 8)}," in told(3, "--ranks-per-node", "8", dp=FEEDBACK)
    # a replica has eight ranks
    assert f"residuals {size(4 * N / 8)}," in told(3, "--replicas", "8", dp=FEEDBACK)
    # on four nodes of eight ranks: a 32nd if a replica spans several nodes, else an eighth
    deep = told(3, "--ranks-per-node", "8", dp=FEEDBACK, hierarchy=["auto", 4])
    assert f"residuals {size(4 * N / 32)}," in deep
    assert f"residuals {size(4 * N / 8)}," in told(3, dp=FEEDBACK, hierarchy=[8, 8])
    few = told(3, dp={**FEEDBACK, "error_feedback": {"bits": 8}})
    assert f"residuals {size(nbytes_of(8, N))}," in few


def test_sums_of_micro_batches_are_told(told: Callable[..., str]) -> None:
    dp = {"codec": "blockint", "bits": 4, "accumulate": "node"}
    for stage in (2, 3):
        line = told(stage, "--ranks-per-node", "8", dp=dp)
        assert f"sums of micro-batches {size(4 * N / 8)}," in line


@pytest.mark.parametrize(("secondary", "held"), [("exact", 2.0), ({"bits": 8}, 33 / 32)])
def test_secondary_copies_are_told(told: Callable[..., str], secondary: Any, held: float) -> None:
    line = told(3, "--ranks-per-node", "8", zero={"secondary": secondary})
    found = float(line.partition("secondary copies ")[2].partition(" GB")[0])
    assert found == pytest.approx(held * N / 8 / 1e9, rel=0.005)


def test_buckets_of_a_few_values_are_refused(said_of: Callable[..., str]) -> None:
    """This happens before a list of all buckets fills the memory."""
    zero = {"stage": 3, "reduce_bucket_size": 5}
    settings = {**job(3, dp=FEEDBACK), "zero_optimization": zero}
    said = said_of("validate", settings, *SIZED, status=cli.BAD_INPUT)
    assert "zero_optimization.reduce_bucket_size: found 5; 1.4e+10 messages in a step" in said, said


def neox(said_of: Callable[..., str], **block: Any) -> str:
    """Return the line for 70 B parameters on 8 x 8 x 16 ranks, of a GPT-NeoX file."""
    config = {
        "model_parallel_size": 8, "pipe_parallel_size": 8, "num_layers": 80, "hidden_size": 8192,
        "num_attention_heads": 64, "seq_length": 4096, "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1}, "precision": "bfloat16",
        "deepspeed_extra_args": {"compression": block},
    }  # fmt: skip
    words = ["--parameters", "70e9", "--world-size", "1024", "--ranks-per-node", "8"]
    return memory_line(said_of("validate", config, *words, file="70B.yml"))


def test_three_dimensions_of_seventy_billion_parameters(said_of: Callable[..., str]) -> None:
    n, eight = N // 64, {"codec": "blockint", "bits": 8}
    start = time.thread_time()
    line = neox(said_of, dp=FEEDBACK, zero=DELTA, tp=eight, pp=eight)
    assert time.thread_time() - start < 5
    assert f"residuals {size(4 * n)}, residuals of sums {size(4 * n / 16)}, " in line
    assert f"references of deltas {size(2 * n / 16)}, " in line
    # tp alone: payloads of 8 bits of 2 x 4096 x 8192 values, 23 parts of an eighth each
    values, codec = 2 * 4096 * 8192, make_codec("blockint", bits=8)
    nbytes = codec.wire_nbytes(values // 8, torch.bfloat16)
    assert neox(said_of, tp=eight).endswith(f": wire buffers {size(23 * nbytes)}")
    sent = codec.wire_nbytes(values, torch.bfloat16)
    assert neox(said_of, pp=eight).endswith(f": wire buffers {size(sent)}")


def test_activations_that_a_file_does_not_tell(said_of: Callable[..., str]) -> None:
    settings = job(1, tp={"codec": "blockint", "bits": 8}, pp="none")
    words = ["--pipeline", "--no-moe", "--tensor", *SIZED[2:], "--replicas", "4"]
    said = said_of("validate", settings, *words)
    assert "without buffers of tp, whose messages --activation VALUES tells" in said
    told = said_of("validate", settings, *words, "--activation", "1e6", "--tensor-ranks", "8")
    nbytes = make_codec("blockint", bits=8).wire_nbytes(125_000, torch.bfloat16)
    assert f"wire buffers {size(23 * nbytes)}" in told and "--activation" not in told


@pytest.mark.parametrize(
    ("gathered", "part"),
    [("stepcode", f"{size(2 * N / 4)}"), ({"keep": "host"}, f"{size(2 * N / 4)} (host)")],
)
def test_weights_kept_for_roll_outs(told: Callable[..., str], gathered: Any, part: str) -> None:
    line = told(3, "--ranks-per-node", "4", gathered=gathered)
    assert f"weights kept for roll-outs {part}" in line
    assert "roll-outs" not in told(3, gathered="expcode")


def test_islands_and_published_weights(tmp_path: Path, told: Callable[..., str]) -> None:
    line = told(2, sync={"islands": 8}, publish={"to": str(tmp_path / "weights")})
    assert f"state of islands {size(2 * 4 * N / 8)}, " in line  # start and momentum
    # sent message, and those of eight islands
    assert f"messages of islands {size((1 + 64 // 8) * 4 * N / 8)}, " in line
    assert f"copies of published weights {size(4 * N / 8)} (host)" in line
    late = {"preset": "streaming", "islands": 8, "every": 8, "delay": 5}  # three in flight
    assert f"messages of islands {size(3 * (1 + 64 // 8) * 4 * N / 8 / 4)}" in told(2, sync=late)
    where = {"rendezvous": "tcp://a:1", "at_start": 5}
    line = told(2, sync={"islands": where})
    assert f"messages of islands {size(6 * 4 * N / 64)}, " in line
    assert f"messages of islands {size(5 * 4 * N / 64)} (host)" in line
    assert "nothing" in told(2, dp="none")


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
    block: dict[str, Any], most: str, fragments: list[str], said_of: Callable[..., str]
) -> None:
    words = [*SIZED, "--device-memory", most]
    error = said_of("validate", job(3, **block), *words, status=cli.BAD_INPUT)
    assert error.count("\n") == 1
    assert all(fragment in error for fragment in fragments), error


def test_what_is_advised_fits(told: Callable[..., str]) -> None:
    for advice in ({"bits": 4}, False):
        assert told(3, "--device-memory", "80e9", dp={**FEEDBACK, "error_feedback": advice})


def test_other_codecs_are_named_where_deltas_cannot_be_switched_off() -> None:
    for zero, words in (("stepcode", "another codec than stepcode"), (DELTA, '"delta": false')):
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
    words: list[str], fragment: str, said_of: Callable[..., str]
) -> None:
    settings = job(3, dp=FEEDBACK)
    assert fragment in said_of("validate", settings, *words, status=cli.BAD_INPUT)
