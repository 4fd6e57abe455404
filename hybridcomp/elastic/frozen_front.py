"""Keep the outputs of a model's frozen front blocks on the host, for the next epochs."""

from __future__ import annotations

import functools
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.channels.messages.kept_weights import hashes_together
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job import small_messages
from hybridcomp.job.devices import default_device
from hybridcomp.log import say

KEY = "hybridcomp.FrozenFront"
#: fraction of a host's free memory that all ranks of the host together may use
SHARE = 0.5


class _Kept(NamedTuple):
    """A sample's output of the first ``depth`` blocks, encoded, on the host.

    ``inputs``: shape of the sample's input, which another batch may pad to another length.
    """

    depth: int
    inputs: torch.Size
    payload: Tensor
    shape: torch.Size
    dtype: torch.dtype


class FrozenFront:
    """A host cache for the outputs of a model's frozen front blocks (each block: tensor to tensor).

    ``front(samples, inputs)`` returns the frozen blocks' outputs without a gradient. It reads the
    outputs of cached samples from the host; for other samples it runs the blocks and caches the
    outputs. If more blocks have been frozen since, only the newly frozen blocks run, on the cached
    outputs. If a frozen weight changes or trains again, all outputs are dropped; if memory is full,
    the least recently used are evicted. The cache is not saved. Under ZeRO 3 and FSDP2 all ranks
    call it together; if every rank has all its samples cached, no weight is gathered.

    Attributes:
        hits, misses: number of samples read from the cache, and computed.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        codec: str = "expcode",
        *,
        host_bytes: int | None = None,
        in_place: bool = False,
        **settings: Any,
    ) -> None:
        """Begin with nothing kept.

        Args:
            blocks: the model's blocks from the front on, including an embedding.
            codec: codec of the kept values: "expcode" is exact, "blockint" with ``bits=8`` takes a
                quarter of fp32's bytes, "none" stores plain values.
            host_bytes: memory for this rank; None: half of the host's free memory, divided by the
                number of ranks on the host.
            in_place: for engines that call the blocks themselves, such as pipelines. The first
                block then also takes ``(samples, inputs)`` and returns the front's outputs, which
                the other frozen blocks pass on. Given ``inputs`` alone, all blocks run normally.
            settings: settings of the codec.

        Raises ConfigError for an unknown codec.
        """
        self._blocks = list(blocks)
        self._codec: Codec | None = None if codec == "none" else make_codec(codec, **settings)
        self._most = _free_bytes() if host_bytes is None else host_bytes
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._marks: list[Any] = []
        self._told: set[str] = set()
        self.nbytes = self.hits = self.misses = 0
        # blocks that this forward pass skips, and whether ``__call__`` runs blocks
        self._passed, self._is_inside = 0, False
        if in_place:
            self._blocks = list(itertools.takewhile(lambda one: isinstance(one, nn.Module), blocks))
            for place, block in enumerate(self._blocks):
                block.forward = functools.partial(self._forward, place, block.forward)

    def _forward(self, place: int, forward: Callable[[Any], Any], values: Any) -> Any:
        """Run a block when the engine calls it, or skip it (``in_place``)."""
        if self._is_inside:
            return forward(values)
        if place == 0:
            self._passed = 0
            if isinstance(values, tuple) and len(values) == 2:
                self._is_inside = True
                try:
                    values, self._passed = self(*values)
                finally:
                    self._is_inside = False
        return values if place < self._passed else forward(values)

    @property
    def depth(self) -> int:
        """Return how many blocks are frozen, counted from the front."""
        trains = (
            any(parameter.requires_grad for parameter in block.parameters())
            for block in self._blocks
        )
        return next(itertools.compress(itertools.count(), trains), len(self._blocks))

    def free(self) -> None:
        """Free all kept outputs."""
        self._kept.clear()
        self.nbytes = 0

    @torch.no_grad()
    def __call__(self, samples: Sequence[int] | Tensor, inputs: Tensor) -> tuple[Tensor, int]:
        """Return the outputs of the frozen blocks, and the number of these blocks.

        Args:
            samples: each sample's number in the data set.
            inputs: (batch, ...) inputs of the first block.

        Raises ConfigError if the batch has another number of samples; if a block depends on random
        numbers or batch statistics (dropout, batch norm) or returns no tensor; and under FSDP2 if a
        block is gathered together with others, or before the model's first forward pass.
        """
        numbers = [int(n) for n in (samples.tolist() if isinstance(samples, Tensor) else samples)]
        if len(numbers) != len(inputs):
            todo = f"expected the numbers of the {len(inputs)} samples of the batch"
            raise ConfigError(f"{KEY}: samples", Shown(f"{len(numbers)} numbers"), todo)
        depth = self.depth
        front = self._blocks[:depth]
        _check(front)
        anew = self._has_changed(front, depth)
        starts = [0 if anew else self._start(number, inputs.shape[1:]) for number in numbers]
        if any(map(_is_sharded, front)):
            anew, agreed = _together(anew, starts, depth)
            if agreed is None:  # this rank needs no output, but others need its shards
                self._through(0, depth, inputs[:1])
            starts = agreed or starts
        if anew:
            self._drop()
        # before anything is cached, which may evict other samples of this batch
        rows = {place: self._take(numbers[place], inputs.device)
                for place, start in enumerate(starts) if start}  # fmt: skip
        for start in sorted(set(starts)):
            places = [place for place, one in enumerate(starts) if one == start]
            if start == depth and depth:
                self.hits += len(places)
                continue
            values = torch.stack([rows[place] for place in places]) if start else inputs[places]
            for place, row in zip(places, self._through(start, depth, values), strict=True):
                rows[place] = row
                if depth:
                    self._put(numbers[place], depth, inputs.shape[1:], row)
            self.misses += len(places)
        return torch.stack([rows[place] for place in range(len(numbers))]), depth

    def _start(self, number: int, shape: torch.Size) -> int:
        """Return how many blocks' output is cached for a sample with an input of this shape."""
        kept = self._kept.get(number)
        return kept.depth if kept is not None and kept.inputs == shape else 0

    def _through(self, start: int, depth: int, values: Any) -> Tensor:
        """Return the outputs of the blocks ``start`` to ``depth`` for ``values``."""
        count = len(values)
        for block in self._blocks[start:depth]:
            values = block(values)
            if not isinstance(values, Tensor) or len(values) != count:
                todo = "expected blocks that return a tensor of the batch"
                raise ConfigError(KEY, Shown(type(block).__name__), todo)
        found: Tensor = values
        return found

    def _put(self, number: int, depth: int, inputs: torch.Size, row: Tensor) -> None:
        flat = row.reshape(-1).contiguous()
        codec = self._codec if row.dtype in VALUE_DTYPES else None
        if codec is None:
            payload = flat.to("cpu", copy=True)
        else:
            room = flat.new_empty(codec.wire_nbytes(flat.numel(), flat.dtype), dtype=torch.uint8)
            payload = room[: codec.encode(flat, room)].to("cpu", copy=True)
        before = self._kept.pop(number, None)
        self.nbytes += payload.nbytes - (0 if before is None else before.payload.nbytes)
        self._kept[number] = _Kept(depth, inputs, payload, row.shape, row.dtype)
        self._say(
            "bound",
            f"frozen front: a sample takes {payload.nbytes / 1e3:.3g} kB of the host, "
            f"{payload.nbytes / max(1, flat.numel()):.2f} bytes a value; {self._most / 1e9:.3g} GB "
            f"of a rank are room for about {self._most // max(1, payload.nbytes)} samples",
        )
        while self.nbytes > self._most and self._kept:
            gone = self._kept.popitem(last=False)[1]
            self.nbytes -= gone.payload.nbytes
            self._say("full", f"frozen front: its {self._most / 1e9:.3g} GB are full: samples that "
                      "were used least recently are computed anew")  # fmt: skip

    def _take(self, number: int, device: torch.device) -> Tensor:
        kept = self._kept[number]
        self._kept.move_to_end(number)
        payload = kept.payload.to(device, non_blocking=True)
        if self._codec is None or kept.dtype not in VALUE_DTYPES:
            return payload.view(kept.shape)
        out = torch.empty(kept.shape.numel(), dtype=kept.dtype, device=device)
        self._codec.decode(payload, out)
        return out.view(kept.shape)

    def _has_changed(self, front: Sequence[nn.Module], depth: int) -> bool:
        """Return whether frozen weights have changed since the last call, or train again."""
        marks = [_mark(block) for block in front]
        before, self._marks = self._marks, marks
        shared = min(len(marks), len(before))
        return marks[:shared] != before[:shared] or depth < len(before)

    def _drop(self) -> None:
        if self._kept:
            say(f"frozen front: weights of it have changed; {len(self._kept)} samples of rank 0 "
                "are computed anew")  # fmt: skip
        self.free()

    def _say(self, once: str, text: str) -> None:
        if once not in self._told:
            self._told.add(once)
            say(text)


def _mark(block: nn.Module) -> list[int]:
    """Return hashes of this rank's weights of a block, which show whether they have changed."""
    own = [_own(value) for value in (*block.parameters(), *block.buffers())]
    held = [one for one in own if one.dtype in VALUE_DTYPES and one.numel()]
    return hashes_together(one.detach().reshape(-1) for one in held)


def _own(value: Any) -> Tensor:
    """Return this rank's shard of a parameter under FSDP2 and ZeRO 3, else the parameter."""
    if hasattr(value, "to_local"):
        own: Tensor = value.to_local()
    else:
        own = getattr(value, "ds_tensor", value)
    return own


def _is_sharded(block: nn.Module) -> bool:
    return any(_own(parameter) is not parameter for parameter in block.parameters())


def _together(anew: bool, starts: list[int], depth: int) -> tuple[bool, list[int] | None]:
    """Return whether any rank drops its outputs, and the block at which each sample starts.

    All ranks gather a block's weights together, so they must run the same blocks. If samples would
    start at different blocks, every sample without a cached output of ``depth`` blocks starts at
    block 0; a rank without such samples gets None, if another rank has some. A collective.
    """
    flags = torch.zeros(depth + 1, device=default_device(), dtype=torch.float32)
    flags[[start for start in starts if start < depth]] = 1
    flags[depth] = float(anew)
    *counts, changed = small_messages.total(flags).tolist()
    if changed:
        return True, [0] * len(starts)
    needed = [start for start, count in enumerate(counts) if count]
    if not needed:
        return False, starts
    if len(needed) == 1 and counts[needed[0]] == dist.get_world_size():
        return False, starts
    if all(start == depth for start in starts):
        return False, None
    return False, [start if start == depth else 0 for start in starts]


def _check(front: Sequence[nn.Module]) -> None:
    for block in front:
        _check_gathered(block)
        for module in block.modules():
            drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
            if module.training and (drops or isinstance(module, nn.modules.batchnorm._BatchNorm)):
                todo = "its outputs are others at each pass; call eval() on the frozen blocks"
                raise ConfigError(KEY, Shown(f"{type(module).__name__} in training"), todo)


def _check_gathered(block: nn.Module) -> None:
    """Raise ConfigError if FSDP2 cannot run a block outside of the model's forward pass."""
    units = {name: module for name, module in block.named_modules() if hasattr(module, "unshard")}
    for module in units.values():
        state: Any = module._get_fsdp_state()
        if state._is_root is None:
            todo = "the first pass makes the model the root of fully_shard; call the front after it"
            raise ConfigError(KEY, Shown("a model that has made no pass"), todo)
    for name, parameter in block.named_parameters():
        inside = any(not unit or name.startswith(f"{unit}.") for unit in units)
        if hasattr(parameter, "to_local") and not inside:
            todo = "call fully_shard on it, so that it can run without the others"
            raise ConfigError(KEY, Shown("a block that FSDP2 gathers with others"), todo)


def _free_bytes() -> int:
    """Return this rank's share of the host's free memory."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(SHARE * free) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
