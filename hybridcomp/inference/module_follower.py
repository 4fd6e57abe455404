"""Update a plain torch module, such as a model of transformers, with published weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line
from hybridcomp.inference.checks import refuse_quantized
from hybridcomp.inference.follower import Follower, Patched
from hybridcomp.job.parameter_names import plain_name
from hybridcomp.publishing import WeightReceiver

#: a receiver accepts at most twice the module's number of weights plus this many
SPARE_WEIGHTS = 1 << 20


class ModuleFollower:
    """Keep a module's parameters at a published version: call ``update()`` before generating.

    The module must have the trained module's parameters, under the same names and in the published
    dtype. Buffers are not updated. No ``close`` is needed: the mirror and fingerprints are freed
    with this object.
    """

    def __init__(
        self, module: Module, source: Any, *, wait_s: float = 60.0, verify: bool = True
    ) -> None:
        """Hold the module; nothing is read before ``update``.

        Args:
            module: module whose parameters are updated in place, on their own device.
            source: as for ``hybridcomp.WeightReceiver``.
            wait_s: seconds to wait for a version that is announced but not available yet.
            verify: whether to check that nobody else has written the weights since the last update.
        """
        count = sum(parameter.numel() for parameter in module.parameters())
        # a larger model may pass this limit; ``check`` then names the parameters that do not fit
        self.receiver = WeightReceiver(source, weights=SPARE_WEIGHTS + 2 * count)
        self._follower = Follower(
            self.receiver, _ModuleWeights(module, self.receiver), wait_s=wait_s, verify=verify
        )

    @property
    def version(self) -> int | None:
        """Return the version that the module holds; None if it holds none completely."""
        return self._follower.version

    @property
    def pause_s(self) -> float:
        """Return for how many seconds the last update wrote into the module."""
        return self._follower.pause_s

    def update(self, version: int | None = None) -> tuple[str, ...]:
        """Bring the module to ``version``, or to the newest one if None.

        Returns the names of parameters that were written. Raises PublishError, in one line; the
        module then keeps its version.
        """
        return self._follower.follow(version)


class _ModuleWeights:
    """The parameters of a module as a ``Follower`` writes them."""

    def __init__(self, module: Module, receiver: WeightReceiver) -> None:
        self._module, self._receiver = module, receiver

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the module's parameters, tied ones only once."""
        return self._module.named_parameters()

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError if names, shapes or dtypes differ, or weights are quantized."""
        config = getattr(self._module, "config", None)
        refuse_quantized(getattr(config, "quantization_config", None), self.weights())
        mine = self._by_name()
        self._receiver.check_engine(mine.items())
        for name, _ in weights:
            if name not in mine:
                raise PublishError(
                    f"version {self._receiver.version}: {one_line(name)} is published and not in "
                    "the engine; build the engine from the configuration of the trained model"
                )
        self._check_ties(mine)

    def _check_ties(self, mine: dict[str, Tensor]) -> None:
        """Raise PublishError if the module does not tie the same parameters as the trained model.

        If only the module ties two parameters, the second write would overwrite the first; if only
        the trained model does, one of the two tensors would stay outdated.
        """
        aliases, by_weight, by_tensor = self._receiver.aliases, dict[str, str](), dict[int, str]()
        for name, tensor in mine.items():
            published = aliases.get(name, name)
            first = by_weight.setdefault(published, name)
            other = by_tensor.setdefault(id(tensor), name)
            if mine[first] is not tensor:
                raise self._ties(first, name, "two tensors in the engine and one")
            if aliases.get(other, other) != published:
                raise self._ties(other, name, "one tensor in the engine and two")

    def _ties(self, first: str, second: str, what: str) -> PublishError:
        return PublishError(
            f"version {self._receiver.version}: {one_line(first)} and {one_line(second)} are {what}"
            " in the trained model; tie the same parameters (tie_word_embeddings)"
        )

    @torch.no_grad()
    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights into the module."""
        mine = self._by_name()
        for name, value in weights:
            mine[name].copy_(value)

    def prepare_changes(self, patches: list[Patched]) -> Callable[[], object]:
        """Return a function that writes the changed values to their places."""
        return functools.partial(self._write, patches)

    @torch.no_grad()
    def _write(self, patches: list[Patched]) -> None:
        mine = self._by_name()
        for patch in patches:
            target = mine[patch.name]
            offsets, values = patch.offsets.to(target.device), patch.values.to(target.device)
            if target.is_contiguous():
                target.view(-1)[offsets] = values
            else:
                target[torch.unravel_index(offsets, target.shape)] = values

    def _by_name(self) -> dict[str, Tensor]:
        """Return the parameters by name, tied ones under each of their names."""
        named = self._module.named_parameters(remove_duplicate=False)
        return {plain_name(name): parameter for name, parameter in named}
