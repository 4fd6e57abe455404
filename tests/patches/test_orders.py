"""Every patch of every installed upstream, applied and reverted in many orders.

Generated from ``PATCHES``, so new seams are covered. Ordered pairs cover interactions of two
patches; shuffles cover longer chains.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import itertools
import random
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.requirements import Requirement

import hybridcomp
from hybridcomp.patches import registry as patches
from hybridcomp.seams.arming import IN_PLACE
from hybridcomp.seams.patching import Patch, apply_all
from tests.patches.recorded import raw
from tests.selection import by_day


def installed(package: str) -> bool:
    """Return whether ``package``, dotted or not, can be imported."""
    parent = package.rpartition(".")[0]
    return (not parent or installed(parent)) and find_spec(package) is not None


PACKAGES = [name for name in patches.MODULES if installed(name)]


@pytest.fixture(scope="module", params=PACKAGES)
def package(request: pytest.FixtureRequest) -> str:
    importlib.import_module(request.param)
    requirement = Requirement(patches.patches_of(request.param)[0].seam.requirement)
    found = importlib.metadata.version("torch")
    if requirement.name == "torch" and not requirement.specifier.contains(found):
        pytest.skip(f"needs {requirement}")
    return str(request.param)


def state(package: str) -> dict[str, Any]:
    """Return the attribute of every seam."""
    return {str(patch.seam): raw(patch.seam) for patch in patches.patches_of(package)}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[key] is right[key] for key in left)


def test_every_module_lists_seams(package: str) -> None:
    for module in patches.modules_of(package):
        assert module.PATCHES, module.__name__
        assert module.__doc__ and len(module.__doc__.splitlines()) > 1, module.__name__
    seams = [str(patch.seam) for patch in patches.patches_of(package)]
    assert len(seams) == len(set(seams))


def test_replacements_take_the_parameters_of_their_seam(package: str) -> None:
    compared = 0
    for module in patches.modules_of(package):
        for seam, make in module.PATCHES:
            spec = inspect.getfullargspec(inspect.unwrap(make))
            if hasattr(make, "__wrapped__") and not spec.varargs and not spec.varkw:
                assert tuple(spec.args[1:] + spec.kwonlyargs) in seam.alternatives, seam
                compared += 1
    assert compared > 5 or package not in ("deepspeed", "megatron.core")


@pytest.mark.parametrize("whole", by_day([False, True], [False]))
def test_pairs_in_both_orders(package: str, whole: bool) -> None:
    """By day those in one module, whose replacements may meet in a class; nightly every pair."""
    before, made = state(package), patches.patches_of(package)
    for first, second in itertools.permutations(range(len(made)), 2):
        if whole or made[first].seam.module == made[second].seam.module:
            fresh = patches.patches_of(package)
            check_pair(fresh[first], fresh[second], before)
    assert same(state(package), before)


def check_pair(one: Patch, two: Patch, before: dict[str, Any]) -> None:
    one.apply()
    two.apply()
    changed = raw(one.seam), raw(two.seam)
    assert changed[0] is not before[str(one.seam)] and changed[1] is not before[str(two.seam)]
    one.revert()
    assert raw(one.seam) is before[str(one.seam)] and raw(two.seam) is changed[1]
    two.revert()
    assert raw(one.seam) is before[str(one.seam)] and raw(two.seam) is before[str(two.seam)]


@pytest.mark.parametrize("seed", by_day(range(20), range(4)))
def test_shuffles(package: str, seed: int) -> None:
    before = state(package)
    order = random.Random(seed)
    fresh: list[Patch] = patches.patches_of(package)
    order.shuffle(fresh)
    apply_all(fresh)
    after = state(package)
    assert all(after[key] is not before[key] for key in before)
    order.shuffle(fresh)
    for patch in fresh:
        patch.revert()
    assert same(state(package), before)


def test_install_twice_and_uninstall(package: str) -> None:
    before = state(package)
    hybridcomp.install()
    after = state(package)
    hybridcomp.install()
    assert same(state(package), after)
    assert len(IN_PLACE[package]) == len(before)
    hybridcomp.uninstall()
    assert same(state(package), before)
    assert package not in IN_PLACE
