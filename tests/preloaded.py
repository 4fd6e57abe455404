"""Imports and look-ups of every rank, done once: the rank server imports this module.

Nothing here arms a patch or keeps a job's state. Forked ranks start with the modules of hybridcomp,
FSDP2 and megatron-core's dependencies, which saves 1.5 core seconds each, and with the results of
DeepSpeed's builders, which would run a compiler.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from pkgutil import walk_packages

import hybridcomp.patches

#: packages that ranks import besides hybridcomp; missing ones are skipped, as no rank needs them
OTHERS = (
    "pytest", "setuptools", "yaml", "wandb", "torch.utils.tensorboard", "torch.utils.serialization",
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.sequence.layer",
    "hybridcomp.session.process", "hybridcomp.publishing", "hybridcomp.patches.rules.ds_check",
    "hybridcomp.kernels._cpu", "hybridcomp.nn.context.attention",
)  # fmt: skip
PATCHES = [
    module.name for module in walk_packages(hybridcomp.patches.__path__, "hybridcomp.patches.")
]

for _name in (*OTHERS, *PATCHES):
    with contextlib.suppress(ImportError):
        import_module(_name)
with contextlib.suppress(ImportError, AttributeError):
    import_module("deepspeed.ops").__compatible_ops__  # noqa: B018  looked up at the first access
