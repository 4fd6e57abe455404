"""Check whether a package called ``megatron`` is GPT-NeoX, and whether the seams fit it.

GPT-NeoX is used from a checkout and has no version. Its package shares the name with megatron-core
(a namespace) and with older Megatrons, which have a ``megatron.mpu`` too. So it is recognized by
its module ``neox_arguments``, and instead of a version its functions are checked: parameters, and
the collectives that they call.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.util import find_spec
from typing import Any

from hybridcomp.errors import SeamError

#: shown in place of a version; checked by ``source``
REQUIREMENT = "GPT-NeoX (a checkout)"
MAPPINGS = "megatron.mpu.mappings"

#: function of ``mappings`` -> its parameters and the collectives that it calls
FUNCTIONS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "_reduce": (("input_",), frozenset({"all_reduce"})),
    "_gather": (("input_",), frozenset({"all_gather"})),
    "_reduce_scatter_along_seq_dim": (
        ("input_", "seq_dim"),
        frozenset({"reduce_scatter_tensor", "reduce_scatter"}),
    ),
    "_gather_along_seq_dim": (
        ("input_", "seq_dim"),
        frozenset({"all_gather_into_tensor", "all_gather"}),
    ),
    "_dmoe_reduce": (("input_", "tokens_per_expert"), frozenset({"all_reduce"})),
    "_dmoe_gather": (("input_", "tokens_per_expert"), frozenset({"all_gather"})),
}


def is_neox() -> bool:
    """Return whether the package ``megatron`` of this process is GPT-NeoX's."""
    return "megatron" in sys.modules and find_spec("megatron.neox_arguments") is not None


def source() -> str:
    """Return the place of the checkout. Raises SeamError if it lacks the expected functions."""
    if not is_neox():
        raise SeamError(
            f"{MAPPINGS}: needs {REQUIREMENT}, found another package called megatron (without "
            "megatron.neox_arguments)"
        )
    mappings = importlib.import_module(MAPPINGS)
    for name, (parameters, collectives) in FUNCTIONS.items():
        function: Any = getattr(mappings, name, None)
        if function is None:
            raise _unknown(name, "is not there; take a checkout with sequence parallelism")
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            raise _unknown(name, f"expected parameters {parameters}, found {found}")
        called = collectives & set(function.__code__.co_names)
        if called != collectives:
            missing = ", ".join(sorted(collectives - called))
            raise _unknown(name, f"no longer calls {missing}")
    return f"GPT-NeoX in {sys.modules['megatron'].__path__[0]}"


def _unknown(name: str, problem: str) -> SeamError:
    return SeamError(
        f"{MAPPINGS}:{name}: {problem}; install a checkout of GPT-NeoX that hybridcomp knows, or a "
        "hybridcomp that knows this one"
    )
