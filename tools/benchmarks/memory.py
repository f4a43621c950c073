"""Bytes of activations that every rank really holds in training, against the plan."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from megatron.schedules.job.flags import SEARCH_VARIABLE
from tools.benchmarks import memory_relief
from tools.benchmarks.apart import rows_apart, tell_megatron
from tools.benchmarks.parts import Part, Row, Say, markdown_table

MOST_ERROR = 0.10
# The most of 1F1B's worst rank, at eight ranks.
MOST_SHARES = {"v-half": 0.70, "v-min": 0.55}
_CLAIMED_SIZE = 8
_BASELINE = "1f1b"

_ONE_CHUNK = (_BASELINE, "zb-1p", "zb-2p", "eager-1f1b")
_SEVERAL_CHUNKS = ("interleaved-1f1b", "1f1b-v", "v-min", "v-half", "v-zb", "adaptive")
_QUICK = {4: (_BASELINE, "zb-1p", "v-min", "v-half", "v-zb"), 8: (_BASELINE, "v-min", "v-half")}
_FLAGS = {"adaptive": ["--pipeline-memory-limit", "0.5"]}

# Decoder layers weigh much more than the small vocabulary of the output layer.
_MODEL = shlex.split("""
    --num-layers 32 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --vocab-size 64 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --mock-data
    --untie-embeddings-and-output-weights --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 --seed 7 --num-workers 0
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-persist-layer-norm
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
    --train-iters 1 --dataloader-type cyclic
""")
# All ranks share one GPU; messages go through the host.
_ON_GPU = ["--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024", "--bf16"]
_ON_GPU += ["--max-position-embeddings", "1024"]


class Peaks(NamedTuple):
    """What one rank held.

    Args:
        whole: the most by plan, in microbatches' worth of the rank's activations, held to the end of W.
        planned: the same where I gives back what W does not need, as it does.
        one: bytes at most while a single microbatch goes through the whole pipeline.
        full: bytes at most with all of them.
    """

    whole: float
    planned: float
    one: int
    full: int


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """A row for each schedule and number of ranks."""
    return rows_apart(_measure, quick, say)


def _measure(quick: bool, say: Say) -> Iterator[Row]:
    import pretrain_gpt  # noqa: F401 - here once, for all ranks
    from tools import _pass_times  # noqa: F401
    from tools.benchmarks.emulated_ranks import run_ranks
    from tools.benchmarks.quick_start import quick_start

    quick_start()
    (share,) = run_ranks(1, _weight_share, 120)
    say(f"memory: of a layer's activations {100 * share:.1f} % wait from I to W")
    for size, schedules in (_QUICK if quick else dict.fromkeys((4, 8), _ONE_CHUNK + _SEVERAL_CHUNKS)).items():
        baseline: list[Peaks] = []
        for schedule in schedules:
            say(f"memory: {schedule} on {size} ranks")
            found = run_ranks(size, partial(_train, schedule, size, share), 300)
            baseline = baseline or found
            yield memory_row(schedule, size, found, baseline)
            if (schedule, size) == (_BASELINE, memory_relief.RANKS):
                inner = [rank.one for rank in found[1:-1]]  # which have decoder layers only
                yield from memory_relief.measure(_model(), round(sum(inner) / len(inner)), quick, say)


def memory_row(schedule: str, size: int, found: Sequence[Peaks], baseline: Sequence[Peaks]) -> dict[str, Any]:
    """Each rank's bytes against planned microbatches times the bytes of one, and the worst against 1F1B's."""
    planned = [round(rank.planned * rank.one) for rank in found]
    errors = [rank.full / plan - 1 for rank, plan in zip(found, planned, strict=True)]
    return {
        "schedule": schedule,
        "pipeline_size": size,
        "microbatches": 2 * size,
        "planned_microbatches": [rank.planned for rank in found],
        "one_microbatch_bytes": [rank.one for rank in found],
        "planned_bytes": planned,
        "measured_bytes": [rank.full for rank in found],
        "worst_error": max(errors, key=abs),
        "ratio": max(rank.full for rank in found) / max(rank.full for rank in baseline),
        "planned_ratio": max(rank.whole for rank in found) / max(rank.whole for rank in baseline),
    }


def _model() -> list[str]:
    from megatron.schedules.integration.cpu import standin

    return _MODEL if standin.needed() else [*_MODEL, *_ON_GPU]


def _weight_share() -> float:
    """The part of a decoder layer's activations that is still held from I to W."""
    from tools import _pass_times as times

    tell_megatron()
    held = times.held(times.build([*_model(), "--num-layers", "1"]), times.LAYERS)
    return held.after_input_grad / held.after_forward


def _train(schedule: str, size: int, share: float) -> Peaks:
    """One iteration of training on this rank, whose schedule runs for a single microbatch first, then for all."""
    import torch.distributed as dist

    import pretrain_gpt
    from megatron.schedules.integration.schedule_function import ScheduleFunction
    from megatron.schedules.schedule.costs import Costs
    from megatron.schedules.schedule.simulator import peaks

    tell_megatron()
    seen: list[Peaks] = []
    step = ScheduleFunction.__call__

    def noted(self: ScheduleFunction, **asked: Any) -> list[Any]:
        self.count_next_call()
        step(self, **asked | {"num_microbatches": 1})
        one = self.peak_activation_bytes
        self.count_next_call()
        losses = step(self, **asked)
        schedule = self._planner.first
        whole, shared = (
            peaks(schedule, Costs(weight_share=part).on(schedule.placement))[dist.get_rank()] for part in (1.0, share)
        )
        seen.append(Peaks(whole, shared, one, self.peak_activation_bytes))
        return losses

    ScheduleFunction.__call__ = noted  # type: ignore[method-assign]
    shape = f"--pipeline-model-parallel-size {size} --global-batch-size {2 * size} --pipeline-schedule {schedule}"
    os.environ[SEARCH_VARIABLE] = "1"
    sys.argv = ["pretrain_gpt.py", *_model(), *shape.split(), *_FLAGS.get(schedule, [])]
    pretrain_gpt.main()
    return seen[0]


def section(rows: Sequence[Row]) -> str:
    """The claims, then every schedule's worst rank; then the same of plans that recompute or offload."""
    relieved = [row for row in rows if "relief" in row]
    text = _schedules([row for row in rows if "relief" not in row])
    return "\n".join([text, "### With recompute and offload\n", memory_relief.section(relieved)]) if relieved else text


def _schedules(rows: Sequence[Row]) -> str:
    text = []
    if rows:
        worst = max(rows, key=lambda row: abs(row["worst_error"]))
        where = f"{worst['schedule']}, {worst['pipeline_size']} ranks"
        text.append(
            f"Every rank holds what is planned, within {100 * MOST_ERROR:.0f} %: at worst "
            f"{100 * worst['worst_error']:+.1f} % ({where}), {_verdict(abs(worst['worst_error']) <= MOST_ERROR)}\n"
        )
    for row in rows:
        most = MOST_SHARES.get(row["schedule"])
        if most is not None and row["pipeline_size"] == _CLAIMED_SIZE:
            text.append(
                f"{row['schedule']} holds at most {most:.2f} of 1F1B's worst rank at {_CLAIMED_SIZE} ranks: "
                f"{row['ratio']:.3f}, planned {row['planned_ratio']:.3f}, {_verdict(row['ratio'] <= most)}\n"
            )
    text.append(
        "Training of a small GPT with twice as many microbatches as ranks; bytes are those that autograd and waiting "
        "weight gradients hold, each storage once. Planned is the plan's number of microbatches times the bytes of "
        "one, which the same job measures on each rank beforehand, with a single microbatch in the pipeline; what I "
        "gives back ahead of W is measured on one layer alone.\n"
    )
    heads = ("schedule", "ranks", "worst rank, KiB", "planned, KiB", "worst error of a rank", "of 1F1B's", "planned")
    return "\n".join([*text, markdown_table(heads, [_cells(row) for row in rows])])


def _verdict(held: bool) -> str:
    return "**held**" if held else "**not held**"


def _cells(row: Row) -> list[str]:
    worst = max(range(len(row["measured_bytes"])), key=row["measured_bytes"].__getitem__)
    figures = [f"{row[name][worst] / 1024:.0f}" for name in ("measured_bytes", "planned_bytes")]
    shares = [f"{100 * row[name]:.1f} %" for name in ("ratio", "planned_ratio")]
    return [row["schedule"], str(row["pipeline_size"]), *figures, f"{100 * row['worst_error']:+.1f} %", *shares]


PART = Part("memory", "Memory", measure, section)
