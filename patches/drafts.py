"""Implement ``hybridcomp.train_draft``, and give ``hybridcomp.generate`` its picker of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.steps import transfer
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.generation import GeneratingStage, Sampling, answer
from hybridcomp.generation.draft import Draft
from hybridcomp.generation.draft_training import GLIDE, PLAIN, DraftSettings, DraftTeacher
from hybridcomp.generation.drafting import Cape, DraftFigures, DraftPicker
from hybridcomp.generation.tree import most_nodes
from hybridcomp.job.agreement import tell
from hybridcomp.job.together import together
from hybridcomp.log import say
from hybridcomp.patches.generating import stage_of

KEY = "train_draft"
#: tokens that a draft proposes at a time
GAMMA = 5


def train_draft(
    engine: Any,
    sequences: Tensor | Sequence[Sequence[int]],
    *,
    kind: Literal["better", "glide", "plain"] = "better",
    layers: int = 1,
    width: int | None = None,
    loss: Literal["target", "text"] = "target",
    lr: float = 2e-3,
    rope_base: float = 10000.0,
    seed: int = 0,
) -> Draft:
    """Train a small model that drafts for ``hybridcomp.generate``; experimental.

    Every rank calls it between two steps. The stages run forward over the sequences, in batches of
    the block's ``generate.batch``, and the last one trains; the engine does not change.

    Args:
        engine: as for ``generate``; no tensor-parallel ranks.
        sequences: token ids, (n, T): equal on the ranks of a replica, equally many on each
            replica. The last sixteenth is held out.
        kind: "glide" looks at the keys and values of the target's top layers, "plain" has a wider
            MLP instead; "better" trains both and keeps the one that agrees more often with the
            target on the held-out sequences.
        layers, width: the draft's; width None: half the total width of the target's heads.
        loss: "target" learns the target's distribution, "text" the next token.
        lr: highest learning rate.
        rope_base: the target's base of rotary positions (in halves, as in Llama and GPT-NeoX).
        seed: seed of the draft's weights.

    Returns the draft. Raises ConfigError and PeerError as ``generate``.
    """
    rows = sequences.tolist() if isinstance(sequences, Tensor) else [list(r) for r in sequences]
    with together(KEY):
        stage = stage_of(engine)
        _check(stage, rows, loss)
        kinds = {"better": (GLIDE, PLAIN), "glide": (GLIDE,), "plain": (PLAIN,)}.get(kind, ())
        if not kinds:
            raise ConfigError(f"{KEY}: kind", kind, 'expected "better", "glide" or "plain"')
        settings = DraftSettings(layers, width, kinds, GAMMA, lr, loss, rope_base, seed)
        with _averaging(stage) as average:
            teacher = DraftTeacher(settings, len(rows), stage.device, average)
            answer(
                stage, rows, 1, Sampling(), in_flight=1, picker=teacher, wants=len(rows[0])
            )  # fmt: skip
        if not teacher.modules:
            return Draft(None, {})
        if stage.replica == 0:
            shares = ", ".join(f"{name} {share:.3f}" for name, share in teacher.agreement.items())
            say(f"{KEY}: first choices equal to the target's: {shares}", anywhere=True)
        return Draft(teacher.best, teacher.agreement)


def _check(stage: GeneratingStage, rows: Sequence[Sequence[int]], loss: str) -> None:
    if stage.tensor is not None:
        todo = "each tensor rank holds the keys of its heads alone; draft without tensor parallel"
        raise ConfigError(KEY, Shown("a tensor-parallel pipeline"), todo)
    lengths = {len(row) for row in rows}
    if len(rows) < 32 or len(lengths) != 1 or min(lengths) <= 2 * GAMMA:
        found = Shown(f"{len(rows)} sequences of {sorted(lengths)[:4]} tokens")
        todo = f"expected 32 or more of one length, of more than {2 * GAMMA} tokens"
        raise ConfigError(f"{KEY}: sequences", found, todo)
    if loss not in ("target", "text"):
        raise ConfigError(f"{KEY}: loss", loss, 'expected "target" or "text"')


def _line(stage: GeneratingStage) -> list[int]:
    return dist.get_process_group_ranks(stage.group)


@contextmanager
def _averaging(stage: GeneratingStage) -> Iterator[Callable[[list[Tensor]], None]]:
    """Yield a function that averages gradients over all last stages; a collective."""
    said = tell({"line": _line(stage)}, what=KEY)
    last = sorted({statement["line"][-1] for statement in said})
    made = dist.new_group(last) if len(last) > 1 else None
    if made is None or dist.get_rank() not in last:
        yield lambda gradients: None
        return
    group = Group.of(made)

    def average(gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        meter = Meter(where=KEY)
        transfer(lambda: transport.all_reduce(flat, group, meter), meter)
        if stage.channels is not None:
            stage.channels["dp"].count_native(meter.wire_nbytes)
        parts = torch.split(flat / group.size, [one.numel() for one in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    try:
        yield average
    finally:
        dist.destroy_process_group(made)


def picker_of(
    stage: GeneratingStage,
    draft: Draft,
    cape: Cape,
    sampling: Sampling,
    figures: DraftFigures | None,
) -> tuple[DraftPicker | None, int]:
    """Return the picker of drafts (None except on the last stage), and the most nodes of a tree.

    Raises ConfigError if drafts cannot act.
    """
    key = "generate: draft"
    if sampling.temperature > 0:
        todo = "drafts are verified against the most likely token; use temperature 0, or no draft"
        raise ConfigError(key, Shown(f"temperature {sampling.temperature:g}"), todo)
    if stage.tensor is not None:
        todo = "each tensor rank holds the keys of its heads alone; generate without a draft"
        raise ConfigError(key, Shown("a tensor-parallel pipeline"), todo)
    if cape not in (True, False, "auto"):
        raise ConfigError("generate: cape", cape, 'expected true, false or "auto"')
    is_last = _line(stage)[-1] == dist.get_rank()
    if is_last and draft.module is None:
        todo = "the last stage holds the draft; give what train_draft returned there, or Draft.load"
        raise ConfigError(key, Shown("a draft of another stage"), todo)
    nodes = most_nodes(GAMMA, cape is not False)
    if not is_last or draft.module is None:
        return None, nodes
    module = draft.module.to(stage.device)
    return DraftPicker(module, sampling, GAMMA, cape, figures or DraftFigures()), nodes
