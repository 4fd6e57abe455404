"""Generate text in the example's pipeline, on its training ranks. Used with --ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import hybridcomp


def show(engine: Any, asked: Sequence[str], tokens: int, temperature: float, seed: int) -> None:
    """Print on the first rank the model's continuation, in bytes, of each text of ``asked``."""
    prompts = [list(text.encode()) for text in asked]
    found = hybridcomp.generate(
        engine, prompts, tokens=tokens, temperature=temperature, seed=seed, stop=[256]
    )  # 256 is prepare_data.py's end of document
    if dist.get_rank() == 0:
        for prompt, answer in zip(prompts, found, strict=True):
            text = bytes(token for token in [*prompt, *answer.tolist()] if token < 256)
            print(f"answer {text.decode(errors='replace')!r}", flush=True)
