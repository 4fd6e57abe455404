"""Write what a script under FSDP2 needs of a plan: its mesh, what stays, and when sums cross."""

from __future__ import annotations

from string import Template

from hybridcomp.tools.plan.plan import Plan

#: the module beside ``fsdp2.json``, and what a script takes from it
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
    layout = plan.layout
    shape, names = (layout.data,), ("shard",)
    if layout.shards > 1:
        shape, names = (layout.data // layout.shards, layout.shards), ("replicate", "shard")
    reshard: bool | int = not layout.stays
    if layout.hpz > 1 and layout.copy == "native":
        reshard = layout.hpz
    sync = "model.set_requires_all_reduce(last)"
    return _TEXT.substitute(
        layout=layout, shape=shape, names=names, dtype=_DTYPES[plan.dtype], reshard=reshard,
        sync=sync if layout.accumulate == "node" else "return None  # each crosses nodes",
    )  # fmt: skip
