"""Costs of a job's passes: measured, given by a flag, or computed from the model's arithmetic."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.estimate.device_costs import device_costs
from megatron.schedules.estimate.devices import named
from megatron.schedules.estimate.model_build import with_model
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.times import attention_shares, loads
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.stage_layers import written
from megatron.schedules.measure.profile_facts import CopyRates, copy_time
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import printable


def costs_of(spec: JobSpec, *, of_device: bool = False) -> Costs:
    """Costs of half a rank's layers, with time and memory of each part of the model if it is known.

    Args:
        spec: the job, with its cost file.
        of_device: true if the plan has to keep within a device, so that parameters count even if their layers are not
            partitioned.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    settings, profile, custom = spec.settings, spec.profile, spec.custom_costs
    costs = profile.costs(spec.sizes.pipeline) if profile is not None else _times(spec)
    if spec.trained is not None:
        layers = len(spec.trained.build.shape.layers)
        if profile is not None and settings.costs is not None and profile.facts.layers != layers:
            raise PlanError(
                f"{spec.flags['model']} has {layers} layers, and {settings.costs.text} was measured for "
                f"{profile.facts.layers}"
            )
        costs = with_model(
            costs,
            spec.trained,
            shared=settings.vocabulary_parallel,
            placed=of_device or settings.layers == "auto",
            profile=profile,
            hides=bool(spec.hides_messages),
        )
    else:
        costs = replace(costs, model=replace(costs.model, shared_vocabulary=settings.vocabulary_parallel))
    if of_device and costs.in_bytes:
        costs = replace(costs, memory=replace(costs.in_bytes, of_device=True))
    if spec.hides_messages is False:
        costs = costs.without_messages
    if custom is not None:
        costs = custom.added_to(costs)
    return _with_copies(spec, costs) if settings.saving.offload else costs


def rank_bytes(spec: JobSpec, costs: Costs) -> float | None:
    """Activation memory of one microbatch in an average rank's layers, bytes; None if unknown."""
    ranks, profile = spec.sizes.pipeline, spec.profile
    if costs.in_bytes is not None:
        return costs.in_bytes.of_rank(ranks)
    return profile.layer_bytes * profile.facts.layers / ranks if profile and profile.layer_bytes else None


def attention_of(spec: JobSpec) -> tuple[float, float]:
    """Attention's shares of an average layer's F and I at the full sequence length.

    Raises:
        PlanError: the model's sizes are unknown.
    """
    if spec.build is None:
        flag = spec.flags["plan_lengths"]
        raise PlanError(f"{flag} needs the model's sizes, to know what attention takes: give their flags")
    return attention_shares(spec.build)


def assumed(spec: JobSpec, costs: Costs, layers: tuple[int, ...] | None) -> str:
    """Describes the costs that a job is planned with.

    Args:
        spec: the job.
        costs: its costs.
        layers: decoder layers of each stage, if they were partitioned.
    """
    choice = spec.settings.costs
    if choice is not None and choice.file is not None:
        said = f"{'costs' if spec.profile is None else 'measured times'} ({printable(choice.text)})"
    elif uses_estimates(spec) and (device := named(spec.gpu)) is not None:
        said = f"times estimated for {device.name}"
    elif choice is not None:
        said = f"F,I,W {choice.text} as given"
    else:
        by = "assumed" if costs.model.divisible else "by the model's arithmetic"
        said = f"F,I,W {costs.layers.forward:g},{costs.layers.input_grad:.3g},{costs.layers.weight_grad:.3g} {by}"
    if costs.model.divisible:
        return f"{said}; equal stages assumed"
    last = costs.last_in_layers
    where = f"; layers {written(spec.layers, layers)}" if layers else ""
    ahead = " with multi-token prediction" if spec.layers.ahead else ""
    known = "" if last > 0.01 else ", its vocabulary not being known"
    if costs.model.shared_vocabulary:
        known = f", and shared with the embedding by {spec.sizes.pipeline} ranks"
    return f"{said}; the output layer{ahead} counted as {last:.2g} decoder layers{known}{where}"


def unknown_bytes(spec: JobSpec, flag: str, instead: str) -> PlanError:
    """Error for ``flag``, which compares bytes, without a model or a profile that counted them.

    Args:
        spec: the job.
        flag: the flag and its value.
        instead: what works on the command line without bytes.
    """
    if spec.by_megatron:
        return PlanError(f"{flag} needs the model's sizes: give their flags")
    given = f"{spec.flags['model']} or a profile in {spec.flags['costs']} that counted bytes"
    return PlanError(f"{flag} needs bytes, from {given}: give one of these, or {instead}")


def _times(spec: JobSpec) -> Costs:
    """Times of a cost file written by hand, of the flag, of a device, or by the model's arithmetic."""
    choice, custom = spec.settings.costs, spec.custom_costs
    given = custom.times if custom is not None else None if choice is None else choice.times
    known = given or spec.times or (of_gpu(spec) if uses_estimates(spec) else None)
    return known or (Costs() if spec.build is None else Costs.of(*loads(spec.build).ratio))


def of_gpu(spec: JobSpec) -> Costs | None:
    """Milliseconds on the job's GPU, estimated; None if the GPU or the model is not known."""
    device, model = named(spec.gpu), spec.trained
    if device is None or model is None:
        return None
    costs = device_costs(
        model,
        Roofline(device),
        spec.sizes.pipeline,
        gpus=spec.sizes.world,
        hides=bool(spec.hides_messages),
    )
    # The parts' loads are relative.
    return costs.scaled(lambda seconds: 1e3 * seconds)


def uses_estimates(spec: JobSpec) -> bool:
    """Returns true if the times of passes are estimates for the job's GPU."""
    return spec.settings.costs is None and spec.times is None and spec.settings.saving.offload


def on_gpu(spec: JobSpec) -> Costs | None:
    """Costs in milliseconds on the job's GPU, with the model's parts, whatever the job is planned with; else None."""
    times, model = of_gpu(spec), spec.trained
    if times is None or model is None:
        return None
    shared, hides = spec.settings.vocabulary_parallel, bool(spec.hides_messages)
    return with_model(times, model, shared=shared, hides=hides)


def _with_copies(spec: JobSpec, costs: Costs) -> Costs:
    """Adds the time to copy the activations of half a rank's layers in one direction, which offload needs."""
    flag, costs_flag, gbps = spec.flags["offload"], spec.flags["costs"], spec.settings.saving.gbps
    device = named(spec.gpu) if uses_estimates(spec) else None
    if gbps is None and device is not None:
        gbps = device.host_link / 1e9
    if gbps is None and not costs.copies.time:
        raise PlanError(
            f"{flag} takes the time of copies from {costs_flag} FILE.json: give copy_time in one written by hand "
            f"(docs/measure.md), or a profile that has it, as tools/profile_passes.py writes; or {flag}=GB/s with "
            f"{costs_flag} in milliseconds"
        )
    if gbps is None:
        return costs
    if spec.settings.costs is None and spec.times is None and device is None:
        raise PlanError(
            f"{flag}={gbps:g} compares copies with passes, whose times are not known: give {costs_flag} in "
            "milliseconds, or a cost file"
        )
    held = rank_bytes(spec, costs)
    if held is None:
        raise unknown_bytes(spec, f"{flag}={gbps:g}", f"offload and copy_time in a {costs_flag} FILE.json")
    time = copy_time(CopyRates(*[gbps] * 3), held / 2, both_ways=True) or 0.0
    return replace(costs, copies=replace(costs.copies, time=time))
