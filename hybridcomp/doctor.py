"""``hybridcomp doctor``: what this machine has, what it lacks, and what does not fit together."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from hybridcomp.codecs import CODECS, make_codec
from hybridcomp.errors import HybridcompError
from hybridcomp.kernels import kernels_of
from hybridcomp.kernels.cuda import images, setup
from hybridcomp.kernels.cuda.setup import CudaSetup

#: what stands in front of a line
OK, INFO, FAIL = "ok", "-", "FAIL"
Finding = tuple[str, str]
cuda: Any = torch.cuda  # parts of it are untyped


def run() -> int:
    """Print a line for each finding as it comes; the exit status is 1 if something fails."""
    failed = False
    for mark, text in findings():
        print(f"{mark:4} {text}", flush=True)
        failed = failed or mark == FAIL
    return int(failed)


def findings() -> Iterator[Finding]:
    """Everything that is looked at, in the order in which it is printed."""
    yield from _requirements()
    yield _kernels()
    found = setup.setup()
    yield from _gpu(found)
    yield from _probes(found)
    yield _apex()
    yield from _optional()
    yield from _seams()


def _gpu(found: CudaSetup) -> Iterator[Finding]:
    """What there is for GPUs, and what does not fit."""
    for line in setup.lines(found):
        yield (OK if found.devices else INFO), line
    if found.devices and torch.distributed.is_nccl_available():
        yield OK, "NCCL " + ".".join(map(str, cuda.nccl.version()))
    if found.driver is not None and not found.devices:
        yield INFO, "there is a driver, but torch sees no GPU (CUDA_VISIBLE_DEVICES, or its build)"
    if not found.devices and not found.cupy:
        yield (
            INFO,
            (
                "no GPU, and cupy is not installed (optional: pip install 'hybridcomp[cuda13]', or "
                "cuda12)"
            ),
        )
    for problem in setup.misfits(found):
        yield FAIL, problem


def _probes(found: CudaSetup) -> Iterator[Finding]:
    """Codes a message on every GPU; without one but with a compiler, compiles for one."""
    if found.nvrtc is not None and not found.devices:
        architecture = max(found.architectures)
        try:
            images.compiled("casts.cu", (), architecture)
        except HybridcompError as error:
            yield FAIL, f"GPU kernels: {error}"
        else:
            yield INFO, f"GPU kernels compile for sm_{architecture}; there is no GPU to run them"
    for index, _ in enumerate(found.devices if found.nvrtc is not None else ()):
        yield _probe(torch.device("cuda", index))


def _probe(device: torch.device) -> Finding:
    """Whether the GPU encodes what the CPU does."""
    codec, values = make_codec("blockint", bits=8), torch.linspace(-1, 1, 5000)
    payloads = []
    try:
        for place in (torch.device("cpu"), device):
            there = values.to(place)
            nbytes = codec.wire_nbytes(there.numel(), there.dtype)
            payload = torch.zeros(nbytes, dtype=torch.uint8, device=place)
            codec.encode(there, payload)
            payloads.append(payload.cpu())
    except Exception as error:  # a driver, a context, a compiler: each fails in its own way
        return FAIL, f"codecs on {device}: {type(error).__name__}: {' '.join(str(error).split())}"
    if not torch.equal(*payloads):
        return FAIL, f"codecs on {device} encode other bytes than on the CPU: please report this"
    return OK, f"codecs run on {device}, with the bytes of the CPU"


def _requirements() -> Iterator[Finding]:
    """Python, and what hybridcomp's own metadata declares as needed."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    python = platform.python_version()
    if _version("hybridcomp") is None:
        yield FAIL, f"python {python}; hybridcomp is not installed: pip install hybridcomp"
        return
    window = metadata.metadata("hybridcomp")["Requires-Python"]
    yield (OK if SpecifierSet(window).contains(python) else FAIL), f"python {python} ({window})"
    for text in metadata.requires("hybridcomp") or ():
        requirement = Requirement(text)
        if requirement.marker is not None:
            continue  # an extra
        found = _version(requirement.name)
        if found is None:
            yield FAIL, f"{requirement.name} is not installed ({requirement.specifier} is needed)"
        elif not requirement.specifier.contains(found, prereleases=True):
            yield FAIL, f"{requirement.name} {found} is outside {requirement.specifier}"
        else:
            yield OK, f"{requirement.name} {found} ({requirement.specifier})"


def _kernels() -> Finding:
    try:
        kernels_of(torch.device("cpu"))
    except HybridcompError as error:
        return FAIL, f"native kernels: {error}"
    return OK, f"native kernels for CPU are loaded; codecs: {', '.join(sorted(CODECS))}"


def _apex() -> Finding:
    """Apex without importing it: the package of that name on PyPI is another project."""
    try:
        distribution = metadata.distribution("apex")
    except metadata.PackageNotFoundError:
        return INFO, "apex is not installed (optional: NVIDIA's, built from its repository)"
    files = [str(path) for path in distribution.files or ()]
    if any(path.startswith("apex/optimizers/") for path in files):
        return OK, f"NVIDIA apex {distribution.version}"
    return FAIL, (
        f"apex {distribution.version} is not NVIDIA's but the unrelated PyPI package; "
        "pip uninstall apex"
    )


def _optional() -> Iterator[Finding]:
    owners = metadata.packages_distributions()
    for module, extra in (("wandb", "wandb"), ("megatron", "megatron"), ("matplotlib", "plot")):
        found = owners.get(module)
        if found:
            yield OK, f"{found[0]} {_version(found[0])}"
        else:
            yield INFO, f"{module} is not installed (optional: pip install 'hybridcomp[{extra}]')"


def _seams() -> Iterator[Finding]:
    """Which patches could be applied now. Imports DeepSpeed, changes nothing."""
    try:
        from hybridcomp.patches import registry

        found = registry.patches_of("deepspeed")
    except ImportError as error:
        yield FAIL, f"seams: patches cannot be imported ({error})"
        return
    good = 0
    for patch in found:
        try:
            patch.check()
        except HybridcompError as error:
            yield FAIL, f"seam {error}"
        else:
            good += 1
    yield (
        (OK if good == len(found) else FAIL),
        f"{good} of {len(found)} DeepSpeed seams are as known",
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
