"""Advice for a job that does not fit its device. Each suggested change is planned and its memory is computed first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.integration.flags.check import planned_job, validate
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.memory_estimate import Estimate, estimated
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import MemoryLimit, MemorySaving
from megatron.schedules.utils.errors import PlanError

_MOST = 3
_GIB = 2.0**30
# These plans do not need to be good; they only show that the job fits.
_SEARCH_SECONDS = 1.0
# A change that saves less than 0.1 % is not suggested.
_LESS = 0.999


def advice(spec: JobSpec, found: Estimate, room: float) -> str:
    """Returns one line with flags that each make the job fit, or with a few flags that do so together.

    Args:
        spec: the job.
        found: memory of the job.
        room: memory of a device, bytes.
    """
    flags: list[str] = []
    for _ in range(_MOST):
        better = list(_better(spec, found, room))
        fitting = [each for each in better if each.device <= room]
        if fitting:
            also = f"{' and '.join(flags)}, and " if flags else ""
            return f"would fit: with {also}{', or '.join(map(str, fitting))}"
        if not better:
            break
        best = min(better, key=lambda each: each.device)
        flags.append(str(best))
        spec, found = best.spec, best.found
    if not flags:
        return "no flag that was tried helps: use more GPUs"
    return f"nothing that was tried is enough: use more GPUs. Most helps {' and '.join(flags)}"


class _Changed(NamedTuple):
    """Job with other flags.

    Args:
        flags: the flags as the user writes them.
        spec: the job with these flags.
        found: memory of that job.
    """

    flags: str
    spec: JobSpec
    found: Estimate

    @property
    def device(self) -> float:
        """Device memory of the rank that uses most, bytes."""
        return self.found.ranks[self.found.worst].device

    def __str__(self) -> str:
        return f"{self.flags} ({self.device / _GIB:.2f} GiB)"


def _better(spec: JobSpec, found: Estimate, room: float) -> Iterator[_Changed]:
    """Yields jobs that need less memory than ``found`` on their fullest rank, and at most a few that fit."""
    fitting = 0
    for flags, changed in _candidates(spec, found, room):
        if fitting and changed.settings.saving.recompute and not spec.settings.saving.recompute:
            return  # planning recompute takes long
        held = _held(changed)
        if held is None:
            continue
        each = _Changed(flags, changed, held)
        if each.device < _LESS * found.ranks[found.worst].device:
            yield each
            fitting += each.device <= room
        if fitting == _MOST:
            return


def _candidates(spec: JobSpec, found: Estimate, room: float) -> Iterator[tuple[str, JobSpec]]:
    """Yields flags and the job with them, the flags with the smallest loss of speed first."""
    sizes, settings, model = spec.sizes, spec.settings, spec.model
    assert model is not None, "it was counted"
    if not sizes.optimizer_instances:
        yield "--use-distributed-optimizer", replace(spec, sizes=replace(sizes, optimizer_instances=1))
    if sizes.tensor > 1 and not model.build.sequence_parallel:
        build = replace(model.build, sequence_parallel=True)
        yield "--sequence-parallel", replace(spec, model=replace(model, build=build))
    if not settings.vocabulary_parallel:
        yield "--pipeline-vocabulary-parallel", replace(spec, settings=replace(settings, vocabulary_parallel=True))
    for name in ("v-half", "v-min"):
        if settings.schedule.name != name:
            yield f"--pipeline-schedule {name}", spec.under(name)
    limit = _limit(spec, found, room)
    adaptive = {"memory_limit": MemoryLimit(f"{limit or 1:.2f}", limit or 1), "search_seconds": _SEARCH_SECONDS}
    flags = f"--pipeline-schedule adaptive --pipeline-memory-limit {limit or 1:.2f}"
    if limit is not None:
        yield flags, spec.under("adaptive", **adaptive)
    if spec.recompute.granularity is None and not settings.saving.recompute:
        full = StockRecompute("full", "uniform", 1)
        written = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield written, replace(spec, recompute=full)
    if limit is not None and spec.recompute.granularity != "full":
        recompute = spec.under("adaptive", saving=MemorySaving(recompute=True), **adaptive)
        yield f"{flags} --pipeline-save-memory recompute", recompute


def _limit(spec: JobSpec, found: Estimate, room: float) -> float | None:
    """Remaining device memory as a fraction of 1F1B's activation memory, rounded down; None if nothing remains."""
    worst = found.ranks[found.worst]
    held = _held(spec.under("1f1b"))
    left = room - worst.static - worst.messages
    if held is None or left <= 0:
        return None
    whole = max(each.activations for each in held.ranks)
    # The worst rank may use a little more than its share, because of the embedding or the output layer.
    return int(95 * min(1.0, left / whole)) / 100 or None


def _held(spec: JobSpec) -> Estimate | None:
    """Memory of the job; None if the job would be refused."""
    try:
        validate(spec)
        asked = planned_job(spec, quiet=True)
        return estimated(asked, Planner(asked))
    except PlanError:
        return None
