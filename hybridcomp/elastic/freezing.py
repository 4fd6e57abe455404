"""Resolve names and modules to parameters, and decide how many blocks to freeze next."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hybridcomp.errors import ConfigError
from hybridcomp.job.parameter_names import plain_name

#: argument of ``hybridcomp.freeze``: parameters, modules or their names, one or several
What = str | nn.Module | Tensor | Iterable[Any]
#: stands for parameters that this process does not hold
ELSEWHERE = "(elsewhere)"


def asked(what: What, named: Mapping[str, Tensor], key: str) -> list[str]:
    """Return ``what`` as names of parameters and modules, in the given order.

    A module or tensor that has no parameter in ``named`` becomes ELSEWHERE: another pipeline stage
    holds it. Raises ConfigError, under ``key``, for other types.
    """
    if isinstance(what, str):
        return [plain_name(what)]
    names = {id(parameter): name for name, parameter in named.items()}
    if isinstance(what, Tensor):
        return [names.get(id(what), ELSEWHERE)]
    if isinstance(what, nn.Module):
        found = [names[id(one)] for one in what.parameters() if id(one) in names]
        return found or [ELSEWHERE]
    if isinstance(what, Iterable) and not isinstance(what, (bytes, Mapping)):
        return [name for one in what for name in asked(one, named, key)]
    todo = "expected names of parameters or modules, or modules or parameters of the model"
    raise ConfigError(key, type(what).__name__, todo)


def chosen(names: Iterable[str], named: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Return the parameters that ``names`` refer to, in the model's order, and unknown names."""
    unknown, wanted = [], set()
    for name in dict.fromkeys(names):
        inside = f"{name}."
        found = [name] if name in named else [one for one in named if one.startswith(inside)]
        wanted.update(found)
        if not found and name != ELSEWHERE:
            unknown.append(name)
    return [name for name in named if name in wanted], unknown


def nearest(name: str, named: Iterable[str]) -> str:
    """Return a parameter or module name that resembles ``name``; "" if none does."""
    every: dict[str, None] = {}
    for one in named:
        parts = one.split(".")
        every.update({".".join(parts[:n]): None for n in range(1, len(parts) + 1)})
    return next(iter(difflib.get_close_matches(name, every, n=1)), "")


def target(blocks: int, frozen: int, alpha: float, norms: Sequence[float] | None = None) -> int:
    """Return how many front blocks PipeTransformer freezes next (arXiv 2102.03161, section 3.1).

    The ``frozen`` blocks stay frozen. With ``norms`` (gradient norm of each block), all blocks in
    front of the active block with the smallest norm are frozen too, at most the fraction ``alpha``
    of the active blocks. Without ``norms``, exactly that fraction, rounded up, is frozen, as in the
    authors' code (4, 7, 9, 10, 11 of 12 blocks with ``alpha`` 1/3).
    """
    most = frozen + math.ceil(alpha * (blocks - frozen))
    if norms is None:
        return most
    return min(most, min(range(frozen, blocks), key=lambda block: norms[block]))
