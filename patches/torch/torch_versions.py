"""Check that the installed torch has the slots and functions that hybridcomp relies on.

Versions from the first one of a requirement to ``NEWEST`` are accepted by number; docs/support.md
lists those on which the tests were run. A newer version is accepted, with a message, if its
functions around the slots have the code of ``NEWEST``, and refused if they differ.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from hybridcomp.errors import SeamError
from hybridcomp.log import say_once
from hybridcomp.seams.patching import since

#: newest minor version on which the tests of engines and nn have run
NEWEST = "2.15"
#: versions on which codecs, collectives and the layers of ``hybridcomp.nn`` run
TORCH = "torch >= 2.4"
#: the first version with ``register_comm_hook`` and ``GradBucket`` as they are used here
DDP = since(TORCH, "2.6")
#: 2.9 is the first with ``set_custom_all_gather`` and ``set_custom_reduce_scatter``
#: (pytorch#155189)
FSDP2 = since(TORCH, "2.9")
#: 2.13 is the first whose ring attention calls ``_create_rotater``
RING = since(TORCH, "2.13")

_SHARD = "torch.distributed.fsdp._fully_shard."
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
_DDP = "torch.nn.parallel.distributed:DistributedDataParallel."
#: by requirement, the functions of ``NEWEST`` that hybridcomp relies on, and their ``digest``
SOURCES: dict[str, dict[str, str]] = {
    DDP: {
        f"{_DDP}register_comm_hook": "b9d9841b9960a501",
        f"{_DDP}_check_comm_hook": "01c42730863c0633",
        f"{_DDP}_lazy_init": "51bc2da6ea836893",
        "torch.amp.grad_scaler:GradScaler.step": "1e8fa416468febf4",
        "torch.amp.grad_scaler:GradScaler.update": "a3cc9ab6ac0db586",
    },
    FSDP2: {
        f"{_SHARD}_fsdp_api:AllGather": "6ae264c4d158ed46",
        f"{_SHARD}_fsdp_api:ReduceScatter": "0c16b27a22dedfe8",
        f"{_SHARD}_fsdp_collectives:foreach_all_gather": "b8e23e8a1c39ab52",
        f"{_SHARD}_fsdp_collectives:foreach_reduce": "54a8ab2c23631277",
        f"{_SHARD}_fsdp_collectives:_get_gradient_divide_factors": "690f5989be160278",
        f"{_SHARD}_fsdp_common:FSDPMeshInfo": "13ffc4bdd624c2cd",
        f"{_SHARD}_fsdp_common:DDPMeshInfo": "af4e485aaa80728b",
        f"{_SHARD}_fsdp_param_group:FSDPParamGroup._all_reduce_process_group": "70574b4fe3576ab4",
        f"{_SHARD}_fsdp_state:FSDPState._lazy_init": "5b2d0ba8cc0e03c8",
    },
    RING: {
        f"{_RING}:_create_rotater": "063229e0b3e92b97",
        f"{_RING}:_RingRotater": "ed5f38daf81f8d66",
        f"{_RING}:_templated_ring_attention": "ad354d49ae3453d0",
        f"{_RING}:_templated_ring_attention_backward": "5847fe3cc87bf82e",
    },
}  # fmt: skip


def check(name: str, requirement: str) -> str:
    """Check the installed torch, needed by ``name``; return its name and version, "torch 2.13.0".

    Raises SeamError if torch is older than ``requirement``, or newer than ``NEWEST`` with changed
    functions around the slots.
    """
    found = version("torch")
    oldest = str(Requirement(requirement).specifier).removeprefix(">=")
    if not Requirement(requirement).specifier.contains(found, prereleases=True):
        raise SeamError(
            f"{name}: needs {requirement}, found torch {found}; install torch {oldest} to {NEWEST}"
        )
    if Version(found).release[:2] <= Version(NEWEST).release:
        return f"torch {found}"
    newer = f"torch {found} is newer than {NEWEST}, the newest that hybridcomp was tested on"
    others = changed(requirement)
    if others:
        raise SeamError(
            f"{name}: {newer}, and {', '.join(others)} changed since; install torch {oldest} to "
            f"{NEWEST}, or a hybridcomp that knows this one"
        )
    say_once(f"{name}: {newer}; what hybridcomp uses of it is unchanged")
    return f"torch {found}"


def checked(name: str, requirement: str) -> Callable[[], str]:
    """Return ``check`` as the ``source`` of a Seam."""
    return lambda: check(name, requirement)


def changed(requirement: str) -> list[str]:
    """Return the functions of ``SOURCES[requirement]`` that torch has changed or removed."""
    return [
        symbol.partition(":")[2]
        for symbol, known in SOURCES[requirement].items()
        if digest(symbol) != known
    ]


def digest(symbol: str) -> str:
    """Hash the code of ``module:qualified.name``, comments, docstrings and spaces left out.

    Returns 16 hexadecimal digits; "" if the function does not exist.
    """
    module, _, path = symbol.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = inspect.getattr_static(found, part)
        found = found.fget if isinstance(found, property) else found
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(found)))
    except (ImportError, AttributeError, OSError, TypeError):
        return ""
    code = "".join("".join(_code_lines(source)).split())
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _code_lines(source: str) -> list[str]:
    """Return the lines of ``source`` without comments and docstrings."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0] - 1
            lines[row] = lines[row][: token.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = node.body[0]
            if ast.get_docstring(node) is not None and first.end_lineno is not None:
                lines[first.lineno - 1 : first.end_lineno] = [""] * (
                    first.end_lineno - first.lineno + 1
                )
    return lines
