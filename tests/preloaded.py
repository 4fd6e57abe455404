"""Import and look up, once for all ranks, what every rank would: the server of ranks imports this.

Nothing here arms a patch or keeps state of a job. A rank that forks from the server so begins with
the modules of hybridcomp, of FSDP2 and of megatron-core's own imports, 1.5 s of a core each time,
and with the answers of DeepSpeed's builders, for which it would run a compiler.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from pkgutil import walk_packages

import hybridcomp.patches

#: what ranks import beside the modules of hybridcomp; where one is not installed, no rank needs it
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
