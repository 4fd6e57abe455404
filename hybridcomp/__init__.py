"""hybridcomp: error-bounded compression of the communication of 3D-parallel LLM training.

install(config=None) arm the patches: they act on engines whose config has a "compression" block
uninstall()          restore upstream, and detach all models
attach(model, block) compress a model under torch's fully_shard (FSDP2) or DistributedDataParallel
detach(model)        restore the native communication of a model
stateful(model)      the part of a model in torch.distributed.checkpoint
save_state(folder)   save residuals and step beside a checkpoint of megatron-core
load_state(folder)   load them
resync(engine)       make the next gather of parameters exact, where deltas are sent
island_group(block)  the ranks of this rank's island, for a model under FSDP2 or DDP
island_pg_collection()  the groups of this rank's island, for megatron-core
resume(engine, folder) go on from a checkpoint on another number of ranks
freeze(engine, what) stop training parameters, which then send no gradients
thaw(engine)         train them again
FreezeSchedule       freeze the first layers of a model during its training
FrozenFront          outputs of the frozen first layers by sample, kept on the host
ElasticSampler       sampler that yields each sample once on any number of ranks
generate(engine, prompts) answer prompts from the ranks of a training, stage by stage
train_draft(engine, text) a small model that drafts for generate; experimental
rollout(engine, tokenizer) generate as a RolloutEngine of DeepSpeed
publish(engine, to)  send versions of an engine's weights, exact deltas, to inference engines
WeightReceiver       the other side: a mirror of published weights
gathered(engine)     all weights on every rank for a roll-out, gathered once
load_config(source)  the block of a ds_config.json (path, dict or base64), or None
CompressionConfig    the block as a model
Attached             result of attach: detach, count_step, its part of a checkpoint
HybridcompError      base of every error that is raised on purpose; see ``hybridcomp.errors``
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridcomp.errors import (
    AgreementError,
    CheckpointError,
    CodecError,
    ConfigError,
    HybridcompError,
    PeerError,
    PublishError,
    SeamError,
    StateFileError,
)

if TYPE_CHECKING:
    from torch.nn import Module

    from hybridcomp.config import CompressionConfig, load_config
    from hybridcomp.elastic.frozen_front import FrozenFront
    from hybridcomp.elastic.sampler import ElasticSampler
    from hybridcomp.generation.draft import Draft
    from hybridcomp.patches.drafts import train_draft
    from hybridcomp.patches.freeze_schedule import FreezeSchedule
    from hybridcomp.patches.frozen import freeze, thaw
    from hybridcomp.patches.generated import generate, rollout
    from hybridcomp.patches.mcore.islands import island_pg_collection
    from hybridcomp.patches.resumed import resume
    from hybridcomp.patches.torch.attach import detach, stateful
    from hybridcomp.patches.torch.attached import Attached
    from hybridcomp.patches.torch.session import island_group
    from hybridcomp.publishing import (
        AppliedVersion,
        Publisher,
        StartedVersion,
        VersionSummary,
        WeightReceiver,
    )

    __version__: str

__all__ = [
    "AgreementError", "AppliedVersion", "Attached", "CheckpointError", "CodecError",
    "CompressionConfig", "ConfigError", "Draft", "ElasticSampler", "FreezeSchedule", "FrozenFront",
    "HybridcompError", "PeerError", "PublishError", "Publisher", "SeamError", "StateFileError",
    "StartedVersion", "VersionSummary", "WeightReceiver", "__version__", "attach", "detach",
    "freeze", "gathered", "generate", "install", "island_group", "island_pg_collection",
    "load_config", "load_state", "publish", "resume", "resync", "rollout", "save_state", "stateful",
    "train_draft", "thaw", "uninstall",
]  # fmt: skip


def install(config: Mapping[str, Any] | str | Path | CompressionConfig | None = None) -> None:
    """Arm all patches.

    Upstream packages that are already imported are patched at once, others on their import.
    Call it before engines and wrappers are built; existing models under FSDP2 and DDP are attached
    in their next forward pass. Another call without a config changes nothing. From then on
    hybridcomp's errors end a job as one line on one rank (``HYBRIDCOMP_TRACEBACK=1`` shows the
    traceback).

    Args:
        config: the block of this process, for jobs without a ds_config.json: a CompressionConfig, a
            block, or a dict or file that holds one under "compression"; None: the file that the
            environment variable HYBRIDCOMP_CONFIG names. A DeepSpeed engine keeps its own block.

    Raises SeamError when an imported upstream is outside the supported versions or was patched by
    another package (nothing stays half-patched), ConfigError on a config that cannot act, or when
    its DeepSpeed engine or Megatron's data-parallel wrapper was built before.
    """
    from hybridcomp.job import environment, error_exit
    from hybridcomp.log import say_once
    from hybridcomp.patches import registry
    from hybridcomp.patches.common import early_engines
    from hybridcomp.patches.torch import auto_attach
    from hybridcomp.seams import arming
    from hybridcomp.session import process, reporter

    error_exit.install()
    say_once(*environment.unknown())
    if config is not None:
        process.configure(config)
        reporter.say_kept(process.configured())
    early_engines.check(frozenset(arming.IN_PLACE), process.configured(), new=config is not None)
    registry.arm()
    auto_attach.arm(new=config is not None)


def uninstall() -> None:
    """Revert all patches, disarm those that wait for an import, and detach all attached models.

    Every rank calls it between two steps; all of them send natively afterwards.
    """
    from hybridcomp.collectives import topology
    from hybridcomp.job import error_exit
    from hybridcomp.patches import registry
    from hybridcomp.patches.torch import auto_attach

    error_exit.uninstall()
    registry.disarm()
    auto_attach.disarm()
    topology.let_go()


def attach(
    model: Module, block: Mapping[str, Any] | str | Path | CompressionConfig | None = None
) -> Attached | None:
    """Compress the messages of a model under torch's FSDP2 or DDP.

    Every rank calls it after ``fully_shard`` or ``DistributedDataParallel`` and before the first
    forward pass, for the same models in the same order. Under ``hybridcomp.run``, or after
    ``install``, models are attached automatically.

    Args:
        model: the root of ``fully_shard``, the DistributedDataParallel, what torch.compile made of
            them, or a module around one DistributedDataParallel.
        block: a CompressionConfig, a block, or a dict or file that holds one under "compression";
            None: that of ``install`` or HYBRIDCOMP_CONFIG.

    Returns the attached model, a ``Stateful`` of torch.distributed.checkpoint; None without a
    block. Raises ConfigError on a setting that cannot act here, AgreementError where ranks have
    different blocks, SeamError on a version of torch outside the window.
    """
    from hybridcomp.job import error_exit
    from hybridcomp.patches.torch.attach import attach

    # so that differing blocks end the job in one line instead of a traceback on each rank
    error_exit.install()
    return attach(model, block)


def save_state(folder: str | Path, loss_scale: float | None = None) -> None:
    """Write the residuals of error feedback and the step, for jobs on megatron-core, FSDP2 and DDP.

    Every rank calls it where the job saves its checkpoint; a restart needs all ranks' files.
    DeepSpeed's checkpoints contain this state: nothing is written for them.

    Args:
        folder: one for each checkpoint.
        loss_scale: the factor on the gradients; None: that of the last optimizer step, under FSDP2
            and DDP that of the GradScaler.

    Raises ConfigError in a process without a block.
    """
    from hybridcomp.patches.torch import steps
    from hybridcomp.patches.torch.state import state_files

    state_files.save(Path(folder), steps.living(), loss_scale)


def load_state(folder: str | Path, loss_scale: float | None = None) -> None:
    """Load the files of ``save_state``; every rank calls it, before the first step.

    On another number of data-parallel ranks the sum of the residuals is kept; with other tensor,
    pipeline or expert groups, or without such files, they start at zero, with a notice.

    Args:
        folder: as for ``save_state``.
        loss_scale: the factor on the gradients from now on; None: the saved one, under FSDP2 and
            DDP that of the GradScaler.

    Raises ConfigError in a process without a block.
    """
    from hybridcomp.patches.torch import steps
    from hybridcomp.patches.torch.state import state_files

    state_files.load(Path(folder), steps.living(), loss_scale)


def resync(engine: Any = None) -> None:
    """Make the next gather of parameters exact, where ``"zero"`` sends deltas or uses stepcode.

    Use it after rewriting master weights by hand: deltas would need several gathers to carry a
    large change. Loading a checkpoint does it automatically. A call on one rank is enough.

    Args:
        engine: the DeepSpeed engine, or the model under FSDP2; None for megatron-core, and for a
            process with one engine.

    Raises ConfigError where nothing is compressed.
    """
    from hybridcomp.channels import channels_of
    from hybridcomp.errors import ConfigError
    from hybridcomp.session import process

    channels = process.current() if engine is None else channels_of(engine)
    if channels is None and engine is not None:
        from hybridcomp.patches.torch.attach import channels_of_model

        channels = channels_of_model(engine)
    if channels is None:
        whose = "this process" if engine is None else "this engine"
        raise ConfigError("compression", "nothing", f"{whose} has no block; do not call resync")
    channels.resync()


def publish(
    engine: Any,
    to: Any,
    *,
    every: int = 1,
    anchor_every: int = 100,
    dtype: str | None = None,
    codec: str = "auto",
    keep: int | None = None,
    names: str = "own",
    still_s: float = 60.0,
    limit_s: float = 600.0,
    as_: str | None = None,
    lora: str | None = None,
) -> Publisher:
    """Publish the weights of an engine, version by version, to inference engines.

    Every rank calls it, after a checkpoint was loaded. Training does not change.

    Args:
        engine: an engine of DeepSpeed (ZeRO 0 to 3), a DistributedDataParallel of torch or
            megatron-core (a list of them with virtual pipeline stages), or the root of fully_shard.
        to: a folder (``file:///...``), on the first rank a socket, a stream with ``write``, or a
            process group of torch.distributed that the first rank shares with the receivers. Each
            island of ``sync`` needs a destination of its own.
        every: optimizer steps from one version to the next, for ``Publisher.stepped``.
        anchor_every: versions from one full version to the next.
        dtype: "bf16" or "fp16" for wider weights; None: what the model computes with.
        codec: "stepcode" for exact steps, "raw" for values as they are, or "auto": stepcode, and on
            streams and groups raw where coding takes longer than it saves.
        keep: full versions that remain in a folder, with those that follow them; None: all.
        names: "own", or "hf": Hugging Face's names and tensors, from megatron-core models of the
            families of Llama and GPT-2.
        still_s: seconds for which the receiver at a socket may accept no data before PublishError.
        limit_s: seconds that a version may take while training goes on (``publish(wait=False)``);
            if it takes longer, the next version raises PublishError.
        as_: "fp8" (E4M3 in blocks of 128 x 128) or "mxfp8" (in blocks of 32) for matrices that
            engines hold in 8 bits; None: 16 bits. The block's key is ``as``.
        lora: for a PEFT model, "adapters": only the adapters, under the names of PEFT's
            checkpoints; "merged": the base weights with the adapters added, under the base model's
            names; None: the weights as the model holds them.

    Raises ConfigError where the engine's weights or the destination do not fit.
    """
    from hybridcomp.patches.published import publish

    given = {"every": every, "anchor_every": anchor_every, "keep": keep, "limit_s": limit_s}
    return publish(engine, to, names, still_s, as_, lora, **given, dtype=dtype, codec=codec)


def gathered(engine: Any) -> AbstractContextManager[Module]:
    """Have every rank compute with all weights: ``with hybridcomp.gathered(engine) as model:``.

    For roll-outs under ZeRO 3 and FSDP2: the weights are gathered once, as the block's key
    ``gathered`` says, and any forward pass sends nothing then. The model is in eval mode, without
    gradients. Every rank enters between two optimizer steps and takes no optimizer step inside. On
    leaving, also by an error, the model is as before.

    Args:
        engine: an engine of DeepSpeed or the root of fully_shard. Under ZeRO 0 to 2 and
            DistributedDataParallel nothing is sent.

    Returns a context manager that yields the model, without the engine around it. Entering raises
    ConfigError where a rank has no memory for the weights (PeerError on the others), and on engines
    whose ranks hold parts of a layer or stages. Leaving raises PeerError where the body has failed
    on another rank.
    """
    from hybridcomp.patches.gathered import gathered

    return gathered(engine)


#: lazily imported public names -> their module, so that `import hybridcomp` loads neither
#: pydantic nor torch
_LATE = {
    "AppliedVersion": "publishing",
    "Attached": "patches.torch.attached",
    "CompressionConfig": "config",
    "Draft": "generation.draft",
    "ElasticSampler": "elastic.sampler",
    "FreezeSchedule": "patches.freeze_schedule",
    "FrozenFront": "elastic.frozen_front",
    "Publisher": "publishing",
    "StartedVersion": "publishing",
    "VersionSummary": "publishing",
    "WeightReceiver": "publishing",
    "detach": "patches.torch.attach",
    "generate": "patches.generated",
    "freeze": "patches.frozen",
    "island_group": "patches.torch.session",
    "island_pg_collection": "patches.mcore.islands",
    "load_config": "config",
    "resume": "patches.resumed",
    "rollout": "patches.generated",
    "stateful": "patches.torch.attach",
    "train_draft": "patches.drafts",
    "thaw": "patches.frozen",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
