"""Make the entries of ``PATCHES`` from functions whose first argument is upstream's function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def around(
    replacement: Callable[Concatenate[Callable[..., Any], P], R],
) -> Callable[[Callable[..., Any]], Callable[P, R]]:
    """Return a function for ``PATCHES`` that binds ``replacement`` to upstream's function.

    ``replacement`` gets upstream's function, then the arguments of each call.
    """

    @functools.wraps(replacement)
    def make(original: Callable[..., Any]) -> Callable[P, R]:
        @functools.wraps(original)
        def replaced(*args: P.args, **kwargs: P.kwargs) -> R:
            return replacement(original, *args, **kwargs)

        return replaced

    return make
