"""Roll out a pipeline for trainers that use DeepSpeed's ``RolloutEngine``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from deepspeed.runtime.rollout.base import (
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)

from hybridcomp.config.error_messages import NOTHING
from hybridcomp.errors import ConfigError
from hybridcomp.generation import Sampling, answer
from hybridcomp.job.together import together
from hybridcomp.patches.ds.generation import stage_of

#: in a seed: the bit position of the call's number, and that of the replica's number
CALLS, REPLICAS = 16, 40


class StagesRollout(RolloutEngine):  # type: ignore[misc]
    """Generate from an engine's stages in their present layout; see ``hybridcomp.rollout``."""

    name = "hybridcomp"

    def __init__(self, engine: Any, tokenizer: Any, seed: int = 0) -> None:
        self.engine, self.tokenizer, self._seed, self._calls = engine, tokenizer, seed, 0

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answer left-padded prompts (B, T); all ranks of a replica pass the same.

        Returns B x ``n_samples_per_prompt`` rows of T + ``max_new_tokens`` tokens, as DeepSpeed's
        own engine does: padded after the first EOS. Raises like ``hybridcomp.generate``.
        """
        with together("rollout"):
            stage, (pad, eos) = stage_of(self.engine), self._tokens()
            size = sampling.continuous_batch_size
            if size is not None:
                settings = stage.settings.model_copy(update={"batch": size})
                stage = dataclasses.replace(stage, settings=settings)
            seed = self._seed + (self._calls << CALLS) + (stage.replica << REPLICAS)
            self._calls += 1
            how = Sampling(
                max(sampling.temperature, 0.0), max(sampling.top_k, 0), sampling.top_p, seed,
                len(self.tokenizer), tuple((token,) for token in eos),
            )  # fmt: skip
            rows = zip(request.prompt_ids, request.prompt_attention_mask.bool(), strict=True)
            prompts = [row[mask].tolist() for row, mask in rows]
            count, tokens = sampling.n_samples_per_prompt, sampling.max_new_tokens
            prompts = [prompt for prompt in prompts for _ in range(count)]
            answers = answer(stage, prompts, tokens, how, tokenizer=len(self.tokenizer))
        ids = request.prompt_ids.repeat_interleave(count, 0)
        masks = request.prompt_attention_mask.repeat_interleave(count, 0)
        new = torch.full((len(ids), tokens), pad, dtype=ids.dtype, device="cpu")
        told = torch.zeros(len(ids), tokens, dtype=masks.dtype, device="cpu")
        for row, mask, found in zip(new, told, answers, strict=True):
            row[: len(found)] = torch.tensor(found, dtype=ids.dtype, device="cpu")
            mask[: len(found)] = torch.tensor(
                [token != pad or token in eos for token in found], device="cpu"
            )
        start = torch.full((len(ids),), ids.shape[1], dtype=torch.int64, device=ids.device)
        both = [torch.cat([old, end.to(ids.device)], 1) for old, end in ((ids, new), (masks, told))]
        return RolloutBatch(both[0], both[1].long(), start)

    def _tokens(self) -> tuple[int, tuple[int, ...]]:
        """Return the pad token and the EOS tokens of the tokenizer."""
        found = self.tokenizer.eos_token_id
        eos = () if found is None else tuple(found) if isinstance(found, list) else (found,)
        pad = self.tokenizer.pad_token_id
        if pad is None and not eos:
            raise ConfigError("rollout: tokenizer", NOTHING, "expected a pad or an EOS token")
        return (eos[0] if pad is None else pad), eos

    def sync_weights(self, step: int) -> None:
        """Do nothing: the training's own weights generate."""
