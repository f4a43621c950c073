"""What a schedule costs the host: processor time of whole training steps of tiny layers, as a part of stock's."""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.apart import rows_apart, tell_megatron
from benchmarks.parts import Claim, Part, Row, Say, Statistics, markdown_table, verdict

_SIZES, _MICROBATCHES, _LAYERS = (2, 4), 32, 8
_ROUNDS, _ITERATIONS, _QUICK_ITERATIONS = 7, 6, 4
_WARM_UP = 2
_MODEL = shlex.split(f"""
    --num-layers {_LAYERS} --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm --no-persist-layer-norm
    --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 127 --mock-data
    --micro-batch-size 1 --global-batch-size {_MICROBATCHES} --lr 1e-4 --min-lr 1e-4 --clip-grad 0
    --attention-dropout 0 --hidden-dropout 0 --seed 1234 --num-workers 0 --eval-iters 0 --eval-interval 1000
    --log-interval 1000 --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-rope-fusion --distributed-backend gloo
""")


class Job(NamedTuple):
    """One job.

    Args:
        name: of its schedule.
        flags: that make it so.
        beside: the job of stock's with as many chunks; empty for one of stock's.
        most: largest ratio to that job's time.
    """

    name: str
    flags: str
    beside: str = ""
    most: float = 1.0


_STOCK, _STOCK_CHUNKS = "stock 1F1B", "stock interleaved 1F1B"
_JOBS = (
    Job(_STOCK, ""),
    Job("`1f1b`", "--pipeline-schedule 1f1b", _STOCK),
    Job("`zb-1p`", "--pipeline-schedule zb-1p", _STOCK, 1.05),
    Job(_STOCK_CHUNKS, "--num-virtual-stages-per-pipeline-rank 2"),
    Job("`interleaved-1f1b`", "--pipeline-schedule interleaved-1f1b", _STOCK_CHUNKS),
    Job("`v-half`", "--pipeline-schedule v-half", _STOCK_CHUNKS, 1.05),
    Job("`v-zb`", "--pipeline-schedule v-zb", _STOCK_CHUNKS, 1.05),
)


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each number of ranks and each job; jobs run in turn, in several rounds."""
    return rows_apart(_measure, quick, say)


def _measure(quick: bool, say: Say) -> Iterator[Row]:
    import pretrain_gpt  # noqa: F401 - here once, for all ranks
    from benchmarks.emulated_ranks import run_ranks
    from benchmarks.quick_start import quick_start

    quick_start()
    rounds, iterations = (1, _QUICK_ITERATIONS) if quick else (_ROUNDS, _ITERATIONS)
    for ranks in _SIZES:
        taken: dict[str, list[float]] = {job.name: [] for job in _JOBS}
        for number in range(rounds):
            for job in _JOBS:
                say(f"host: {ranks} ranks, {job.name}, round {number + 1} of {rounds}")
                flags = [*shlex.split(job.flags), "--train-iters", str(iterations + _WARM_UP)]
                taken[job.name].append(sum(run_ranks(ranks, partial(_train, ranks, flags), 600)))
        for job in _JOBS:
            beside = taken[job.beside or job.name]
            ratios = [own / other for own, other in zip(taken[job.name], beside, strict=True)]
            yield {
                "job": job.name,
                "beside": job.beside,
                "most": job.most,
                "pipeline_size": ranks,
                "microbatches": _MICROBATCHES,
                "repetitions": rounds,
                "seconds": Statistics.of(taken[job.name])._asdict(),
                "ratio": Statistics.of(ratios)._asdict(),
            }


def _train(ranks: int, flags: Sequence[str]) -> float:
    """Trains; returns this rank's processor time of a step, of the thread that runs it.

    The mode with which the stand-in for a GPU sees each torch call is off in a step, since no job on a GPU has one. It
    takes a fifth of a step, and more of stock's than of ours.
    """
    import torch
    from megatron.training import training

    import pretrain_gpt

    tell_megatron()
    _replace_calls_with_a_device()
    seconds: list[float] = []
    step = training.train_step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            begun = time.thread_time()
            found = step(*args, **kwargs)
            seconds.append(time.thread_time() - begun)
        return found

    training.train_step = stepped
    sys.argv = ["pretrain_gpt.py", *_MODEL, "--pipeline-model-parallel-size", str(ranks), *flags]
    pretrain_gpt.main()
    return statistics.median(seconds[_WARM_UP:])


def _replace_calls_with_a_device() -> None:
    """Takes the stand-in's mode out of backwards, and makes calls that name a CUDA device work without it."""
    import torch
    from torch.autograd.function import BackwardCFunction

    from megatron.schedules.integration.cpu.standin import cuda_type, making_on_cpu

    BackwardCFunction.apply = BackwardCFunction.apply.__wrapped__  # type: ignore[method-assign, attr-defined]

    for name in ("empty", "ones", "tensor", "zeros"):
        setattr(torch, name, making_on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    stock = torch.Tensor.type
    torch.Tensor.type = lambda *args, **kwargs: cuda_type(stock, args, kwargs)  # type: ignore[method-assign]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns a claim for each schedule of ours."""
    found = []
    for job in _JOBS:
        ratios = [row["ratio"]["median"] for row in rows if row["job"] == job.name]
        if job.beside and ratios:
            said = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            sizes = _sizes([row for row in rows if row["job"] == job.name])
            text = f"A step under {job.name} takes the host at most {job.most:.2f} of the time of {job.beside}"
            found.append(Claim(text, f"{said} on {sizes} ranks", verdict(max(ratios) <= job.most)))
    return found


def section(rows: Sequence[Row]) -> str:
    """Returns how it was measured, and a table."""
    how = (
        f"Whole training steps of {_LAYERS} layers of hidden size 32, {_MICROBATCHES} microbatches, on {_sizes(rows)} "
        "processes. Layers this small leave the host nothing but its own work. Counted is the processor time of the "
        "thread that trains, of all ranks together, waiting excluded; the median of the rounds with their range. "
        "Jobs take turns, and a ratio is of one round: to stock's job with as many chunks. The stand-in for a GPU does "
        "not watch torch's calls meanwhile."
    )
    heads = ("schedule", "ranks", "step, ms", "of stock's")
    return f"{how}\n\n{markdown_table(heads, [_cells(row) for row in rows])}"


def _sizes(rows: Sequence[Row]) -> str:
    return " and ".join(str(size) for size in dict.fromkeys(row["pipeline_size"] for row in rows))


def _cells(row: Row) -> list[str]:
    time_of, ratio = Statistics(**row["seconds"]), Statistics(**row["ratio"])
    beside = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if row["beside"] else ""
    return [row["job"], str(row["pipeline_size"]), f"{1e3 * time_of.median:.0f}", beside]


PART = Part("host", "Time of the host", measure, claims, section)
