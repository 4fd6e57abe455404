"""Every codec's functions: both back ends implement its Protocol."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridcomp.codecs import CODECS, StepCode, casts, quantized_residual
from hybridcomp.errors import CodecError
from hybridcomp.kernels import KernelSet, VariableKernels, kernels_of
from hybridcomp.kernels import cuda as cuda_package
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.functions import CudaFunctions
from hybridcomp.kernels.cuda.pieces import CudaPieces
from tests.kernels.cuda.emulated import EmulatedLauncher


def kernel_sets() -> dict[str, Any]:
    """Return the Protocol of every function set that codecs request, by the set's name."""
    sets = [getattr(codec, "kernels", None) for codec in CODECS.built_in.values()]
    found: dict[str, Any] = {
        one.codec: one
        for one in (*sets, casts.KERNELS, StepCode.kernels, quantized_residual.KERNELS)
        if isinstance(one, KernelSet)
    }
    return {name: one.__orig_class__.__args__[0] for name, one in found.items()}


def launch_modules() -> Iterator[str]:
    """Return the modules of the CUDA back end that launch a single codec's kernels."""
    for path in sorted(Path(cuda_package.__file__).parent.glob("*.py")):
        name = f"{cuda_package.__name__}.{path.stem}"
        if path.stem == "__init__":
            continue
        classes = vars(importlib.import_module(name)).values()
        own = [c for c in classes if isinstance(c, type) and c.__module__ == name]
        if any(issubclass(c, CudaFunctions) and c not in (CudaFunctions, CudaPieces) for c in own):
            yield path.stem


def shape(function: Any) -> list[tuple[Any, Any, Any]]:
    """Return kind, default and annotation of every parameter but ``self``."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [(one.kind, one.default, one.annotation) for one in parameters]


#: arguments behind the settings of a codec of variable size
BEHIND = {
    "encode": ["dtype", "values", "numel", "out", "nbytes", "threads", "size"],
    "decode": ["dtype", "payload", "nbytes", "out", "numel", "add", "threads"],
}


def test_every_set_has_its_launches() -> None:
    assert set(launch_modules()) == set(kernel_sets())
    assert {"blockint", "casts", "expcode", "fp8", "mpc", "radix", "zfp"} <= set(kernel_sets())


@pytest.mark.parametrize("name", sorted(kernel_sets()))
def test_back_ends_have_the_functions_of_the_protocol(name: str) -> None:
    protocol = kernel_sets()[name]
    declared = {key: value for key, value in vars(protocol).items() if inspect.isfunction(value)}
    functions = {key: value for key, value in declared.items() if not key.startswith("_")}
    assert functions
    launches = CudaKernels(EmulatedLauncher()).functions(name)
    cpu = kernels_of(torch.device("cpu")).functions(name)
    for key, function in functions.items():
        assert callable(getattr(cpu, key)), f"the extension lacks {name}.{key}"
        launched = getattr(type(launches), key)
        if protocol is VariableKernels:
            assert list(inspect.signature(launched).parameters)[-7:] == BEHIND[key], name
            assert {kind for kind, *_ in shape(launched)} == {inspect.Parameter.POSITIONAL_ONLY}
        else:
            assert shape(launched) == shape(function), f"{name}.{key}"


def test_a_codec_without_kernels_there_is_refused_by_name() -> None:
    with pytest.raises(CodecError, match="nosuch has no kernels for GPUs; choose another codec"):
        CudaKernels(EmulatedLauncher()).functions("nosuch")
    with pytest.raises(CodecError, match="had none of nosuch; build them again"):
        kernels_of(torch.device("cpu")).functions("nosuch")
