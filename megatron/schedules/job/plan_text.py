"""A job's plan as text, for the ranks of a job that did not make it."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Struct

from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.job.plan_job import JobPlan
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import Layers, MemorySaving
from megatron.schedules.planner.request import Request
from megatron.schedules.planner.service import Plan
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.json_files import decode, encode


class _Text(Struct):
    """Choices of the planner, and the plan."""

    layers: Layers | None
    saving: MemorySaving
    recompute: StockRecompute
    left_out: str
    asked: Request
    request: Request
    schedule: Schedule


def to_text(job: JobPlan) -> str:
    """Returns the plan as one JSON object."""
    settings, plan = job.spec.settings, job.plan
    chosen = settings.layers, settings.saving, job.spec.recompute, job.left_out
    return encode(_Text(*chosen, plan.asked, plan.request, plan.schedule))


def from_text(text: str, spec: JobSpec) -> JobPlan:
    """Returns the plan in the output of :func:`to_text` for the same job, and checks that its order is valid.

    Raises:
        PlanError: a pass is missing, repeated, on the wrong rank, or would wait for ever.
    """
    sent = decode(text, _Text)
    validate(sent.schedule)
    settings = replace(spec.settings, layers=sent.layers, saving=sent.saving)
    chosen = replace(spec, settings=settings, recompute=sent.recompute)
    return JobPlan(chosen, Plan(sent.asked, sent.request, sent.schedule), sent.left_out)
