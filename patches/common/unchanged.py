"""Check whether a model still has the same parameters: objects, shapes and dtypes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hybridcomp.errors import PublishError
from hybridcomp.job.parameter_names import named_once


class KnownParameters:
    """Holds a model's parameters weakly; a call checks that the model still has the same ones.

    ``half()``, ``module.weight = nn.Parameter(...)``, ``load_state_dict(assign=True)`` and
    quantizers replace parameters, and the new ones would not be published.
    """

    def __init__(self, model: nn.Module) -> None:
        """Record the parameters of ``model``, and which of them are tied."""
        found, self._aliases = named_once(model)
        self._model = weakref.ref(model)
        self._known = {name: (weakref.ref(one), _facts(one)) for name, one in found.items()}

    def __call__(self) -> None:
        """Raise PublishError if the model has other parameters now."""
        model = self._model()
        assert model is not None, "the engine of a publisher is alive"
        found, aliases = named_once(model)
        for name in sorted({*found, *self._known}):
            then, now = self._known.get(name), found.get(name)
            if then is None or now is None:
                what = "it is new" if then is None else "it is gone, or tied to another one"
                raise changed(name, what)
            if then[0]() is not now:
                raise changed(name, "it is another Parameter than when this publisher was made")
            if then[1] != (facts := _facts(now)):
                raise changed(name, f"expected {_shown(then[1])}, found {_shown(facts)}")
        for name in sorted(dict(aliases.items() ^ self._aliases.items())):
            raise changed(name, "it is tied to another parameter than it was")


def changed(name: str, what: str) -> PublishError:
    """Return the error about a parameter that differs from the published one."""
    return PublishError(
        f"{name}: {what}; make a new publisher with hybridcomp.publish, for another dtype or other "
        "parameters to an empty folder"
    )


def _facts(parameter: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the whole shape, and the dtype that the model computes with."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return shape, getattr(parameter, "ds_tensor", parameter).dtype


def _shown(facts: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{facts[0]} of {str(facts[1]).removeprefix('torch.')}"
