"""Load published weights in SGLang's workers through a custom weight loader.

A server is started with ``--custom-weight-loader hybridcomp.inference.sglang_loader.load``. An
update is one small message to all workers that names the folder and the version. Each worker has
its own receiver and loads changed parameters as SGLang loads those of a checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.escaping import SENTENCE, one_line, parsed_json
from hybridcomp.inference.checks import PLAIN, are_eight_bits, refuse_configuration
from hybridcomp.inference.follower import Follower, Patched, is_wait
from hybridcomp.inference.layout import LoaderLayout, learn
from hybridcomp.inference.sglang_seams import SEAMS, WORKER_SEAMS
from hybridcomp.inference.upstream import check
from hybridcomp.log import say_once
from hybridcomp.publishing import WeightReceiver

#: name of the loader in the server's option and in the ``load_format`` of an update
LOADER = "hybridcomp.inference.sglang_loader.load"
#: name of a message's only tensor
MESSAGE = "__hybridcomp__"
#: attribute of a model that holds its follower, so that both are freed together
KEPT = "_hybridcomp_follower"
#: class names of draft models, to which SGLang passes every update, too
DRAFTS = re.compile(r"Eagle3.*|.*(Eagle3?|NextN|MTP)")


@dataclass(frozen=True)
class Announcement:
    """Message to a worker: the folder under the worker's path, the version, and options."""

    source: str
    version: int
    wait_s: float = 60.0
    verify: bool = True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the message in the form that ``update_weights_from_tensor`` takes."""
        return [
            (
                MESSAGE,
                torch.tensor(
                    list(json.dumps(asdict(self)).encode()), dtype=torch.uint8, device="cpu"
                ),
            )
        ]


def update(
    engine: Any, source: str, version: int, *, wait_s: float = 60.0, verify: bool = True
) -> None:
    """Have all workers of an ``sglang.Engine`` load a version of the folder ``source``.

    A worker that cannot load it dies with its loader's error and takes the server with it: SGLang
    does not handle a failing loader. Raises PublishError if the engine reports a failure.
    """
    check(SEAMS)
    said = Announcement(source, version, wait_s, verify)
    engine.begin_weight_update()
    try:
        result = engine.update_weights_from_tensor(said.tensors(), load_format=LOADER)
    finally:
        engine.end_weight_update()
    if isinstance(result, Sequence) and not result[0]:
        raise PublishError(f"version {version} was not loaded: {one_line(result[1], SENTENCE)}")


def load(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Bring ``model`` to the version named in a message; SGLang calls it in each worker.

    A draft model keeps its weights, as none of a draft are published. Raises PublishError, in one
    line and before anything is written, if the version cannot be loaded completely.
    """
    said = _announced(named_tensors)
    if DRAFTS.fullmatch(type(model).__name__):
        say_once(f"sglang: the draft {type(model).__name__} keeps its weights", anywhere=True)
        return
    kept = vars(model).get(KEPT)
    if kept is None or kept[0] != said.source:
        check(WORKER_SEAMS)
        receiver = WeightReceiver(said.source)
        weights = _ModelWeights(model, _quantization(model), receiver)
        follower = Follower(receiver, weights, wait_s=said.wait_s, verify=said.verify)
        kept = vars(model)[KEPT] = (said.source, follower)
    kept[1].wait_s, kept[1].verify = said.wait_s, said.verify
    kept[1].follow(said.version)


def _announced(named_tensors: Iterable[tuple[str, Tensor]]) -> Announcement:
    """Parse and check a message."""
    found = dict(named_tensors)
    try:
        text = bytes(found[MESSAGE].cpu().tolist()).decode()
        fields = parsed_json(text)
        said = Announcement(**fields)
        kinds = (isinstance(said.source, str), type(said.version) is int, said.version > 0,
                 is_wait(said.wait_s), isinstance(said.verify, bool))  # fmt: skip
        if len(found) != 1 or not all(kinds):
            raise ValueError(f"it has {one_line(fields)}")
    except (KeyError, TypeError, ValueError) as error:
        raise PublishError(
            f"expected one tensor {MESSAGE} with source and version, found another message "
            f"({one_line(error)}); send it with hybridcomp.inference.sglang_loader.update"
        ) from None
    return said


def _quantization(model: Any) -> object:
    """Return the name of a model's quantization in SGLang; None if it has none."""
    found = getattr(model, "quant_config", None)
    name = getattr(found, "get_name", None)
    return name() if callable(name) else found


class _ModelWeights:
    """The model of one worker as a ``Follower`` writes it."""

    def __init__(self, model: Any, asked: object, receiver: WeightReceiver) -> None:
        self._named, self._load, self._asked = model.named_parameters, model.load_weights, asked
        config = getattr(model, "config", None)
        self._config, self._receiver = getattr(config, "text_config", config), receiver
        self._layout = LoaderLayout()

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return this worker's parameters, by SGLang's names."""
        found: Iterable[tuple[str, Tensor]] = self._named()
        return found

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError if the weights are another model's or would be converted.

        SGLang itself only logs names that its model lacks.
        """
        published = dict(weights)
        shapes = {name: tuple(tensor.shape) for name, tensor in published.items()}
        refuse_configuration(self._config, shapes, self._receiver.aliases)
        are_eight_bits(published, self._asked, self._named())
        wanted = {tensor.dtype for tensor in published.values() if tensor.dtype in PLAIN[:2]}
        mine = {tensor.dtype for _, tensor in self._named()}
        if not wanted <= mine:
            odd = sorted(str(dtype).removeprefix("torch.") for dtype in wanted - mine)
            raise PublishError(
                f"weights are published in {', '.join(odd)}, in which the engine has none: values "
                f"would be rounded; start the server with --dtype as published"
            )

    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors like a checkpoint, then compare a few values of each.

        It loads copies, since a loader may write to its inputs.
        """
        given = dict(weights)
        self._load((name, tensor.clone()) for name, tensor in given.items())
        mine, known = dict(self._named()), self._layout
        new = {n: one for n, one in given.items() if n not in {**known.blocks, **known.unknown}}
        found = learn(self._load, mine, new.items())
        known.blocks.update(found.blocks)
        known.unknown.update(found.unknown)
        if odd := known.differing(mine, given.items()):
            raise PublishError(
                f"{one_line(odd)} has other values behind the load than were published: SGLang "
                "rearranges this weight in a way that hybridcomp does not know"
            )

    def prepare_changes(self, patches: list[Patched]) -> Callable[[], object]:
        """Return a function that reloads, as a whole, each parameter with a changed value."""
        return lambda: self.load_whole((patch.name, patch.whole) for patch in patches)
