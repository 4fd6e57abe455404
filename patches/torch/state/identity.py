"""Identify attached models across restarts, for their state in checkpoints.

A model is identified by the names and shapes of its parameters, independently of ranks, engine and
wrappers; models with equal parameters also by their order of attaching. A counter alone would
identify the wrong model after an earlier model was deleted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hybridcomp.errors import CheckpointError
from hybridcomp.job.agreement import tell
from hybridcomp.job.parameter_names import plain_name


def identity_of(model: nn.Module) -> str:
    """Return a digest of the parameters' names and global shapes: 12 hexadecimal digits."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda pair: plain_name(pair[0])):
        found.update(f"{plain_name(name)} {tuple(parameter.shape)}\n".encode())
    return found.hexdigest()[:12]


def names_of(models: Sequence[Any]) -> list[str]:
    """Return names of attached models, equal on all ranks: identity, and number among equal models.

    A collective through the rendezvous store. All ranks use rank 0's names, since the stages of a
    pipeline differ. Raises CheckpointError if ranks have attached different numbers of models.
    """
    said = tell({"models": [model.identity for model in models]}, what="attached models")
    counts = [len(rank["models"]) for rank in said]
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"ranks have attached {counts} models; every rank attaches, and drops, as many in the "
            "same order"
        )
    seen: Counter[str] = Counter()
    names = []
    for identity in said[0]["models"]:
        names.append(f"{identity}_{seen[identity]:02d}")
        seen[identity] += 1
    return names


def with_plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's saved state without names of wrappers, which earlier versions left in."""

    def plain(by_name: Mapping[str, Any]) -> dict[str, Any]:
        return {plain_name(name): value for name, value in by_name.items()}

    residuals = {hop: plain(by_name) for hop, by_name in state["residuals"].items()}
    named = {part: plain(state[part]) for part in ("divisors", "factors") if part in state}
    return {**state, **named, "residuals": residuals}
