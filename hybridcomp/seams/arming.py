"""Apply patches once their upstream module is imported, and report which are in place."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable

from wrapt import register_post_import_hook

from hybridcomp.seams.patching import Patch, revert_all


class ArmedPatches:
    """Apply patches by upstream module: at once if it is imported, otherwise on import.

    ``apply`` applies and returns a module's patches; None if there are none to apply now.
    ``in_place`` holds the applied patches; ``armed`` says whether imports trigger patches.
    """

    def __init__(
        self, apply: Callable[[str], list[Patch] | None], in_place: dict[str, list[Patch]]
    ) -> None:
        self.in_place, self.armed = in_place, False
        self._apply, self._hooked = apply, set[str]()

    def arm(self, modules: Iterable[str]) -> None:
        """Apply the patches of each of ``modules``: now if it is imported, else on its import."""
        self.armed = True
        for module in modules:
            if module in sys.modules:
                self.apply(module)
            elif module not in self._hooked:
                self._hooked.add(module)
                register_post_import_hook(self._on_import, module)

    def disarm(self) -> None:
        self.armed = False
        for module in list(self.in_place):
            revert_all(self.in_place.pop(module))

    def apply(self, module: str) -> None:
        """Apply the patches of an imported module, unless they are in place."""
        if module not in self.in_place:
            applied = self._apply(module)
            if applied is not None:
                self.in_place[module] = applied

    def _on_import(self, module: types.ModuleType) -> None:
        # the import hook cannot be removed, so it checks whether patches are still armed
        if self.armed:
            self.apply(module.__name__)


#: upstream package -> its applied patches
IN_PLACE: dict[str, list[Patch]] = {}
#: optional upstream package -> why its patches are not applied
UNFIT: dict[str, str] = {}


def missing(package: str) -> str | None:
    """Return why the patches of an optional package are not applied; None if they are."""
    if package in IN_PLACE:
        return None
    return UNFIT.get(package, f"{package} is not imported, or hybridcomp not installed")
