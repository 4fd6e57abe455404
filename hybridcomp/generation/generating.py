"""Answer prompts on an engine's stages: check arguments, try layers, run, restore the model."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridcomp.channels import Channels, native_nbytes
from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.wire import transport
from hybridcomp.config import CompressionConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.config.generation import GenerateConfig
from hybridcomp.errors import AgreementError, ConfigError
from hybridcomp.generation.flight import Flight, GenerationFigures, Hops
from hybridcomp.generation.frames import KEY
from hybridcomp.generation.host_layers import HostLayers
from hybridcomp.generation.past import KeyStore
from hybridcomp.generation.picking import Picker, Sampling, StageReader
from hybridcomp.generation.requests import Requests
from hybridcomp.generation.stage_runner import StageRunner
from hybridcomp.job import agreement, peer_liveness, small_messages
from hybridcomp.job.together import together


@dataclass(frozen=True)
class GeneratingStage:
    """This rank's stage of an engine, as an engine's adapter describes it.

    Attributes:
        layers: layers of the stage, called as in ``StageRunner``.
        modules: the layers' modules, whose mode and buffers are restored.
        group: the ranks of this pipeline, in the order of stages; gloo between CPUs.
        tensor: the tensor-parallel group that shares the stage's layers; None: only this rank.
        replica: number of this pipeline in the job.
        channels: the engine's channels; None: the job has no block.
        is_cut: whether the last layer returns only this tensor rank's part of the vocabulary.
    """

    layers: Sequence[Callable[..., Any]]
    modules: Sequence[nn.Module]
    device: torch.device
    group: ProcessGroup
    tensor: ProcessGroup | None
    replica: int
    channels: Channels | None
    is_cut: bool
    settings: GenerateConfig
    min_bytes: int

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Channels]:
        """Put the stage into eval mode and yield channels for generation; restore it afterwards."""
        config = CompressionConfig.parse(self.settings.block(self.min_bytes))
        channels, own = Channels(config), self.channels
        modes = [(inner, inner.training) for module in self.modules for inner in module.modules()]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            try:
                for inner, _ in modes:
                    inner.training = False
                if own is not None:
                    before, own.by_dimension = own.by_dimension, channels.by_dimension
                yield channels
            finally:
                for inner, mode in modes:
                    inner.training = mode
                if own is not None:
                    own.by_dimension = before
                    own.ledger.add_generated(channels.ledger)


def answer(
    stage: GeneratingStage,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    *,
    in_flight: int | None = None,
    tokenizer: int | None = None,
    picker: Picker | None = None,
    tree: int = 1,
    wants: int = 1,
    figures: GenerationFigures | None = None,
) -> list[list[int]]:
    """Answer ``prompts``; every rank of the job calls it, with equal arguments within a replica.

    Args:
        prompts: token ids of each prompt, at least one id.
        tokens: maximum tokens of an answer.
        in_flight: batches in flight; None: the block's value.
        tokenizer: number of the tokenizer's tokens, checked against the logits; None: no check.
        picker: replaces ``sampling``, which then only defines where answers stop.
        tree: maximum tokens that ``picker`` requests per sequence and pass.
        wants: for how many of a prompt's last tokens ``picker`` gets logits.

    Raises on every rank a ConfigError, or a PeerError that names the failed rank.
    """
    with together(KEY):
        try:
            return _answered(
                stage, prompts, tokens, sampling, in_flight, tokenizer, picker or sampling, tree,
                wants, figures or GenerationFigures(),
            )  # fmt: skip
        except (RuntimeError, OSError) as problem:
            lost = peer_liveness.lost(problem, KEY)
            if lost is None:
                raise
            lost.names_rank = True
            raise lost from problem


def _answered(
    stage: GeneratingStage, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling,
    in_flight: int | None, tokenizer: int | None, picker: Picker, tree: int,
    wants: int, figures: GenerationFigures,
) -> list[list[int]]:  # fmt: skip
    settings, line = stage.settings, Group.of(stage.group)
    _check(prompts, tokens, settings.room, in_flight)
    _agree(stage, [prompts, tokens, repr(sampling), in_flight, tree, wants])
    asked = settings.in_flight if in_flight is None else in_flight
    slots = (2 * line.size if line.size > 1 else 1) if asked == "auto" else asked
    requests = Requests(
        prompts,
        tokens,
        sampling.stops,
        batch=settings.batch,
        slots=slots,
        tree=tree,
        wants=wants,
    )
    with (
        stage.prepared() as channels,
        HostLayers(
            stage.layers, stage.modules, stage.device, settings.weights_gb, channels.ledger
        ) as host,
        contextlib.closing(KeyStore(settings.room + tree)) as store,
    ):
        runner = StageRunner(
            stage.layers, store, stage.device, is_first=line.rank == 0,
            is_last=line.rank == line.size - 1, whole=_whole(stage, channels), fetch=host.fetch,
        )  # fmt: skip
        if isinstance(picker, StageReader):
            picker.begin(runner)
        width, dtype, vocabulary = _tried(runner, line)
        _check_ids(prompts, vocabulary, tokenizer)
        parts = stage.tensor if width % (stage.tensor.size() if stage.tensor else 1) == 0 else None
        hops = Hops(channels, stage.group, parts, width, dtype, stage.device)
        with Flight(runner, hops, requests, settings.batch, figures) as flight:
            flight.run(picker)
    answers = requests.answers if runner.is_first else None
    shared = small_messages.gather_objects(answers, stage.group)[0]
    assert shared is not None, "the first stage has the answers"
    return shared


def _check(prompts: Sequence[Sequence[int]], tokens: int, room: int, in_flight: int | None) -> None:
    """Raise ConfigError for invalid prompts or lengths."""
    if not prompts or tokens < 1:
        asked = Shown(f"{len(prompts)} prompts and answers of {tokens} tokens")
        raise ConfigError(KEY, asked, "expected at least one prompt and one token")
    if in_flight is not None and in_flight < 1:
        raise ConfigError(f"{KEY}: in_flight", in_flight, "expected at least one batch")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(
                f"{KEY}: prompt {number}", Shown("no tokens"), "expected at least one"
            )
        if len(prompt) + tokens > room:
            asked = Shown(f"{len(prompt)} tokens and an answer of up to {tokens}")
            todo = f"room is {room} tokens a sequence: raise it, or ask for fewer"
            raise ConfigError(f"{KEY}: prompt {number}", asked, todo)


def _check_ids(prompts: Sequence[Sequence[int]], size: int, tokenizer: int | None) -> None:
    """Raise ConfigError if the prompts' ids or the tokenizer do not fit the number of logits.

    ``size``: number of logits, which may exceed the tokenizer's tokens, since models pad it.
    """
    if tokenizer is not None and not tokenizer <= size <= tokenizer + max(127, size // 32):
        sizes = Shown(f"{tokenizer} tokens, and a model with logits of {size}")
        raise ConfigError(f"{KEY}: tokenizer", sizes, "expected the model's own tokenizer")
    for number, prompt in enumerate(prompts):
        for token in prompt:
            if not 0 <= token < size:
                todo = f"the model has {size}; use its own tokenizer"
                raise ConfigError(f"{KEY}: prompt {number}", Shown(f"token {token}"), todo)


def _agree(stage: GeneratingStage, said: object) -> None:
    """Raise AgreementError if the ranks of a replica were called with different arguments."""
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    mine = {"replica": stage.replica, "asked": digest, "settings": stage.settings.model_dump_json()}
    every = agreement.tell(mine, what=KEY)
    first: dict[int, tuple[int, dict[str, Any]]] = {}
    for rank, other in enumerate(every):
        known, theirs = first.setdefault(other["replica"], (rank, other))
        if theirs != other:
            what = "prompts or arguments" if theirs["asked"] != other["asked"] else "settings"
            text = f"ranks {known} and {rank} share a replica and have other {what}"
            raise AgreementError(f"{KEY}: {text}; give all ranks of a replica the same")


def _tried(runner: StageRunner, line: Group) -> tuple[int, torch.dtype, int]:
    """Try the layers; return width and dtype of hidden states, and number of logits.

    A collective.
    """
    device, generator = runner.device, torch.Generator().manual_seed(0)
    said = None
    if runner.is_first:
        out = runner.tried()
        said = (out.shape[-1], str(out.dtype).removeprefix("torch."))
    stated = small_messages.gather_objects(said)[line.global_ranks[0]]
    assert stated is not None, "the first stage has said it"
    width, dtype = stated[0], getattr(torch, stated[1])
    last = width if runner.is_first else 0
    if not runner.is_first:
        values = torch.randn(
            1, 3, width, generator=generator, dtype=torch.float32, device="cpu"
        ).to(device, dtype)
        out = runner.tried(values)
        last = out.shape[-1]
        if last != width and not runner.is_last:
            widths = Shown(f"hidden states of width {last} after others of {width}")
            raise ConfigError(KEY, widths, "expected one width between all stages")
        if not runner.is_last and torch.promote_types(out.dtype, dtype) != dtype:
            kind = str(out.dtype).removeprefix("torch.")
            kinds = Shown(f"hidden states of {kind} after others of {stated[1]}")
            raise ConfigError(KEY, kinds, f"they would be rounded; return {stated[1]} values")
    return width, dtype, small_messages.gather_objects(last)[line.global_ranks[-1]]


def _whole(stage: GeneratingStage, channels: Channels) -> Callable[[Tensor], Tensor]:
    """Return a function that all-gathers whole logits (n, V) from tensor ranks' (n, V / ranks).

    If the weights do not show whether the vocabulary is sharded, the first logits do: they are
    equal on all ranks if it is not.
    """
    if stage.tensor is None:
        return Tensor.detach
    group, cut = Group.of(stage.tensor), [True] if stage.is_cut else []

    def whole(logits: Tensor) -> Tensor:
        own = logits.detach().contiguous()
        if cut == [False]:
            return own
        every = own.new_empty(group.size, *own.shape)
        transport.all_gather(every.view(-1), own.view(-1), group, Meter()).wait()
        nbytes = native_nbytes.all_gather_nbytes(own.numel(), own.dtype, group.size)
        channels["tp"].count_native(nbytes)
        if not cut:
            cut.append(bool((every != own).any()))
        return every.permute(1, 0, 2).reshape(len(own), -1) if cut[0] else own

    return whole
