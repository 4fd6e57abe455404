"""Run the layers of one stage over a packed pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.generation.past import KeyStore, PackedPass, PackedPast, SequencePart

#: number of the sequence used to try the layers
TRIED = -1


class StageRunner:
    """The layers of this rank's stage, with the keys and values of all sequences.

    One call is one pass over packed tokens. A pass verifies several candidates if a sequence's part
    holds their tree (``SequencePart.parents``) and ``wants`` is the number of nodes. The sequence's
    next part lists the accepted nodes (``SequencePart.kept``): all stages then hold the same keys
    and values as if only the accepted tokens had been computed, one by one.

    Attributes:
        layers: layers of the stage, in order.
        store: keys and values; ``store.of(sequence, layer)`` returns them, for the ``layer`` that
            was passed to ``past.attend``.
    """

    def __init__(
        self, layers: Sequence[Callable[..., Any]], store: KeyStore, device: torch.device,
        *, is_first: bool, is_last: bool, whole: Callable[[Tensor], Tensor] = torch.Tensor.detach,
        fetch: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Run ``layers``, each ``layer(values)`` or ``layer(values, past=past)`` by its signature.

        Layers with ``past`` access other tokens only through it; layers without it treat each token
        separately. The first stage's first layer takes ids (1, N); between layers values are (1, N,
        C). ``whole``: gathers whole logits (n, V) from the last layer's output. ``fetch``: called
        with a layer's number before it runs.
        """
        self.layers, self.store, self.device = list(layers), store, device
        self.is_first, self.is_last, self.whole = is_first, is_last, whole
        self._fetch = fetch
        self._with_past = [takes_past(layer) for layer in self.layers]
        self._looks = max((at for at, takes in enumerate(self._with_past) if takes), default=-1)

    @torch.no_grad()
    def __call__(self, passed: PackedPass, values: Tensor | None = None) -> Tensor:
        """Run a pass; return hidden states (1, N, C), on the last stage the requested logits.

        ``values``: hidden states of the previous stage, (1, N, C); None on the first stage. Raises
        ConfigError if a sequence exceeds its room.
        """
        self.store.begin(passed)
        past = PackedPast(self.store, passed, self.device)
        if values is None:
            ids = [token for part in passed.parts for token in part.tokens]
            values = torch.tensor([ids], dtype=torch.int64, device=self.device)
        for at, layer in enumerate(self.layers):
            if self.is_last and at == self._looks + 1:
                values = values[:, passed.wanted]
            values = self._one(at, layer, values, past)
        if self.is_last and self._looks + 1 == len(self.layers):
            values = values[:, passed.wanted]
        self.store.end(passed)
        return self.whole(values[0]) if self.is_last else values

    def _one(self, at: int, layer: Callable[..., Any], values: Tensor, past: PackedPast) -> Tensor:
        if self._fetch is not None:
            self._fetch(at)
        out = layer(values, past=past) if self._with_past[at] else layer(values)
        if not isinstance(out, Tensor) or out.shape[:2] != values.shape[:2]:
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            todo = (
                f"expected a tensor (1, {values.shape[1]}, width) for its {values.shape[1]} tokens"
            )
            raise ConfigError("generate", Shown(f"{_name(layer)} that returns {shape}"), todo)
        return out

    @torch.no_grad()
    def tried(self, values: Tensor | None = None) -> Tensor:
        """Run the layers on three tokens, then drop these; return the result for all three.

        ``values``: as for a pass. Raises ConfigError if a layer without ``past`` depends on other
        tokens, or on positions, which would be wrong in a packed pass.
        """
        passed = PackedPass((SequencePart(TRIED, (0, 1, 1), wants=3),))
        self.store.begin(passed)
        past = PackedPast(self.store, passed, self.device)
        if values is None:
            values = torch.tensor([[0, 1, 1]], device=self.device)
        for at, layer in enumerate(self.layers):
            out = self._one(at, layer, values, past)
            if not self._with_past[at]:
                alone = self._one(at, layer, values[:, 2:], past)
                exact = 1e-3 if out.dtype == torch.float32 else 0.05
                if not torch.allclose(alone, out[:, 2:], rtol=exact, atol=exact):
                    named = Shown(f"{_name(layer)}, which looks at other tokens or positions")
                    todo = "its forward needs a parameter past: see docs/generation.md"
                    raise ConfigError("generate", named, todo)
            values = out
        self.store.drop(TRIED)
        return self.whole(values[0]) if self.is_last else values


def takes_past(layer: Callable[..., Any]) -> bool:
    """Return whether a layer has a parameter ``past``."""
    called = layer.forward if isinstance(layer, nn.Module) else layer
    return "past" in inspect.signature(called).parameters


def _name(layer: Callable[..., Any]) -> str:
    kind = type(layer).__name__ if isinstance(layer, nn.Module) else "a layer"
    return getattr(layer, "__name__", kind)
