"""Register the weight-transfer engine "hybridcomp" in vLLM, for its workers and trainers.

vLLM calls ``plugin`` in each of its processes, as an entry point of ``vllm.general_plugins``; a
trainer calls ``register``. The engines are imported only when one is created.
"""

from __future__ import annotations

import importlib

from hybridcomp.errors import SeamError
from hybridcomp.inference.upstream import VLLM, check
from hybridcomp.log import complain
from hybridcomp.seams.patching import Seam

#: name of the backend in ``--weight-transfer-config`` and in the trainer's factory
BACKEND = "hybridcomp"
FACTORY = "vllm.distributed.weight_transfer.factory"
WORKER = ("hybridcomp.inference.vllm_worker", "HybridcompWeightTransferEngine")
TRAINER = ("hybridcomp.inference.vllm_trainer", "HybridcompTrainerEngine")
#: seams that ``register`` calls
SEAMS = tuple(
    Seam(VLLM, FACTORY, f"{factory}.register_engine",
         ("cls", "name", "module_path_or_cls", "class_name"))
    for factory in ("WeightTransferEngineFactory", "WeightTransferTrainerFactory")
)  # fmt: skip

_registered = False


def register() -> None:
    """Register both engines, once per process.

    Raises SeamError if vLLM's version or signatures are not the expected ones.
    """
    global _registered
    if _registered:
        return
    check(SEAMS)
    factory = importlib.import_module(FACTORY)
    factory.WeightTransferEngineFactory.register_engine(BACKEND, *WORKER)
    factory.WeightTransferTrainerFactory.register_engine(BACKEND, *TRAINER)
    _registered = True


def plugin() -> None:
    """Register both engines in a vLLM process; on a SeamError print why and let vLLM start.

    vLLM calls this wherever hybridcomp is installed, also in servers that do not use the backend.
    If the backend is not registered, vLLM itself ends a server that is configured to use it.
    """
    try:
        register()
    except SeamError as error:
        complain(f'vLLM will not know the weight-transfer backend "{BACKEND}": {error}')
