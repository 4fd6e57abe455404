"""Name the weight-transfer engine "hybridcomp" to vLLM, on the side of workers and of trainers.

vLLM calls ``plugin`` in each of its processes, as an entry point of ``vllm.general_plugins``; a
trainer calls ``register``. The engines are imported when one of them is made.
"""

from __future__ import annotations

import importlib

from hybridcomp.errors import SeamError
from hybridcomp.inference.upstream import VLLM, check
from hybridcomp.log import complain
from hybridcomp.seams.patching import Seam

#: the backend in ``--weight-transfer-config`` and in the trainer's factory
BACKEND = "hybridcomp"
FACTORY = "vllm.distributed.weight_transfer.factory"
WORKER = ("hybridcomp.inference.vllm_worker", "HybridcompWeightTransferEngine")
TRAINER = ("hybridcomp.inference.vllm_trainer", "HybridcompTrainerEngine")
#: what ``register`` calls
SEAMS = tuple(
    Seam(VLLM, FACTORY, f"{factory}.register_engine",
         ("cls", "name", "module_path_or_cls", "class_name"))
    for factory in ("WeightTransferEngineFactory", "WeightTransferTrainerFactory")
)  # fmt: skip

_registered = False


def register() -> None:
    """Register both engines, once in a process.

    Raises SeamError where vLLM is not of the version whose signatures are known, or has changed
    them.
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
    """Register as ``register``; where that is refused, say why and let vLLM start.

    vLLM calls this wherever hybridcomp is installed, also for servers that take no weights from it.
    The backend is then unknown to vLLM, which ends a server that asks for it.
    """
    try:
        register()
    except SeamError as error:
        complain(f'vLLM will not know the weight-transfer backend "{BACKEND}": {error}')
