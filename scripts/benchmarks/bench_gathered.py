#!/usr/bin/env python3
"""Gather the weights of a ZeRO-3 job for roll-outs: hybridcomp.gathered beside TRL's way.

torchrun --standalone --nproc-per-node 4 scripts/benchmarks/bench_gathered.py --text FILE

Two nodes of two ranks train a bf16 Llama of 3.3 M parameters on the bytes of FILE (or on random
ones), and sample with transformers' generate after every step. Prints, for each way, the bytes that
all ranks send in a gather, those between the nodes (TRL's: of a ring over all ranks, as NCCL's),
the latter as bits a weight, and whether the tokens of all ranks are those of TRL's gather.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import deepspeed
import torch
import torch.distributed as dist
from on_cpu import deepspeed_on_cpu
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from trl.models import unwrap_model_for_generation

import hybridcomp
from hybridcomp.channels import channels_of

NODE, LENGTH, PROMPT, ANSWER = 2, 64, 16, 24
WAYS: dict[str, str | None] = {
    "TRL": None, "native": "none", "expcode": "expcode", "stepcode": "stepcode",
}  # fmt: skip


@contextmanager
def gathered(engine: Any, way: str) -> Iterator[Any]:
    """All weights on every rank, by TRL or by us."""
    if way != "TRL":
        with hybridcomp.gathered(engine) as model:
            yield model
        return
    plugin = SimpleNamespace(zero_stage=3)
    accelerator: Any = SimpleNamespace(
        unwrap_model=lambda model, **_: model.module, state=SimpleNamespace(deepspeed_plugin=plugin)
    )
    with unwrap_model_for_generation(engine, accelerator) as model:
        training = model.training
        model.eval()
        yield model
        model.train(training)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each gather of DeepSpeed's, as a ring sends them."""
    backend, found = deepspeed.comm.comm.cdb, list[int]()

    def count(name: str) -> Any:
        original = getattr(backend, name)

        def gather(*args: Any, **given: Any) -> Any:
            own = [*args[1:2], *(one for key, one in given.items() if "input" in key)][0]
            each = [own] if isinstance(own, Tensor) else own
            found.extend((dist.get_world_size() - 1) * one.nbytes for one in each)
            return original(*args, **given)

        return gather

    names = ("all_gather", "all_gather_into_tensor", "all_gather_coalesced")
    vars(backend).update({name: count(name) for name in names})
    try:
        yield found
    finally:
        for name in names:
            del vars(backend)[name]


def engine_of(way: str, lr: float) -> Any:
    """A ZeRO-3 engine whose block has the codec of ``way``."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=128, bos_token_id=None,
            eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    codec = WAYS[way]
    block: dict[str, Any] = {"preset": "none"} if codec is None else {"gathered": codec}
    if codec not in (None, "none"):
        block["hierarchy"] = NODE
    adam = {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}}
    settings = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": adam, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "compression": block,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings
    )
    return engine


def batch(text: Tensor, step: int, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
    return torch.stack([text[start : start + length] for start in starts]).long()


def run(way: str, text: Tensor, steps: int, lr: float) -> tuple[int, list[Any]]:
    """Weights; bytes of all ranks, those between nodes, and this rank's tokens, by gather."""
    engine, found = engine_of(way, lr), []
    numel = sum(int(p.ds_numel) for p in engine.module.parameters())
    channels = channels_of(engine)
    assert channels is not None
    for step in range(steps):
        tokens = batch(text, step, 4, LENGTH)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        entry = channels.ledger.interval["zero", "forward"]
        before = entry.wire_nbytes, entry.inter_nbytes
        with counted() as theirs, gathered(engine, way) as model:
            asked = batch(text, 10_000, 4, PROMPT)
            answer = model.generate(
                asked, max_new_tokens=ANSWER, do_sample=False, synced_gpus=False,
                attention_mask=torch.ones_like(asked),
            )  # fmt: skip
        ours = entry.wire_nbytes - before[0]
        sent = torch.tensor([ours + sum(theirs), entry.inter_nbytes - before[1]])
        if entry.inter_nbytes == 0:  # sent natively: a ring's last rank of each node sends it all
            sent[1] = sent[0] * (dist.get_rank() % NODE == NODE - 1)
        dist.all_reduce(sent)
        found.append((float(sent[0]), float(sent[1]), answer.tolist()))
    engine.destroy()
    return numel, found


def main() -> None:
    """Print the table on the first rank."""
    shape = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--text", type=Path, help="file whose bytes are trained on")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    deepspeed_on_cpu()
    hybridcomp.install()
    deepspeed.init_distributed(verbose=False)
    raw = args.text.read_bytes() if args.text else bytes(range(256)) * 64
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = {}
    for way in WAYS:
        numel, rows[way] = run(way, text, args.steps, args.lr)
    same = {
        way: [one[2] for one in found] == [one[2] for one in rows["TRL"]]
        for way, found in rows.items()
    }
    agree = torch.tensor([int(equal) for equal in same.values()])
    dist.all_reduce(agree, op=dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(f"{numel} weights, lr {args.lr:g}")
        print("| way | gather | MB sent | MB between nodes | bits a weight | tokens |")
        print("|---|---|---|---|---|---|")
        for (way, found), equal in zip(rows.items(), agree.tolist(), strict=True):
            for name, some in (("first", found[:1]), ("later", found[1:])):
                sent, between = (sum(one[i] for one in some) / len(some) for i in (0, 1))
                cells = f"{sent / 1e6:.2f} | {between / 1e6:.2f} | {8 * between / numel:.2f}"
                print(f"| {way} | {name} | {cells} | {'equal' if equal else 'differ'} |")


if __name__ == "__main__":
    main()
