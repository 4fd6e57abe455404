"""Write what an FSDP2 script needs of a plan: mesh, resharding, and when sums cross nodes."""

from __future__ import annotations

from string import Template

from hybridcomp.tools.plan.plan import Plan

#: the module written next to ``fsdp2.json``, and what a script imports from it
MODULE = "sharding.py"
HOW = "model = shard(model, model.layers), and syncs(model, last) before every backward pass"
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "None"}
_TEXT = Template('''\
"""$layout: shard a model, and let its sums cross nodes as planned."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model, layers, device="cuda"):
    """Shard every one of ``layers``, the blocks of ``model``, then ``model``; return it."""
    mesh = init_device_mesh(device, $shape, mesh_dim_names=$names)
    policy = MixedPrecisionPolicy(param_dtype=$dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=$reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def syncs(model, last):
    """Say before a backward pass whether its micro-batch is the last one of the step."""
    $sync
''')


def module(plan: Plan) -> str:
    """Return the text of ``MODULE`` for ``plan``."""
    layout, sync = plan.layout, "return None  # each crosses nodes"
    shape: tuple[int, ...] = (layout.data,)
    if layout.shards > 1:
        shape = (layout.data // layout.shards, layout.shards)
    numbered = layout.hpz > 1 and layout.copy == "native"
    if layout.accumulate == "node":
        sync = "model.set_requires_all_reduce(last)"
    return _TEXT.substitute(
        layout=layout, shape=shape, names=("replicate", "shard")[-len(shape) :], sync=sync,
        dtype=_DTYPES[plan.dtype], reshard=layout.hpz if numbered else not layout.stays,
    )  # fmt: skip
