"""Patch lifecycle on a stub upstream: apply, revert, and every refusal."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybridcomp.errors import SeamError
from hybridcomp.seams import patching
from hybridcomp.seams.patching import Patch, Seam, apply_all, revert_all, stale_bindings

SOURCE = """
def free(a, b=1):
    return ("free", a, b)

class Base:
    def inherited(self, x):
        return ("inherited", x)

class Engine(Base):
    def method(self, x):
        return ("method", x)

    def __private(self, x):
        return ("private", x)

    def call_private(self, x):
        return self.__private(x)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def klass(cls, x):
        return (cls.__name__, x)
"""


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = types.ModuleType("upstream_stub")
    exec(compile(SOURCE, "upstream_stub", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "upstream_stub", module)

    def version(name: str) -> str:
        if name == "upstream-stub":
            return "1.5.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(patching, "version", version)
    yield module


def seam(qualname: str, parameters: Any, requirement: str = "upstream-stub >= 1, < 2") -> Seam:
    return Seam(requirement, "upstream_stub", qualname, parameters)


def tag(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ("mine", original(*args, **kwargs))

    return replacement


@pytest.mark.parametrize(
    ("qualname", "parameters", "call"),
    [
        ("free", ("a", "b"), lambda m: m.free(1)),
        ("Engine.method", ("self", "x"), lambda m: m.Engine().method(1)),
        ("Engine._Engine__private", ("self", "x"), lambda m: m.Engine().call_private(1)),
        ("Engine.static", ("x",), lambda m: m.Engine.static(1)),
        ("Engine.klass", ("cls", "x"), lambda m: m.Engine.klass(1)),
        ("Base.inherited", ("self", "x"), lambda m: m.Engine().inherited(1)),
    ],
)
def test_apply_and_revert(
    upstream: Any, qualname: str, parameters: Any, call: Callable[[Any], Any]
) -> None:
    before = call(upstream)
    attributes = {k: dict(vars(v)) for k, v in vars(upstream).items() if isinstance(v, type)}
    patch = Patch(seam(qualname, parameters), tag)
    with patch:
        assert patch.applied
        assert call(upstream) == ("mine", before)
    assert not patch.applied
    assert call(upstream) == before
    after = {k: dict(vars(v)) for k, v in vars(upstream).items() if isinstance(v, type)}
    assert after == attributes


def test_alternative_parameters(upstream: Any) -> None:
    with Patch(seam("free", (("a",), ("a", "b"))), tag):
        assert upstream.free(1)[0] == "mine"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (seam("free", ("a",)), r"expected parameters \('a',\), found \('a', 'b'\)"),
        (seam("free", ("a", "b"), "upstream-stub >= 2"), "needs upstream-stub >= 2, found"),
        (seam("free", ("a", "b"), "no-such-thing >= 2"), "no-such-thing is not installed"),
        (seam("gone", ("a", "b")), "not there in upstream-stub 1.5.0"),
        (seam("Gone.method", ("a", "b")), "not there in upstream-stub 1.5.0"),
        (Seam("upstream-stub", "no_such_module", "f", ()), "not there"),
    ],
)
def test_refusals(upstream: Any, bad: Seam, message: str) -> None:
    patch = Patch(bad, tag)
    with pytest.raises(SeamError, match=message):
        patch.apply()
    assert not patch.applied
    assert upstream.free(1) == ("free", 1, 1)


def test_no_stacking(upstream: Any) -> None:
    first, second = (Patch(seam("free", ("a", "b")), tag) for _ in range(2))
    with first:
        with pytest.raises(SeamError, match="already applied"):
            first.apply()
        with pytest.raises(SeamError, match="do not stack"):
            second.apply()
    with pytest.raises(SeamError, match="not applied"):
        first.revert()


def test_foreign_wrapper_is_refused() -> None:
    json: Any = __import__("json")
    foreign = Seam("packaging", "json", "dumps", None)
    original = json.dumps
    json.dumps = lambda *args, **kwargs: original(*args, **kwargs)  # defined here: foreign
    try:
        with pytest.raises(SeamError, match="already replaced by .*test_patching"):
            Patch(foreign, tag).apply()
    finally:
        json.dumps = original
    with Patch(foreign, tag):
        assert json.dumps(1) == ("mine", "1")


def test_revert_refuses_when_replaced_since(upstream: Any) -> None:
    patch = Patch(seam("free", ("a", "b")), tag).apply()
    mine, upstream.free = upstream.free, lambda a, b=1: None
    with pytest.raises(SeamError, match="replaced by someone else"):
        patch.revert()
    upstream.free = mine
    patch.revert()


def test_apply_all_is_all_or_nothing(upstream: Any) -> None:
    good = Patch(seam("free", ("a", "b")), tag)
    bad = Patch(seam("Engine.method", ("self",)), tag)
    with pytest.raises(SeamError):
        apply_all([good, bad])
    assert upstream.free(1) == ("free", 1, 1)
    revert_all(apply_all([good]))
    assert upstream.free(1) == ("free", 1, 1)


def test_stale_bindings(upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer: Any = types.ModuleType("consumer_stub")
    consumer.imported = upstream.free
    monkeypatch.setitem(sys.modules, "consumer_stub", consumer)
    assert stale_bindings(upstream.free) == ["consumer_stub.imported", "upstream_stub.free"]
