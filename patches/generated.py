"""Implement ``hybridcomp.generate`` and ``hybridcomp.rollout``: find the engine's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hybridcomp.generation import GenerationFigures, Sampling, answer
from hybridcomp.job.together import together
from hybridcomp.patches.generating import KEY, stage_of

if TYPE_CHECKING:
    from hybridcomp.generation.draft import Draft
    from hybridcomp.generation.drafting import DraftFigures


def generate(
    engine: Any,
    prompts: Sequence[Tensor | Sequence[int]],
    *,
    tokens: int,
    in_flight: int | None = None,
    samples: int = 1,
    stop: Sequence[int | Sequence[int]] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    figures: GenerationFigures | None = None,
    draft: Draft | None = None,
    cape: bool | Literal["auto"] = "auto",
    drafted: DraftFigures | None = None,
) -> list[Tensor]:
    """Answer prompts from the ranks of a training, whose weights and state stay as they are.

    Every rank calls it between two steps; the ranks of a replica pass the same arguments. The
    block's key ``generate`` sets how messages are sent.

    Args:
        engine: a DeepSpeed engine of a PipelineModule, or of a SlicedStage (token slices), whose
            attention layers take ``past`` (``docs/generation.md``).
        prompts: token ids of each prompt, 1-D.
        tokens: largest number of tokens in an answer.
        in_flight: number of batches in the pipeline at a time; None: the block's value.
        samples: number of answers to each prompt, consecutive in the result.
        stop: tokens, or sequences of tokens, that end an answer and are included in it.
        temperature: temperature of sampling; 0 takes the most likely token.
        top_k: sample among this many most likely tokens; 0: all.
        top_p: sample among the fewest tokens whose probabilities add up to ``top_p``.
        seed: seed of sampling; answers do not depend on the number of stages and ranks.
        figures: counters of this rank's work, which the call increases.
        draft: a draft of ``train_draft``, for temperature 0; experimental (``docs/drafts.md``).
        cape: whether a draft proposes more candidates where it is unsure; "auto": if faster.
        drafted: counters of what drafts save, which the last stage increases.

    Returns the answers, int64 (n,) each on the CPU, on every rank of the replica.

    Raises on every rank: ConfigError for prompts that cannot be answered, AgreementError if ranks
    of a replica pass different arguments, PeerError, naming the rank, if a rank fails.
    """
    with together(KEY):
        stage = stage_of(engine)
        runs = tuple((one,) if isinstance(one, int) else tuple(one) for one in stop)
        sampling = Sampling(temperature, top_k, top_p, seed, None, runs)
        asked = [p.tolist() if isinstance(p, Tensor) else list(p) for p in prompts]
        asked = [prompt for prompt in asked for _ in range(samples)]
        picker, nodes = None, 1
        if draft is not None:
            from hybridcomp.patches import drafts

            picker, nodes = drafts.picker_of(stage, draft, cape, sampling, drafted)
        found = answer(
            stage, asked, tokens, sampling, in_flight=in_flight, picker=picker, tree=nodes,
            figures=figures,
        )  # fmt: skip
    return [torch.tensor(each, dtype=torch.int64, device="cpu") for each in found]


def rollout(engine: Any, tokenizer: Any, *, seed: int = 0) -> Any:
    """Return a ``RolloutEngine`` of DeepSpeed's that generates as ``generate`` does.

    ``tokenizer``: the model's, with a pad or an EOS token. ``seed``: seed of sampling, from which
    each call on each replica derives its own. Raises ConfigError as ``generate`` does.
    """
    stage_of(engine)
    from hybridcomp.patches.ds.rollout import StagesRollout

    return StagesRollout(engine, tokenizer, seed)
