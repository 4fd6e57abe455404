"""Replace upstream attributes: declared, checked, revertible.

A ``Seam`` names one upstream attribute and its expected form; a ``Patch`` puts a replacement there
and removes it again. Nothing is patched on a guess: an unknown version, a missing symbol, other
parameters or a foreign wrapper raise SeamError.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as read_version
from typing import Any

from packaging.requirements import Requirement

from hybridcomp.errors import SeamError

_MISSING = object()

#: builds the replacement from upstream's original
Maker = Callable[[Any], Any]


@functools.cache
def version(package: str) -> str:
    """Return a package's installed version, cached, since a hundred seams ask for few packages."""
    return read_version(package)


def since(requirement: str, oldest: str) -> str:
    """Return ``requirement`` with lower bound ``oldest``, for seams that older releases lack."""
    newer, count = re.subn(r">= [\w.]+", f">= {oldest}", requirement)
    assert count == 1, requirement
    return newer


@dataclass(frozen=True)
class Seam:
    """One upstream attribute that hybridcomp may replace.

    Attributes:
        requirement: PEP 508 requirement of the upstream package, ``deepspeed >= 0.19, < 0.20``.
        module: module whose attribute is looked up at call time, which need not be the module
            that defines it: consumers that import a name keep their own binding.
        qualname: dotted path inside the module, private names already mangled.
        parameters: names of the parameters, or a tuple of alternatives where versions differ;
            ``None`` for classes, whose parameters say nothing.
        source: for upstreams without a version number, or whose number does not suffice: checks the
            upstream code, and returns a description of its version if the seam fits, else raises
            SeamError. The requirement then only informs human readers.
    """

    requirement: str
    module: str
    qualname: str
    parameters: tuple[str, ...] | tuple[tuple[str, ...], ...] | None
    source: Callable[[], str] | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def alternatives(self) -> tuple[tuple[str, ...], ...]:
        """Return the accepted parameter lists."""
        if not self.parameters:
            return ((),)
        if isinstance(self.parameters[0], str):
            return (self.parameters,)
        return self.parameters

    def found_version(self) -> str:
        """Return the installed version if it is supported; else raise SeamError."""
        if self.source is not None:
            return self.source()
        requirement = Requirement(self.requirement)
        try:
            present = version(requirement.name)
        except PackageNotFoundError:
            raise SeamError(
                f"{self}: needs {self.requirement}, but {requirement.name} is not installed"
            ) from None
        if not requirement.specifier.contains(present, prereleases=True):
            raise SeamError(
                f"{self}: needs {self.requirement}, found {requirement.name} {present}; install a "
                "version inside the window, or a hybridcomp that knows this one"
            )
        return f"{requirement.name} {present}"

    def owner_and_name(self) -> tuple[Any, str]:
        """Return the object that holds the attribute, and its last name."""
        owner: Any = importlib.import_module(self.module)
        *path, name = self.qualname.split(".")
        for part in path:
            owner = inspect.getattr_static(owner, part)
        return owner, name


class Patch:
    """One seam and its replacement; applied at most once at a time."""

    def __init__(self, seam: Seam, make: Maker) -> None:
        self.seam = seam
        self._make = make
        self._mine: Any = None
        self._saved: Any = _MISSING
        self._owner: Any = None
        self._name = ""

    @property
    def applied(self) -> bool:
        """Return whether the replacement is in place, as far as we know."""
        return self._mine is not None

    def check(self) -> Any:
        """Find the original; check version, parameters and origin; return the raw attribute.

        Raises SeamError. Changes nothing.
        """
        supported = self.seam.found_version()
        try:
            owner, name = self.seam.owner_and_name()
            raw = inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise SeamError(f"{self.seam}: not there in {supported} ({error})") from error
        original = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        if getattr(original, "__hybridcomp__", False):
            raise SeamError(f"{self.seam}: already patched by hybridcomp; patches do not stack")
        if self.seam.parameters is not None:
            got = tuple(inspect.signature(_decorated(original)).parameters)
            if got not in self.seam.alternatives:
                raise SeamError(
                    f"{self.seam}: expected parameters {self.seam.parameters}, found {got} in "
                    f"{supported}"
                )
        _refuse_foreign_wrapper(self.seam, original)
        return raw

    def apply(self) -> Patch:
        """Check, then replace. Raises SeamError and leaves upstream unchanged."""
        if self.applied:
            raise SeamError(f"{self.seam}: already applied")
        raw = self.check()
        owner, name = self.seam.owner_and_name()
        static = isinstance(raw, (staticmethod, classmethod))
        original = raw.__func__ if static else raw
        mine = self._make(original)
        mine.__hybridcomp__ = True
        if not hasattr(mine, "__wrapped__") and not isinstance(mine, type):
            mine.__wrapped__ = original
        self._saved = vars(owner).get(name, _MISSING)
        self._mine = type(raw)(mine) if static else mine
        self._owner, self._name = owner, name
        setattr(owner, name, self._mine)
        return self

    def revert(self) -> None:
        """Restore the original; raise SeamError if somebody has replaced our replacement."""
        if not self.applied:
            raise SeamError(f"{self.seam}: not applied")
        if inspect.getattr_static(self._owner, self._name) is not self._mine:
            raise SeamError(
                f"{self.seam}: replaced by someone else since it was applied; revert that first"
            )
        if self._saved is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._saved)
        self._mine = None

    def __enter__(self) -> Patch:
        return self.apply()

    def __exit__(self, *exc: object) -> None:
        self.revert()


def _decorated(function: Any) -> Any:
    """Return the function inside upstream's decorators.

    Some decorators (DeepSpeed's instrument_w_nvtx) set no ``__wrapped__`` and take ``*args,
    **kwargs``: the decorated function is then the only callable in their closure.
    """
    while tuple(inspect.signature(function).parameters) == ("args", "kwargs"):
        cells = getattr(function, "__closure__", None) or ()
        inner = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
        if len(inner) != 1:
            break
        (function,) = inner
    return function


def _refuse_foreign_wrapper(seam: Seam, original: Any) -> None:
    """Raise SeamError if ``original`` was not written by the upstream package (or by torch)."""
    code = getattr(original, "__code__", None)
    if code is None or not os.path.isabs(code.co_filename):
        return
    package = sys.modules.get(seam.module.partition(".")[0])
    if package is None or not hasattr(package, "__path__"):
        return  # a single-file module, or a stub
    # decorators of torch and contextlib count as upstream code
    torch_home = list(getattr(sys.modules.get("torch"), "__path__", ()))
    homes = [os.path.realpath(home) + os.sep for home in [*package.__path__, *torch_home]]
    homes.append(os.path.realpath(contextlib.__file__))
    if not os.path.realpath(code.co_filename).startswith(tuple(homes)):
        raise SeamError(
            f"{seam}: already replaced by {code.co_filename}; hybridcomp does not wrap foreign "
            "patches: remove it, or install hybridcomp first"
        )


def has_module(name: str) -> bool:
    """Return whether an upstream module exists; seams of missing upstreams are only listed."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # raised if a parent package is missing
        return False


def apply_all(patches: Iterable[Patch]) -> list[Patch]:
    """Apply every patch, or none: after a failure, revert the applied patches, and raise."""
    done: list[Patch] = []
    try:
        for patch in patches:
            done.append(patch.apply())
    except BaseException:
        revert_all(done)
        raise
    return done


def revert_all(patches: Sequence[Patch]) -> None:
    """Revert in reverse order of application."""
    for patch in reversed(patches):
        patch.revert()


def stale_bindings(obj: object) -> list[str]:
    """Return modules that imported ``obj`` by name: a patch of its own module misses them."""
    return sorted(
        f"{module_name}.{name}"
        for module_name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        for name, value in list(vars(module).items())
        if value is obj
    )
