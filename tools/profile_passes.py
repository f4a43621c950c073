#!/usr/bin/env python3
"""Measures the times and memory of a model's passes on one device, and writes a cost file as a job does.

    python tools/profile_passes.py --output profile.json --num-layers 30 --hidden-size 5120 --num-attention-heads 40 \\
        --seq-length 1024 --micro-batch-size 1 --bf16 --pipeline-model-parallel-size 8

Takes Megatron's own flags, those of a training job as it is. No pipeline is started: one chunk of decoder layers runs
alone, and the embedding, and the output layer with the loss, all as in training. In the file all decoder layers of the
model are one stage, each as long as those of the chunk. Under tensor or context parallelism start it with torchrun,
with as many processes as those ask for. Without a GPU it measures the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import logging
import os
import platform
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import astuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.integration.environment import whole_variable
from megatron.schedules.integration.flags.arguments import model_facts
from megatron.schedules.integration.flags.declared import add_arguments
from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.job_profile_json import to_text
from megatron.schedules.schedule.kinds import SEEN_BY, Kind, Share
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.output_files import objection, write_text
from megatron.schedules.utils.printable import printable
from tools._parsing import Parser

_WARM_UP = 3
# Megatron's flags that have no place where there is no pipeline, by how many values follow them.
_LEFT_OUT = {
    "--pipeline-model-parallel-layout": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--account-for-embedding-in-pipeline-split": 0,
    "--account-for-loss-in-pipeline-split": 0,
    "--global-batch-size": 1,
    "--rampup-batch-size": 3,
    "--step-batch-size-schedule": 1,
    "--load": 1,
    "--save": 1,
}


class Planned(NamedTuple):
    """A request, checked.

    Args:
        own: our flags, and those of Megatron's that are looked at here.
        layers: of the chunk.
        flags: Megatron's, for a model of these layers and no pipeline.
    """

    own: argparse.Namespace
    layers: int
    flags: list[str]


def parse(argv: Sequence[str], processes: int) -> Planned:
    """Parses ``argv``, to be measured by so many processes; exits with status 2 and one line where it cannot."""
    parser = _parser()
    own, others = parser.parse_known_args(argv)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    for name in ("profile_repetitions", *_NEEDED, *sizes):
        if getattr(own, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(own, name)}")
    try:
        check_bounds(own)
    except PlanError as error:
        parser.error(str(error))
    if any(word.partition("=")[0] in _HYBRID for word in others):
        parser.error(f"{_HYBRID[0]}: this measures a GPT's layers; measure a hybrid job with --pipeline-measure DIR")
    layers = own.profile_layers
    if layers is None:
        layers = max(1, round(own.num_layers / (2 * own.pipeline_model_parallel_size)))
    if layers < 1:
        parser.error(f"--profile-layers must be at least 1, not {layers}")
    parallel = own.tensor_model_parallel_size * own.context_parallel_size
    if parallel != processes:
        how = f"torchrun --nproc-per-node {parallel} {parser.prog}"
        parser.error(
            "--tensor-model-parallel-size x --context-parallel-size is "
            f"{parallel} ranks and {processes} run: start it with {how} ..."
        )
    if why := objection(own.output):
        parser.error(f"--output {own.output} cannot be written: {why}")
    shape = [str(word) for name in _NEEDED[1:] for word in (f"--{name.replace('_', '-')}", getattr(own, name))]
    shape += ["--num-layers", str(layers), "--tensor-model-parallel-size", str(own.tensor_model_parallel_size)]
    shape += ["--context-parallel-size", str(own.context_parallel_size)]
    if "--max-position-embeddings" not in others:
        shape += ["--max-position-embeddings", str(own.seq_length)]
    return Planned(own, layers, shape + _for_one_device(others))


_HYBRID = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


def _parser() -> Parser:
    usage = "%(prog)s --output FILE [flags below] [any of Megatron's flags]"
    parser = Parser(prog="profile_passes.py", usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="the cost profile, JSON")
    add("--profile-layers", type=int, metavar="L", help="layers of the chunk; default: those of one of two a rank")
    add("--profile-repetitions", type=int, default=20, metavar="N", help="times each pass is timed; default: 20")
    for name in _NEEDED:
        add(f"--{name.replace('_', '-')}", type=int, required=True, help="Megatron's")
    for name in ("pipeline", "tensor"):
        add(f"--{name}-model-parallel-size", type=int, default=1, help="Megatron's")
    add("--context-parallel-size", type=int, default=1, help="Megatron's")
    return parser


def _for_one_device(flags: Sequence[str]) -> list[str]:
    """Returns ``flags`` without those of schedules, those of :data:`_LEFT_OUT`, and their values."""
    kept, skipped = [], 0
    schedules = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    for word in schedules.parse_known_args(flags)[1]:
        flag, _, value = word.partition("=")
        if flag in _LEFT_OUT:
            skipped = 0 if value else _LEFT_OUT[flag]
        elif skipped:
            skipped -= 1
        else:
            kept.append(word)
    return kept


class RefusedError(Exception):
    """Megatron refuses its flags; the message is one line."""


def _stage(times: Mapping[Kind, Sequence[float]], held: float, weights: float) -> StageProfile:
    """Returns a stage without decoder layers from seconds by kind, bytes from F to I, and bytes from I to W."""
    sizes = dict.fromkeys(SEEN_BY, 0.0) | {Share.WEIGHTS: weights}
    return StageProfile(
        0, {kind: Measured.of([1e3 * each for each in every]) for kind, every in times.items()}, held=held, sizes=sizes
    )


def _whole_model(chunk: StageProfile, chunk_layers: int, layers: int, layer_inputs: float) -> StageProfile:
    """Returns a stage of ``layers`` decoder layers, each as those of ``chunk``.

    Args:
        chunk: with R of all its layers.
        chunk_layers: its number of layers.
        layers: those of the model.
        layer_inputs: bytes that stay of the chunk where its layers are recomputed.
    """
    scale = layers / chunk_layers
    sizes = {**chunk.sizes, Share.RECOMPUTED: max(0.0, chunk.held - layer_inputs)}
    return replace(
        chunk,
        layers=layers,
        times={kind: Measured(*(scale * each for each in astuple(time))) for kind, time in chunk.times.items()},
        held=scale * chunk.held,
        sizes={share: scale * size for share, size in sizes.items()},
        recomputed=1.0,
    )


def profile(asked: Planned, say: Callable[[str, bool], None]) -> JobProfile:
    """Measures and returns the profile of a pipeline of one rank, with all decoder layers in the stage in the middle.

    Needs torchrun's environment; ``say`` prints progress.
    """
    say("importing Megatron", False)
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        from tools import _pass_times as times
        from tools._copy_rates import copy_rates
    say(f"building {asked.layers} layers of {asked.own.num_layers}, the embedding and the output layer", False)
    kernels = times.ON_CPU_FLAGS if times.ON_CPU else [] if times.has_te() else times.LOCAL_FLAGS
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            model = times.build([*kernels, *asked.flags])
        except (AssertionError, ValueError) as error:  # how Megatron refuses flags that do not go together
            asserted = f"Megatron refuses these flags: {traceback.extract_tb(error.__traceback__)[-1].line}"
            raise RefusedError(next(iter(str(error).splitlines()), asserted)) from error
    args, repetitions = model.args, asked.own.profile_repetitions
    stages = []
    for name, stage in (("embedding", times.EMBEDDING), ("chunk", times.LAYERS), ("output layer", times.OUTPUT)):
        held, passes, wholes = times.held(model, stage), times.time_passes(model, stage), []
        if stage == times.LAYERS:
            whole = times.time_passes(model, stage, split=False)
            wholes = [next(whole).backward for _ in range(_WARM_UP + repetitions)][_WARM_UP:]
        found = []
        for repetition in range(1, _WARM_UP + repetitions + 1):
            found.append(next(passes))
            done = repetition - _WARM_UP
            say(f"{name}: {max(0, done)} of {repetitions} repetitions", done < repetitions)
        seconds = dict(zip((Kind.F, Kind.I, Kind.W), zip(*found[_WARM_UP:], strict=True), strict=True))
        stages.append(_stage(seconds | ({Kind.B: wholes} if wholes else {}), held.after_forward, held.after_input_grad))
    forwards = times.time_recompute(model, times.LAYERS)
    recomputed = [next(forwards) for _ in range(_WARM_UP + repetitions)][_WARM_UP:]
    again = Measured.of([1e3 * each.seconds for each in recomputed])
    chunk = replace(stages[1], times={**stages[1].times, Kind.R: again})
    stages[1] = _whole_model(chunk, asked.layers, asked.own.num_layers, recomputed[0].input_bytes)
    say("copies to the host and back", False)
    rates = copy_rates(torch.empty(0, device="cuda").device)
    device = f"a CPU ({platform.machine()}, {os.cpu_count()} cores)" if times.ON_CPU else torch.cuda.get_device_name()
    facts = model_facts(args)._replace(device=device, layers=asked.own.num_layers)
    return JobProfile(
        facts,
        "no pipeline",
        Placement("interleaved", (0, 0, 0)),
        microbatches=1,
        iterations=(_WARM_UP + 1, _WARM_UP + repetitions),
        replicas=facts.tensor_parallel * facts.context_parallel,
        stages=tuple(stages),
        copy_gbps=rates,
    )


def _join_nobody() -> None:
    """Sets what torchrun would set for a single process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, measures, and writes."""
    try:
        processes = whole_variable("WORLD_SIZE", 1)
    except PlanError as error:
        print(f"profile_passes.py: error: {error}", file=sys.stderr)
        return 2
    asked = parse(sys.argv[1:] if argv is None else argv, processes)
    first = os.environ.get("RANK", "0") == "0"
    if "WORLD_SIZE" not in os.environ:
        _join_nobody()
    # Megatron and torch say much about what this machine lacks.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    # A flag that nobody knows is one line of Megatron's, after a thousand of usage.
    argparse.ArgumentParser.print_usage = lambda *_: None  # type: ignore[method-assign]
    terminal = sys.stderr.isatty()

    def say(text: str, counting: bool) -> None:
        if first and (terminal or not counting):
            print(f"{text}\x1b[K" if terminal else text, end="\r" if counting else "\n", file=sys.stderr, flush=True)

    try:
        measured = profile(asked, say)
    except RefusedError as error:
        print(f"profile_passes.py: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    if first:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
        text = to_text(measured, versions=versions, date=datetime.date.today().isoformat())
        try:
            write_text(asked.own.output, text)
        except OSError as error:
            why = one_line(f"--output: cannot write {asked.own.output}: {error.strerror}")
            print(f"profile_passes.py: error: {why}", file=sys.stderr)
            return 2
        print(_summary(printable(str(asked.own.output)), measured))
    return 0


def _summary(file: str, measured: JobProfile) -> str:
    layers, rates = measured.stages[1], measured.copy_gbps
    assert rates is not None
    forward, input_grad, weight_grad, again = (
        f"{layers.median(kind) / layers.layers:.3g}" for kind in (Kind.F, Kind.I, Kind.W, Kind.R)
    )
    sizes = layers.held, layers.sizes[Share.WEIGHTS], layers.held - layers.sizes[Share.RECOMPUTED]
    held, weights, left = (f"{size / layers.layers / 2**20:.1f} MiB" for size in sizes)
    return (
        f"{file}: a layer takes F, I, W {forward}, {input_grad}, {weight_grad} ms on {measured.facts.device}; a "
        f"microbatch\nholds {held} from F to I, {weights} from I to W\n"
        f"recomputed, its forward takes {again} ms and keeps {left}\n"
        f"copies: {rates.to_host:.3g} GB/s to the host, {rates.from_host:.3g} back, {rates.both_ways:.3g} both at once"
    )


if __name__ == "__main__":
    sys.exit(main())
