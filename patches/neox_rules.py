"""What GPT-NeoX does with the traffic of each dimension: a table over the keys of its YAML files.

Beside that of DeepSpeed (``ds_rules``), whose engine carries the rest. No seam is in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridcomp.patches.rules import Job, Rule

#: switches that put Transformer Engine's layers in the place of GPT-NeoX's own
TRANSFORMER_ENGINE = (
    "te_columnparallel",
    "te_rowparallel",
    "te_layernorm_mlp",
    "te_mha",
    "te_fp8_mha",
)


def settings_of(args: Any) -> Mapping[str, Any] | None:
    """The settings of a GPT-NeoX job, from the ``args`` of ``deepspeed.initialize``; else None."""
    if type(args).__module__.startswith("megatron.neox_arguments"):
        settings: Mapping[str, Any] = vars(args)
        return settings
    return None


def _tensor_parallel(job: Job) -> bool:
    return int(job.get("model_parallel_size", 1)) > 1


RULES: tuple[Rule, ...] = (
    Rule(
        "bypass", ("tp",), "layers of Transformer Engine (te_mha, te_columnparallel, ...)",
        "they communicate inside Transformer Engine, where no seam reaches",
        "set the te_ switches to false",
        lambda job: _tensor_parallel(job)
        and any(job.get(name, False) for name in TRANSFORMER_ENGINE),
    ),
    Rule(
        "note", ("tp",), '"partition_activations": true',
        "checkpointed activations are gathered over the tensor-parallel ranks as they are, since "
        "recomputation must see what the forward pass saw", "",
        lambda job: _tensor_parallel(job)
        and bool(job.get("checkpoint_activations", False))
        and bool(job.get("partition_activations", False)),
    ),
)  # fmt: skip
