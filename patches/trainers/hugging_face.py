"""Log figures and save state in Hugging Face's Trainer, and in TRL's trainers on top of it.

The Trainer's ``log`` writes to ``log_history`` (saved as ``trainer_state.json``), to the console
and to every reporter (TensorBoard, W&B, MLflow, ...), so the figures go there. A callback does not
know which Trainer calls it, so this one gets the Trainer as an argument.

Under DeepSpeed the Trainer's checkpoints hold hybridcomp's state already. Under FSDP2 and DDP
checkpoints hold weights and optimizer states only; there this callback writes a folder
``hybridcomp`` into each checkpoint, with the step count of ``start_step`` and ``ramp``, residuals,
and the state of guard and islands, and reads the folder when a run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

import hybridcomp
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.log import say
from hybridcomp.metric_names import trainer_name
from hybridcomp.patches.torch.attach import unwrapped
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.state import state_files
from hybridcomp.patches.trainers.figures import reporters, say_if_idle, take

if TYPE_CHECKING:
    from hybridcomp.config import CompressionConfig

#: the folder inside a checkpoint of the Trainer
FOLDER = "hybridcomp"


class HybridcompCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that compresses, logs and saves: ``add_callback(HybridcompCallback(trainer))``."""

    def __init__(
        self,
        trainer: Any,
        block: Mapping[str, Any] | str | Path | CompressionConfig | None = None,
        resume_from: str | Path | None = None,
    ) -> None:
        """Watch ``trainer``.

        Args:
            trainer: a ``transformers.Trainer``.
            block: as for ``hybridcomp.attach``, under FSDP2 and DDP; None: that of
                ``hybridcomp.install`` or HYBRIDCOMP_CONFIG. Under DeepSpeed it stands in the
                DeepSpeed configuration file.
            resume_from: the checkpoint that a run is resumed from; None: ``checkpoint-<step>`` in
                the output folder, which ``resume_from_checkpoint=True`` also takes.
        """
        self._trainer = trainer
        self._block = block
        self._resume_from = resume_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach a model under FSDP2 or DDP, and load the state beside its checkpoint.

        Raises ConfigError under DeepSpeed where the callback has a block.
        """
        if self._trainer.is_deepspeed_enabled:
            if self._block is not None:
                todo = 'under DeepSpeed it stands in the DeepSpeed file, as "compression"'
                raise ConfigError(BLOCK, Shown("a block of the callback"), todo)
            say_if_idle(self._trainer.model_wrapped)
            return
        self._attach(args)
        if state.global_step and self._models():
            folder = self._checkpoint(args, state, self._resume_from)
            if not folder.is_dir():
                say(f"{folder} is not there: steps are counted from 0, residuals start at zero")
                return
            state_files.load(folder, self._models())

    def _attach(self, args: Any) -> None:
        model = unwrapped(self._trainer.model_wrapped)
        if args.world_size == 1:
            say("one process sends nothing: nothing is compressed")
        elif any(reporters(model)):
            return  # attached by an earlier ``train()`` of this Trainer
        elif self._block is not None or isinstance(model, DistributedDataParallel | FSDPModule):
            hybridcomp.attach(model, self._block)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the report of this step, if there is one, on all ranks, as the Trainer does."""
        figures: dict[str, float] = take(self._trainer.model_wrapped)
        if figures:
            due = control.should_log  # ``log`` unsets it, but the step's losses are logged later
            # the Trainer's own ``log``, since TRL's override averages its figures at every call
            named = {trainer_name(name): value for name, value in figures.items()}
            Trainer.log(self._trainer, named)
            control.should_log = due

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write hybridcomp's state into the checkpoint that was just saved, on all ranks."""
        if models := self._models():
            state_files.save(self._checkpoint(args, state, None), models)

    def _models(self) -> list[Attached]:
        """Return the attached models of this Trainer; the process may have others, of another
        Trainer, which have their own checkpoints.
        """
        found = reporters(self._trainer.model_wrapped)
        return [model for model in found if isinstance(model, Attached)]

    @staticmethod
    def _checkpoint(args: Any, state: Any, named: str | Path | None) -> Path:
        where = named or Path(args.output_dir) / f"checkpoint-{state.global_step}"
        return Path(where) / FOLDER
