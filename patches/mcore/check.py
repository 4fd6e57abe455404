"""Refuse or announce messages that megatron-core sends on paths without a seam.

The seam is ``_BaseDataParallel.__init__``, because every data-parallel wrapper, also FSDP's, calls
it with the model and its configuration. DistributedDataParallel is checked before its constructor
runs, with its configuration (``ddp``). The rules are in ``rules.mcore``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hybridcomp.channels import Channels
from hybridcomp.config.error_messages import Shown
from hybridcomp.dimensions import DIMENSIONS
from hybridcomp.log import say_once
from hybridcomp.patches.common import early_engines
from hybridcomp.patches.mcore.groups import sizes
from hybridcomp.patches.mcore.requirement import REQUIREMENT
from hybridcomp.patches.rules import engine, mcore
from hybridcomp.seams.arming import missing
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session.process import current

BASE = Seam(
    requirement=REQUIREMENT,
    module="megatron.core.distributed.data_parallel_base",
    qualname="_BaseDataParallel.__init__",
    parameters=("self", "config", "module"),
)


def check(
    channels: Channels, wrapper: Any, config: Any, ddp: Any, model: Any, groups: Any = None
) -> None:
    """Check the block against one model chunk; see ``rules.engine.hold``. Rank 0 prints messages.

    Codecs that only the preset chose, and that the model cannot use, are removed from ``channels``.

    ``groups``: a ProcessGroupCollection that the user gave the wrapper. Raises ConfigError for the
    first dimension that cannot act.
    """
    block = channels.config
    job = mcore.MegatronJob(
        config, ddp, type(wrapper).__name__, sizes(groups), frozenset(_homes(model)),
        frozenset(p.dtype for p in model.parameters()), engine.lossy(block), block.zero.delta,
        block.zero.steps,
    )  # fmt: skip
    if (sentence := mcore.scatter_gather(block, job)) is not None:
        say_once(sentence)
    for sentence in engine.ungathered(block, "Megatron samples from its ranks itself"):
        say_once(sentence)
    if block.generate is not None:
        say_once(engine.no_generation(block, Shown("a job under megatron-core")))
    rules = list(mcore.RULES)
    if (reason := missing("transformer_engine.pytorch")) is not None:
        rules.insert(0, mcore.out_of_reach(reason))
    hold(channels, rules, job)


def check_optimizer(channels: Channels, config: Any) -> None:
    """Check the block against the settings of an optimizer, as ``check`` does."""
    lossy = engine.lossy(channels.config)
    job = mcore.MegatronJob(config, None, "DistributedDataParallel", sizes(None), lossy=lossy)
    hold(channels, mcore.OPTIMIZERS, job)


def hold(
    channels: Channels, rules: Iterable[engine.Rule[mcore.MegatronJob]], job: mcore.MegatronJob
) -> None:
    """Check the block of ``channels`` against ``rules``; what stays native loses its codec."""
    block = channels.config
    active = [name for name in DIMENSIONS if block.active(name)]
    for sentence in engine.hold(block, ((rule, job) for rule in rules)):
        say_once(sentence)
    if [name for name in DIMENSIONS if block.active(name)] != active:
        channels.policy = block.policy()


def _homes(model: Any) -> Iterator[str]:
    """Yield the packages of the model's layer classes and their bases."""
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        yield kind.__module__.partition(".")[0]


@around
def make_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Check wrappers other than DistributedDataParallel."""
    channels = current()
    early_engines.register(self, attached=channels is not None)
    if channels is not None and type(self).__name__ != "DistributedDataParallel":
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        check(channels, self, given["config"], None, given["module"])
    original(self, *args, **kwargs)


PATCHES = ((BASE, make_init),)
