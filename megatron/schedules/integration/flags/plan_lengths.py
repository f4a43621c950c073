"""Checks of ``--pipeline-plan-lengths`` against other flags."""

from __future__ import annotations

from megatron.schedules.estimate.times import attention_shares
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import MemorySaving
from megatron.schedules.utils.errors import PlanError

_FLAG = FLAGS["plan_lengths"]
# Stock's flags that cannot be combined with it, and why.
_NOT_WITH = {
    "iterations_to_skip": "samples are read an iteration ahead; leave one of the two out",
    "hybrid_context_parallel": "it deals sequences out itself; leave one of the two out",
    "phase_transition_iterations": "samples of the next phase cannot be read ahead; leave one of the two out",
}


def check_plan_lengths(spec: JobSpec) -> None:
    """Refuses the flag if it cannot work.

    Raises:
        PlanError: the error names the conflicting flag.
    """
    settings, stock = spec.settings, spec.stock
    if not settings.plan_lengths:
        return
    for name, why in _NOT_WITH.items():
        if name in stock.given:
            raise PlanError(f"{_FLAG} does not go with --{name.replace('_', '-')}: {why}")
    if stock.dataloader_type == "external":
        raise PlanError(f"{_FLAG} does not go with --dataloader-type external: its state would be an iteration ahead")
    if spec.sizes.expert > 1:
        raise PlanError(
            f"{_FLAG} does not go with --expert-model-parallel-size above 1: replicas that share experts would run "
            "different orders; leave one of the two out"
        )
    if settings.vocabulary_parallel:
        raise PlanError(
            f"{_FLAG} does not go with {FLAGS['shared_vocabulary']}: ranks meet over microbatches of one shape; leave "
            "one of the two out"
        )
    if settings.saving != MemorySaving():
        raise PlanError(f"{_FLAG} does not go with {FLAGS['save_memory']} so far: leave one of the two out")
    for flag, is_given in ((FLAGS["measure"], settings.measuring is not None), (FLAGS["replan"], settings.replan)):
        if is_given:
            raise PlanError(
                f"{_FLAG} does not go with {flag}: every iteration has a plan of its own; measure a job of even "
                f"lengths, and give the costs that it wrote to {FLAGS['costs']}"
            )
    if settings.measures_limit:
        raise PlanError(f"{_FLAG} does not go with {FLAGS['memory_limit']} auto: give a number")


def attention_of(spec: JobSpec) -> tuple[float, float]:
    """Attention's shares of an average layer's F and I at the full sequence length.

    Raises:
        PlanError: the model's sizes are unknown.
    """
    if spec.build is None:
        raise PlanError(f"{_FLAG} needs the model's sizes, to know what attention takes: give their flags")
    return attention_shares(spec.build)
