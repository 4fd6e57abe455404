"""Train a small byte-level language model with a hashed n-gram table too large for a device.

torchrun --nproc-per-node 2 scripts/examples/train_ngrams.py --steps 200

Every rank reads its share of the text; table rows are sharded over the ranks (docs/tables.md).
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.nn import CachedEmbedding, RowOptimizer, ngram_keys

BYTES = 256
BLOCK = '{"embed": "expcode", "dp": {"codec": "blockint", "bits": 4}}'


class Model(nn.Module):
    """A layer of attention and one of MLP over bytes, with rows of n-grams added to them."""

    def __init__(self, width: int, table: CachedEmbedding | None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.table = table
        rows = 0 if table is None else table.embedding_dim
        self.ngrams = nn.Linear(rows, width, bias=False) if rows else None
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.out = nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor, keys: Tensor) -> Tensor:
        """Return logits (B, T, 256) of ``tokens`` (B, T) with the keys of their n-grams."""
        hidden = self.tokens(tokens)
        if self.table is not None and self.ngrams is not None:
            hidden = hidden + self.ngrams(self.table(keys))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], hidden.device)
        logits: Tensor = self.out(self.layer(hidden, src_mask=mask, is_causal=True))
        return logits


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--local_rank", type=int, help="set by some launchers")
    add("--text", type=Path, nargs="*", help="files; by default the pages of this repository")
    add("--rows", type=int, default=5_000_000, help="rows of the table; 0: a model without one")
    add("--row-width", type=int, default=64)
    add("--order", type=int, default=4, help="bytes of an n-gram")
    add("--resident", type=int, default=50_000, help="rows of a rank on its device")
    add("--folder", type=Path, help="for mapped files, which take the place of host memory")
    add("--ahead", type=int, default=2, help="batches whose rows are read ahead")
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=16, help="samples of a rank")
    add("--length", type=int, default=128)
    add("--width", type=int, default=64, help="of the model")
    add("--block", default=BLOCK, help="the compression block, JSON")
    add("--save", type=Path, help="save model and table there at the end")
    add("--load", type=Path, help="begin with what --save wrote, on any number of ranks")
    return parser.parse_args()


def batch(text: Tensor, arguments: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's samples of a step, (B, T + 1), and the keys of their n-grams (B, T)."""
    random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    length = arguments.length + 1
    begins = torch.randint(len(text) - length, (arguments.batch, 1), generator=random)
    tokens = text[begins + torch.arange(length)]
    return tokens, ngram_keys(tokens[:, :-1], arguments.order)


def made(arguments: argparse.Namespace, device: torch.device) -> tuple[Model, RowOptimizer | None]:
    """Return the model and the optimizer of its table."""
    torch.manual_seed(0)
    if not arguments.rows:
        return Model(arguments.width, None).to(device), None
    table = CachedEmbedding(
        arguments.rows, arguments.row_width, resident=arguments.resident, hashed=True,
        folder=arguments.folder, init="zeros", device=device,
    )  # fmt: skip
    optimizer = RowOptimizer([table], "rowwise_adagrad", lr=0.1)
    return Model(arguments.width, table).to(device), optimizer


def main() -> None:
    """Train."""
    arguments = parsed()
    is_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    pages = arguments.text or sorted(Path(__file__).parents[2].glob("docs/**/*.md"))
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in pages)), dtype=torch.uint8)
    text = text.to(torch.int64)

    model, rows = made(arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arguments.load is not None:
        state = torch.load(arguments.load / "model.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if model.table is not None and rows is not None:
            rows.load_state_dict(state["rows"])
            model.table.load(arguments.load / "table")
    whole = DistributedDataParallel(model)
    hybridcomp.attach(whole, json.loads(arguments.block))

    coming = [batch(text, arguments, step) for step in range(arguments.ahead)]
    for _, keys in coming:
        if model.table is not None:
            model.table.prefetch(keys)
    losses = []
    for step in range(arguments.steps):
        coming.append(batch(text, arguments, step + arguments.ahead))
        if model.table is not None and arguments.ahead:
            model.table.prefetch(coming[-1][1])
        tokens, keys = coming.pop(0)
        tokens = tokens.to(device)
        logits = whole(tokens[:, :-1], keys)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rows is not None:
            rows.step()
        losses.append(loss.detach())
        if (step + 1) % 20 == 0:
            mean = torch.stack(losses[-20:]).mean()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                hits = "" if model.table is None else f", hits {model.table.figures().hit_rate:.3f}"
                print(f"step {step + 1}: loss {mean / dist.get_world_size():.4f}{hits}", flush=True)
    if arguments.save is not None:
        arguments.save.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "rows": None if rows is None else rows.state_dict()}  # fmt: skip
            torch.save(state, arguments.save / "model.pt")
        if model.table is not None:
            model.table.save(arguments.save / "table")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"rank {dist.get_rank()}: peak of host memory {peak:.2f} GB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
