"""Generation on pipelines: answers, seeds, messages, user errors, and restored state."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("deepspeed")

import hybridcomp
from hybridcomp.errors import ConfigError
from hybridcomp.generation import GenerationFigures, Sampling, answer, generating
from hybridcomp.job import small_messages
from tests.generation import generating_jobs as jobs
from tests.ranks import RankPool, run_ranks

TOKENS, SEED = 8, 5
#: stops about every sixth answer of the model early
STOP = ((3,), (17,), (40,))
EIGHT = {"codec": "blockint", "bits": 8}


@dataclass
class Answered:
    """A rank's observations while answering prompts."""

    greedy: list[list[int]]
    logits: dict[int, Tensor]  # logits of greedy answers, on the last stage
    sampled: list[list[int]]
    figures: GenerationFigures
    under_way: int  # maximum passes in flight between the first stage and its next picked tokens


def answered(tp: int, pp: int, count: int, block: Any = None) -> Answered:
    """Answer greedily with four batches in flight, and by sampling."""
    hybridcomp.install()
    engine = jobs.engine(tp, pp, block)
    stage = jobs.settle(engine, batch=8, room=64)
    recording, figures = jobs.Recording(Sampling()), GenerationFigures()
    trace = watched()
    answers = answer(
        stage, jobs.prompts(count), TOKENS, Sampling(stop=STOP), in_flight=4, picker=recording,
        figures=figures,
    )  # fmt: skip
    sampled = hybridcomp.generate(
        engine, [torch.tensor(p) for p in jobs.prompts(30, seed=1)], tokens=TOKENS, samples=2,
        temperature=0.9, top_k=30, top_p=0.95, seed=SEED, stop=[3, (40, 41)],
    )  # fmt: skip
    logits = {number: torch.stack(rows) for number, rows in recording.logits.items()}
    return Answered(
        answers, logits, [ids.tolist() for ids in sampled], figures, max(trace, default=0)
    )


def watched() -> list[int]:
    """Record at each received frame how many were sent since the last."""
    from hybridcomp.generation.frames import Incoming, Outgoing

    sent, trace = [0], list[int]()
    send, take = Outgoing.send, Incoming.take

    def sending(self: Any, frame: Any) -> None:
        sent[0] += 1
        send(self, frame)

    def taking(self: Any) -> Any:
        trace.append(sent[0])
        sent[0] -= 1
        return take(self)

    # the ranks end with the test
    Outgoing.send, Incoming.take = sending, taking  # type: ignore[method-assign]
    return trace


def in_one_piece(count: int) -> list[tuple[list[int], Tensor]]:
    """Return the same answers by full passes of the whole model, up to a stop."""
    model, answers = jobs.whole_model(), []
    for prompt in jobs.prompts(count):
        ids, logits = jobs.greedy(model, prompt, TOKENS)
        stop = Sampling(stop=STOP).stops(ids, 0) or TOKENS
        answers.append((ids[:stop], logits[:stop]))
    return answers


def test_tensor_ranks_and_stages_answer_as_one_process() -> None:
    """Prompts of random lengths, four batches in flight; finished answers make room."""
    count = 200
    want = in_one_piece(count)
    ranks = run_ranks(4, answered, 2, 2, count)
    for rank in ranks:
        assert rank.greedy == [ids for ids, _ in want]
    assert len({len(ids) for ids, _ in want}) > 4  # many end early
    for rank in ranks[2:]:  # the ranks of the last stage
        for number, (_, logits) in enumerate(want):
            logits_of_rank = rank.logits[number][:, : jobs.VOCAB]  # the rest is padding
            torch.testing.assert_close(logits_of_rank, logits, atol=1e-5, rtol=1e-5)
    real = sum(len(prompt) for prompt in jobs.prompts(count)) + sum(len(ids) - 1 for ids, _ in want)
    for rank in ranks:
        assert rank.figures.tokens == real  # no padding, no recomputation
    assert [rank.figures.hops for rank in ranks] == [ranks[0].figures.passes] * 2 + [0] * 2
    assert ranks[0].under_way == 4
    # sequential batches of 8 would take TOKENS passes each
    assert ranks[0].figures.passes < count // 8 * TOKENS
    single, two, four = run_ranks(1, answered, 1, 1, 9), run_ranks(2, answered, 1, 2, 9), ranks
    assert [rank.sampled for rank in (*single, *two, *four)] == [single[0].sampled] * 7
    texts = single[0].sampled
    assert len(texts) == 60 and texts[0::2] != texts[1::2]


def trained(generating: bool) -> dict[str, Any]:
    """Train two replicas of two stages with a lossy block, optionally generating between steps."""
    hybridcomp.install()
    block = {
        "dp": {"codec": "blockint", "bits": 4, "error_feedback": True}, "pp": EIGHT,
        "min_bytes": 0, "generate": {"pp": {"codec": "blockint", "bits": 4}, "min_bytes": 0},
    }  # fmt: skip
    engine = jobs.engine(1, 2, block)
    draw = torch.Generator().manual_seed(engine.grid.get_data_parallel_id())
    batches = iter([torch.randint(jobs.VOCAB, (1, 2, 12), generator=draw) for _ in range(12)])
    data = iter((batch[:, 0], batch[:, 1]) for batch in batches)
    torch.manual_seed(7)
    losses = []
    from hybridcomp.channels import channels_of

    channels = channels_of(engine)
    assert channels is not None
    for step in range(3):
        losses.append(float(engine.train_batch(data)))
        if generating and step < 2:
            before = state(engine, channels)
            count = 3 + 5 * engine.grid.get_data_parallel_id()  # replicas have different prompts
            answers = hybridcomp.generate(engine, jobs.prompts(count), tokens=4, temperature=1.0)
            assert [len(ids) for ids in answers] == [4] * count
            after = state(engine, channels)
            assert before == after
    parameters = {name: jobs.digest(p) for name, p in engine.module.named_parameters()}
    return {"losses": losses, "parameters": parameters}


def state(engine: Any, channels: Any) -> list[Any]:
    """Return the state that a training step reads, without the data."""
    parameters = list(engine.module.parameters())
    gradients = [None if p.grad is None else jobs.digest(p.grad) for p in parameters]
    return [
        [part.training for part in engine.module.modules()], gradients, channels.residuals.norm(),
        jobs.digest(torch.get_rng_state()), channels.step, channels.passes,
        channels["pp"].state is channels, torch.is_grad_enabled(),
        [jobs.digest(p) for p in parameters],
    ]  # fmt: skip


def test_a_training_does_not_notice() -> None:
    with RankPool(4) as four:
        with_it, without = (four.run(trained, generating) for generating in (True, False))
    assert with_it == without
    assert with_it[0]["losses"][2] != with_it[0]["losses"][0]


def hops(block: Any) -> tuple[list[list[int]], float, float, float]:
    """Answer with one token each, so that all share a prefix; return bytes of ``pp`` by rank."""
    from hybridcomp.channels import channels_of

    hybridcomp.install()
    engine = jobs.engine(1, 2, block)
    stage = jobs.settle(engine, batch=16)
    answers = answer(stage, jobs.prompts(200), 1, Sampling())
    channels = channels_of(engine)
    assert channels is not None
    assert not channels.ledger.interval["pp", "forward"].messages
    entry = channels.ledger.interval["generate", "pp"]  # type: ignore[index]
    return answers, entry.raw_nbytes, entry.wire_nbytes, entry.messages


def test_eight_bits_on_hops_keep_tokens() -> None:
    """Hops use the bounds of ``generate``, not training's codec of ``pp``."""
    training = {"pp": {"codec": "blockint", "bits": 2}, "min_bytes": 0}
    blocks: list[dict[str, Any]] = [{}, {"generate": {}}, {"generate": {"pp": EIGHT}}]
    with RankPool(2) as two:
        alone, native, eight = (two.run(hops, {**training, **more}) for more in blocks)
    assert alone == native  # without the key generate: native too
    same = sum(a == b for a, b in zip(native[0][0], eight[0][0], strict=True))
    assert same >= 0.99 * len(native[0][0])
    values = 4 * jobs.WIDTH * sum(len(prompt) for prompt in jobs.prompts(200))
    assert native[0][1] == eight[0][1] == values
    heads = native[0][2] - values  # header bytes of frames
    assert 0 < heads < 0.2 * values
    # 9 bits in blocks of 32 values: 1 byte each and the scale, of 4
    assert (eight[0][2] - heads) / values == pytest.approx(0.26, abs=0.02)
    assert native[1][1] == 0 < native[1][2]  # the last stage sends the picked tokens
    assert eight[0][3] == native[0][3] > 0


def sliced() -> list[list[int]]:
    """Return answers of a SlicedStage under a plain engine."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
    from gpt.token_slices import Layers

    from hybridcomp.nn.slices import SlicedStage
    from tests.training.in_turn import start_deepspeed

    start_deepspeed()
    layers = Layers(jobs.config(), [2, 2], dist.get_rank())
    jobs.sharpen(layers.layers)
    grid = PipelineParallelGrid(topology=PipeModelDataParallelTopology(2, 1, 1))
    group = grid.get_pipe_parallel_group()
    module = SlicedStage(layers, (8,), jobs.WIDTH, nn.functional.cross_entropy, group=group)
    settings = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9,
                "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, mpu=grid, config=settings)
    answers = hybridcomp.generate(engine, jobs.prompts(20), tokens=4)
    return [ids.tolist() for ids in answers]


def test_stages_of_token_slices_answer() -> None:
    jobs.example()
    model = jobs.whole_model()
    want = [jobs.greedy(model, prompt, 4)[0] for prompt in jobs.prompts(20)]
    assert run_ranks(2, sliced) == [want, want]


def mistakes() -> list[str]:
    """Return errors of wrong calls in sequence, and an answer after them."""
    from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig

    engine = jobs.engine(1, 2)
    me = dist.get_rank()

    def ask(prompts: Any, **more: Any) -> Callable[[], object]:
        return lambda: hybridcomp.generate(engine, prompts, **{"tokens": 4, **more})

    def roll(size: int, mask: int = 1) -> Callable[[], object]:
        ids = torch.ones(2, 3, dtype=torch.int64)
        request = RolloutRequest(ids, torch.tensor([[1, 1, 1], [mask] * 3]))
        rollout = hybridcomp.rollout(engine, jobs.Tokenizer(size))
        return lambda: rollout.generate(request, SamplingConfig(2, temperature=0.0))

    calls = [
        ask([[1], []]), ask([[1] * 4000], tokens=97), ask([[1, jobs.VOCAB]]), ask([[1]], tokens=0),
        ask([]), ask([[1]] if me else [[]]), ask([[1 + me]]), ask([[1]], temperature=-1.0),
        roll(400), roll(jobs.VOCAB, mask=0), ask([[1]], in_flight=0),
    ]  # fmt: skip
    errors = [jobs.refused(call) for call in calls]
    layer = engine.module.forward_funcs[-1]
    hook = layer.register_forward_pre_hook(raising) if me else None
    errors.append(jobs.refused(ask(jobs.prompts(80))))
    if hook is not None:
        hook.remove()
    return [*errors, str(len(ask(jobs.prompts(80))()))]  # type: ignore[arg-type]


calls = [0]


def raising(module: nn.Module, given: Any) -> None:
    """Fail in the middle of a flight."""
    calls[0] += 1
    if calls[0] == 12:
        raise ValueError("a layer cannot")


def test_mistakes_are_one_line_on_all_ranks() -> None:
    first, second = run_ranks(2, mistakes)
    for errors in (first, second):
        assert all("\n" not in line for line in errors)
    both = [
        "prompt 1: found no tokens",
        "prompt 0: found 4000 tokens and an answer of up to 97; room is 4096",
        f"prompt 0: found token {jobs.VOCAB}; the model has {jobs.VOCAB}",
        "found 1 prompts and answers of 0 tokens",
        "found 0 prompts",
        "prompt 0: found no tokens",
        "ranks 0 and 1 share a replica and have other prompts or arguments",
        "temperature: found -1.0",
        f"tokenizer: found 400 tokens, and a model with logits of {jobs.VOCAB}",
        "prompt 1: found no tokens",
        "in_flight: found 0",
        "a layer cannot",
        "80",
    ]
    for index, text in enumerate(both):
        assert text in first[index] and text in second[index], (index, first[index], second[index])
    assert first[5].startswith("ConfigError") and second[5].startswith("PeerError")
    assert "rank 1: ValueError" in first[11] and first[11].startswith("PeerError")


def elsewhere() -> dict[str, str]:
    """Return errors of engines, and of drafts, that cannot generate."""
    import deepspeed

    from hybridcomp.generation.draft import Draft, DraftModule, DraftSizes
    from tests.training.in_turn import start_deepspeed

    errors: dict[str, str] = {}

    def tried(name: str, engine: Any, call: Any = hybridcomp.generate, **more: Any) -> None:
        asked = {"prompts": [[1, 2]], "tokens": 2} if call is hybridcomp.generate else {}
        errors[name] = jobs.refused(lambda: call(engine, **asked, **more))

    start_deepspeed()
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
                "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}  # fmt: skip
    whole, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=settings)
    tensor = jobs.engine(2, 1)
    draft = Draft(DraftModule(DraftSizes(jobs.VOCAB, 16, 4, 1, jobs.HEADS, 8, cross=True)), {})
    tried("draft", tensor, draft=draft)
    tried("training", tensor, hybridcomp.train_draft, sequences=[[1] * 20] * 40)
    tried("megatron", type("GPTModel", (nn.Module,), {"__module__": "megatron.core.models.gpt"})())
    tried("fsdp2", type("FSDPLinear", (nn.Linear,), {"__module__": "torch.fsdp"})(2, 2))
    tried("zero3", whole)
    tried("rollout", whole, lambda engine: hybridcomp.rollout(engine, jobs.Tokenizer(4)))
    return errors


def test_engines_that_cannot_generate_name_what_can() -> None:
    first, second = run_ranks(2, elsewhere)
    assert first == second
    for name in ("draft", "training"):
        assert "found a tensor-parallel pipeline; each tensor rank holds the keys" in first[name]
    assert "DynamicInferenceEngine" in first["megatron"]
    assert "hybridcomp.publish feeds vLLM and SGLang" in first["megatron"]
    assert "FSDPLinear" in first["fsdp2"] and "use hybridcomp.gathered(model)" in first["fsdp2"]
    for name in ("zero3", "rollout"):
        assert "found Linear; expected a PipelineModule or a SlicedStage" in first[name]
        assert "hybridcomp.gathered(engine)" in first[name]


def heads() -> None:
    """Return logits of AutoTP's heads, whose weights do not show if the vocabulary is sharded."""
    from deepspeed.module_inject import layers

    from hybridcomp.channels import Channels
    from hybridcomp.config import CompressionConfig
    from hybridcomp.generation.generating import _whole
    from hybridcomp.patches.ds.generation import _is_cut
    from tests.training.in_turn import start_deepspeed

    start_deepspeed()
    torch.manual_seed(3)
    head, hidden = nn.Linear(8, 12, bias=False), torch.randn(5, 8)
    want, group = head(hidden).detach(), dist.group.WORLD
    made = {
        "cut": layers.LinearLayer(copy.deepcopy(head), group),
        "gathered": layers.LinearLayer(copy.deepcopy(head), group, gather_output=True),
        "reduced": layers.LinearAllreduceWithReplicatedInput(copy.deepcopy(head), group),
    }
    for name, layer in made.items():
        stage: Any = SimpleNamespace(tensor=group, is_cut=_is_cut(layer))
        whole = _whole(stage, Channels(CompressionConfig.parse({"preset": "none"})))
        for _ in range(2):  # the first call detects it
            logits = whole(layer(hidden))
            torch.testing.assert_close(logits, want, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hidden_states_that_hops_would_round_are_refused(dtype: torch.dtype) -> None:
    """All hops send values of the dtype that the first stage returns."""
    runner: Any = SimpleNamespace(
        device=torch.device("cpu"), is_first=False, is_last=False,
        tried=lambda values: values.to(dtype),
    )  # fmt: skip
    line: Any = SimpleNamespace(global_ranks=[0])
    said = mock.patch.object(small_messages, "gather_objects", lambda own: [own or (4, "bfloat16")])
    with said:
        if dtype is torch.bfloat16:
            assert generating._tried(runner, line)[1] is dtype
            return
        with pytest.raises(ConfigError, match="found hidden states of float32 after others of bf"):
            generating._tried(runner, line)


def test_logits_of_autotps_heads_are_whole() -> None:
    run_ranks(2, heads)


def dies() -> None:
    """Kill the third of four stages in the middle of a flight."""
    hybridcomp.install()
    engine = jobs.engine(1, 4, {"dp": "none"})
    if dist.get_rank() == 2:
        seen = [0]

        def ends(*_: object) -> None:
            seen[0] += 1
            if seen[0] == 9:
                os._exit(3)

        engine.module.forward_funcs[0].register_forward_pre_hook(ends)
    hybridcomp.generate(engine, jobs.prompts(100), tokens=6)


def test_a_stage_that_dies_is_named_on_all_others() -> None:
    with RankPool(4) as pool, pytest.raises(AssertionError) as raised:
        pool.run(dies, grace=30.0)
    text = str(raised.value)
    assert "rank 2 of 4:\ndied without a word, exit code 3" in text
    for rank in (0, 1, 3):
        part = text.partition(f"rank {rank} of 4:\n")[2].partition("\nrank ")[0]
        assert "PeerError" in part and "rank 2" in part, text
    assert "still running" not in text
