"""The cost of splitting the backward: I and W against the whole, and the engine's own time for a pass."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from benchmarks.apart import rows_apart, tell_megatron
from benchmarks.parts import Claim, Part, Row, Say, Statistics, markdown_table, verdict
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.schedule.kinds import Kind

MOST_RATIO, MOST_MICROSECONDS = 1.03, 100.0

# Hidden size, sequence, and seconds to measure for; on a GPU two layers of models that are known by name.
_LAYERS = ((256, 128, 30.0), (512, 256, 45.0), (512, 512, 45.0), (1024, 256, 60.0), (1024, 512, 90.0))
_QUICK_LAYERS = ((512, 256, 20.0), (1024, 256, 25.0))
_GPU_MODELS, _GPU_SECONDS = ("Llama-3-8B", "Llama-3-70B"), 5.0
_SCHEDULES = ("1f1b", "v-half", "v-zb")
_RANKS = 4
# Numbers in each message: next to nothing, and 128 KiB.
_MESSAGES = (1, 1 << 15)
_WARM_UP = 5
_ROUNDS, _QUICK_ROUNDS = 500, 50


class Pair(NamedTuple):
    """Two repetitions side by side.

    Args:
        forward: seconds of the forward before stock's backward.
        whole: seconds of stock's backward.
        input_grad, weight_grad: seconds of the same in two.
    """

    forward: float
    whole: float
    input_grad: float
    weight_grad: float

    @property
    def ratio(self) -> float:
        return (self.input_grad + self.weight_grad) / self.whole


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each size of layer, and for each schedule and size of message of the engine."""
    return rows_apart(_measure, quick, say)


def _measure(quick: bool, say: Say) -> Iterator[Row]:
    from benchmarks.emulated_ranks import run_ranks

    # First, for what comes next puts the stand-in for CUDA under every call of torch.
    say(f"split: the engine under {', '.join(_SCHEDULES)}")
    found = run_ranks(_RANKS, partial(_time_engine, _QUICK_ROUNDS if quick else _ROUNDS), 300)
    for ranks in zip(*found, strict=True):
        yield max(ranks, key=lambda row: float(row["engine_microseconds"]))

    from tools import _pass_times  # here once, for all ranks

    for flags, seconds, facts in _cpu_layers(quick) if _pass_times.ON_CPU else _gpu_layers():
        sizes = f"hidden size {facts['hidden_size']}, sequence {facts['sequence_length']}"
        say(f"split: layers of {sizes}, {seconds:.0f} s")
        (pairs,) = run_ranks(1, partial(_time_layers, flags, seconds), seconds + 120)
        yield layer_row(pairs) | facts


class _Layers(NamedTuple):
    """Megatron's flags of layers to measure, seconds to measure for, and what their row says of them."""

    flags: list[str]
    seconds: float
    facts: dict[str, Any]


def _cpu_layers(quick: bool) -> Iterator[_Layers]:
    from tools import _pass_times as times

    for hidden, sequence, seconds in _QUICK_LAYERS if quick else _LAYERS:
        shape = f"--num-layers 1 --hidden-size {hidden} --num-attention-heads {hidden // 64} --seq-length {sequence} "
        shape += f"--max-position-embeddings {sequence} --micro-batch-size 1 --vocab-size 1024"
        facts = {"device": "one thread of the CPU", "hidden_size": hidden, "sequence_length": sequence}
        yield _Layers([*shape.split(), *times.ON_CPU_FLAGS], seconds, facts)


def _gpu_layers() -> Iterator[_Layers]:
    """Layers of models with a small vocabulary, with the GPU libraries that are here."""
    from megatron.schedules.integration.gpu_libraries import te_fault
    from tools import _pass_times as times

    for name in _GPU_MODELS:
        args = MODELS[name].args
        shape = f"{MODELS[name].flags} --num-layers 2 --vocab-size 1024 --micro-batch-size 1"
        flags = [*shlex.split(shape), *times.gpu_flags(te=te_fault() is None), "--distributed-backend", "gloo"]
        facts = {"device": "GPU", "model": name, "hidden_size": args.hidden_size, "sequence_length": args.seq_length}
        yield _Layers(flags, _GPU_SECONDS, facts)


def layer_row(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Returns the result of one layer's repetitions; the ratio is their median, with its quartiles."""
    low, middle, high = statistics.quantiles([pair.ratio for pair in pairs], n=4)
    return {
        "what": "layer",
        "repetitions": len(pairs),
        "forward_seconds": Statistics.of([pair.forward for pair in pairs])._asdict(),
        "whole_seconds": Statistics.of([pair.whole for pair in pairs])._asdict(),
        "input_seconds": Statistics.of([pair.input_grad for pair in pairs])._asdict(),
        "weight_seconds": Statistics.of([pair.weight_grad for pair in pairs])._asdict(),
        "ratio": middle,
        "ratio_quartiles": [low, high],
    }


def _time_layers(flags: Sequence[str], seconds: float) -> list[Pair]:
    """Times the backward of a model's decoder layers as a whole and split, alternately."""
    from tools import _pass_times as times

    tell_megatron()
    model = times.build(flags)
    whole, split = (times.time_passes(model, times.LAYERS, split=halves) for halves in (False, True))
    pairs: list[Pair] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(pairs) < _WARM_UP + 4:
        first, second = (whole, split) if len(pairs) % 2 else (split, whole)
        found = {first: next(first), second: next(second)}
        pairs.append(
            Pair(found[whole].forward, found[whole].backward, found[split].input_grad, found[split].weight_grad)
        )
    return pairs[_WARM_UP:]


def _time_engine(rounds: int) -> list[Row]:
    """Returns the engine's microseconds a pass, for programs whose passes do nothing.

    All schedules and messages by turns, so that a minute in which the host is slow is no schedule's own.
    """
    import torch
    import torch.distributed as dist

    from megatron.schedules.planner.registry import Request, plan
    from megatron.schedules.programs.lowering import lower
    from megatron.schedules.programs.program import channels_of
    from megatron.schedules.runtime.engine import run
    from megatron.schedules.runtime.transport import MessageSpec, Transport, make_channels

    plans = [plan(Request(schedule, _RANKS, 4 * _RANKS)) for schedule in _SCHEDULES]
    channels = make_channels([range(_RANKS)], {channel for made in plans for channel in channels_of(made.placement)})
    settings = [
        _EngineTimes(made.name, lower(made)[dist.get_rank()], torch.zeros(numbers), [], [])
        for made, numbers in product(plans, _MESSAGES)
    ]
    for _ in range(_WARM_UP + rounds):
        for _, program, message, engine, process in settings:
            transport = Transport(channels, MessageSpec(tuple(message.shape), message.dtype, message.device))
            stages: Any = _Idle(message)
            dist.barrier()
            # The clock of this thread stands still while it waits for a message, and while other ranks have the core.
            begun = time.thread_time(), time.process_time()
            run(program, stages, transport)
            engine.append(time.thread_time() - begun[0])
            process.append(time.process_time() - begun[1])
    return [setting.row() for setting in settings]


class _EngineTimes(NamedTuple):
    """One setting on one rank, and the seconds that its runs took of the engine's thread and of the process."""

    schedule: str
    program: Any
    message: Any
    engine: list[float]
    process: list[float]

    def row(self) -> Row:
        passes = sum(isinstance(action.op, Kind) for action in self.program.actions)
        engine, process = ([1e6 * run / passes for run in runs[_WARM_UP:]] for runs in (self.engine, self.process))
        low, middle, high = statistics.quantiles(engine, n=4)
        return {
            "what": "engine",
            "schedule": self.schedule,
            "pipeline_size": _RANKS,
            "message_bytes": self.message.nbytes,
            "passes": passes,
            "engine_microseconds": middle,
            "engine_quartiles": [low, high],
            "process_microseconds": statistics.median(process),
        }


class _Idle:
    """Stages that do nothing: every result is ``message``."""

    def __init__(self, message: Any) -> None:
        self._message = message

    def forward(self, stage: int, microbatch: int, activation: Any, *, split: bool, recompute: bool) -> Any:
        return self._message

    def backward(self, stage: int, microbatch: int, gradient: Any) -> Any:
        return self._message

    backward_input = backward

    def backward_weight(self, stage: int, microbatch: int) -> None: ...

    def reduce_gradients(self, stage: int) -> None: ...


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about the split of a layer's backward, and about the engine."""
    layers, engines = _apart(rows)
    found = []
    if layers:
        worst, best = (pick(row["ratio"] for row in layers) for pick in (max, min))
        beyond = [f"{_layer_name(row)} ({row['ratio']:.3f})" for row in layers if row["ratio"] > MOST_RATIO]
        but = f", not {', '.join(beyond)}" if beyond else ""
        found.append(
            Claim(
                f"I and W together take at most {MOST_RATIO} of the whole backward of a decoder layer",
                f"{best:.3f} to {worst:.3f}, {len(layers) - len(beyond)} of {len(layers)} layers within{but}",
                verdict(not beyond),
            )
        )
    if engines:
        most = max(row["engine_microseconds"] for row in engines)
        found.append(
            Claim(
                f"The engine takes at most {MOST_MICROSECONDS:.0f} microseconds per pass on four ranks",
                f"{most:.0f}",
                verdict(most <= MOST_MICROSECONDS),
            )
        )
    return found


def section(rows: Sequence[Row]) -> str:
    """Returns how both were measured, and their tables."""
    layers, engines = _apart(rows)
    text = []
    if layers:
        text.append(
            f"The whole and the split backward run in turn on {layers[0]['device']}; the ratio is the median over the "
            "pairs. The split adds a nearly constant time, so it shows most in the smallest layer.\n"
        )
        heads = ("layer", "whole, ms", "I, ms", "W, ms", "(I + W) / whole")
        text.append(markdown_table(heads, [_layer_cells(row) for row in layers]))
    if engines:
        text.append(
            "The engine runs schedules on four processes over gloo, with passes that do nothing. Counted is the "
            "processor time of its thread on the worst rank, messages included and waiting excluded.\n"
        )
        engine_heads = ("schedule", "message, bytes", "microseconds per pass")
        text.append(markdown_table(engine_heads, [_engine_cells(row) for row in engines]))
    return "\n".join(text)


def _apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    layers, engines = ([row for row in rows if row["what"] == what] for what in ("layer", "engine"))
    return layers, engines


def _layer_name(row: Row) -> str:
    sizes = f"hidden {row['hidden_size']}, sequence {row['sequence_length']}"
    return f"{row['model']}, {sizes}" if "model" in row else sizes


def _layer_cells(row: Row) -> list[str]:
    times = [f"{1e3 * row[part]['median']:.2f}" for part in ("whole_seconds", "input_seconds", "weight_seconds")]
    return [_layer_name(row), *times, f"{row['ratio']:.3f}"]


def _engine_cells(row: Row) -> list[str]:
    return [row["schedule"], str(row["message_bytes"]), f"{row['engine_microseconds']:.0f}"]


PART = Part("split", "Splitting the backward", measure, claims, section)
