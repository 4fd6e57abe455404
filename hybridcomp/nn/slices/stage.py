"""SlicedStage: a pipeline stage as a module whose forward runs all slices through the pipeline.

An engine such as DeepSpeed's trains it like any module that returns its loss. Autograd sees all
slices as one operation, so every gradient arrives once, scaled like the loss, and the engine's
handling of gradients (buckets, ZeRO 1 and 2, accumulation over micro-batches, clipping) works
unchanged. Inside the operation, slices run on leaf tensors that share the parameters' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call

from hybridcomp.channels import Channels
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.nn.slices.kv_cache import KVCache
from hybridcomp.nn.slices.pipeline import SlicePipeline

Loss = Callable[[Tensor, Tensor], Tensor]


class _AllSlices(torch.autograd.Function):
    """Run forward and backward of all slices as one operation on a stage's parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        pipeline: SlicePipeline,
        batch: tuple[Tensor, Tensor],
        always: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Return the mean loss on the last stage, 0 on the others.

        ``always`` requires a gradient but gets none, so that a stage with only frozen parameters
        also takes part in the backward pass, for which its neighbours wait.
        """
        module = pipeline.stage
        assert isinstance(module, nn.Module)
        ctx.pipeline, ctx.leaves = pipeline, leaves_of(parameters)
        ctx.run = OnLeaves(module, ctx.leaves)
        with torch.enable_grad():
            ctx.passed = pipeline.forward(*batch, ctx.run)
        return ctx.passed.loss if pipeline.is_last else _nothing(pipeline)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the parameters' gradients, scaled by the last stage's gradient of the loss."""
        with torch.enable_grad():
            ctx.run.within(lambda: ctx.pipeline.backward(ctx.passed, grads[0]))
        grads_of_leaves = [leaf.grad for leaf in ctx.leaves]
        del ctx.passed, ctx.leaves, ctx.run  # frees the graphs of all slices
        return None, None, None, *grads_of_leaves


class OnLeaves:
    """Call a stage with other tensors in place of its parameters."""

    def __init__(self, module: nn.Module, leaves: Sequence[Tensor]) -> None:
        """Store ``leaves``, one for each parameter of ``module``, in order."""
        names = (name for name, _ in module.named_parameters())
        self._module, self._parameters = module, dict(zip(names, leaves, strict=True))

    def __call__(self, values: Tensor, past: KVCache) -> Tensor:
        out: Tensor = functional_call(self._module, self._parameters, (values, past))
        return out

    def within(self, do: Callable[[], None]) -> None:
        """Call ``do`` while the module's parameters are replaced by the leaves.

        Otherwise a layer that is recomputed in the backward pass would use the module's parameters
        and add gradients to them slice by slice, bypassing the engine.
        """
        inside = {f"stage.{name}": leaf for name, leaf in self._parameters.items()}
        functional_call(_Inside(self._module), inside, (do,))


class _Inside(nn.Module):
    """Parent module of a stage; its forward calls a given function."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, do: Callable[[], None]) -> None:
        do()


def leaves_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return leaves that share the memory of ``parameters`` but none of their hooks."""
    return [value.detach().requires_grad_(value.requires_grad) for value in parameters]


def _nothing(pipeline: SlicePipeline) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=pipeline.device)


class SlicedStage(nn.Module):
    """This rank's stage of a pipeline over token slices, as a module that returns the loss.

    Attributes:
        stage: the layers, ``stage(values, past)`` as for ``SlicePipeline``.
        slices: tokens of each slice; assign new ones only between steps, the same on all stages.
    """

    def __init__(
        self,
        stage: nn.Module,
        slices: Sequence[int],
        width: int,
        loss: Loss,
        *,
        group: ProcessGroup | None = None,
        channels: Callable[[], Channels | None] | None = None,
        ignore_index: int = -100,
    ) -> None:
        """Set up the stage; arguments as for ``SlicePipeline``, dtype and device from the
        parameters.

        Raises ConfigError on slices without tokens.
        """
        super().__init__()
        self.stage = stage
        self._settings = {
            "width": width, "loss": loss, "group": group, "channels": channels,
            "ignore_index": ignore_index,
        }  # fmt: skip
        self._pipeline = SlicePipeline(stage, slices, **self._settings)  # type: ignore[arg-type]

    @property
    def slices(self) -> tuple[int, ...]:
        return self._pipeline.slices

    @slices.setter
    def slices(self, lengths: Sequence[int]) -> None:
        self._pipeline = SlicePipeline(self.stage, lengths, **self._settings)  # type: ignore[arg-type]

    @property
    def count(self) -> int:
        return self._pipeline.count

    @property
    def pipeline(self) -> SlicePipeline:
        """Return the pipeline, set to the dtype and device of the parameters.

        Raises ConfigError if an engine has sharded the parameters (ZeRO 3, FSDP2).
        """
        every = list(self.stage.parameters())
        if any(hasattr(one, "ds_id") or hasattr(one, "placements") for one in every):
            raise ConfigError(
                "pp", Shown("a stage whose parameters are cut over ranks (ZeRO 3 or FSDP2)"),
                "token slices need them whole; use ZeRO 0, 1 or 2",
            )  # fmt: skip
        # a quantized base may begin with weights in integers or fp8, as hidden states never are
        wide = (one for one in every if one.is_floating_point() and one.itemsize > 1)
        first = next(wide, every[0])
        self._pipeline.dtype, self._pipeline.device = first.dtype, first.device
        return self._pipeline

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return a scalar: the mean loss of the batch (B, T) on the last stage, 0 on the others.

        Call its ``backward`` on all stages; this runs the backward passes of all slices. Raises
        ConfigError if the sequence length is not the sum of the slices.
        """
        pipeline = self.pipeline
        if not torch.is_grad_enabled():
            passed = pipeline.forward(tokens, labels)
            return passed.loss if pipeline.is_last else _nothing(pipeline)
        loss: Tensor = _AllSlices.apply(  # type: ignore[no-untyped-call]
            pipeline, (tokens, labels), _nothing(pipeline).requires_grad_(),
            *self.stage.parameters(),
        )  # fmt: skip
        return loss
