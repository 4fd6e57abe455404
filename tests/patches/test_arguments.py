"""Communication arguments of upstreams: a file records how each is handled.

``arguments.json`` lists every field and parameter of the classes and functions in
``read_upstream.ARGUMENTS``: it ``acts``, is ``refused`` or ``said`` by a rule or a check, acts only
``under`` such an argument, or is ``harmless`` since it sends nothing. New arguments of an installed
release fail here until they are recorded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import read_upstream
from hybridcomp.patches.mcore import transformer_engine
from tests.paths import ROOT

RECORDED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("arguments.json").read_text()
)
PLACES = [f"{module}:{name}" for module, names in read_upstream.ARGUMENTS.items() for name in names]
MARKS = {"acts", "refused", "said", "under", "harmless"}
#: a folder with newer releases, as ``pip install --no-deps --target`` leaves them
NEWEST = os.environ.get("HYBRIDCOMP_UPSTREAM_NEWEST")
#: modules that reject or report: rules, and checks of seams
RULES = "".join(
    path.read_text()
    for folder in ("patches/rules", "patches/trainers", "patches/mcore", "patches/torch")
    for path in sorted((ROOT / folder).rglob("*.py"))
)


def names(place: str, *marks: str) -> list[str]:
    row = RECORDED[place]
    found = [row.get(mark, "") for mark in marks]
    return [name for one in found for name in (one.split() if isinstance(one, str) else one)]


def source(module: str) -> str | None:
    """Return a module's source, newest or installed, without running it; None if missing."""
    top, _, rest = module.partition(".")
    found = importlib.util.find_spec(top)
    homes = [] if found is None else list(found.submodule_search_locations or ())
    for home in [*([str(Path(NEWEST, top))] if NEWEST else []), *homes]:
        path = Path(home, *rest.split(".")).with_suffix(".py")
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


@pytest.mark.parametrize("place", PLACES)
def test_every_argument_of_what_is_installed_is_known(place: str) -> None:
    module, _, name = place.partition(":")
    if (text := source(module)) is None:
        pytest.skip(f"{module} is not installed")
    new = read_upstream.arguments(text, name) - set(names(place, *MARKS))
    assert not new, (
        f"{place} has {sorted(new)}, which no table knows: does it change what is sent? Then a "
        "rule refuses or says it, or its seam takes it over; write which of these it is into "
        "tests/patches/arguments.json"
    )


def test_every_place_is_recorded_with_one_mark_for_each_name() -> None:
    assert set(RECORDED) == set(PLACES)
    for place, row in RECORDED.items():
        assert set(row) <= MARKS
        every = names(place, *MARKS)
        assert len(every) == len(set(every)), place


@pytest.mark.parametrize("place", PLACES)
def test_what_is_refused_or_said_is_named_by_a_rule(place: str) -> None:
    told = [*names(place, "refused", "said"), *RECORDED[place].get("under", {}).values()]
    assert [name for name in told if not re.search(rf"\b(\w+_)?{name}\b", RULES)] == []


def test_parameters_of_transformer_engine_are_those_of_its_seam() -> None:
    for name, releases in transformer_engine.FUNCTIONS.items():
        newest = set(releases[-1])
        assert newest == set(names(f"{transformer_engine.DISTRIBUTED}:{name}", *MARKS))


TEXT = """
from typing import overload
@overload
def cut(a: int) -> int: ...
def cut(a, *, mesh=None, **more): ...
class Settings:
    stage: int = 0
    nothing = 1
    def __init__(self, group, bucket=1): ...
"""


def test_fields_and_parameters_are_read_and_not_run() -> None:
    assert read_upstream.arguments(TEXT, "cut") == {"a", "mesh"}
    assert read_upstream.arguments(TEXT, "Settings") == {"stage"}
    assert read_upstream.arguments(TEXT, "Settings.__init__") == {"group", "bucket"}
    with pytest.raises(LookupError):
        read_upstream.arguments(TEXT, "Gone")
