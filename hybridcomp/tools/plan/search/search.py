"""Search the layout, recomputation and codecs with the fastest step that fits.

Layouts are in a heap, ordered by a lower bound of their steps: first the compute of balanced
stages, then, cut and placed, the path through their stages with ideal messages, at last the
simulated step with their best choices. A simulated layout that comes off the heap is next in the
ranking, since no bound left in the heap is below its seconds (A*, Hart, Nilsson and Raphael 1968).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.calibrate import calibrated
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.predict import plan_of
from hybridcomp.tools.plan.cost.work import KEPT, Work, layer_seconds, work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.models.model import Model
from hybridcomp.tools.plan.plan import Plan
from hybridcomp.tools.plan.request import Batch, Found, Nearest, SearchLimits
from hybridcomp.tools.plan.search.budget import AllowedChoices
from hybridcomp.tools.plan.search.evaluate import Evaluator
from hybridcomp.tools.plan.search.nearest import NO_HOST_ROOM, NO_ROOM, nothing
from hybridcomp.tools.plan.search.placing import Placer
from hybridcomp.tools.plan.search.space import layouts, world
from hybridcomp.tools.plan.search.tiers import divisions

DEFAULT = SearchLimits()
#: budget of the first plan's layout without compression
NATIVE = "native"
#: an entry of the heap: a layout, a placed layout, or a simulated one with its best choices
Waiting = Layout | Work | tuple[Work, Choices]


def search(
    model: Model,
    cluster: Cluster,
    budget: AllowedChoices,
    batch: Batch,
    limits: SearchLimits = DEFAULT,
) -> Found:
    """Find the fastest plans of ``model`` on ``cluster`` within ``budget``, the best first.

    Returns a ``Found`` without plans, but with a reason and the nearest plan, where nothing is
    feasible. Codecs that the cluster has no measurement of are not used, and named in ``unpriced``.
    Raises HybridcompError where the cluster lacks another figure that is needed.
    """
    job = calibrated(PlannedJob(model, cluster, batch, limits))
    budget, unpriced = budget.priced(job.can_price)
    ranks = world(job)
    if ranks > cluster.world_size:
        reason = f"{ranks} ranks are wanted, and the cluster has {cluster.world_size}"
        nearest = Nearest(Layout(data=ranks), "ranks", ranks, cluster.world_size)
        return Found((), reason=reason, nearest=nearest)
    found = _Search(job, budget).run()
    beside = _on_a_mesh(job, budget) if found.plans else ()
    return replace(
        found, unpriced=tuple(unpriced), best=(*found.best, *beside), parameters=model.parameters
    )


def _on_a_mesh(job: PlannedJob, budget: AllowedChoices) -> tuple[Plan, ...]:
    """Return FSDP2's fastest plan on an HSDP mesh, to compare with DeepSpeed's, or nothing."""
    decided = any(value != 1 for value in job.limits.fixed.values())
    if not job.limits.each or job.limits.engine != "deepspeed" or job.cluster.nodes < 2 or decided:
        return ()
    limits = replace(job.limits, engine="fsdp2", keep=1, own=(), offload=False, each=False)
    other = PlannedJob(job.model, job.cluster, job.batch, limits)
    return _Search(other, budget).run(lambda layout: layout.shards > 1).plans


def kind_of(plan: Layout) -> str:
    """Describe how a layout distributes the model's parameters over the ranks."""
    if not plan.is_uncut:
        return "layers cut, or stages"
    if plan.zero_stage < 3:
        return "parameters whole on every rank"
    if plan.shards > 1:
        return "HSDP"
    return "ZeRO 3, a copy in each node" if plan.hpz > 1 else "ZeRO 3"


@dataclass(eq=False)
class _Search:
    """State of one search."""

    job: PlannedJob
    budget: AllowedChoices
    refused: Counter[str] = field(default_factory=Counter)
    considered: int = 0
    simulated: int = 0

    def __post_init__(self) -> None:
        self.placer = Placer(self.job)
        self.evaluator = Evaluator(self.job, self.budget)
        self._heap: list[tuple[float, int, Waiting]] = []
        self._count = 0

    def run(self, wanted: Callable[[Layout], bool] = lambda layout: True) -> Found:
        """Search the layouts that are ``wanted``, and return the answer.

        With ``SearchLimits.each`` the search goes on after the last kept plan, for the kinds
        (``kind_of``) that no plan has yet.
        """
        allowed = (one for one in layouts(self.job, self.refused) if self._allows(one))
        every = [one for one in allowed if wanted(one)]
        for layout in every:
            self._push(balanced_seconds(self.job, self.evaluator, layout), layout)
        ranked: dict[Layout, tuple[Work, Choices]] = {}
        best: dict[str, tuple[Work, Choices]] = {}
        while self._heap and (self.job.limits.each or len(ranked) < self.job.limits.keep):
            _, _, waiting = heapq.heappop(self._heap)
            work = waiting[0] if isinstance(waiting, tuple) else waiting
            layout = work if isinstance(work, Layout) else work.layout
            if len(ranked) == self.job.limits.keep and kind_of(layout) in best:
                continue
            if isinstance(waiting, Layout):
                self._place(waiting)
            elif isinstance(waiting, Work):
                self._judge(waiting)
            else:
                best.setdefault(kind_of(layout), waiting)
                if len(ranked) < self.job.limits.keep:
                    ranked.setdefault(_family(layout), waiting)
        plans, firsts = (
            tuple(plan_of(self.job, *one, self.budget.name) for one in found.values())
            for found in (ranked, best)
        )
        native = None
        for work, choices in [*ranked.values()][:1]:
            if choices.items or work.layout.frozen != "gathered":
                bare = work_of(self.job, work.layout.replace(frozen="gathered"))
                native = plan_of(self.job, bare, Choices(), NATIVE)
        found = Found(plans, self.considered, self.simulated, dict(self.refused), native=native,
                      best=firsts)  # fmt: skip
        return found if plans else nothing(self.job, self.placer, every, found)

    def _allows(self, layout: Layout) -> bool:
        """Return whether the budget has the codecs that ``layout`` needs for copies and sums."""
        sums = not layout.sums_ours or self.budget.acts("dp")
        kept = layout.frozen == "gathered" or (
            self.budget.acts("zero") and self.job.can_price("zero", KEPT)
        )
        return self.budget.keeps(layout.copy) and sums and kept

    def _push(self, bound: float, what: Waiting) -> None:
        self._count += 1
        heapq.heappush(self._heap, (bound, self._count, what))

    def _place(self, layout: Layout) -> None:
        """Place ``layout`` with and without room for residuals, and push the results."""
        self.considered += 1
        feedback = any(choice.error_feedback for _, some in self.budget.allowed for choice in some)
        works = list(self.placer.places(layout, feedback and layout.size("replicas") > 1))
        if not works:
            self.refused[self.placer.unable.get(layout, NO_ROOM)] += 1
        for work in works:
            found = list(divisions(self.job, self.evaluator, work))
            if not found:
                self.refused[NO_HOST_ROOM] += 1
            for one in found:
                self._push(self.evaluator.bound(one), one)

    def _judge(self, work: Work) -> None:
        best = self.evaluator.best(work)
        if best is None:
            self.refused[NO_ROOM] += 1
            return
        self.simulated += best.simulated
        self._push(best.seconds, (work, best.choices))


def _family(layout: Layout) -> Layout:
    """Return ``layout`` without the fields in which layouts of one ranking entry may differ.

    These are cuts, recomputed layers, levels, lengths of slices, and how memory is divided.
    """
    slices, rest = (1, 1) if layout.slices else (), {"ratio": 1.0, "drive": 0.0, "knobs": ()}
    return layout.replace(cuts=(), recompute=(), nodes=(), hierarchy=True, slices=slices, **rest)


def balanced_seconds(job: PlannedJob, evaluator: Evaluator, layout: Layout) -> float:
    """Bound a step from below over all cuts: perfectly balanced stages, ideal messages."""
    speeds = job.cluster.speeds
    ideal = evaluator.ideal(layout.zero_stage)
    total = 0.0
    counted: dict[int, float] = {}
    for layer in job.layers(layout):
        if id(layer) not in counted:
            counted[id(layer)] = layer_seconds(job, layout, layer, ideal)
        total += counted[id(layer)]
    top = max(speeds[: layout.ranks])
    paces = [speeds[job.slowest_rank(layout, stage)] / top for stage in range(layout.stages)]
    steady = total / sum(paces)
    count = layout.passes
    if layout.virtual > 1:
        return count * steady
    return total + (count - 1) * steady if layout.stages > 1 else count * steady
