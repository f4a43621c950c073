"""Real jobs with a vocabulary of 50 thousand: memory of every rank, and losses compared with stock's."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.apart import rows_apart, tell_megatron
from benchmarks.parts import Claim, Row, Say, markdown_table, verdict

_RANKS, _ITERATIONS = 4, 10
_MODEL = shlex.split("""
    --num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm --no-persist-layer-norm
    --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 50257 --mock-data
    --micro-batch-size 2 --global-batch-size 16 --lr 1.5e-3 --min-lr 1.5e-4 --clip-grad 0
    --attention-dropout 0 --hidden-dropout 0 --seed 1234 --num-workers 0 --eval-iters 0 --eval-interval 1000
    --log-interval 1 --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion --distributed-backend gloo --dataloader-type cyclic
""")
_SHARED = "--pipeline-vocabulary-parallel"


class Job(NamedTuple):
    """One job.

    Args:
        name: of the job.
        flags: that make it so.
        compared_with: the job, run before, that draws the same weights at its start: a V puts layers on other ranks.
    """

    name: str
    flags: list[str]
    compared_with: str = ""


JOBS = (
    Job("stock 1F1B", []),
    Job("`1f1b`", ["--pipeline-schedule", "1f1b"], "stock 1F1B"),
    Job("`1f1b` with vocabulary parallelism", ["--pipeline-schedule", "1f1b", _SHARED], "stock 1F1B"),
    Job("`v-half`", ["--pipeline-schedule", "v-half"]),
    Job("`v-half` with vocabulary parallelism", ["--pipeline-schedule", "v-half", _SHARED], "`v-half`"),
)
_MOST_LOSS_ERROR, _UNEVEN = 1e-6, 0.05


class Held(NamedTuple):
    """Memory of one rank, in bytes, and on the last rank each iteration's loss."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    losses: list[float]


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each job."""
    return rows_apart(_measure, quick, say)


def _measure(quick: bool, say: Say) -> Iterator[Row]:
    import pretrain_gpt  # noqa: F401 - here once, for all ranks
    from benchmarks.emulated_ranks import run_ranks
    from benchmarks.quick_start import quick_start

    quick_start()
    known: dict[str, list[float]] = {}
    for name, flags, compared_with in JOBS:
        say(f"vocabulary: a job with 50 thousand words, {name}")
        found = run_ranks(_RANKS, partial(_train, [*flags, "--train-iters", "3" if quick else str(_ITERATIONS)]), 600)
        losses = known[name] = found[-1].losses
        yield {
            "job": name,
            **{field: [getattr(rank, field) for rank in found] for field in Held._fields[:-1]},
            "losses": losses,
            "compared_with": compared_with,
            "worst_loss_error": max(abs(a / b - 1) for a, b in zip(losses, known[compared_with or name], strict=True)),
        }


def _train(flags: Sequence[str]) -> Held:
    from megatron.training import training

    import pretrain_gpt
    from megatron.schedules.integration.schedule_function import ScheduleFunction

    tell_megatron()
    losses: list[float] = []
    held: dict[str, int] = {}
    step, call = training.train_step, ScheduleFunction.__call__

    def stepped(*args: Any, **kwargs: Any) -> Any:
        found = step(*args, **kwargs)
        model, optimizer = args[2], args[3]
        parameters = [parameter for chunk in model for parameter in chunk.parameters()]
        held["weights"] = sum(parameter.nbytes for parameter in parameters)
        held["gradients"] = sum(parameter.main_grad.nbytes for parameter in parameters)
        states = [value for each in optimizer.optimizer.state.values() for value in each.values()]
        held["optimizer"] = sum(value.nbytes for value in states if hasattr(value, "nbytes"))
        if "lm loss" in found[0]:
            losses.append(float(found[0]["lm loss"]))
        return found

    def called(self: ScheduleFunction, **asked: Any) -> list[Any]:
        if "activations" not in held:
            self.peaks.count_next_call()
        found = call(self, **asked)
        held.setdefault("activations", self.peaks.bytes)
        return found

    training.train_step = stepped
    ScheduleFunction.__call__ = called  # type: ignore[method-assign]
    sys.argv = ["pretrain_gpt.py", *_MODEL, "--pipeline-model-parallel-size", str(_RANKS), *flags]
    pretrain_gpt.main()
    return Held(held["weights"], held["gradients"], held["optimizer"], held.get("activations", 0), losses)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about jobs with vocabulary parallelism: losses, and how evenly memory is spread over the ranks."""
    found = []
    for row in rows:
        if "vocabulary" in row["job"]:
            name = row["job"]
            found.append(
                Claim(
                    f"Losses of {name} differ from those of {row['compared_with']} by at most {_MOST_LOSS_ERROR:g}",
                    f"{row['worst_loss_error']:.1e} at most in {len(row['losses'])} iterations",
                    verdict(row["worst_loss_error"] <= _MOST_LOSS_ERROR),
                )
            )
            uneven = {what: max(row[what]) / (sum(row[what]) / len(row[what])) - 1 for what in _even(row)}
            found.append(
                Claim(
                    f"The worst rank's {', '.join(uneven)} of {name} are within {_UNEVEN:.0%} of the mean",
                    ", ".join(f"{each:+.1%}" for each in uneven.values()),
                    verdict(max(uneven.values()) <= _UNEVEN),
                )
            )
    return found


def _even(row: Row) -> tuple[str, ...]:
    """Returns what should be equal on all ranks: under 1F1B not the activations."""
    return ("weights", "gradients", "activations") if "v-half" in row["job"] else ("weights", "gradients")


def section(rows: Sequence[Row]) -> str:
    """Returns a line for each job, with the memory of each rank."""
    heads = ["MiB, by rank", "weights", "activations"]
    table = [[row["job"], *(_by_rank(row[what]) for what in ("weights", "activations"))] for row in rows]
    how = (
        "Real jobs: four ranks, 8 layers, a vocabulary of 50,304 words, eight microbatches, fp32. Gradients take as "
        "much as weights, Adam's state twice as much."
    )
    return f"{how}\n\n{markdown_table(heads, table)}"


def _by_rank(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / 2**20:.1f}" for size in sizes) if any(sizes) else ""
