"""Map messages of an FSDP2 group to parameters: torch's slots pass no names.

A message is a rank-major table: a row for every rank of the shard group, with that rank's chunk of
each parameter. Rank r's chunk of a parameter sharded at dimension 0 is its rows ``[r * c, (r + 1)
* c)``, with c = ceil(rows / ranks), padded with zeros. A parameter sharded at another dimension is
split into columns, not contiguous in its flattened values: each chunk's residual has its own name.

Gradients of a parameter that took no part in the pass are left out of the message. Torch 2.15 calls
``_prepare_reduce_scatter_inputs`` with the parameters of each message, in the order of the message,
which may differ from the group's. Before 2.15, ``register_post_accumulate_grad_hook`` records which
ones took part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridcomp.channels.residuals.pieces import Piece

#: most layouts cached per group: experts without tokens have no gradient, so messages vary
MOST_KNOWN = 64
#: the method of a group of torch 2.15 that gets the parameters of a message
PREPARE = "_prepare_reduce_scatter_inputs"


@dataclass(frozen=True)
class Member:
    """A parameter of a group: its name, shape, and the dimension at which it is cut."""

    name: str
    numel: int
    rows: int  # length of the dimension at which it is cut
    dim: int

    def chunk(self, world_size: int) -> int:
        """Return the elements of one rank's chunk, padding included."""
        return math.ceil(self.rows / world_size) * (self.numel // max(1, self.rows))

    def pieces(self, world_size: int) -> list[list[Piece]]:
        """Return the pieces of every rank's chunk: a range of the parameter, and padding."""
        chunk = self.chunk(world_size)
        name = self.name if self.dim == 0 else f"{self.name} cut at {self.dim} in {world_size}"
        found = []
        for rank in range(world_size):
            start = min(rank * chunk, self.numel)
            held = min(chunk, self.numel - start)
            found.append([Piece(name, start, held)] if held else [])
            if held < chunk:
                found[-1].append(Piece("", 0, chunk - held))
        return found


class Members:
    """The parameters of one FSDP2 group."""

    def __init__(self, group: Any, names: dict[int, str], where: str = "") -> None:
        """Collect the parameters of ``group``.

        ``names``: the name of every module of the model, by id. ``where``: suffix of the
        parameters' names, which distinguishes experts of different ranks.
        """
        self.group = group
        self.members = [_member(parameter, names, where) for parameter in group.fsdp_params]
        #: called before each message, until one call raises no error
        self.before_first: Callable[[], None] | None = None
        self._announced: tuple[int, ...] | None = None  # parameters of the next message
        self._prepare: Any = None  # torch's own method while ours replaces it
        self._ends: Any = None  # torch's own end of a backward pass while ours replaces it
        self._touched: set[int] = set()
        self._hooks: dict[int, Any] = {}  # by id of the unsharded parameter
        #: returns, by rank, the pieces of a message with these parameters; cached
        self.pieces = functools.lru_cache(MOST_KNOWN)(self._pieces)

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """Return the process group that shards the parameters; None: nothing is sharded."""
        found: dist.ProcessGroup | None
        found = getattr(self.group.mesh_info, "shard_process_group", None)
        return found

    @property
    def place(self) -> tuple[int, int]:
        """Return the number of shards, and the index of this rank's shard."""
        return (1, 0) if self.shards is None else (self.shards.size(), self.shards.rank())

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Return the process group of the replicas; None if there is only one replica."""
        found = getattr(self.group.mesh_info, "replicate_process_group", None)
        return None if found is None or found.size() < 2 else found

    @property
    def trained(self) -> tuple[int, ...]:
        """Return the indices, in the group, of the parameters that require gradients."""
        return tuple(
            place
            for place, parameter in enumerate(self.group.fsdp_params)
            if parameter.sharded_param.requires_grad
        )

    @property
    def sharded(self) -> list[Any]:
        """Return this rank's shards of the parameters, which optimizers hold."""
        return [parameter.sharded_param for parameter in self.group.fsdp_params]

    def numel(self, places: Sequence[int], world_size: int) -> int:
        """Return the elements of a message with the gradients of these parameters."""
        return sum(self.members[place].chunk(world_size) for place in places) * world_size

    @property
    def hears_of_messages(self) -> bool:
        """Return whether torch passes the parameters of a message, so that no hooks are needed."""
        return hasattr(self.group, PREPARE)

    def follow_messages(self) -> None:
        """Record the parameters of every message from now on, if torch passes them."""
        if not self.hears_of_messages:
            return
        prepare = self._prepare = getattr(self.group, PREPARE)
        places = {id(parameter): n for n, parameter in enumerate(self.group.fsdp_params)}

        def noted(parameters: Any, gradients: Any, world_size: int) -> Any:
            self._announced = tuple(places[id(parameter)] for parameter in parameters)
            return prepare(parameters, gradients, world_size)

        setattr(self.group, PREPARE, noted)

    def watch(self) -> None:
        """Hook the unsharded parameters, which exist now, to record which get a gradient."""
        for place, parameter in enumerate(self.group.fsdp_params):
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is None or id(unsharded) in self._hooks or not unsharded.requires_grad:
                continue
            # torch keeps the hook where the garbage collector does not look: reference a set only
            self._hooks[id(unsharded)] = unsharded.register_post_accumulate_grad_hook(
                lambda _, touched=self._touched, place=place: touched.add(place)
            )

    def reduce_unused(self, names: Callable[[], Collection[str]]) -> None:
        """Make torch reduce zeros for the parameters ``names()`` that a backward pass did not use.

        ``names`` is called at the end of each backward pass of the group.
        """
        original = self._ends = self.group.post_backward

        def post_backward(*unused: Any) -> None:
            wanted = names()
            for place, parameter in enumerate(self.group.fsdp_params if wanted else ()):
                whole: Any = getattr(parameter, "_unsharded_param", None)
                lacks = whole is not None and whole.requires_grad and whole.grad is None
                lacks = lacks and parameter.unsharded_accumulated_grad is None
                if lacks and self.members[place].name in wanted:
                    whole.grad = torch.zeros_like(whole)
                    self._touched.add(place)
            original(*unused)

        self.group.post_backward = post_backward

    def unwatch(self) -> None:
        """Remove what ``follow_messages``, ``watch`` and ``reduce_unused`` have installed."""
        if self._ends is not None:
            del self.group.post_backward  # its class has torch's own
            self._ends = None
        if self._prepare is not None:  # a group of torch holds it itself, its class does not
            setattr(self.group, PREPARE, self._prepare)
            self._prepare, self._announced = None, None
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def of_message(self, numel: int, world_size: int) -> tuple[int, ...]:
        """Return the indices of the parameters in the next reduce-scatter, of ``numel`` elements.

        Raises RuntimeError if no set of parameters fits, and whatever ``before_first`` raises.
        """
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        touched = tuple(sorted(self._touched))
        self._touched.clear()
        ways = (self.trained, touched) if self._announced is None else (self._announced,)
        for places in ways:
            if self.numel(places, world_size) == numel:
                return places
        raise RuntimeError(
            f"hybridcomp: FSDP2 reduces {numel} elements, expected gradients of some of "
            f"{[member.name for member in self.members]}; please report this with the version of "
            "torch"
        )

    def _pieces(self, places: tuple[int, ...], world_size: int) -> tuple[tuple[Piece, ...], ...]:
        """Compute the result of ``pieces``."""
        rows: list[list[Piece]] = [[] for _ in range(world_size)]
        for place in places:
            of_rank = self.members[place].pieces(world_size)
            for row, more in zip(rows, of_rank, strict=True):
                row += more
        return tuple(map(tuple, rows))

    def cuts(self, world_size: int, places: Sequence[int] | None = None) -> list[int]:
        """Return the offsets in a rank's shard between the parameters ``places`` (None: all)."""
        chosen = range(len(self.members)) if places is None else places
        lengths = [self.members[place].chunk(world_size) for place in chosen]
        return [cut for cut in list(accumulate(lengths))[:-1] if cut]


def _member(parameter: Any, names: dict[int, str], where: str) -> Member:
    info = parameter._module_info
    module = names.get(id(info.module), "")
    size = torch.Size(parameter._orig_size)
    dim = parameter.fsdp_placement.dim
    return Member(
        (f"{module}.{info.param_name}" if module else info.param_name) + where,
        size.numel(),
        size[dim] if size else 1,
        dim,
    )


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the dotted name of every module of ``model``, by id; its first if it has several."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        found.setdefault(id(module), name)
    return found
