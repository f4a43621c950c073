"""A training run to search settings for, and the settings that go with its model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.schedules.estimate.devices import Device
from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.estimate.models import Model
from megatron.schedules.estimate.times import ONES, PassTimes
from megatron.schedules.utils.errors import PlanError
from tools._bounds import Promise, Stages
from tools._methods import Method
from tools._setting import NONE, Setting

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_CONTEXTS = (1, 2, 4, 8, 16)
# Tokens of a rank under context parallelism: attention was not measured with fewer (docs/accuracy.md).
_LEAST_TOKENS = 4096
# Tokens of a microbatch of a model with experts: no more were measured (docs/accuracy.md). How much less its layers
# wait for their host if there are more is the least certain part of an estimate.
_MOST_TOKENS_TO_EXPERTS = 8192
FULL = StockRecompute("full", "uniform", 1)


@dataclass(frozen=True)
class Question:
    """The training run to search settings for.

    Args:
        model, device: the model and the GPU.
        gpus: number of GPUs.
        global_batch: samples of an iteration.
        correction: correction of the roofline, from a measured profile.
        own: the user's setting; None without one.
        lost: Megatron's arguments that our schedules do not work with.
        recomputes: recompute that is tried; None for all that goes with the model.

    Raises:
        PlanError: the device cannot compute the model's FP8 or FP4.
    """

    model: Model
    device: Device
    gpus: int
    global_batch: int
    correction: PassTimes = ONES
    own: Setting | None = None
    lost: frozenset[str] = frozenset()
    recomputes: tuple[StockRecompute, ...] | None = None

    def __post_init__(self) -> None:
        quantized, device = self.model.whole.quantized, self.device
        if quantized is not None and quantized.recipe not in device.recipes:
            known = ", ".join(device.recipes)
            raise PlanError(
                f"{quantized.recipe} does not run on {device.name}, which "
                + (f"has {known}: give one of them as --fp8-recipe" if known else "has no FP8: leave out --fp8-format"),
                "model",
            )

    @property
    def tried_recomputes(self) -> tuple[StockRecompute, ...]:
        """Recompute that is tried."""
        return self.recomputes if self.recomputes is not None else recomputes(self.model, self.own)

    @property
    def _micro_batches(self) -> list[int]:
        """Samples of a microbatch that are tried, that of the user's setting in any case."""
        most = _MICRO_BATCHES[-1]
        if self.model.whole.has_experts:
            most = max(1, _MOST_TOKENS_TO_EXPERTS // self.model.sequence)
        return sorted(
            {*(each for each in _MICRO_BATCHES if each <= most), *([self.own.micro_batch] if self.own else [])}
        )

    def stages(self, method: Method) -> Iterator[Stages]:
        """Yields all sizes but those of pipelines, that go with the model."""
        own = self.own
        experts = int(self.model.args.num_experts or 1)
        longer = [context for context in _CONTEXTS[1:] if self.model.sequence // context >= _LEAST_TOKENS]
        contexts = sorted({1, *longer, own.context if own else 1})
        for tensor, context in itertools.product(_divisors(self.device.domain), contexts):
            data, rest = divmod(self.gpus, tensor * context)
            is_near = self.device.domain % (tensor * context) == 0 or (own is not None and context == own.context)
            if rest or not is_near:
                continue
            # Half the samples on half the ranks are the same computing with fewer messages.
            samples = self._micro_batches if context == 1 else _MICRO_BATCHES[:1]
            for expert, micro_batch in itertools.product(_divisors(experts), samples):
                sizes = data, tensor, 1, micro_batch, self.global_batch, self.correction, context, expert
                setting = Setting(method, self.model, self.device, *sizes, lost=self.lost)
                if not setting.wrong_in_stages:
                    yield Stages(setting)

    def promises(self, method: Method) -> Iterator[Promise]:
        """Yields bounds of all settings of ``method``, including those that do not fit. Some cannot run."""
        own = self.own.method.chunks if self.own is not None else 1
        ranks = len(self.model.whole.shape.layers) + 2  # on more, some would have no layer, nor an end
        for stages in self.stages(method):
            at = stages.setting
            pipelines = [
                pipeline
                for pipeline in _divisors(at.data)
                if (pipeline > 1 or method.schedule == "1f1b")
                and pipeline <= ranks
                and self.global_batch % (at.data // pipeline * at.micro_batch) == 0
            ]
            yield from stages.promises(self.tried_recomputes, pipelines, own)

    def settings(self, method: Method) -> Iterator[Setting]:
        """Yields all settings of ``method``, including those that do not fit."""
        for promise in self.promises(method):
            for bound in promise.bounds:
                setting = promise._replace(bounds=(bound,)).setting
                if not setting.wrong:
                    yield setting


def recomputes(model: Model, own: Setting | None) -> tuple[StockRecompute, ...]:
    """Returns no recompute, that of the user's setting, of cheap parts, of whole MLPs too, and of whole layers."""
    args, build = model.args, model.whole
    symbols = "".join(build.shape.layers)
    latent = ["mla_up_proj"] * bool(args.multi_latent_attention)
    cheap = [*latent, *(["layernorm"] if args.normalization else []), *["moe_act"] * build.has_experts]
    if build.quantized is not None and build.quantized.recipe == "delayed":
        cheap = latent  # the others discard what delayed scaling needs
    inner = [*latent, *["mlp"] * ("-" in symbols), *["moe"] * build.has_experts]
    found = [NONE, *(StockRecompute("selective", None, None, tuple(each)) for each in (cheap, inner) if each), FULL]
    return tuple(dict.fromkeys([*found[:1], *([own.recompute] if own else []), *found[1:]]))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
