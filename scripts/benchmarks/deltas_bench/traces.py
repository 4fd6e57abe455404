"""Record weights before and after an Adam step of a small byte-level GPT on this checkout."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Size:
    """Model shape and batch size."""

    width: int
    layers: int
    length: int = 64
    batch: int = 8


@dataclass(frozen=True)
class Trace:
    """All weights of the model as bf16, before and after the last step at ``rate``."""

    rate: float
    reference: Tensor
    values: Tensor

    @property
    def label(self) -> str:
        """Return the trace's label in tables."""
        return f"{self.rate:g}"


class SmallGpt(nn.Module):
    """Causal transformer over bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.places = nn.Embedding(size.length, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.width // 64, 4 * size.width, 0.0, "gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, 256)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                deep = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * size.layers) ** 0.5 if deep else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of predicting bytes 1.. of ``text``, (batch, length + 1), int64."""
        seen, wanted = text[:, :-1], text[:, 1:]
        length = seen.shape[1]
        hidden = self.tokens(seen) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def text() -> Tensor:
    """Return the bytes of docs/ and of the package's sources as one tensor, uint8."""
    paths = sorted((*ROOT.glob("docs/*.md"), *ROOT.glob("hybridcomp/**/*.py")))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def flat(model: nn.Module) -> Tensor:
    """Return all weights as one bf16 tensor, (numel,)."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).bfloat16()


class Training:
    """One training in fp32 with Adam, at a rate that may change; only traces are cast to bf16."""

    def __init__(self, size: Size, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.size = size
        self.model = SmallGpt(size)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.text = text()

    def steps(self, count: int, rate: float) -> float:
        """Train; returns the last loss."""
        loss = torch.zeros(())
        for _ in range(count):
            starts = torch.randint(len(self.text) - self.size.length - 1, (self.size.batch,))
            batch = torch.stack(
                [self.text[start : start + self.size.length + 1] for start in starts]
            )
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.zero_grad()
            loss = self.model(batch.long())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return float(loss.detach())


def traces(size: Size, rates: list[float], warmup: int, settle: int) -> Iterator[Trace]:
    """Pretrain ``warmup`` steps at 1e-3; per rate, train ``settle`` steps and yield the next."""
    training = Training(size)
    loss = training.steps(warmup, 1e-3)
    numel = sum(weight.numel() for weight in training.model.parameters())
    print(f"{numel / 1e6:.1f} M parameters, loss {loss:.2f} after {warmup} steps at 1e-3")
    kept = deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    for rate in rates:
        training.model.load_state_dict(kept[0])
        training.optimizer.load_state_dict(deepcopy(kept[1]))
        training.steps(settle, rate)
        reference = flat(training.model)
        training.steps(1, rate)
        yield Trace(rate, reference, flat(training.model))
