"""Convert the state of whole models on a mesh to and from that of the plain model.

Parameters that are not sharded over the mesh are equal on all ranks and stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job import small_messages
from hybridcomp.nn.tp2d.layers import Cut
from hybridcomp.nn.tp2d.layouts import WeightCut
from hybridcomp.nn.tp2d.mesh import Mesh

State = Mapping[str, Tensor]


def layouts_of(model: nn.Module) -> dict[str, WeightCut]:
    """Return the layouts of the sharded parameters of ``model``, by name."""
    return {
        f"{path}.{name}" if path else name: layout
        for path, module in model.named_modules()
        if isinstance(module, Cut)
        for name, layout in module.layouts.items()
        if module._parameters.get(name) is not None
    }


def join_states(
    states: Sequence[State], layouts: Mapping[str, WeightCut], q: int
) -> dict[str, Tensor]:
    """Join the states of all q * q ranks, ordered by mesh rank, to that of the plain model."""
    joined = {}
    for name, own in states[0].items():
        layout = layouts.get(name)
        parts = [state[name] for state in states]
        joined[name] = own.clone() if layout is None else layout.join(parts, q)
    return joined


def cut_state(
    plain: State, layouts: Mapping[str, WeightCut], q: int, row: int, column: int
) -> dict[str, Tensor]:
    """Cut the state of the plain model to that of rank (``row``, ``column``)."""
    return {
        name: whole if name not in layouts else layouts[name].cut(whole, q, row, column)
        for name, whole in plain.items()
    }


def gather_state(model: nn.Module, mesh: Mesh) -> dict[str, Tensor] | None:
    """Return the plain model's state, on the CPU, on the mesh's first rank; None elsewhere.

    A collective over the mesh. At any time at most one whole parameter is on a device.
    """
    layouts, joined = layouts_of(model), {}
    for name, own in model.state_dict().items():
        layout = layouts.get(name)
        if layout is None:
            joined[name] = own.detach().cpu().clone()
            continue
        parts = small_messages.gather(own, mesh.group)
        if mesh.rank == 0:
            joined[name] = layout.join(parts, mesh.q).cpu()
    return joined if mesh.rank == 0 else None


def load_state(model: nn.Module, mesh: Mesh, plain: State) -> Any:
    """Load this rank's part of the plain model's weights; sends no message.

    Returns the result of ``load_state_dict``. Raises ConfigError if names or shapes differ.
    """
    own, layouts = model.state_dict(), layouts_of(model)
    if own.keys() != plain.keys():
        odd = sorted(own.keys() ^ plain.keys())
        raise ConfigError("tp2d", Shown(odd[0]), "only one of the two models has this parameter")
    cut = cut_state(plain, layouts, mesh.q, mesh.row, mesh.column)
    for name, part in cut.items():
        if part.shape != own[name].shape:
            shapes = f"{name} of shape {tuple(part.shape)}, cut"
            todo = f"expected {tuple(own[name].shape)}; both models need the same sizes"
            raise ConfigError("tp2d", Shown(shapes), todo)
    return model.load_state_dict(cut)
