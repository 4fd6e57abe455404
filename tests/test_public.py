"""The public names and their signatures change only together with ``tests/public.json``.

``python -m tests.test_public`` in the root of a checkout, with scripts/ in PYTHONPATH, rewrites
that file; its changes belong into CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from doc_pages import inside, json_rows

LIST = Path(__file__).with_name("public.json")


def found() -> dict[str, object]:
    """Return signatures of public functions, and of the public methods of classes."""
    return {f"hybridcomp.{name}": _shape(thing) for name, thing in inside.public()}


def _shape(thing: object) -> object:
    if not inspect.isclass(thing):
        assert callable(thing)
        return _signature(thing)
    methods = {
        name: _signature(getattr(thing, name))
        for name, value in vars(thing).items()
        if not name.startswith("_") and inspect.isfunction(getattr(value, "__func__", value))
    }
    return {"fields": sorted(_fields(thing)), "methods": dict(sorted(methods.items()))}


def _fields(thing: type) -> set[str]:
    """Return the fields of a class; of the block, also its dimensions' fields."""
    known = getattr(thing, "model_fields", None) or vars(thing).get("__annotations__", {})
    return {name for name in known if name[0] != "_"}


def _signature(function: object) -> str:
    assert callable(function)
    return str(inspect.signature(function)).replace("'", "")


def test_public_names_are_those_of_the_list() -> None:
    assert found() == json.loads(LIST.read_text())


def test_each_has_a_docstring_and_annotations() -> None:
    for name, thing in inside.public():
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            parameters = inspect.signature(thing).parameters.values()
            assert all(one.annotation is not one.empty for one in parameters), name


if __name__ == "__main__":
    LIST.write_text(json_rows.dumps(dict(sorted(found().items())), depth=2), encoding="utf-8")
