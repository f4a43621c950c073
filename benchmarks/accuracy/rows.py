"""Published measurements as jobs: what our estimate predicts for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from benchmarks.accuracy.models import flags, named
from megatron.schedules.cli.options import FLAGS
from megatron.schedules.estimate.build import Adapters
from megatron.schedules.estimate.calibration import CALIBRATED, Calibration
from megatron.schedules.estimate.device_costs import device_costs, optimizer_seconds
from megatron.schedules.estimate.devices import SHORT, Device
from megatron.schedules.estimate.model_build import recomputed_share
from megatron.schedules.estimate.models import Model
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.job.plans import model_fields
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import Placement, interleaved, sequential

_RECIPES = {
    "BF16": "",
    "FP8": "--fp8-format hybrid --fp8-recipe tensorwise",
    "MXFP8": "--fp8-format hybrid --fp8-recipe mxfp8",
    "NVFP4": "--fp4-format e2m1",
}


# Fields of a record that come from a release's recipe, which is not known for every release.
_OF_RECIPES = (
    "recompute_modules",
    "cuda_graph_impl",
    "cuda_graph_scope",
    "moe_a2a_overlap",
    "moe_flex_dispatcher_backend",
)
# Tokens of a sample below which runs of a dense model of this size are fine-tuning.
_FINE_TUNED = {"Llama-3-70B": 8192}


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Args:
        release, model, gpu, precision: as the table calls them.
        gpus: number of GPUs.
        batch, micro: samples of an iteration and of a microbatch.
        sequence: tokens of a sample.
        tensor, pipeline, context, chunks, expert: parallel sizes; chunks of a rank.
        tokens: measured tokens per second and GPU.
        recompute: modules that Megatron recomputes.
        graphs: what captures CUDA graphs, as ``--cuda-graph-impl`` names it; empty without.
        captured: parts of layers that are captured.
        overlaps: true if experts' messages run behind another microbatch's computing.
        backend: library that sends tokens to experts, as ``--moe-flex-dispatcher-backend`` names it; empty without.
        adapters: rank of the adapters of ``linear_qkv`` that are all that is trained; 0 without.
    """

    release: str
    model: str
    gpu: str
    precision: str
    gpus: int
    batch: int
    micro: int
    sequence: int
    tensor: int
    pipeline: int
    context: int
    chunks: int
    expert: int
    tokens: float
    recompute: tuple[str, ...] = ()
    graphs: str = ""
    captured: tuple[str, ...] = ()
    overlaps: bool = False
    backend: str = ""
    adapters: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Row:
        """Reads a record of ``measured.json``."""
        graphs = record.get("cuda_graph_impl") or ""
        scope = record.get("cuda_graph_scope") or ()
        return cls(
            record["release"],
            record["model"],
            record["gpu"],
            record["precision"],
            record["gpus"],
            record["gbs"],
            record["mbs"],
            record["seq"],
            record["tp"],
            record["pp"],
            record["cp"],
            record["vp"] or 1,
            record["ep"] or 1,
            record["tokens"],
            tuple(record.get("recompute_modules") or ()),
            "" if graphs == "none" else graphs,
            (scope,) if isinstance(scope, str) else tuple(scope),
            bool(record.get("moe_a2a_overlap")),
            record.get("moe_flex_dispatcher_backend") or "",
            record.get("adapters") or 0,
        )

    @property
    def is_pretraining(self) -> bool:
        """False for fine-tuning, whose samples are packed, and where adapters may be all that is trained (LoRA)."""
        return self.sequence >= _FINE_TUNED.get(self.name, 0)

    @property
    def has_experts(self) -> bool:
        """True if layers have experts."""
        assert self.spec.build is not None
        return self.spec.build.has_experts

    @property
    def setting(self) -> Row:
        """The same without release and measurement."""
        return replace(self, release="", tokens=0.0)

    @property
    def name(self) -> str:
        """Our name of the model."""
        found = named(self.model)
        assert found is not None, self.model
        return found

    @property
    def device(self) -> Device:
        """The GPU."""
        return SHORT[self.gpu]

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def microbatches(self) -> int:
        """Microbatches of an iteration in one pipeline."""
        return self.batch // (self.data * self.micro)

    @property
    def measured(self) -> float:
        """Measured seconds of an iteration."""
        return self.batch * self.sequence / (self.tokens * self.gpus)

    @property
    def placement(self) -> Placement:
        """Rank of each stage."""
        return sequential(self.pipeline) if self.chunks == 1 else interleaved(self.pipeline, self.chunks)

    @cached_property
    def spec(self) -> JobSpec:
        """The job, without times."""
        return _job(self.setting)

    @cached_property
    def _recomputed(self) -> float:
        """Share of the forward of a layer that Megatron recomputes."""
        model = self.spec.trained
        assert model is not None, "the model is known"
        return recomputed_share(model.recompute, model.build)

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        assert self.spec.build is not None
        return even_layers(len(self.spec.build.shape.layers), self.placement.stages)

    def costs(self, known: Calibration = CALIBRATED) -> Costs:
        """Estimated seconds of its passes."""
        model = self.spec.trained
        assert model is not None, "the model is known"
        # Megatron's overlap needs several chunks of a rank.
        roofline = Roofline(self.device, known, overlaps=self.overlaps and self.chunks > 1)
        return device_costs(model, roofline, self.pipeline, gpus=self.gpus)

    def after(self, known: Calibration = CALIBRATED) -> float:
        """Estimated seconds of the optimizer. Recipes hide the messages of gradients and parameters."""
        model = self.spec.trained
        assert model is not None, "the model is known"
        sizes = parameters(model.build).by_stage(self.layers, self.placement.rank_of, False)
        most = max(sizes, key=lambda count: count.all)
        return optimizer_seconds(model, Roofline(self.device, known), most, self.data * self.context)

    def planned(self, known: Calibration = CALIBRATED, schedule: str = "") -> JobPlan:
        """Plans the job."""
        name = schedule or ("1f1b" if self.chunks == 1 else f"interleaved-1f1b:{self.chunks}")
        base, _, chunks = name.partition(":")
        count = int(chunks) if chunks else 2 if base.startswith("v-") else 1
        assert self.spec.build is not None, "the model is known"
        layers = even_layers(len(self.spec.build.shape.layers), count * self.pipeline)
        choice = ScheduleChoice(name, base, int(chunks) if chunks else None)
        settings = replace(self.spec.settings, schedule=choice, layers=layers)
        return plan_job(replace(self.spec, settings=settings, times=self.costs(known)))

    def predicted(self, known: Calibration = CALIBRATED) -> float:
        """Predicted seconds of an iteration."""
        return _pipeline(self.setting, known) + self.after(known)

    @property
    def stretch(self) -> float:
        """Time of the pipeline over that in which its busiest rank computes, with today's numbers."""
        return _pipeline(self.setting, CALIBRATED) / self.busiest()

    def busiest(self, known: Calibration = CALIBRATED) -> float:
        """Estimated seconds in which the rank with most work computes in an iteration."""
        costs = self.costs(known)
        costs = replace(costs, layers=replace(costs.layers, stock_recompute=self._recomputed))
        on = costs.on(self.placement, Decisions(layers=self.layers)).durations
        works = zip(on[Kind.F], on[Kind.B], strict=True)
        stages = [forward + backward for forward, backward in works]
        ranks = range(self.pipeline)
        return self.microbatches * max(sum(stages[s] for s in self.placement.stages_of(rank)) for rank in ranks)


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Decoder layers of each stage as recipes place them.

    All stages have as many, also if embedding and output layer count as one each; otherwise the last ones have fewer.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0:
        full = (layers + 2) // stages
        return (full - 1, *(full,) * (stages - 2), full - 1)
    full = -(-layers // stages)
    return tuple(max(0, min(full, layers - at * full)) for at in range(stages))


def _pipeline(setting: Row, known: Calibration) -> float:
    """Estimated seconds of the pipeline."""
    return _today(setting) if known is CALIBRATED else setting.planned(known).plan.iteration_time


@cache
def _today(setting: Row) -> float:
    return setting.planned().plan.iteration_time


@cache
def _job(row: Row) -> JobSpec:
    text = f"{flags(row.name)} --seq-length {row.sequence} --max-position-embeddings {row.sequence} "
    if row.name.startswith("DeepSeek") and "w/o" not in row.model:
        text += "--mtp-num-layers 1 "
    model = Model(row.name, text + _RECIPES[row.precision])
    changes: dict[str, Any] = {
        "tensor_model_parallel_size": row.tensor,
        "pipeline_model_parallel_size": row.pipeline,
        "context_parallel_size": row.context,
        "expert_model_parallel_size": row.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": row.tensor > 1,
        "micro_batch_size": row.micro,
        "global_batch_size": row.batch,
        "cuda_graph_impl": row.graphs or "none",
        "cuda_graph_modules": list(row.captured),
        "cuda_graph_scope": list(row.captured),
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": row.backend or "deepep",
        "overlap_moe_expert_parallel_comm": row.overlaps,
        "adapters": Adapters(row.adapters, frozenset(("linear_qkv",))) if row.adapters else None,
    }
    if row.recompute:
        changes |= {"recompute_granularity": "selective", "recompute_modules": list(row.recompute)}
    fields = model_fields(model.trained(**changes), row.gpus)
    # Stock's own overlap is no matter of W passes.
    fields["hides_messages"] = False
    settings = Settings(ScheduleChoice("1f1b", "1f1b"))
    return JobSpec(settings, microbatches=row.microbatches, flags=FLAGS, **fields)


def read(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns the rows of models that are known here.

    A row of a release whose recipe is not known has the recipe of the latest release before it, of the same GPU if
    there is one: what a release captures and hides the next ones do too.
    """
    known = [record for record in records if named(record["model"]) is not None]
    return [Row.of(_completed(record, known)) for record in known]


def _completed(record: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if "moe_a2a_overlap" in record:
        return record
    before = [
        other
        for other in known
        if "moe_a2a_overlap" in other
        and named(other["model"]) == named(record["model"])
        and other["release"] < record["release"]
    ]
    latest = max(before, key=lambda other: (other["gpu"] == record["gpu"], other["release"]), default={})
    return {**record, **{name: latest[name] for name in _OF_RECIPES if name in latest}}
