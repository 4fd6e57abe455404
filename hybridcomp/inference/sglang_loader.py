"""Load published weights in SGLang's workers: a custom weight loader.

A server is started with ``--custom-weight-loader hybridcomp.inference.sglang_loader.load``. An
update is a small message, one for all workers, that names folder and version; each worker has a
receiver of its own and loads the parameters that changed as SGLang loads a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.foreign import one_line, parsed_json
from hybridcomp.inference.checks import PLAIN, has_eight_bits, refuse_quantized, refuse_sixteen
from hybridcomp.inference.follower import Follower, Patched, is_wait
from hybridcomp.inference.layout import LoaderLayout, learn
from hybridcomp.inference.sglang_seams import SEAMS, WORKER_SEAMS
from hybridcomp.inference.upstream import check
from hybridcomp.publishing import WeightReceiver

#: what the server's option and the ``load_format`` of an update name
LOADER = "hybridcomp.inference.sglang_loader.load"
#: name of the one tensor of a message
MESSAGE = "__hybridcomp__"
#: where a model keeps its follower: it is freed with the model
KEPT = "_hybridcomp_follower"


@dataclass(frozen=True)
class Announcement:
    """Message to a worker: the folder as it names it, the version, and how to follow it."""

    source: str
    version: int
    wait_s: float = 60.0
    verify: bool = True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the message as ``update_weights_from_tensor`` takes it."""
        return [(MESSAGE, torch.tensor(list(json.dumps(asdict(self)).encode()), dtype=torch.uint8))]


def update(
    engine: Any, source: str, version: int, *, wait_s: float = 60.0, verify: bool = True
) -> None:
    """Have all workers of an ``sglang.Engine`` load a version of the folder ``source``.

    A worker that cannot load it ends with the error of its loader, and with it the server: SGLang
    has no answer for a loader that fails. Raises PublishError where the engine reports a failure.
    """
    check(SEAMS)
    said = Announcement(source, version, wait_s, verify)
    engine.begin_weight_update()
    try:
        result = engine.update_weights_from_tensor(said.tensors(), load_format=LOADER)
    finally:
        engine.end_weight_update()
    if isinstance(result, Sequence) and not result[0]:
        raise PublishError(f"version {version} was not loaded: {one_line(result[1])}")


def load(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Bring ``model`` to the version of a message; SGLang calls it in each worker.

    Raises PublishError, in one line and before anything is written, where the version cannot be
    loaded as a whole.
    """
    said = _announced(named_tensors)
    kept = vars(model).get(KEPT)
    if kept is None or kept[0] != said.source:
        check(WORKER_SEAMS)
        receiver = WeightReceiver(said.source)
        weights = _ModelWeights(model, _quantization(model))
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
    """Return the name of SGLang's quantization of a model; nothing where it has none."""
    found = getattr(model, "quant_config", None)
    name = getattr(found, "get_name", None)
    return name() if callable(name) else found


class _ModelWeights:
    """The model of one worker as a ``Follower`` writes it."""

    def __init__(self, model: Any, asked: object) -> None:
        self._named, self._load, self._asked = model.named_parameters, model.load_weights, asked
        self._layout = LoaderLayout()

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the parameters of this worker, by SGLang's own names."""
        found: Iterable[tuple[str, Tensor]] = self._named()
        return found

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise PublishError where the model has no parameter of the published dtype."""
        published = dict(weights)
        if has_eight_bits(published):
            refuse_sixteen(self._asked)
        else:
            refuse_quantized(self._asked, self._named())
        wanted = {tensor.dtype for tensor in published.values() if tensor.dtype in PLAIN[:2]}
        mine = {tensor.dtype for _, tensor in self._named()}
        if not wanted <= mine:
            odd = sorted(str(dtype).removeprefix("torch.") for dtype in wanted - mine)
            raise PublishError(
                f"weights are published in {', '.join(odd)}, in which the engine has none: values "
                f"would be rounded; start the server with --dtype as published"
            )

    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors as from a checkpoint, and compare a few values of each.

        They are copies, as a loader may write to what it is given.
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
        """Return what loads the parameters of which a value changed, as a whole."""
        return lambda: self.load_whole((one.name, one.whole) for one in patches)
