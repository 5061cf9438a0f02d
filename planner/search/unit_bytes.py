"""A lowered program -> bytes of every unit in one microbatch, whole or run again before its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..checkpointing import Checkpointing, policy_of
from ..sharding.program import Compute, ModelProgram, TemplateProgram
from .kept import Kept, KeptTemplate, first_kept_bytes, stage_bytes
from .prices import Prices
from .run_again import FULL, NONE, SELECTIVE, keeps_result, runs_again
from .storages import shares_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """A unit in one microbatch. `kept` lives until its backward, `remade` from when it has run again until its backward
    is over; `working_bytes` lives only while it runs."""

    kept: Kept
    remade: Kept
    working_bytes: int


@dataclass(frozen=True, kw_only=True)
class UnitsBytes:
    """What the units of one program keep. Each template and kind of edge is looked at once."""

    program: ModelProgram
    prices: Prices
    keys: tuple[int, ...]  # of the templates, as `Shared` has them
    _views: dict[tuple[int, int, int, int], bool] = field(default_factory=dict, init=False)

    def unit(self, index: int, *, recompute: Checkpointing) -> UnitBytes:
        """`recompute`: one of RECOMPUTE for all blocks, or for each unit."""
        return self.template(self.program.graph.units[index].template, policy_of(recompute, index))

    def template(self, index: int, recompute: str) -> UnitBytes:
        """A unit of a template."""
        lowered = self.program.templates[index]
        policy = recompute if lowered.template.is_module else NONE
        known, key = self.prices.shared.costs, ("bytes", self.keys[index], policy)
        if key not in known:
            known[key] = self._whole(index) if policy == NONE else self._recomputed(index, policy)
        return known[key]

    def stage_saved_bytes(self, first: int, last: int, *, recompute: Checkpointing, is_remade: bool = False) -> int:
        """What autograd keeps of one microbatch of units [first, last), before or after all of them have run again."""

        def kept(index: int) -> Kept:
            unit = self.unit(index, recompute=recompute)
            return unit.remade if is_remade else unit.kept

        return stage_bytes(self.program, range(max(first, 1), last), kept, self._is_view)

    def first_kept_bytes(self, policies: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Under each policy, of every unit but the prelude what autograd keeps of one microbatch for no unit before it,
        whatever the policies of those."""

        def kept_under(policy: str) -> Callable[[int], Kept]:
            return lambda index: self.unit(index, recompute=policy).kept

        units = range(1, len(self.program.graph.units))
        return first_kept_bytes(self.program, units, [kept_under(policy) for policy in policies], self._is_view)

    def _is_view(self, index: int, position: int) -> bool:
        """Whether conversions at an input leave its memory as it is; what they made is kept by the unit."""
        units = self.program.graph.units
        value = units[index].inputs[position]
        key = (units[value.unit].template, value.output, units[index].template, position)
        if key not in self._views:
            self._views[key] = all(map(shares_memory, self.program.in_microbatch(index, position)))
        return self._views[key]

    def _whole(self, index: int) -> UnitBytes:
        kept = self._kept(index).kept()
        return UnitBytes(kept=kept, remade=kept, working_bytes=_working_bytes(self.program.templates[index]))

    def _recomputed(self, index: int, policy: str) -> UnitBytes:
        """Checkpointing: what the part that runs again makes is not kept."""
        plain, of_template = self.template(index, NONE), self._kept(index)
        if policy == FULL:
            kept = of_template.inputs()
            working = plain.working_bytes + plain.kept.num_bytes
        elif policy == SELECTIVE:
            # Another mesh may have lowered it: the same steps, whose layouts name other axes.
            results = [step for step in of_template.lowered.steps if keeps_result(step)]
            kept = of_template.inputs(results)
            # What autograd keeps of these results is there already when the rest is computed again.
            working = plain.working_bytes + of_template.kept(there=results).num_bytes
        else:
            kept = of_template.kept(without=runs_again(self.program.templates[index], policy, self.prices))
            working = plain.working_bytes + plain.kept.num_bytes - kept.num_bytes
        return UnitBytes(kept=kept, remade=plain.kept, working_bytes=working)

    def _kept(self, index: int) -> KeptTemplate:
        known, key = self.prices.shared.costs, ("kept", self.keys[index])
        if key not in known:
            known[key] = KeptTemplate(self.program.templates[index], self.prices)
        return known[key]


def _working_bytes(lowered: TemplateProgram) -> int:
    """The largest result and its gradient."""
    results = (value.num_bytes for step in lowered.steps if isinstance(step, Compute) for value in step.outputs)
    return 2 * max(results, default=0)
