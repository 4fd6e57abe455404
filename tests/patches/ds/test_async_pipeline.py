"""One-line errors of a flushless pipeline, and its read-ahead, on stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("deepspeed")

from hybridcomp.config import CompressionConfig
from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.errors import ConfigError
from hybridcomp.nn.async_pipeline import make_correction
from hybridcomp.patches.ds.pipeline import async_pipeline
from hybridcomp.patches.ds.pipeline.async_rules import check, is_adam
from hybridcomp.patches.ds.pipeline.micro_batch_prefetch import ReadAhead
from hybridcomp.session.agreement import agree_on

STASH = AsyncPipelineConfig(versions="stash")


def engine(**changes: Any) -> Any:
    """Return the attributes of a four-stage engine that the checks read."""
    facts = {
        "num_stages": 4, "tied_comms": {}, "dynamic_shape": False, "tensor": 1, "micro_batches": 4,
        "fp16": False, "bf16": False, "zero": 0, **changes,
    }  # fmt: skip
    grid = SimpleNamespace(get_slice_parallel_world_size=lambda: facts["tensor"])
    module = SimpleNamespace(
        num_stages=facts["num_stages"],
        tied_comms=facts["tied_comms"],
        dynamic_shape=facts["dynamic_shape"],
        _grid=grid,
    )
    return SimpleNamespace(
        module=module,
        fp16_enabled=lambda: facts["fp16"],
        bfloat16_enabled=lambda: facts["bf16"],
        zero_optimization_stage=lambda: facts["zero"],
        gradient_accumulation_steps=lambda: facts["micro_batches"],
    )


@pytest.mark.parametrize(
    ("settings", "changes", "fragment"),
    [
        ({"versions": "stash"}, {"num_stages": 1}, "versions: found one stage"),
        ({"versions": "stash"}, {"fp16": True}, "versions: found fp16"),
        ({"versions": "stash"}, {"tied_comms": {"embed": 1}}, "versions: found tied layers"),
        ({"versions": "stash"}, {"dynamic_shape": True}, "versions: found dynamic_shape"),
        ({"versions": "stash"}, {"tensor": 2}, "versions: found tensor parallel stages"),
        ({"versions": 2}, {"micro_batches": 2}, "accumulation_steps of at least 3"),
        ({"versions": 2, "slack": 1}, {}, "accumulation_steps of at least 6"),
        ({"versions": 1, "correction": "pipemare"}, {"bf16": True}, "correction: found 'pipemare'"),
        ({"versions": 1, "correction": "spike"}, {"zero": 1}, "correction: found 'spike'"),
    ],
)
def test_refused(settings: dict[str, Any], changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(engine(**changes), AsyncPipelineConfig(**settings))
    assert fragment in str(raised.value) and "\n" not in str(raised.value)
    check(engine(), STASH)
    check(engine(micro_batches=3), AsyncPipelineConfig(versions=2))


@pytest.mark.parametrize(
    ("settings", "adam", "said"),
    [
        ({"versions": 2}, True, True),
        ({"versions": 2}, False, False),
        ({"versions": 2, "correction": "look_ahead"}, True, False),
        ({"versions": "stash"}, True, False),
    ],
)
def test_adam_and_gradients_of_older_weights_are_warned_of(
    settings: dict[str, Any], adam: bool, said: bool
) -> None:
    sentences: list[str] = []
    parts = dict.fromkeys(("check", "PostedMessages", "AsyncPipeline"), mock.DEFAULT)
    built = mock.MagicMock(module=mock.MagicMock(stage_id=0, num_stages=1))
    with mock.patch.multiple(
        async_pipeline, is_adam=lambda engine: adam, say=sentences.append, **parts
    ):
        async_pipeline.start(built, built, AsyncPipelineConfig(**settings))
    expected = ["pipeline.versions 2 with Adam"] if said else []
    assert [sentence.partition(" is known")[0] for sentence in sentences] == expected


def test_spike_needs_its_optimizer() -> None:
    settings = AsyncPipelineConfig(versions=1, correction="spike")
    parameters = [torch.nn.Parameter(torch.ones(2))]
    for optimizer in (
        torch.optim.AdamW(parameters),
        torch.optim.SGD(parameters, 0.1),
        torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    ):
        with pytest.raises(ConfigError, match="SGD with momentum"):
            make_correction(settings, optimizer, float, int)
    assert is_adam(SimpleNamespace(basic_optimizer=torch.optim.AdamW(parameters)))


def test_corrections_follow_the_number_of_micro_batches() -> None:
    module, counts = torch.nn.Linear(2, 2), [1, 2]
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    module.num_stages, module.stage_id = 5, 0  # type: ignore[assignment]
    stage = SimpleNamespace(
        module=module, basic_optimizer=optimizer, global_steps=0, _next_batch=None,
        gradient_accumulation_steps=lambda: counts[0],
    )  # fmt: skip
    settings, rates = AsyncPipelineConfig(versions=1, correction="pipemare", anneal=10), []
    pipeline = async_pipeline.AsyncPipeline(stage, settings, mock.MagicMock(depth=1))
    assert pipeline.correction is not None
    while counts:
        pipeline.correction.before()
        rates.append(optimizer.param_groups[0]["lr"])
        pipeline.correction.after()
        counts.pop(0)
    assert rates == [1 / 4, 1 / 2]


def test_other_engines_have_no_such_pipeline() -> None:
    block = CompressionConfig.parse({"pipeline": {"versions": 2}})
    with pytest.raises(ConfigError, match=r"pipeline\.versions: found 2; only DeepSpeed's"):
        agree_on(block, "megatron-core")


def reader(numbers: range) -> tuple[Any, ReadAhead, Callable[[bool], Any]]:
    """Return an engine, its read-ahead, and a function that reads a micro-batch."""
    source = iter(numbers)
    stand_in = SimpleNamespace(
        module=SimpleNamespace(stage_id=0), data_iterator=source, _next_batch=lambda: next(source)
    )
    ahead = ReadAhead(stand_in)

    def read(is_ahead: bool) -> Any:
        with ahead.reading(is_ahead):
            return stand_in._next_batch()

    return stand_in, ahead, read


def test_what_was_read_ahead_is_read_again() -> None:
    _, ahead, read = reader(range(9))
    ahead.begin(True)
    assert [read(False), read(True), read(True)] == [0, 1, 2]
    ahead.used()
    ahead.replay()
    ahead.begin(True)
    assert [read(False), read(False), read(True), read(True)] == [1, 2, 3, 4]


def test_an_evaluation_reads_its_own_data() -> None:
    stand_in, ahead, read = reader(range(9))
    ahead.begin(True)
    assert [read(False), read(True)] == [0, 1]
    own, stand_in.data_iterator = stand_in.data_iterator, "another"
    assert stand_in._next_batch() == 2  # from the stand-in's only source
    stand_in.data_iterator = own
    ahead.used()
    assert stand_in._next_batch() == 1  # upstream's schedule, after the patches are reverted


def test_data_that_ends_or_changes() -> None:
    stand_in, ahead, read = reader(range(3))
    ahead.begin(True)
    assert [read(False), read(True), read(True), read(True)] == [0, 1, 2, 2]  # filled up
    with pytest.raises(ConfigError, match=r"found an iterator that has ended;.*Repeating"):
        ahead.begin(False)
    ahead.replay()
    ahead.begin(True)  # drained
    with pytest.raises(StopIteration):
        [read(False) for _ in range(4)]
    stand_in, ahead, read = reader(range(3))
    ahead.begin(True)
    read(False)
    stand_in.data_iterator = iter(range(3))
    with pytest.raises(ConfigError, match="another iterator"):
        ahead.begin(False)
    ahead.replay()
    ahead.begin(True)  # drained: 0 was of the other iterator
    assert read(False) == 1
