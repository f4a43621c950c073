#!/usr/bin/env python3
"""Measures the times and memory of a model's passes on one device, and writes a cost profile for the planner.

    python tools/profile_passes.py --output profile.json --num-layers 30 --hidden-size 5120 --num-attention-heads 40 \\
        --seq-length 1024 --micro-batch-size 1 --bf16 --pipeline-model-parallel-size 8

Takes Megatron's own flags, those of a training job as it is. No pipeline is started: one chunk of decoder layers runs
alone, then the embedding and the output layer with the loss, all as in training. Under tensor or context parallelism
start it with torchrun, with as many processes as those ask for. Without a GPU it measures the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import logging
import os
import shlex
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts import Statistics, machine
from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.integration.flags.declared import add_arguments
from megatron.schedules.integration.flags.environment import whole_variable
from megatron.schedules.measure.cost_profile import ChunkForm, ChunkProfileForm, EndForm, TimedForm
from megatron.schedules.measure.profile_facts import ModelForm
from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.json_files import encode
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
        given: Megatron's as they were given.
    """

    own: argparse.Namespace
    layers: int
    flags: list[str]
    given: str


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
    return Planned(own, layers, shape + _for_one_device(others), shlex.join(_without_ours(argv)))


_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


def _parser() -> Parser:
    usage = "%(prog)s --output FILE [flags below] [any of Megatron's flags]"
    parser = Parser(prog="profile_passes.py", usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="the cost profile, JSON")
    add("--profile-layers", type=int, metavar="L", help="layers of the chunk; default: those of one of two a rank")
    add("--profile-repetitions", type=int, default=20, metavar="N", help="times each pass is timed; default: 20")
    add("--profile-name", metavar="NAME", help="what the profile calls the model")
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


def _without_ours(argv: Sequence[str]) -> list[str]:
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--output", "--profile-layers", "--profile-repetitions", "--profile-name"):
        ours.add_argument(flag)
    return ours.parse_known_args(argv)[1]


class RefusedError(Exception):
    """Megatron refuses its flags; the message is one line."""


def profile(asked: Planned, say: Callable[[str, bool], None]) -> ChunkProfileForm:
    """Measures and returns the profile's JSON. Needs torchrun's environment; ``say`` prints progress."""
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
    parts: dict[str, Any] = {}
    for name, stage in (("chunk", times.LAYERS), ("output_layer", times.OUTPUT), ("embedding", times.EMBEDDING)):
        held, passes = times.held(model, stage), times.time_passes(model, stage)
        found = []
        for repetition in range(1, _WARM_UP + repetitions + 1):
            found.append(next(passes))
            done = repetition - _WARM_UP
            say(f"{name.replace('_', ' ')}: {max(0, done)} of {repetitions} repetitions", done < repetitions)
        parts[name] = {
            **{
                kind: _timed_form([getattr(each, kind) for each in found[_WARM_UP:]])
                for kind in ("forward", "input_grad", "weight_grad")
            },
            "activation_bytes": held.after_forward,
            "weight_bytes": held.after_input_grad,
        }
    forwards = times.time_recompute(model, times.LAYERS)
    recomputed = [next(forwards) for _ in range(_WARM_UP + repetitions)][_WARM_UP:]
    again, left = _timed_form([each.seconds for each in recomputed]), recomputed[0].input_bytes
    say("copies to the host and back", False)
    rates = copy_rates(torch.empty(0, device="cuda").device)
    return ChunkProfileForm(
        version=1,
        device=machine() if times.ON_CPU else torch.cuda.get_device_name(),
        model=ModelForm(
            name=asked.own.profile_name,
            layers=asked.own.num_layers,
            hidden_size=args.hidden_size,
            heads=args.num_attention_heads,
            sequence_length=args.seq_length,
            vocabulary=args.padded_vocab_size,
            flags=asked.given,
        ),
        micro_batch_size=args.micro_batch_size,
        tensor_parallel=args.tensor_model_parallel_size,
        context_parallel=args.context_parallel_size,
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        chunk=ChunkForm(layers=asked.layers, recompute=again, input_bytes=left, **parts["chunk"]),
        output_layer=EndForm(**parts["output_layer"]),
        embedding=EndForm(**parts["embedding"]),
        copy_gbps=rates,
        versions={name: importlib.metadata.version(name) for name in ("torch", "megatron-core")},
        date=datetime.date.today().isoformat(),
    )


def _timed_form(seconds: Sequence[float]) -> TimedForm[float]:
    return TimedForm(**Statistics.of(seconds)._asdict())


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
        made = profile(asked, say)
    except RefusedError as error:
        print(f"profile_passes.py: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    if first:
        try:
            write_text(asked.own.output, encode(made, indent=1) + "\n")
        except OSError as error:
            why = one_line(f"--output: cannot write {asked.own.output}: {error.strerror}")
            print(f"profile_passes.py: error: {why}", file=sys.stderr)
            return 2
        chunk = made.chunk
        each = ", ".join(f"{1e3 * part.median:.3g}" for part in (chunk.forward, chunk.input_grad, chunk.weight_grad))
        mib = [held / 2**20 for held in (chunk.activation_bytes, chunk.weight_bytes)]
        file = printable(str(asked.own.output))
        print(f"{file}: {chunk.layers} layers take F, I, W {each} ms on {made.device}; a microbatch")
        print(f"holds {mib[0]:.1f} MiB from F to I, {mib[1]:.1f} MiB from I to W")
        assert chunk.recompute and chunk.input_bytes is not UNSET and made.copy_gbps
        again, left = 1e3 * chunk.recompute.median, chunk.input_bytes / 2**20
        print(f"recomputed, their forward takes {again:.3g} ms and keeps {left:.1f} MiB")
        rates = made.copy_gbps
        ways = f"{rates.to_host:.3g} GB/s to the host, {rates.from_host:.3g} back, {rates.both_ways:.3g} both at once"
        print(f"copies: {ways}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
