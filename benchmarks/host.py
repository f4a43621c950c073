"""What a schedule costs the host: processor time of whole training steps of tiny layers, as a part of stock's."""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from benchmarks.apart import rows_apart
from benchmarks.host_ranks import WARM_UP, Turns, Watch, seconds_of_steps
from benchmarks.parts import Claim, Part, Row, Say, Statistics, markdown_table, verdict
from megatron.schedules.api import plan
from megatron.schedules.schedule.kinds import Kind

_SIZES, _MICROBATCHES, _LAYERS = (2, 4), 32, 8
_STARTS, _STEPS = 10, 8
_MOST_S = 900.0
_LOCAL, _ENGINES = "local", "transformer_engine"
_LAYERS_OF = {_LOCAL: "local", _ENGINES: "Transformer Engine's"}
_MODEL = shlex.split(f"""
    --num-layers {_LAYERS} --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm --no-persist-layer-norm
    --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 127 --mock-data
    --micro-batch-size 1 --global-batch-size {_MICROBATCHES} --lr 1e-4 --min-lr 1e-4 --clip-grad 0
    --attention-dropout 0 --hidden-dropout 0 --seed 1234 --num-workers 0 --eval-iters 0 --eval-interval 1000
    --log-interval 1000 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
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
    """Yields a row for each kind of layers, number of ranks and job; the jobs take turns."""
    starts = 1 if quick else _STARTS
    for layers, start in ((_LOCAL, _start_local), (_ENGINES, _start_engines)):
        taken: dict[tuple[int, str], list[float]] = defaultdict(list)
        for number in range(starts):
            say(f"host: start {number + 1} with {_LAYERS_OF[layers]} layers")
            for row in rows_apart(start, quick, say):
                taken[row["pipeline_size"], row["job"]] += row["seconds"]
        for (ranks, name), seconds in taken.items():
            job = next(job for job in _JOBS if job.name == name)
            ratios = [own / other for own, other in zip(seconds, taken[ranks, job.beside or name], strict=True)]
            yield {
                "layers": layers,
                "job": name,
                "beside": job.beside,
                "most": job.most,
                "pipeline_size": ranks,
                "microbatches": _MICROBATCHES,
                "starts": starts,
                "repetitions": len(seconds),
                "split": splits(job, layers, ranks) if job.beside else 0,
                "seconds": Statistics.quartiles(seconds)._asdict(),
                "ratio": Statistics.quartiles(ratios)._asdict(),
            }


def splits(job: Job, layers: str, ranks: int) -> int:
    """Returns how many backwards of a step the plan of ``job`` splits, on all ranks together."""
    name = shlex.split(job.flags)[-1]
    with NamedTemporaryFile("w", suffix=".sh") as script:
        script.write(shlex.join(["pretrain_gpt.py", *_MODEL, "--transformer-impl", layers]))
        script.flush()
        made = plan(name, pipeline_size=ranks, microbatches=_MICROBATCHES, model=script.name)
    return sum(work.kind is Kind.I for _, work in made.schedule.passes())


def _start_local(quick: bool, say: Say) -> Iterator[Row]:
    yield from _start(_LOCAL, say)


def _start_engines(quick: bool, say: Say) -> Iterator[Row]:
    from tests.support.te_python import without_gpu

    versions = [path for path in Path(sys.prefix, "transformer_engine").glob("*.*") if path.suffix != ".part"]
    if not versions:
        say("host: no Transformer Engine here; scripts/setup.sh installs its Python")
        return
    sys.path.insert(0, str(max(versions, key=lambda path: [int(part) for part in path.name.split(".")])))
    without_gpu()
    yield from _start(_ENGINES, say)


def _start(layers: str, say: Say) -> Iterator[Row]:
    """Starts all jobs once; yields the seconds of the steps of each."""
    import pretrain_gpt  # noqa: F401 - here once, for all ranks
    from benchmarks.emulated_ranks import running_ranks
    from benchmarks.quick_start import quick_start

    quick_start()
    for ranks in _SIZES:
        say(f"host: {_LAYERS_OF[layers]} layers on {ranks} ranks, {len(_JOBS)} jobs in turns")
        turns = Turns(ranks * len(_JOBS))
        with ExitStack() as running:
            waits = []
            for number, job in enumerate(_JOBS):
                flags = [*_MODEL, "--transformer-impl", layers, "--pipeline-model-parallel-size", str(ranks)]
                flags += [*shlex.split(job.flags), "--train-iters", str(_STEPS + WARM_UP)]
                watches = [Watch(turns, rank * len(_JOBS) + number) for rank in range(ranks)]
                body = partial(seconds_of_steps, flags, watches)
                waits.append(running.enter_context(running_ranks(ranks, body, _MOST_S)))
            for job, results in zip(_JOBS, waits, strict=True):
                seconds = [sum(step) for step in zip(*results(), strict=True)]
                yield {"pipeline_size": ranks, "job": job.name, "seconds": seconds}


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns a claim for each schedule of ours."""
    found = []
    for job in _JOBS:
        own = [row for row in rows if row["job"] == job.name]
        ratios = [row["ratio"]["median"] for row in own]
        if job.beside and ratios:
            said = "; ".join(
                f"{_LAYERS_OF[layers]} layers: "
                + ", ".join(f"{row['ratio']['median']:.3f}" for row in own if row["layers"] == layers)
                for layers in dict.fromkeys(row["layers"] for row in own)
            )
            text = f"A step under {job.name} takes the host at most {job.most:.2f} of the time of {job.beside}"
            found.append(Claim(text, f"{said}, on {_sizes(own)} ranks", verdict(max(ratios) <= job.most)))
    return found


def section(rows: Sequence[Row]) -> str:
    """Returns how it was measured, and a table."""
    how = (
        f"Whole training steps of {_LAYERS} layers of hidden size 32, {_MICROBATCHES} microbatches, on {_sizes(rows)} "
        "processes. Layers this small leave the host nothing but its own work. Counted is the processor time of the "
        f"thread that trains, of all ranks together: the median of {rows[0]['repetitions']} steps, in "
        f"{rows[0]['starts']} starts of each job. A rank works alone, with messages that end at once and bring zeros: "
        "neither other ranks nor gloo's threads share its core. All ranks of all jobs take turns on one core, from "
        "one forward to the next, in an order by chance, so a step of each sees the same machine, which is now faster, "
        "now slower. A ratio is of two steps done at once, to stock's job with as many chunks; half of them lie in the "
        "range. The stand-in for a GPU does not watch torch's calls meanwhile. Steps of stock's get the room for "
        "Python's frames that the engine gives its own "
        "([frame_stack.py](../megatron/schedules/runtime/frame_stack.py)); without it a step of stock's interleaved "
        "1F1B took 4 % longer at the depth at which it is called here. Transformer Engine's layers are its own Python, "
        "over plain torch in place of its kernels. Weight gradients of layers this small are a fourteenth of a "
        "backward by the model's arithmetic, so few ranks wait for a split, and plans split few backwards."
    )
    heads = ("layers", "schedule", "ranks", "backwards split", "step, ms", "of stock's")
    return f"{how}\n\n{markdown_table(heads, [_cells(row) for row in rows])}"


def _sizes(rows: Sequence[Row]) -> str:
    return " and ".join(str(size) for size in dict.fromkeys(row["pipeline_size"] for row in rows))


def _cells(row: Row) -> list[str]:
    time_of, ratio = Statistics(**row["seconds"]), Statistics(**row["ratio"])
    beside = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if row["beside"] else ""
    chunks = 2 if row["beside"] == _STOCK_CHUNKS else 1
    split = f"{row['split']} of {row['pipeline_size'] * chunks * row['microbatches']}" if row["beside"] else ""
    step = f"{1e3 * time_of.median:.0f}"
    return [_LAYERS_OF[row["layers"]], row["job"], str(row["pipeline_size"]), split, step, beside]


PART = Part("host", "Time of the host", measure, claims, section)
