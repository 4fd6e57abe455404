"""Pass a value from a seam to the seams that upstream calls inside it.

Upstream passes no argument of ours along. Backward passes run in threads of autograd, so a value
holds in the thread that set it and in no other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

from hybridcomp.seams.around import around

T = TypeVar("T")


class Scope(Generic[T]):
    """A value that is visible only to calls inside ``with scope.inside(value)``."""

    def __init__(self, name: str, default: T) -> None:
        """Create a scope; ``name`` is shown by debuggers, ``default`` is its value outside."""
        self._value: ContextVar[T] = ContextVar(f"hybridcomp_{name}", default=default)
        self.get = self._value.get

    def inside(self, value: T) -> _Inside[T]:
        """Return a context manager inside of which ``get`` returns ``value``."""
        return _Inside(self._value, value)

    def marks(self, value: T) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator under which ``get`` returns ``value`` while the function runs."""

        @around
        def make(original: Any, *args: Any, **kwargs: Any) -> Any:
            with self.inside(value):
                return original(*args, **kwargs)

        return make


class _Inside(Generic[T]):
    """Set a value on entering, and restore the one before on leaving; usable once."""

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value = variable, value
        self._token: Token[T] | None = None

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None, "entered"
        self._variable.reset(self._token)
