"""Measures the activation memory of every rank in training, and compares it with the plan."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks import memory_saving
from benchmarks.apart import rows_apart, tell_megatron
from benchmarks.parts import Claim, Part, Row, Say, markdown_table, verdict
from megatron.schedules.job.flags import SEARCH_VARIABLE

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
    """Peak memory of one rank.

    Args:
        planned: the most by plan, in microbatches' worth of the rank's activations.
        one: bytes at most while a single microbatch goes through the whole pipeline.
        full: bytes at most with all of them.
    """

    planned: float
    one: int
    full: int


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each schedule and number of ranks."""
    return rows_apart(_measure, quick, say)


def _measure(quick: bool, say: Say) -> Iterator[Row]:
    import pretrain_gpt  # noqa: F401 - here once, for all ranks
    from benchmarks.emulated_ranks import run_ranks
    from benchmarks.quick_start import quick_start
    from tools import _pass_times  # noqa: F401

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
            if (schedule, size) == (_BASELINE, memory_saving.RANKS):
                inner = [rank.one for rank in found[1:-1]]  # which have decoder layers only
                yield from memory_saving.measure(_model(), round(sum(inner) / len(inner)), quick, say)


def memory_row(schedule: str, size: int, found: Sequence[Peaks], baseline: Sequence[Peaks]) -> dict[str, Any]:
    """Returns each rank's bytes against the planned ones, and the worst rank's against 1F1B's."""
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
        "planned_ratio": max(rank.planned for rank in found) / max(rank.planned for rank in baseline),
    }


def _model() -> list[str]:
    from megatron.schedules.integration.cpu import standin

    return _MODEL if standin.needed() else [*_MODEL, *_ON_GPU]


def _weight_share() -> float:
    """Returns the share of a decoder layer's activations that is still held from I to W."""
    from tools import _pass_times as times

    tell_megatron()
    held = times.held(times.build([*_model(), "--num-layers", "1"]), times.LAYERS)
    return held.after_input_grad / held.after_forward


def _train(schedule: str, size: int, share: float) -> Peaks:
    """Trains one iteration on this rank, first with a single microbatch, then with all."""
    import torch.distributed as dist

    import pretrain_gpt
    from megatron.schedules.integration.schedule_function import ScheduleFunction
    from megatron.schedules.schedule.cost_parts import MemoryShares
    from megatron.schedules.schedule.costs import Costs
    from megatron.schedules.schedule.simulator import peaks

    tell_megatron()
    seen: list[Peaks] = []
    step = ScheduleFunction.__call__

    def noted(self: ScheduleFunction, **asked: Any) -> list[Any]:
        self.peaks.count_next_call()
        step(self, **asked | {"num_microbatches": 1})
        one = self.peaks.bytes
        self.peaks.count_next_call()
        losses = step(self, **asked)
        schedule = self._planner.first
        planned = peaks(schedule, Costs(memory=MemoryShares(share)).on(schedule.placement))[dist.get_rank()]
        seen.append(Peaks(planned, one, self.peaks.bytes))
        return losses

    ScheduleFunction.__call__ = noted  # type: ignore[method-assign]
    shape = f"--pipeline-model-parallel-size {size} --global-batch-size {2 * size} --pipeline-schedule {schedule}"
    os.environ[SEARCH_VARIABLE] = "1"
    sys.argv = ["pretrain_gpt.py", *_model(), *shape.split(), *_FLAGS.get(schedule, [])]
    pretrain_gpt.main()
    return seen[0]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about the planned bytes and the shares of 1F1B's; then with recompute and offload."""
    schedules, saved = _apart(rows)
    found = []
    if schedules:
        worst = max(schedules, key=lambda row: abs(row["worst_error"]))
        found.append(
            Claim(
                f"Every rank holds the planned activation memory, within {MOST_ERROR:.0%}",
                f"{worst['worst_error']:+.1%} at worst ({worst['schedule']}, {worst['pipeline_size']} ranks)",
                verdict(abs(worst["worst_error"]) <= MOST_ERROR),
            )
        )
    for row in schedules:
        most = MOST_SHARES.get(row["schedule"])
        if most is not None and row["pipeline_size"] == _CLAIMED_SIZE:
            found.append(
                Claim(
                    f"`{row['schedule']}` holds at most {most:.2f} of 1F1B's activations at {_CLAIMED_SIZE} ranks",
                    f"{row['ratio']:.3f}, planned {row['planned_ratio']:.3f}",
                    verdict(row["ratio"] <= most),
                )
            )
    return found + (memory_saving.claims(saved) if saved else [])


def section(rows: Sequence[Row]) -> str:
    """Returns how it was measured, and every schedule's worst rank; then with recompute and offload."""
    schedules, saved = _apart(rows)
    text = [_HOW, _table(schedules)]
    return "\n\n".join([*text, memory_saving.section(saved)] if saved else text)


def _apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if "memory_saving" not in row], [row for row in rows if "memory_saving" in row]


_HOW = """\
Training of a small GPT with twice as many microbatches as ranks. Counted are the bytes that autograd and waiting weight
gradients hold on the worst rank, relative to 1F1B's worst rank."""


def _table(rows: Sequence[Row]) -> str:
    """Returns a line for each schedule; measured and planned for each number of ranks."""
    sizes = list(dict.fromkeys(row["pipeline_size"] for row in rows))
    found = {(row["schedule"], row["pipeline_size"]): row for row in rows}
    heads = [f"{what}, {size} ranks" for size in sizes for what in ("measured", "planned")]
    table = []
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        at = [found.get((schedule, size)) for size in sizes]
        table.append([schedule, *(cell for row in at for cell in (_cells(row) if row else ["", ""]))])
    return markdown_table(["", *heads], table).strip()


def _cells(row: Row) -> list[str]:
    return [f"{row['ratio']:.1%}", f"{row['planned_ratio']:.1%}"]


PART = Part("memory", "Activation memory", measure, claims, section)
