"""Every patch of every installed upstream, applied and reverted in many orders.

Generated from ``PATCHES``, so new seams are covered. All ordered pairs cover interactions of two
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

import hybridcomp
from hybridcomp.patches import registry as patches
from hybridcomp.seams.patching import Patch, apply_all


def installed(package: str) -> bool:
    """Return whether ``package``, dotted or not, can be imported."""
    parent = package.rpartition(".")[0]
    return (not parent or installed(parent)) and find_spec(package) is not None


PACKAGES = [name for name in patches.MODULES if installed(name)]


@pytest.fixture(scope="module", params=PACKAGES)
def package(request: pytest.FixtureRequest) -> str:
    importlib.import_module(request.param)
    return str(request.param)


def state(package: str) -> dict[str, Any]:
    """Return the raw attribute of every seam."""
    found = {}
    for patch in patches.patches_of(package):
        owner, name = patch.seam.owner_and_name()
        found[str(patch.seam)] = inspect.getattr_static(owner, name)
    return found


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[key] is right[key] for key in left)


def test_every_module_lists_seams(package: str) -> None:
    for module in patches.modules_of(package):
        assert module.PATCHES, module.__name__
        assert module.__doc__ and len(module.__doc__.splitlines()) > 1, module.__name__
    seams = [str(patch.seam) for patch in patches.patches_of(package)]
    assert len(seams) == len(set(seams))


def test_every_pair_in_both_orders(package: str) -> None:
    before = state(package)
    indices = range(len(patches.patches_of(package)))
    for first, second in itertools.permutations(indices, 2):
        fresh = patches.patches_of(package)
        one, two = fresh[first].apply(), fresh[second].apply()
        changed = state(package)
        for patch in (one, two):
            assert changed[str(patch.seam)] is not before[str(patch.seam)]
        one.revert()
        assert state(package)[str(one.seam)] is before[str(one.seam)]
        assert state(package)[str(two.seam)] is changed[str(two.seam)]
        two.revert()
        assert same(state(package), before)


@pytest.mark.parametrize("seed", range(20))
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
    assert len(patches.applied(package)) == len(before)
    hybridcomp.uninstall()
    assert same(state(package), before)
    assert not patches.applied(package)
