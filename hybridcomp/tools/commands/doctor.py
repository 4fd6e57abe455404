"""Report the setup of this machine for ``hybridcomp doctor``: versions, missing parts, misfits."""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hybridcomp.codecs import CODECS, make_codec
from hybridcomp.errors import HybridcompError, install_hint, installed
from hybridcomp.escaping import printable
from hybridcomp.job import environment
from hybridcomp.job.devices import device_name
from hybridcomp.kernels import kernels_of
from hybridcomp.kernels.cuda import hip, images, setup
from hybridcomp.kernels.cuda.setup import CudaSetup
from hybridcomp.session import process
from hybridcomp.tools.measure import report
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.missing import missing
from hybridcomp.tools.progress import ProgressDisplay

#: marks in front of a line
OK, INFO, FAIL = "ok", "-", "FAIL"
Finding = tuple[str, str]
#: seconds before the command prints a line on its progress
TELL_S = 5.0
#: upstream package that is patched -> the extra of hybridcomp that installs it
UPSTREAM = {"deepspeed": "deepspeed", "megatron.core": "megatron"}
#: environment variable that names the block of jobs without a DeepSpeed file
CONFIG = process.ENVIRONMENT
cuda: Any = torch.cuda  # untyped in part


def run(cluster: Path | None = None) -> int:
    """Print a line for each finding as it comes; returns exit status 1 if something fails.

    ``cluster``: the file of a measurement; None: ``cluster.json`` in the working folder, if any.
    """
    failed, stages = 0, _stages(cluster)
    with ProgressDisplay(len(stages), least_s=TELL_S) as progress:
        for done, (what, found) in enumerate(stages.items()):
            progress.show(done, f"checks {what} ({done + 1} of {len(stages)})")
            for mark, text in found():
                print(f"{mark:4} {printable(text.replace('`', ''))}", flush=True)
                failed += mark == FAIL
    words = "what is marked FAIL does not fit" if failed else "what is installed fits together"
    print(words, flush=True)
    return int(failed > 0)


def _stages(cluster: Path | None) -> dict[str, Callable[[], Iterable[Finding]]]:
    """Return the stages of the check by topic, in the order of printing."""
    return {
        "requirements": _requirements,
        "native kernels": lambda: [_kernels()],
        "GPUs": _gpus,
        **{
            f"the seams of {name}": partial(_seams, name, extra) for name, extra in UPSTREAM.items()
        },
        "apex": lambda: [_apex()],
        "optional packages": _optional,
        "the environment": _environment,
        "the cluster's file": lambda: _cluster(cluster),
    }


def _cluster(path: Path | None) -> Iterator[Finding]:
    """Check the results of ``hybridcomp measure``, and whether they include a machine like this."""
    if path is None and not cluster_file.DEFAULT.is_file():
        yield INFO, "no cluster.json here (optional: hybridcomp measure writes one)"
        return
    try:
        cluster = cluster_file.read(path or cluster_file.DEFAULT)
    except HybridcompError as error:
        yield FAIL, str(error)
        return
    for line in report.lines(cluster):
        yield OK, line
    for line in missing(cluster, offload=not cluster.by_hand):
        yield INFO, f"it says {line}"
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mine = device_name(torch.device(kind)).partition(",")[0]
    known = {rank.device.partition(",")[0] for rank in cluster.ranks}
    if mine not in known and not cluster.by_hand:
        yield INFO, f"the cluster is not of machines like this one, which has {mine}"


def _gpus() -> Iterator[Finding]:
    found = setup.setup()
    yield from _gpu(found)
    yield from _probes(found)


def _gpu(found: CudaSetup) -> Iterator[Finding]:
    """Report the packages for GPUs, and which do not fit together."""
    for line in setup.lines(found):
        yield (OK if found.devices else INFO), line
    if torch.distributed.is_nccl_available():
        name = "RCCL " if found.rocm else "NCCL "
        yield (OK if found.devices else INFO), name + ".".join(map(str, cuda.nccl.version()))
    if found.driver is not None and not found.devices:
        yield INFO, "there is a driver, but torch sees no GPU (CUDA_VISIBLE_DEVICES, or its build)"
    if not found.devices and not found.cupy:
        optional = hip.install() if found.rocm else f"{install_hint('cuda13')}, or cuda12"
        yield INFO, f"no GPU, and cupy is not installed (optional: {optional})"
    for problem in setup.misfits(found):
        yield FAIL, problem


def _probes(found: CudaSetup) -> Iterator[Finding]:
    """Encode a message on every GPU; with a compiler but no GPU, compile a kernel."""
    if found.nvrtc is not None and not found.devices:
        newest = max(found.architectures, default=0)
        name = hip.EXAMPLE if found.rocm else f"sm_{newest}"
        try:
            images.compiled("casts.cu", (), hip.EXAMPLE if found.rocm else newest)
        except HybridcompError as error:
            yield FAIL, f"GPU kernels: {error}"
        else:
            yield INFO, f"GPU kernels compile for {name}; there is no GPU to run them"
    for index, _ in enumerate(found.devices if found.nvrtc is not None else ()):
        yield _probe(torch.device("cuda", index))


def _probe(device: torch.device) -> Finding:
    """Check that the GPU encodes the same bytes as the CPU."""
    codec, values = make_codec("blockint", bits=8), torch.linspace(-1, 1, 5000)
    payloads = []
    try:
        for place in (torch.device("cpu"), device):
            there = values.to(place)
            nbytes = codec.wire_nbytes(there.numel(), there.dtype)
            payload = torch.zeros(nbytes, dtype=torch.uint8, device=place)
            codec.encode(there, payload)
            payloads.append(payload.cpu())
    except Exception as error:  # a driver, a context and a compiler each fail in their own way
        return FAIL, f"codecs on {device}: {type(error).__name__}: {' '.join(str(error).split())}"
    if not torch.equal(*payloads):
        return FAIL, f"codecs on {device} encode other bytes than on the CPU: please report this"
    return OK, f"codecs run on {device}, with the bytes of the CPU"


def _requirements() -> Iterator[Finding]:
    """Check Python and the requirements in hybridcomp's metadata."""
    python = platform.python_version()
    if installed("hybridcomp") is None:
        yield FAIL, f"python {python}; hybridcomp is not installed: {install_hint()}"
        return
    window = metadata.metadata("hybridcomp")["Requires-Python"]
    yield (OK if SpecifierSet(window).contains(python) else FAIL), f"python {python} ({window})"
    for text in metadata.requires("hybridcomp") or ():
        requirement = Requirement(text)
        if requirement.marker is not None:
            continue  # a requirement of an extra
        found = installed(requirement.name)
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
    """Check apex without importing it: the package of that name on PyPI is another project."""
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
    """Report optional packages, by the names of their distributions."""
    for name, advice in (
        ("transformers", "Hugging Face's Trainer"),
        ("accelerate", "of Hugging Face"),
        ("transformer-engine", "NVIDIA's, for layers of megatron-core"),
        ("wandb", install_hint("wandb")),
        ("matplotlib", install_hint("plot")),
        ("plotly", install_hint("report")),
        ("rich", install_hint("report")),
    ):
        found = installed(name)
        if found is None:
            yield INFO, f"{name} is not installed (optional: {advice})"
        else:
            yield OK, f"{name} {found}"


def _environment() -> Iterator[Finding]:
    """Report our environment variables, which a launcher may not pass to other machines."""
    names = sorted(name for name in os.environ if name.startswith("HYBRIDCOMP_"))
    handed = launcher_environment()
    for name in names:
        where = "" if name in handed else (
            "; DeepSpeed's launcher hands it to other machines only if ~/.deepspeed_env has it too"
        )  # fmt: skip
        yield INFO, f"{name}={os.environ[name]}{where}"
    yield from ((FAIL, text) for text in environment.unknown())
    if CONFIG in names:
        try:
            process.configured()
        except HybridcompError as error:
            yield FAIL, f"{CONFIG}: {error}"


def launcher_environment() -> set[str]:
    """Return the variables in the file that DeepSpeed's launcher reads for other machines."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    names: set[str] = set()
    for path in (Path.home() / name, Path(name)):
        with contextlib.suppress(OSError):
            names |= {line.partition("=")[0].strip() for line in path.read_text().splitlines()}
    return names


def _seams(package: str, extra: str) -> Iterator[Finding]:
    """Check which patches of an upstream package apply; imports it, changes nothing.

    ``extra``: the extra of hybridcomp that installs it.
    """
    from hybridcomp.patches import registry

    found = registry.patches_of(package)
    name = Requirement(found[0].seam.requirement).name
    version = installed(name)
    if version is None:
        yield INFO, f"{name} is not installed (optional: {install_hint(extra)})"
        return
    reasons: dict[str, list[str]] = {}
    for patch in found:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # upstream's warnings about missing optional parts
                patch.check()
        except Exception as error:  # an error of ours, or one that upstream raises at import
            text = str(error) if isinstance(error, HybridcompError) else repr(error)
            reasons.setdefault(text.removeprefix(f"{patch.seam}: "), []).append(str(patch.seam))
    for reason, seams in reasons.items():
        more = f" and {len(seams) - 1} more" if len(seams) > 1 else ""
        yield FAIL, f"seam {seams[0]}{more}: {reason}"
    good = len(found) - sum(map(len, reasons.values()))
    mark = FAIL if reasons else OK
    yield mark, f"{name} {version}: {good} of {len(found)} seams are as known"
