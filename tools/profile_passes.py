#!/usr/bin/env python3
"""Measures the times and memory of a model's passes on one device, and writes a cost file as a job does.

    python tools/profile_passes.py --output profile.json --num-layers 30 --hidden-size 5120 --num-attention-heads 40 \\
        --seq-length 1024 --micro-batch-size 1 --bf16 --pipeline-model-parallel-size 8

Takes Megatron's own flags, those of a training job as it is. No pipeline is started: one chunk of decoder layers runs
alone, and the embedding, and the output layer with the loss, all as in training. In the file all decoder layers of the
model are one stage, each as long as those of the chunk. Of a hybrid model there is a chunk for each kind of layer, and
in the file a stage for each run of layers of one kind. Under tensor or context parallelism start it with torchrun, with
as many processes as those ask for. Without a GPU it measures the CPU.
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
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.estimate.layer_pattern import hybrid_layers, model_layers
from megatron.schedules.integration.environment import whole_variable
from megatron.schedules.integration.flags.arguments import model_facts
from megatron.schedules.integration.flags.declared import add_arguments
from megatron.schedules.integration.gpu_libraries import te_fault
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.measure.job_profile_json import to_text
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.output_files import objection, write_text
from megatron.schedules.utils.printable import printable
from tools._parsing import Parser

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
        chunks: number of layers in the chunk of each kind of layer: symbols of a hybrid model, or ``GPT``.
        flags: Megatron's, for a model of these layers and no pipeline.
        letters: the kind of each decoder layer of the whole model, in order.
    """

    own: argparse.Namespace
    chunks: dict[str, int]
    flags: list[str]
    letters: tuple[str, ...]

    @property
    def patterns(self) -> list[str]:
        """Symbols of the layers of each chunk of a hybrid model; none for a GPT."""
        return [] if GPT in self.chunks else [kind * count for kind, count in self.chunks.items()]


def parse(argv: Sequence[str], processes: int) -> Planned:
    """Parses ``argv``, to be measured by so many processes; exits with status 2 and one line where it cannot."""
    hybrid = any(word.partition("=")[0] in _HYBRID for word in argv)
    parser = _parser(hybrid)
    own, others = parser.parse_known_args(argv)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    needed = _NEEDED[hybrid:]
    for name in ("profile_repetitions", *needed, *sizes):
        if getattr(own, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(own, name)}")
    try:
        check_bounds(own)
    except PlanError as error:
        parser.error(str(error))
    if own.profile_layers is not None and own.profile_layers < 1:
        parser.error(f"--profile-layers must be at least 1, not {own.profile_layers}")
    letters, ahead = (GPT,) * own.num_layers if not hybrid else (), own.mtp_num_layers
    if hybrid:
        own.num_experts = any(word.partition("=")[0] == "--num-experts" for word in others)
        if hybrid_layers(own) is None:
            parser.error(f"{_HYBRID[0]} names no layers")
        try:
            letters, of_prediction = model_layers(own)
        except ValueError as error:
            parser.error(str(error))
        ahead = ahead or len(of_prediction)
    if ahead:
        parser.error(
            f"{'--mtp-num-layers' if own.mtp_num_layers else _HYBRID[0]}: multi-token prediction is not measured here: "
            "leave it out, or measure a job (--pipeline-measure)"
        )
    in_chunk = {kind: own.profile_layers or _in_chunk(letters.count(kind), own) for kind in dict.fromkeys(letters)}
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
    shape += ["--hybrid-layer-pattern", "".join(in_chunk)] if hybrid else ["--num-layers", str(in_chunk[GPT])]
    shape += ["--tensor-model-parallel-size", str(own.tensor_model_parallel_size)]
    shape += ["--context-parallel-size", str(own.context_parallel_size)]
    if "--max-position-embeddings" not in others:
        shape += ["--max-position-embeddings", str(own.seq_length)]
    return Planned(own, in_chunk, shape + _for_one_device(others), letters)


GPT = "GPT"
_HYBRID = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


def _in_chunk(layers: int, own: argparse.Namespace) -> int:
    """Returns the layers of a chunk of one kind, of which the model has so many, with two chunks a rank."""
    return max(1, round(layers / (2 * own.pipeline_model_parallel_size)))


def _parser(hybrid: bool) -> Parser:
    usage = "%(prog)s --output FILE [flags below] [any of Megatron's flags]"
    parser = Parser(prog="profile_passes.py", usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="the cost profile, JSON")
    add("--profile-layers", type=int, metavar="L", help="layers of a chunk; default: those of one of two a rank")
    add("--profile-repetitions", type=int, default=20, metavar="N", help="times each pass is timed; default: 20")
    for name in _NEEDED:
        required = not (hybrid and name == "num_layers")  # the pattern says how many
        add(f"--{name.replace('_', '-')}", type=int, required=required, help="Megatron's")
    for flag in _HYBRID:
        add(flag, help="Megatron's")
    add("--mtp-num-layers", type=int, default=0, help="Megatron's")
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


def profile(asked: Planned, say: Callable[[str, bool], None]) -> JobProfile:
    """Measures and returns the profile of a pipeline of one rank, with all decoder layers between its two ends.

    Needs torchrun's environment; ``say`` prints progress.
    """
    say("importing Megatron", False)
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        from tools import _pass_times as times
        from tools import _stage_profiles as profiles
        from tools._copy_rates import copy_rates
    fault = te_fault()
    if asked.patterns and fault is not None:
        raise RefusedError(f"{_HYBRID[0]}: a hybrid model has Transformer Engine's layers, and here {fault}")
    counts, layers = asked.chunks, len(asked.letters)
    say(f"building {sum(counts.values())} layers of {layers}, the embedding and the output layer", False)
    local = not asked.patterns and (times.ON_CPU or fault is not None)
    kernels = [*(times.LOCAL_FLAGS if local else []), *(times.WITHOUT_GPU_FLAGS if times.ON_CPU else [])]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            model = times.build([*kernels, *asked.flags], asked.patterns)
        except (AssertionError, ValueError) as error:  # how Megatron refuses flags that do not go together
            asserted = f"Megatron refuses these flags: {traceback.extract_tb(error.__traceback__)[-1].line}"
            raise RefusedError(next(iter(str(error).splitlines()), asserted)) from error
    names = ["embedding", *(f"chunk{'' if kind == GPT else f' of {kind}'}" for kind in counts), "output layer"]
    repetitions = asked.own.profile_repetitions
    first, *chunks, last = (profiles.timed(model, stage, name, repetitions, say) for stage, name in enumerate(names))
    of_kind = {
        kind: profiles.with_recompute(model, stage, chunk, repetitions)
        for stage, (kind, chunk) in enumerate(zip(counts, chunks, strict=True), 1)
    }
    runs = [(kind, len(list(run))) for kind, run in groupby(asked.letters)]
    stages = [first, *(profiles.of_layers(of_kind[kind], counts[kind], length) for kind, length in runs), last]
    say("copies to the host and back", False)
    rates = copy_rates(torch.empty(0, device="cuda").device)
    device = f"a CPU ({platform.machine()}, {os.cpu_count()} cores)" if times.ON_CPU else torch.cuda.get_device_name()
    facts = model_facts(model.args)._replace(device=device, layers=layers)
    return JobProfile(
        facts,
        "no pipeline",
        Placement("interleaved", (0,) * len(stages)),
        microbatches=1,
        iterations=(profiles.WARM_UP + 1, profiles.WARM_UP + repetitions),
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
        runs = [kind for kind, _ in groupby(asked.letters)]
        print(_summary(printable(str(asked.own.output)), measured, runs))
    return 0


def _summary(file: str, measured: JobProfile, kinds: Sequence[str]) -> str:
    """Returns what was measured, with a line or two for each kind of layer.

    Args:
        file: name of the written file.
        measured: has a stage for each run of layers of one kind, between the embedding and the output layer.
        kinds: of these runs.
    """
    rates = measured.copy_gbps
    assert rates is not None
    lines = [f"{file}: measured on {measured.facts.device}"]
    for kind, layers in dict(zip(kinds, measured.stages[1:-1], strict=True)).items():
        forward, input_grad, weight_grad, again = (
            f"{layers.median(each) / layers.layers:.3g}" for each in (Kind.F, Kind.I, Kind.W, Kind.R)
        )
        sizes = layers.held, layers.sizes[Share.WEIGHTS], layers.held - layers.sizes[Share.RECOMPUTED]
        held, weights, left = (f"{size / layers.layers / 2**20:.1f} MiB" for size in sizes)
        lines += [
            f"a layer{'' if kind == GPT else f' {kind}'} takes F, I, W {forward}, {input_grad}, {weight_grad} ms; a "
            f"microbatch holds {held} from F to I, {weights} from I to W",
            f"recomputed, its forward takes {again} ms and keeps {left}",
        ]
    copies = f"{rates.to_host:.3g} GB/s to the host, {rates.from_host:.3g} back, {rates.both_ways:.3g} both at once"
    return "\n".join([*lines, f"copies: {copies}"])


if __name__ == "__main__":
    sys.exit(main())
