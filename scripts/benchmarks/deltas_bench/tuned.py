"""Weights before and after a step of fine-tuning and of reinforcement learning.

Models of transformers, made from a configuration: 10 M parameters and more, with the vocabulary of
a tokenizer that is trained here. They are pretrained on the package's code. From there fine-tuning
goes on with the pages, reinforcement learning (GRPO: groups of sampled answers, whose reward a
function checks) with pieces of the code as prompts; both have a new AdamW, as trainers make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.deltas_bench.traces import ROOT, Trace, flat, kinds_of

FINE_TUNING, LEARNING = (1e-4, 3e-5, 1e-5), (3e-6, 1e-6)
VOCABULARY, LENGTH, BATCH = 4096, 96, 8
#: prompts of a step of reinforcement learning, answers to each, tokens of both
PROMPTS, ANSWERS, ASKED, ANSWERED = 4, 8, 16, 24
NAMES = ("llama", "qwen3", "gpt2")

Loss = Callable[[], Tensor]


def made(name: str) -> Any:
    """Return a new model of this architecture, in fp32. Raises ModuleNotFoundError."""
    import transformers

    if name == "gpt2":
        few = {"n_embd": 320, "n_layer": 8, "n_head": 5, "n_positions": LENGTH}
        ends = {"bos_token_id": None, "eos_token_id": None}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        settings: Any = transformers.GPT2Config(vocab_size=VOCABULARY, **few, **ends, **drops)
        return transformers.GPT2LMHeadModel(settings)
    sizes = {
        "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8,
        "num_attention_heads": 5, "num_key_value_heads": 1, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    if name == "llama":
        settings = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)
        return transformers.LlamaForCausalLM(settings)
    settings = transformers.Qwen3Config(
        vocab_size=VOCABULARY, head_dim=64, tie_word_embeddings=True, **sizes
    )
    return transformers.Qwen3ForCausalLM(settings)


class Texts:
    """Tokens of the code and of the pages of this checkout, and their tokenizer."""

    def __init__(self) -> None:
        from tokenizers import ByteLevelBPETokenizer

        paths = [sorted(ROOT.glob(name)) for name in ("hybridcomp/**/*.py", "docs/**/*.md")]
        texts = ["".join(path.read_text() for path in some) for some in paths]
        self._tokenizer = ByteLevelBPETokenizer()
        self._tokenizer.train_from_iterator(texts, VOCABULARY, show_progress=False)
        self.code, self.pages = (torch.tensor(self._tokenizer.encode(one).ids) for one in texts)

    def rewards(self, answers: Tensor) -> Tensor:
        """Return for each answer the share of its characters that are small letters or blanks."""
        found = [self._tokenizer.decode(row) for row in answers.tolist()]
        return torch.tensor(
            [sum(c.islower() or c == " " for c in t) / (len(t) or 1) for t in found]
        )


def drawn(tokens: Tensor, count: int, length: int) -> Tensor:
    """Return stretches of ``tokens`` from random places, (count, length)."""
    starts = torch.randint(len(tokens) - length, (count,))
    return torch.stack([tokens[start : start + length] for start in starts])


def next_tokens(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of predicting a batch of ``tokens``."""
    rows = drawn(tokens, BATCH, LENGTH)
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss


def policy_loss(model: Any, texts: Texts) -> Tensor:
    """Sample answers; return GRPO's loss, log-probabilities times rewards above their mean."""
    asked = drawn(texts.code, PROMPTS, ASKED).repeat_interleave(ANSWERS, 0)
    both = model.generate(
        asked, attention_mask=torch.ones_like(asked), do_sample=True, top_k=0, pad_token_id=0,
        min_new_tokens=ANSWERED, max_new_tokens=ANSWERED,
    )  # fmt: skip
    answers = both[:, ASKED:]
    rewards = texts.rewards(answers).view(PROMPTS, ANSWERS)
    spread = rewards.std(1, keepdim=True) + 1e-4
    above = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
    logits = model(input_ids=both).logits[:, ASKED - 1 : -1]
    chosen: Tensor = logits.log_softmax(-1).gather(2, answers[..., None]).squeeze(2)
    return -(above[:, None] * chosen).mean()


def train(model: nn.Module, loss: Loss, count: int, optimizer: torch.optim.Optimizer) -> float:
    """Take ``count`` steps; returns the last loss."""
    found = torch.zeros(())
    for _ in range(count):
        optimizer.zero_grad()
        found = loss()
        torch.autograd.backward(found)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(found.detach())


def _step(name: str, model: nn.Module, loss: Loss, rate: float, settle: int) -> Trace:
    """Train for ``settle`` steps at ``rate`` with a new optimizer; return the step after them."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.999), weight_decay=0.01)
    train(model, loss, max(0, settle - 1), optimizer)
    before = flat(model)
    train(model, loss, min(1, settle), optimizer)
    reference = flat(model)
    train(model, loss, 1, optimizer)
    return Trace(rate, reference, flat(model), before, kinds_of(model), f"{name} {rate:g}")


def tuned(name: str, warmup: int, settle: int) -> Iterator[Trace]:
    """Pretrain an architecture for ``warmup`` steps at 1e-3; yield a step of each rate after it."""
    torch.manual_seed(0)
    texts, model = Texts(), made(name)
    numel = sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1)
    loss = train(model, partial(next_tokens, model, texts.code), warmup, optimizer)
    print(
        f"{name}: {numel / 1e6:.1f} M parameters, loss {loss:.2f} after {warmup} steps at 1e-3",
        flush=True,
    )
    kept = deepcopy(model.state_dict())
    ways: list[tuple[str, tuple[float, ...], Loss]] = [
        (f"{name} fine-tuning", FINE_TUNING, partial(next_tokens, model, texts.pages)),
        (f"{name} GRPO", LEARNING, partial(policy_loss, model, texts)),
    ]
    for way, rates, loss_of in ways:
        for rate in rates:
            model.load_state_dict(kept)
            yield _step(way, model, loss_of, rate, settle)
