"""Make a model compute with all its weights in eval mode, and restore it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.errors import PeerError
from hybridcomp.generation.gathered import WeightGather, free_nbytes
from hybridcomp.job import small_messages
from hybridcomp.job.gates import gate
from hybridcomp.job.together import together

WHAT = "hybridcomp.gathered"


@contextmanager
def rolling_out(
    model: nn.Module,
    gather: Callable[[], WeightGather | None],
    put: Callable[[Sequence[Tensor], ExitStack], None],
    ranks: tuple[int, ...] | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Iterator[nn.Module]:
    """Yield ``model`` with whole weights, in eval mode and without gradients; all ranks enter.

    1 all ranks check that the weights fit
    2 all ranks, or none, gather the weights and put them into the model
    3 the body runs, in which hybridcomp sends nothing
    4 all ranks restore the model, and exchange whether their body has failed

    Args:
        gather: checks the engine and returns the gather; None: the model already has all weights.
        put: puts the weights into the model; adds a callback to the stack that removes them.
        ranks, group: global ranks that enter, and their process group; None: all.
        device: device of the message in step 4.

    Raises ConfigError on all ranks if the weights do not fit on one. If the body fails on a rank,
    that rank raises the body's error, and ranks whose body ended well raise PeerError.
    """
    with ExitStack() as undo:
        with together(WHAT, undo.close, ranks=ranks):
            gathered = gather()
            if gathered is not None:
                gathered.check(free_nbytes(gathered.device))
                gate()  # every rank sends its first message only if the weights fit on all ranks
                put(gathered.gather(), undo)
            _evaluate(model, undo)
        failed: BaseException | None = None
        try:
            with torch.no_grad():
                yield model
        except Exception as error:
            failed = error
            raise
        finally:
            undo.close()
            first = _first_to_fail(failed is not None, group, device)
        if first is not None:
            raise PeerError.naming_rank(
                f"{WHAT}: rank {first}: its roll-out raised an error; this rank's ended well, and "
                "the weights are as before on all ranks"
            )


def _first_to_fail(
    failed: bool, group: dist.ProcessGroup | None, device: torch.device
) -> int | None:
    """Return the first global rank whose body has failed, or None; a collective."""
    none = torch.iinfo(torch.int32).max
    mine = torch.tensor(dist.get_rank() if failed else none, dtype=torch.int32, device=device)
    rank = int(small_messages.least(mine, group))
    return None if rank == none else rank


def _evaluate(model: nn.Module, undo: ExitStack) -> None:
    """Put the model into eval mode; add a callback to ``undo`` that restores all modes."""
    modes = [(module, module.training) for module in model.modules()]

    def put_back() -> None:
        for module, mode in modes:
            module.training = mode

    undo.callback(put_back)
    model.eval()


def without_hooks(handles: Iterable[Any], undo: ExitStack) -> None:
    """Remove the hooks of ``handles`` (RemovableHandle); ``undo`` restores them in order."""
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            undo.callback(_restore, hooks, dict(hooks), handle.id)
            del hooks[handle.id]


def _restore(hooks: dict[int, Any], before: dict[int, Any], key: int) -> None:
    """Restore a removed hook to its former place; hooks added since ``before`` come last."""
    now = dict(hooks)
    there = {other: hook for other, hook in before.items() if other == key or other in now}
    hooks.clear()
    hooks.update({**there, **now})
