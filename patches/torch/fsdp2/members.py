"""Map messages of an FSDP2 group to parameters: torch's slots pass no names.

A message is a rank-major table: a row for every rank of the shard group, with that rank's chunk of
each parameter. Rank r's chunk of a parameter sharded at dimension 0 is its rows ``[r * c, (r + 1)
* c)``, with c = ceil(rows / ranks), padded with zeros. A parameter sharded at another dimension is
split into columns, not contiguous in its flattened values: each chunk's residual has its own name.

Gradients of a parameter that took no part in the pass are left out of the message. Torch 2.15 calls
``_prepare_reduce_scatter_inputs`` with the parameters of each message, in the order of the message,
which may differ from the group's. Before 2.15, the parameters with a gradient at the end of the
group's backward pass are those of its message.
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
from hybridcomp.job.parameter_names import plain_name

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

    def follow_messages(self) -> None:
        """Record the parameters of every message from now on."""
        if not hasattr(self.group, PREPARE):
            original = self.group.post_backward

            def post_backward(*unused: Any) -> None:
                # torch 2.13 can reduce zeros for parameters without a gradient
                all_trained = getattr(self.group, "reduce_scatter_unused_params", False)
                self._announced = tuple(
                    place
                    for place, parameter in enumerate(self.group.fsdp_params)
                    if _has_gradient(parameter) or (all_trained and _is_trained(parameter))
                )
                original(*unused)

            self.group.post_backward = post_backward
            return
        prepare = self._prepare = getattr(self.group, PREPARE)
        places = {id(parameter): n for n, parameter in enumerate(self.group.fsdp_params)}

        def noted(parameters: Any, gradients: Any, world_size: int) -> Any:
            self._announced = tuple(places[id(parameter)] for parameter in parameters)
            return prepare(parameters, gradients, world_size)

        setattr(self.group, PREPARE, noted)

    def reduce_unused(self, names: Callable[[], Collection[str]]) -> None:
        """Make torch reduce zeros for the parameters ``names()`` that a backward pass did not use.

        ``names`` is called at the end of each backward pass of the group.
        """
        original = self.group.post_backward

        def post_backward(*unused: Any) -> None:
            wanted = names()
            for place, parameter in enumerate(self.group.fsdp_params if wanted else ()):
                lacks = _is_trained(parameter) and not _has_gradient(parameter)
                if lacks and self.members[place].name in wanted:
                    parameter._unsharded_param.grad = torch.zeros_like(parameter._unsharded_param)
            original(*unused)

        self.group.post_backward = post_backward

    def unwatch(self) -> None:
        """Remove what ``follow_messages`` and ``reduce_unused`` have installed."""
        vars(self.group).pop("post_backward", None)  # its class has torch's own
        if self._prepare is not None:  # a group of torch holds it itself, its class does not
            setattr(self.group, PREPARE, self._prepare)
            self._prepare = None

    def of_message(self, numel: int, world_size: int) -> tuple[int, ...]:
        """Return the indices of the parameters in the next reduce-scatter, of ``numel`` elements.

        Raises RuntimeError if no set of parameters fits, and whatever ``before_first`` raises.
        """
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        if self._announced is not None and self.numel(self._announced, world_size) == numel:
            return self._announced
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


def _is_trained(parameter: Any) -> bool:
    """Return whether an ``FSDPParam`` was gathered and requires gradients."""
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and bool(whole.requires_grad)


def _has_gradient(parameter: Any) -> bool:
    """Return whether an ``FSDPParam`` has a gradient that was not reduced yet."""
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and (
        whole.grad is not None or parameter.unsharded_accumulated_grad is not None
    )


def _member(parameter: Any, names: dict[int, str], where: str) -> Member:
    info = parameter._module_info
    module = names.get(id(info.module), "")
    size = torch.Size(parameter._orig_size)
    dim = parameter.fsdp_placement.dim
    return Member(
        plain_name(f"{module}.{info.param_name}" if module else info.param_name) + where,
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
