"""A job's plan in a few lines of its log, and what of Megatron's is off under it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.schedules.estimate.calibration import ERRORS
from megatron.schedules.estimate.devices import named
from megatron.schedules.job.job_costs import on_gpu
from megatron.schedules.job.plan_job import JobPlan
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.registry import AUTO
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.utils.printable import amount, counted, percent


def summary(job: JobPlan) -> str:
    """Log lines about the plan: its bubble, its memory, the costs used for planning, and why ``auto`` chose it."""
    plan, schedule, request = job.plan, job.schedule, job.request
    timeline, d, n = plan.timeline, schedule.ranks, schedule.microbatches
    name, peak = schedule.name, plan.peak_bytes
    if request.schedule == "adaptive":
        name = f"adaptive{'' if name == 'adaptive' else f': {name}'}, within {_limit(job)}"
    told = [amount(peak)] if peak is not None else []
    told += [f"{percent(timeline.of_1f1b, 1)} of 1F1B's"] if timeline.of_1f1b is not None else []
    lines = [
        f"{name}, {d} ranks, {counted(n, 'microbatch')}, planned bubble {100 * timeline.bubble:.1f} %, "
        f"planned peak activation memory {', '.join(told)}, and {counted(max(job.messages), 'message')} at most",
        f"planned for {job.assumed}",
        *([job.left_out] if job.left_out else []),
        *_estimated(job),
        *(plan.explanation.splitlines() if job.spec.settings.schedule.name == AUTO else []),
    ]
    hidden, exposed = timeline.messages
    if hidden + exposed:
        lines[1:1] = [
            f"messages of experts take {100 * (hidden + exposed):.1f} % of an average rank's time: "
            f"{100 * hidden:.1f} % behind weight gradients, {100 * exposed:.1f} % exposed"
        ]
    return "\n".join(f"pipeline schedule: {line}" for line in lines)


def _estimated(job: JobPlan) -> Iterator[str]:
    """Yields how long an iteration takes on the job's GPU, and how exact that is; nothing if it is not estimated."""
    device, batch, spec = named(job.spec.gpu), job.schedule.microbatches, job.spec
    costs = on_gpu(spec) if spec.settings.costs is None else None
    if device is None or costs is None or spec.build is None:
        return
    seconds = simulate(job.schedule, costs.on(job.schedule.placement, job.request.decisions)).makespan / 1e3
    tokens = batch * spec.build.samples * spec.build.shape.sequence / (seconds * spec.sizes.of_replica)
    measure = f"; {spec.flags['measure']} measures it" if "measure" in spec.flags else ""
    yield (
        f"on {spec.sizes.world} {device.name} the pipeline takes {seconds:.3g} s an iteration, {tokens:,.0f} tokens/s "
        f"a GPU ({ERRORS}){measure}"
    )


def switched_off(spec: JobSpec, schedule: Schedule) -> list[str]:
    """Returns a sentence for each setting that is given and does nothing. ``integration.linears`` switches them off.

    Args:
        spec: the job.
        schedule: its plan.
    """
    given, lines = spec.stock.given, []
    if "tp_comm_overlap" in given and schedule.splits and spec.stock.transformer_impl != "local":
        lines.append(
            "--tp-comm-overlap: tp_comm_bulk_dgrad and tp_comm_bulk_wgrad are off, because they need the weight "
            "gradient right after the input gradient; these two messages are sent as without the flag"
        )
    if "defer_embedding_wgrad_compute" in given:
        lines.append(
            "--defer-embedding-wgrad-compute is off: the output layer's weight gradient is computed with its input's"
        )
    if "overlap_moe_expert_parallel_comm" in given and not schedule.splits:
        lines.append(
            "--overlap-moe-expert-parallel-comm hides nothing: the plan splits no backward, so no weight gradients are "
            "left to run behind messages"
        )
    return lines


def _limit(job: JobPlan) -> str:
    """The memory limit in bytes where they are known, and as a fraction where 1F1B holds a microbatch a rank."""
    size, limit = job.request.limit_bytes, job.request.memory_limit or 0.0
    fraction = f"{limit:.3g} of 1F1B's memory"
    if size is None:
        return fraction
    return f"{amount(size)}, {fraction}" if limit <= 1 and job.plan.timeline.of_1f1b is not None else amount(size)
