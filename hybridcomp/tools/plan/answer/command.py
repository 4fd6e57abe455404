"""Run ``hybridcomp plan``: search, print, write files, try and draw; or check a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridcomp.channels.accounting.memory import size
from hybridcomp.codecs.words import DTYPES
from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.escaping import parsed_json, printable
from hybridcomp.tools.measure.block import BlockSize
from hybridcomp.tools.plan.answer import files, start_command
from hybridcomp.tools.plan.answer.base import Base, base_of
from hybridcomp.tools.plan.answer.report import answer, duration
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.missing import missing
from hybridcomp.tools.plan.meetings import proposal
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.models.frozen import FrozenModel, partly_frozen
from hybridcomp.tools.plan.models.model import Model
from hybridcomp.tools.plan.models.reading import read_model
from hybridcomp.tools.plan.plan import Plan
from hybridcomp.tools.plan.request import Batch, Found, Nearest, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.search import search

#: plans in the table and the picture
SHOWN = 10
#: options that act with ``--jobs`` alone, and their defaults
OF_JOBS = {"replay": False, "now": 0.0, "scheduler": "plain"}
PICTURE, LINKS, FOUND = "plan.png", "links.svg", "plans.json"


def run(options: argparse.Namespace) -> int:
    """Plan or check; return the exit status, 1 after a miss. Raises HybridcompError, OSError."""
    if options.check is not None:
        return _check(options)
    for name in ("model", "samples", "length"):
        if getattr(options, name) is None:
            shown = "MODEL" if name == "model" else f"--{name}"
            raise ConfigError(shown, None, "needed; see hybridcomp plan --help")
    _look(options)
    base = base_of(options.base, options.engine)
    whole = read_model(options.model)
    model = partly_frozen(whole, options.frozen)
    cluster = cluster_file.read(options.cluster)
    options.dtype = dtype_of(options.dtype, cluster)
    found = _search(options, model, cluster)
    if not found.plans:
        raise HybridcompError(infeasible(found))
    for line in answer(found, cluster):
        print(printable(line))
    best = found.plans[0]
    if options.tries:
        best = _tried(options, found, cluster, base)
    written = files.write(best, cluster, options.out, base, options.command)
    every = options.out / FOUND
    every.write_text(json.dumps([plan.to_json() for plan in found.plans], indent=1) + "\n")
    print(f"start it with {options.out / files.START_FILE}; written: "
          f"{', '.join(str(path.name) for path in [*written, every])}")  # fmt: skip
    offload = options.offload or any(plan.layout.offload for plan in found.plans)
    if found.unpriced:
        print(f"note: {unpriced(found, options)}")
    for line in missing(cluster, offload, options.engine):
        print(f"note: {options.cluster} says {line}")
    for note in (whole.remark if isinstance(whole, Decoder) else "",
                 _moved(options, best, whole, cluster) if isinstance(model, FrozenModel) else None,
                 untimed(best, whole, cluster, options.cluster),
                 *start_command.left_to_user(best, options.command, base),
                 *without_effect(options, cluster),
                 islands(found.plans[0], cluster, model),
                 start_command.left_to_script(best, options.command),
                 start_command.unknown_places(best, options.command, cluster)):  # fmt: skip
        if note:
            print(f"note: {printable(note)}")
    _draw(options, found, cluster)
    return 0


def _moved(options: argparse.Namespace, best: Plan, whole: Model, cluster: Cluster) -> str | None:
    """Return a note on the layout that is best for the unfrozen model, if ``best`` has another."""
    before = _search(options, whole, cluster)
    if not before.plans:
        return f"with nothing frozen there is no plan: {before.reason}"
    old, now = before.plans[0].layout, best.layout
    if (old.stages, old.data) == (now.stages, now.data):
        return f"{old.stages} stage(s) x {old.data} replicas are fastest with nothing frozen, too"
    fixed = {**fixed_of(options.fix), "stages": old.stages, "tensor": old.tensor}
    kept = limits_of(options, fixed, options.ranks, options.command, 1)
    still = search(
        FrozenModel(whole, options.frozen), cluster, budget_of(options.budget),
        Batch(options.samples, options.length), kept,
    )  # fmt: skip
    costs = f"takes {duration(still.plans[0].prediction.seconds)} a step" if still.plans else (
        "does not fit")  # fmt: skip
    return (
        f"{now.stages} stage(s) x {now.data} replicas take "
        f"{duration(best.prediction.seconds)} a step; the layout with nothing frozen, {old.stages} "
        f"x {old.data}, {costs}: hybridcomp replan CHECKPOINT --ranks {now.ranks} --stages "
        f"{now.stages} goes over to this one"
    )


def islands(best: Plan, cluster: Cluster, model: Model) -> str | None:
    """Return what islands would gain for the ``best`` plan, or why that is unknown."""
    try:
        return proposal(best, cluster, model)
    except HybridcompError as error:
        return f"whether islands that meet now and then would be faster is not known: {error}"


def untimed(best: Plan, model: Model, cluster: Cluster, where: Path) -> str | None:
    """Say which block of ``model`` to measure, where ``best`` estimates unmeasured ones by FLOP."""
    layout, blocks = best.layout, [row for row in cluster.kernels if row.kind == "block_forward"]
    cut = layout.innermost * layout.context * layout.slice_count > 1
    if cluster.by_hand or cut or not isinstance(model, Decoder):
        return None
    size = BlockSize(layout.micro_batch, best.length, model.hidden)
    if any((row.dtype, row.note) == (best.dtype, size.describe()) for row in blocks):
        return None
    words = f"{size.batch}x{size.length}x{size.width}x{model.heads}"
    return (
        f"{where} has no block of {size.describe()} in {best.dtype}: its seconds follow from other "
        f"blocks by their FLOP; `hybridcomp measure --block {words}` times it"
    )


def unpriced(found: Found, options: argparse.Namespace) -> str:
    """Name the codecs that no plan uses, because the cluster's file has no figures for them."""
    return (
        f"{options.cluster} says nothing about {', '.join(found.unpriced)}: no plan has these "
        'codecs; run `hybridcomp measure` again, or write them into its "codecs"'
    )


def without_effect(options: argparse.Namespace, cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for each option that changes nothing about these plans."""
    if options.offload and options.engine != "deepspeed":
        yield f"--offload has no effect: plans of {options.engine} have no optimizer on the host"
    elif options.offload and cluster.on_cpu:
        yield "--offload has no effect: a CPU is its own host, and --fix offload=true insists"
    if options.own_cuts and options.engine != "deepspeed":
        yield f"--own-cuts has no effect: {options.engine} builds none of them"


def _look(options: argparse.Namespace) -> None:
    """Refuse wrong options before the search, which takes long. Raises ConfigError."""
    from hybridcomp.tools.plan.answer.trial import NO_COMMAND

    if options.tries < 0:
        raise ConfigError("--try", options.tries, "expected 1 or more, or leave it out")
    if options.tries and not options.command:
        raise ConfigError("--try", "no command", NO_COMMAND)
    if options.plan is not None:
        raise ConfigError("--plan", str(options.plan), "goes with --check RUN")
    for name, usual in OF_JOBS.items():
        if (found := getattr(options, name)) != usual:
            raise ConfigError(f"--{name}", found, "goes with --jobs FILE")
    if options.out.exists() and not options.out.is_dir():
        raise ConfigError("--out", str(options.out), "expected a folder, and it is a file")


def dtype_of(wanted: str | None, cluster: Cluster) -> str:
    """Return the dtype to plan in: ``wanted``, else the first that ``cluster`` has figures for.

    Raises ConfigError where it has none.
    """
    known = [name for name in DTYPES if name in cluster.dtypes]
    if wanted in known or (wanted is None and known):
        return wanted or known[0]
    listed = ", ".join(known) or "none"
    raise ConfigError(
        "--dtype", wanted,
        f"the cluster's file says how fast matrix products are in: {listed}; choose one of these, "
        "measure again, or describe it (tflops)",
    )  # fmt: skip


def _search(options: argparse.Namespace, model: Model, cluster: Cluster) -> Found:
    fixed, keep = fixed_of(options.fix), max(SHOWN, options.tries)
    limits = limits_of(options, fixed, options.ranks, options.command, keep)
    limits = replace(limits, each=True)
    batch = Batch(options.samples, options.length)
    return search(model, cluster, budget_of(options.budget), batch, limits)


def limits_of(
    options: argparse.Namespace,
    fixed: Mapping[str, Any],
    ranks: int | None,
    command: Sequence[str],
    keep: int,
) -> SearchLimits:
    """Return the limits that the options set for a job on ``ranks``, of which ``keep`` plans stay.

    Raises ConfigError.
    """
    return SearchLimits(
        engine=options.engine,
        dtype=options.dtype,
        fixed=fixed,
        memory_share=options.memory,
        ranks=ranks,
        most_micro_batch=options.most_micro_batch,
        recompute=not options.no_recompute,
        offload=options.offload,
        own=own_cuts(options.own_cuts, command),
        keep=keep,
    )


def _tried(options: argparse.Namespace, found: Found, cluster: Cluster, base: Base) -> Plan:
    """Run the best plans on the machines and return the fastest."""
    from hybridcomp.tools.plan.answer.trial import tried

    plans = found.plans[: options.tries]
    done = tried(plans, cluster, options.command, options.out, base)
    best = done[0]
    number = plans.index(best.plan) + 1
    print(f"plan {number} is the fastest of those that ran: {duration(best.seconds)} a step")
    return best.plan


def _check(options: argparse.Namespace) -> int:
    from hybridcomp.tools.plan.answer.check import check, describe

    plan = Plan.read(options.plan or options.out / files.PLAN_FILE)
    found = check(plan, options.check)
    for line in describe(found):
        print(line)
    return 0 if all(one.held for one in found) else 1


def _draw(options: argparse.Namespace, found: Found, cluster: Cluster) -> None:
    """Draw the picture; without matplotlib print a line instead, since the plan is complete."""
    from hybridcomp.tools.plan.answer.picture import draw, draw_links

    known = [rank.nbytes for rank in cluster.ranks if rank.nbytes]
    limit = options.memory * min(known, default=0)
    title = f"{found.plans[0].model} on {cluster.world_size} ranks, budget {found.plans[0].budget}"
    try:
        draw(found.plans[:SHOWN], limit, options.out / PICTURE, title, found.native)
    except HybridcompError as error:
        print(f"no picture: {error}")
    else:
        print(f"picture: {options.out / PICTURE}")
    if cluster.nodes < 2:
        return
    try:
        svg = draw_links(found.plans[0], cluster.nodes, cluster.world_size)
    except HybridcompError as error:
        print(f"no picture of the links: {error}")
    else:
        (options.out / LINKS).write_text(svg, encoding="utf-8")
        print(f"what crosses which link: {options.out / LINKS}")


def infeasible(found: Found) -> str:
    """Say in one sentence why there is no plan, and what the nearest one would need."""
    if found.nearest is None:
        return f"no plan: {found.reason}"
    return f"no plan: {found.reason}; {_nearest(found.nearest)}"


def _nearest(nearest: Nearest) -> str:
    if nearest.what == "memory":
        needed, available = size(nearest.needed), size(nearest.available)
    else:
        needed, available = f"{nearest.needed:g}", f"{nearest.available:g}"
    return (
        f"the nearest, {nearest.layout}, would need {needed} of {nearest.what} where there is "
        f"{available}"
    )


def own_cuts(names: str, command: Sequence[str]) -> tuple[str, ...]:
    """Return the layers of hybridcomp.nn that the script builds, by ``names`` or its command."""
    text = " ".join(command)
    asked = {"tp2d": "{mesh}", "slices": "{slices}"}
    named = [name.strip() for name in names.split(",") if name.strip()]
    return tuple(dict.fromkeys([*named, *(n for n, place in asked.items() if place in text)]))


def budget_of(text: str) -> AllowedChoices:
    """Read a budget from a name, or from JSON. Raises ConfigError."""
    if not text.lstrip().startswith("{"):
        return AllowedChoices.parse(text)
    try:
        written: Mapping[str, Any] = parsed_json(text)
    except ValueError as error:
        raise ConfigError("--budget", text, f"expected JSON ({error})") from None
    return AllowedChoices.parse(written)


def fixed_of(texts: list[str]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` words into fields of a layout. Raises ConfigError."""
    fixed: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            found = parsed_json(value)
        except ValueError:
            found = None
        if not equals or found is None:
            raise ConfigError("--fix", text, "expected NAME=VALUE, such as tensor=2")
        if isinstance(found, list):
            found = tuple(tuple(one) if isinstance(one, list) else one for one in found)
        fixed[name] = found
    return fixed
