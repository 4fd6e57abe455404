"""Multiply matrices that are cut into q * q blocks, by SUMMA, with their gradients.

Rank (i, j) holds block (i, j) of activations: samples i, features j. Of a weight W, stored as
(outputs, inputs) as in torch, the rank holds outputs j and inputs i, so that C = A W^T has the
paper's form AB.

Source: Optimus, arXiv 2104.05343, section 3; van de Geijn and Watts, SUMMA (1997).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridcomp.job.autocast import cast, off
from hybridcomp.nn.tp2d.mesh import Mesh
from hybridcomp.nn.tp2d.mesh_axis_collectives import LineBlocks, LineSums

#: product of two blocks
Product = Callable[[Tensor, Tensor], Tensor]


def times_transposed(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.T


def transposed_times(left: Tensor, right: Tensor) -> Tensor:
    return left.T @ right


def _multiplied(product: Product, left: Tensor, right: Tensor) -> Tensor:
    """Multiply with autocast off, since the operands were cast before."""
    with off(left):
        return product(left, right)


def add_up(lefts: LineBlocks, rights: LineBlocks, product: Product) -> Tensor:
    """Compute form AB: sum the products of blocks broadcast along the row and the column.

    16-bit products are added in fp32 and rounded once.
    """
    total = None
    for left, right in zip(lefts, rights, strict=True):
        part = _multiplied(product, left, right)
        if total is None:
            dtype, total = part.dtype, part.to(torch.promote_types(part.dtype, torch.float32))
        else:
            total += part
    assert total is not None
    return total.to(dtype)


def hand_out(rights: LineBlocks, own: Tensor, sums: LineSums, product: Product) -> Tensor:
    """Compute form AB^T or A^T B: reduce the product with each rank's block to that rank."""
    for place, block in enumerate(rights):
        part = _multiplied(product, own, block)
        sums.add(place, part)
    return sums.own(own.dtype)


def _flat(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


class LinearFunction(torch.autograd.Function):
    """Compute ``values @ weight^T`` on the mesh; save only this rank's blocks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
        """Map (..., inputs / q) and (outputs / q, inputs / q) to (..., outputs / q)."""
        ctx.mesh = mesh
        ctx.save_for_backward(values, weight)
        rows = LineBlocks(mesh, "row", _flat(values), "activations")
        columns = LineBlocks(mesh, "column", weight, "weights")
        out = add_up(rows, columns, times_transposed)
        return out.view(*values.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return gradients of the values (form AB^T) and of the weight (form A^T B)."""
        values, weight = ctx.saved_tensors
        mesh, own = ctx.mesh, _flat(grad).contiguous()
        of_values, of_weight = ctx.needs_input_grad[:2]
        columns = LineBlocks(mesh, "column", weight, "weights") if of_values else None
        rows = LineBlocks(mesh, "row", _flat(values), "activations") if of_weight else None
        to_values = to_weight = None
        if columns is not None:
            sums = LineSums(mesh, "row", "gradients")
            to_values = hand_out(columns, own, sums, torch.mm).view(values.shape)
        if rows is not None:
            sums = LineSums(mesh, "column", "gradients")
            to_weight = hand_out(rows, own, sums, transposed_times)
        return to_values, to_weight, None


class ProjectFunction(torch.autograd.Function):
    """Compute ``values @ table^T`` with an embedding's table, words cut over mesh rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, table: Tensor, mesh: Mesh) -> Tensor:
        """Map (..., features / q) and (vocabulary / q, features / q) to (..., vocabulary / q).

        This is form AB^T, which here reduces activations.
        """
        ctx.mesh = mesh
        ctx.save_for_backward(values, table)
        columns = LineBlocks(mesh, "column", table, "weights")
        sums = LineSums(mesh, "row", "activations")
        out = hand_out(columns, _flat(values), sums, times_transposed)
        return out.view(*values.shape[:-1], table.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return gradients of the values (form AB) and of the table (form A^T B)."""
        values, table = ctx.saved_tensors
        mesh, own = ctx.mesh, _flat(grad)
        of_values, of_table = ctx.needs_input_grad[:2]
        to_values = to_table = None
        if of_values:
            rows = LineBlocks(mesh, "row", own, "gradients")
            columns = LineBlocks(mesh, "column", table, "weights")
            to_values = add_up(rows, columns, torch.mm).view(values.shape)
        if of_table:
            rows = LineBlocks(mesh, "row", own, "gradients")
            sums = LineSums(mesh, "column", "gradients")
            to_table = hand_out(rows, _flat(values), sums, _second_transposed_times_first)
        return to_values, to_table, None


def _second_transposed_times_first(own: Tensor, block: Tensor) -> Tensor:
    return block.T @ own


class LookUpFunction(torch.autograd.Function):
    """Select the table rows of tokens, as a product with a matrix of zeros and ones."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, table: Tensor, mesh: Mesh, scales: Tensor | None
    ) -> Tensor:
        """Look up tokens (...), equal along a row, in the table (vocabulary / q, features / q).

        ``scales`` (...): factor of each token's gradient; None: 1.
        """
        ctx.mesh, ctx.rows = mesh, table.shape[0]
        ctx.save_for_backward(tokens, scales)
        flat = tokens.reshape(-1)
        out = table.new_zeros(flat.numel(), table.shape[1])
        local = flat.remainder(ctx.rows)
        for place, block in enumerate(LineBlocks(mesh, "column", table, "weights")):
            out = torch.where(_is_here(flat, place, len(block)), block[local], out)
        return out.view(*tokens.shape, table.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        """Return the table's gradient A^T B; each rank makes A from the tokens, not broadcast."""
        tokens, scales = ctx.saved_tensors
        own, flat = _flat(grad), tokens.reshape(-1)
        if scales is not None:
            scales = scales.reshape(-1, 1).to(own.dtype)
            # gradients of padding may be NaN, so multiplying by 0 would not clear them
            own = torch.where(scales > 0, own * scales, 0.0)
        sums, local = LineSums(ctx.mesh, "column", "gradients"), flat.remainder(ctx.rows)
        for place in range(ctx.mesh.q):
            part = own.new_zeros(ctx.rows, own.shape[1])
            here = torch.where(_is_here(flat, place, ctx.rows), own, 0.0)
            sums.add(place, part.index_add_(0, local, here))
        return None, sums.own(own.dtype), None, None


def _is_here(tokens: Tensor, place: int, rows: int) -> Tensor:
    """Return whether each of the flat ``tokens`` is in the rows of position ``place``, (numel, 1).

    It returns a mask, since the length of a list would synchronize the host with a GPU.
    """
    return ((tokens >= place * rows) & (tokens < (place + 1) * rows)).unsqueeze(1)


class SpreadFunction(torch.autograd.Function):
    """All-gather a vector whose parts lie on the ranks of a column."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return mesh.gather(part, "column", "weights").view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mesh = ctx.mesh
        return mesh.scatter_sum(grad.reshape(mesh.q, -1), "column", "gradients"), None


def linear(values: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
    """Compute ``F.linear`` on the mesh, without a bias; see ``LinearFunction``."""
    values, weight = cast(values, weight)
    out: Tensor = LinearFunction.apply(values, weight, mesh)  # type: ignore[no-untyped-call]
    return out


def projected(values: Tensor, table: Tensor, mesh: Mesh) -> Tensor:
    """Compute logits from an embedding's table; see ``ProjectFunction``."""
    values, table = cast(values, table)
    out: Tensor = ProjectFunction.apply(values, table, mesh)  # type: ignore[no-untyped-call]
    return out


def looked_up(tokens: Tensor, table: Tensor, mesh: Mesh, scales: Tensor | None = None) -> Tensor:
    """Compute ``F.embedding`` on the mesh; see ``LookUpFunction``."""
    out: Tensor = LookUpFunction.apply(tokens, table, mesh, scales)  # type: ignore[no-untyped-call]
    return out


def spread(part: Tensor, mesh: Mesh) -> Tensor:
    """All-gather this column's part of a vector; see ``SpreadFunction``."""
    out: Tensor = SpreadFunction.apply(part, mesh)  # type: ignore[no-untyped-call]
    return out
