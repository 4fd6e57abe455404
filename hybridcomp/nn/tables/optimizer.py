"""Update the rows that a batch has used, on their owners, by torch's formulas."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job.together import ending
from hybridcomp.nn.tables.embedding import CachedEmbedding
from hybridcomp.nn.tables.making import agree_on_room

NAME = "RowOptimizer"
Method = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
#: method -> its states by name: True if a state has one number per row, False if one per value
STATES: Mapping[str, Mapping[str, bool]] = {
    "sgd": {},
    "adagrad": {"sum": False},
    "rowwise_adagrad": {"sum": True},
    "adam": {"exp_avg": False, "exp_avg_sq": False},
}
#: reason against methods that move all rows
MOVES_ALL = "it moves rows that no batch has touched; expected one of " + ", ".join(STATES)
#: values of rows by state, "weight" included
Rows = dict[str, Tensor]


def _check_numbers(
    method: Method, lr: float, betas: tuple[float, float], eps: float | None
) -> None:
    for name, given, is_set in (
        ("betas", betas, betas != (0.9, 0.999) and method != "adam"),
        ("eps", eps, eps is not None and method == "sgd"),
    ):
        if is_set:
            raise ConfigError(f"{NAME}.{name}", given, f"{method} has none; leave it out")
    numbers = [("lr", lr, math.inf), ("eps", eps or 0.0, math.inf)]
    for name, number, limit in [*numbers, *(("betas", beta, 1.0) for beta in betas)]:
        if not 0 <= number < limit:
            raise ConfigError(f"{NAME}.{name}", number, f"expected 0 to below {limit:g}")


class RowOptimizer(torch.optim.Optimizer):
    """SGD, Adagrad, row-wise Adagrad or SparseAdam for ``CachedEmbedding``; works with schedulers.

    A step applies the gradients of all backward passes since the last step, in order, and drops
    them. Rows equal, bit for bit, those of torch's ``SGD``, ``Adagrad`` (for dense gradients; with
    ``sparse_formula``, for sparse ones) and ``SparseAdam``.
    """

    #: torch's GradScaler then leaves its scale to ``step``, which refuses it: the anchors'
    #: gradients, which the scaler would divide, are zeros
    _step_supports_amp_scaling = True

    def __init__(
        self,
        tables: Iterable[CachedEmbedding],
        method: Method = "adagrad",
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = None,
        sparse_formula: bool = False,
        **others: Any,
    ) -> None:
        """Add the states of ``method`` to ``tables``; a collective over the ranks of each.

        Args:
            tables: the tables to update; a table may be in one RowOptimizer only.
            method: "rowwise_adagrad" keeps one number per row, the sum of mean squares.
            lr: learning rate, in ``param_groups`` for schedulers.
            betas: for "adam" only. eps: not for "sgd"; by default 1e-8 for "adam", else 1e-10.
            sparse_formula: for "adagrad": whether to use torch's formula for sparse gradients.

        Raises ConfigError for weight decay, momentum, dense Adam and other settings that move rows
        without gradients, on settings that the method does not have, on numbers that torch's
        optimizers refuse, and if there is no room for the states.
        """
        for key, other in others.items():
            raise ConfigError(f"{NAME}.{key}", other, f"{MOVES_ALL}, without {key}")
        if method not in STATES:
            raise ConfigError(f"{NAME}.method", method, MOVES_ALL)
        if sparse_formula and method != "adagrad":
            todo = "the other methods have one formula; leave it out"
            raise ConfigError(f"{NAME}.sparse_formula", True, todo)
        _check_numbers(method, lr, betas, eps)
        self.tables, self.method, self._is_sparse = list(tables), method, sparse_formula
        for number, table in enumerate(self.tables):
            self._check(table, self.tables[:number])
        usual = 1e-8 if method == "adam" else 1e-10
        defaults = {"lr": lr, "betas": betas, "eps": usual if eps is None else eps}
        super().__init__([table.anchor for table in self.tables], defaults)
        for table in self.tables:
            self._add_states(table)
            table.optimizer = weakref.ref(self)

    def _check(self, table: object, before: list[CachedEmbedding]) -> None:
        if not isinstance(table, CachedEmbedding):
            given = Shown(type(table).__name__)
            raise ConfigError(f"{NAME}.tables", given, "expected tables of CachedEmbedding")
        if table in before or (table.optimizer is not None and table.optimizer() is not None):
            todo = "its rows would be stepped twice; give it to one RowOptimizer, once"
            raise ConfigError(f"{NAME}.tables", Shown(f"{table.name} a second time"), todo)

    def _add_states(self, table: CachedEmbedding) -> None:
        host, weight = table.host, table.host.states["weight"]
        for name in [name for name in host.states if name != "weight"]:
            del host.states[name], table.slots.values[name]  # of a deleted optimizer
        kinds = {
            name: ((), torch.float32) if each else (weight.shape[1:], weight.dtype)
            for name, each in STATES[self.method].items()
        }
        nbytes = sum(host.nbytes(*kind) for kind in kinds.values())
        mine = {"method": self.method, "sparse_formula": str(self._is_sparse)}
        agree_on_room(table.owners, host, nbytes, mine, None)
        for name, (tail, dtype) in kinds.items():
            host.add(name, tail, dtype)
            table.slots.make(name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        todo = "its states are with the rows of its tables; make another one, and save and load"
        raise ConfigError(NAME, Shown("a deepcopy or pickle"), todo)

    def __getstate__(self) -> NoReturn:
        self.__deepcopy__(None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients."""
        super().zero_grad(set_to_none)
        for table in self.tables:
            table.drop_gradients()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows with gradients. No collective. Raises ConfigError under a GradScaler."""
        scaler = [vars(self).pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(given is not None for given in scaler):
            todo = "rows have no loss scale; train in bf16 or fp32, without a scaler"
            raise ConfigError(f"{NAME}.step", Shown("a GradScaler"), todo)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for anchor in group["params"]:
                table, state = self._table_of(anchor), self.state[anchor]
                if not table.row_gradients.is_empty:  # torch counts no step without a gradient
                    state["step"] = state.get("step", 0) + 1
                    self._step_rows(table, group, state["step"])
                table.drop_gradients()
        return loss

    def _table_of(self, anchor: Tensor) -> CachedEmbedding:
        anchors = [a for group in self.param_groups for a in group["params"]]
        return self.tables[next(n for n, known in enumerate(anchors) if known is anchor)]

    def _step_rows(self, table: CachedEmbedding, group: Mapping[str, Any], step: int) -> None:
        rows, gradients = table.gradients()
        slots, most = table.slots, max(1, table.slots.count)
        for low in range(0, len(rows), most):
            places = slots.hold(rows[low : low + most], is_asked=False)
            at = places.to(gradients.device)
            values = {name: part.index_select(0, at) for name, part in slots.values.items()}
            part = gradients[low : low + most].to(values["weight"].dtype)
            self._change(values, part, group, step)
            slots.update(places, values)

    def _change(self, rows: Rows, grad: Tensor, group: Mapping[str, Any], step: int) -> None:
        lr, eps = float(group["lr"]), group["eps"]
        if self.method == "sgd":
            rows["weight"].add_(grad, alpha=-lr)
        elif self.method == "rowwise_adagrad":
            rows["sum"] += grad.to(torch.float32).square().mean(1)
            std = rows["sum"].sqrt().add_(eps)
            rows["weight"].addcdiv_(grad, std[:, None].to(grad.dtype), value=-lr)
        elif self.method == "adam":
            _sparse_adam(rows, grad, lr, group["betas"], eps, step)
        elif self._is_sparse:
            rows["sum"].add_(grad.pow(2))
            rows["weight"].add_(grad / rows["sum"].sqrt().add_(eps), alpha=-lr)
        else:
            rows["sum"].addcmul_(grad, grad, value=1)
            rows["weight"].addcdiv_(grad, rows["sum"].sqrt().add_(eps), value=-lr)

    def square_norm(self) -> Tensor:
        """Return the sum of squares of the accumulated gradients of all tables and ranks, fp32.

        A gradient norm over ``model.parameters()`` does not include rows: add this sum to the
        norm's square, and clip rows by ``scale_gradients``. A collective over each table's ranks.
        """
        with ending("the norm of the gradients of rows"):
            square = torch.zeros((), dtype=torch.float32, device="cpu")
            for table in self.tables:
                own = table.gradients()[1].square().sum()
                square = square.to(own.device) + table.owners.total(own)
        return square

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the accumulated gradients."""
        for table in self.tables:
            table.gradients()[1].mul_(factor)


def _sparse_adam(
    rows: Rows, grad: Tensor, lr: float, betas: tuple[float, float], eps: float, step: int
) -> None:
    """Update the rows of a sparse gradient like ``torch.optim.SparseAdam``, bit for bit."""
    beta1, beta2 = betas
    old, old_sq = rows["exp_avg"], rows["exp_avg_sq"]
    update = grad.sub(old).mul_(1 - beta1)
    rows["exp_avg"] = old.add(update)
    update_sq = grad.pow(2).sub_(old_sq).mul_(1 - beta2)
    rows["exp_avg_sq"] = old_sq.add(update_sq)
    numer = update.add_(old)
    denom = update_sq.add_(old_sq).sqrt_().add_(eps)
    size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    rows["weight"].add_(-size * numer.div_(denom))
