"""Jobs of the real main program in forked ranks, and what tests compare of them.

Importing this turns the CPU stand-in on, for the whole process: only :mod:`tests.integration.server` does.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
import threading
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import count, pairwise
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import training
from megatron.training.arguments import add_megatron_arguments
from megatron.training.global_vars import get_tensorboard_writer

import pretrain_gpt
from benchmarks.quick_start import quick_start
from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.integration import gpt, model_binding, schedule_function, stage_inputs
from megatron.schedules.integration import hooks as integration
from megatron.schedules.integration.model_stages import MegatronStages
from megatron.schedules.integration.rank_device import STANDIN_VARIABLE, PeakReport
from megatron.schedules.integration.vocabulary.parts import EMBEDDING, OUTPUT, parts_of
from megatron.schedules.runtime.planner import Planner
from tests.integration import (
    conversations,
    counted_forwards,
    fake_deep_ep,
    fake_wandb,
    fused_kernels,
    held_in_jobs,
    hybrid_script,
    kernel_attention,
    low_rank,
    ordered_samples,
    own_loader,
    own_loop,
    plain_attention,
    planted_faults,
    reading_script,
    residual_streams,
    stalled_step,
    stock_script,
)
from tests.integration import replanned as replanned_jobs
from tests.integration.behind_messages import Recorded, recorded
from tests.integration.core_loop import core_loop, core_loop_refusals
from tests.integration.forked_ranks import run_ranks
from tests.integration.graphed_jobs import graphed, graphed_loop
from tests.integration.in_groups import in_groups
from tests.integration.logged import by_name, logged, numbers
from tests.integration.ordered_samples import reads_ahead
from tests.integration.plain_attention import PlainAttention
from tests.integration.results import Result, flags_of
from tests.integration.server import ROUNDING_VARIABLE
from tests.integration.sync_detector import detected
from tests.integration.verified_loop import verified_loop
from tests.integration.wrapped_loop import WRAPPERS, passing, wrapped_loops
from tests.loops.calls import called, imported_before
from tests.loops.ours import counted_passes
from tests.runtime.late_copies import LateCopies
from tests.support import te_nvfp4
from tests.waiting import HANGS_S
from tools import profile_passes

quick_start()

_EXTENSIONS = "megatron.core.extensions.transformer_engine"

# What the server is asked for by name, among others.
__all__ = [
    "called",
    "core_loop",
    "core_loop_refusals",
    "graphed",
    "graphed_loop",
    "imported_before",
    "in_groups",
    "logged",
    "passing",
    "reads_ahead",
    "train",
    "verified_loop",
    "wrapped_loops",
]


def train(
    world: int,
    flags: Sequence[str],
    samples: str = "plain",
    adapters: bool = False,
    attention: str = "stock",
    orders: Sequence[Sequence[Sequence[int]]] = (),
    streams: bool = False,
    timeout: float = HANGS_S,
) -> Result:
    """Run ``pretrain_gpt.py`` with ``flags`` on ``world`` ranks.

    Its samples are "plain", "varied" in size from microbatch to microbatch, "cut" in size as they are read, of
    several "documents", "packed" with documents, with "conversations", or from the user's "own loader". Or a script
    reads documents where "Megatron says", or "at the ends" alone: see :mod:`.reading_script`. Or it is a "hybrid
    script": see :mod:`.hybrid_script`. Or the loop is the user's own: see :mod:`.own_loop`. With ``adapters`` only low-
    rank ones beside every linear are trained. ``attention`` is stock's local one, or "plain": see
    :mod:`.plain_attention`. Where there are ``orders``, each rank takes the microbatches of each iteration in its own:
    see :mod:`.ordered_samples`. With ``streams`` the model has several residual streams: see :mod:`.residual_streams`.
    """
    ranks = run_ranks(world, _rank, list(flags), samples, adapters, attention, orders, streams, timeout=timeout)
    last = ranks[-1]
    return Result(
        last["losses"],
        last["evaluations"],
        _joined(ranks, "gradients"),
        _joined(ranks, "weights"),
        [rank["peak"] for rank in ranks],
        [rank["shapes"] for rank in ranks],
        last["iterations"],
        last["loss_scales"],
        [rank["orders"] for rank in ranks],
        set().union(*(rank["passes"] for rank in ranks)),
    )


def train_without_us(world: int, flags: Sequence[str]) -> tuple[list[int], list[float]]:
    """Iterations and losses of a stock script with ``flags``, in processes where this package cannot be imported."""
    last = run_ranks(world, _rank_without_us, list(flags))[-1]
    return last["iterations"], last["losses"]


def outputs(world: int, flags: Sequence[str], script: str | None = None) -> list[tuple[int, str]]:
    """How ``pretrain_gpt.py`` ends on each of ``world`` ranks: exit status and all it printed.

    A ``script`` reads its samples: see :mod:`.reading_script`.
    """
    return run_ranks(world, _ending, list(flags), script)


def wrapped_outputs(world: int, flags: Sequence[str], wrapper: str) -> list[tuple[int, str]]:
    """The same, where the user's model is wrapped as :data:`.wrapped_loop.WRAPPERS` says."""
    return run_ranks(world, _wrapped_ending, list(flags), wrapper)


def verified(world: int, flags: Sequence[str], fault: str | None = None) -> list[tuple[int, str]]:
    """:func:`outputs` of a job that verifies its schedule, with one of :data:`.planted_faults.FAULTS` in it."""
    return run_ranks(world, _verified, [*flags, "--pipeline-verify"], fault)


def reductions(world: int, flags: Sequence[str]) -> list[list[tuple[str, int]]]:
    """What each rank does, in order: passes by kind and chunk, as they begin and end, and "reduce" for each bucket."""
    return run_ranks(world, _reductions, list(flags))


def behind_messages(world: int, flags: Sequence[str]) -> list[Recorded]:
    """Which weight gradients each rank computes behind the messages of experts."""
    return run_ranks(world, _behind_messages, list(flags))


def layer_runs(world: int, flags: Sequence[str]) -> dict[int, list[int]]:
    """How often the forward of each decoder layer is run, without a graph and with one."""
    return {number: runs for rank in run_ranks(world, _layer_runs, list(flags)) for number, runs in rank.items()}


def live_bytes(world: int, flags: Sequence[str]) -> list[list[int]]:
    """Bytes of all tensors alive on each rank after every tenth iteration."""
    return run_ranks(world, _live_bytes, list(flags))


def waits(world: int, flags: Sequence[str]) -> list[list[str]]:
    """What on each rank would make the host wait for a GPU inside a program, after the first iteration."""
    return run_ranks(world, _waits, list(flags))


def message_timeouts(world: int, flags: Sequence[str]) -> list[list[list[float]]]:
    """For each rank how many seconds its channels may take, out and in, in the first iteration and in the last."""
    return run_ranks(world, _message_timeouts, list(flags))


def counted(world: int, flags: Sequence[str]) -> list[list[bool]]:
    """For each rank and iteration whether tensors were counted, which is slow."""
    return run_ranks(world, _counted, list(flags))


def stalled(world: int, flags: Sequence[str], how: str) -> list[list[str]]:
    """A job whose rank 1 may not come out of its sixth forward step (:mod:`.stalled_step`); each rank's threads."""
    return run_ranks(world, _stalled, list(flags), how)


def copied(
    world: int, flags: Sequence[str], pinned: float = float("inf"), layers: Sequence[int] | None = None
) -> list[list[tuple[list[Any], int]]]:
    """For each rank and iteration the copies to the host and back, and all bytes of host memory.

    There are ``pinned`` bytes; the activations of so many ``layers`` of each stage go, or of all.
    """
    return run_ranks(world, _copied, list(flags), pinned, layers)


def replanned(
    world: int,
    flags: Sequence[str],
    names: Sequence[str] | None = (),
    failing: int | None = None,
    standin_bytes: int = 0,
    slow_from: int | None = None,
) -> list[tuple[list[str], list[float], str]]:
    """For each rank the programs it ran in training, the losses it saw, and what it printed.

    Planning again proposes the first of schedules ``names`` that does not run, without them what a process finds that
    is waited for, and nothing where they are None. Rank ``failing`` cannot prove its programs. Devices have
    ``standin_bytes`` for activations. The last rank's forwards take 40 ms longer from iteration ``slow_from`` on.
    """
    return run_ranks(world, _replanned, list(flags), names, failing, standin_bytes, slow_from)


def input_difference(stages: Sequence[tuple[set[str], set[str]]]) -> str:
    """What is refused where stages, each on a rank of its own, were given inputs and lacked others, in one forward."""
    taken = [stage_inputs.Taken(frozenset(given), frozenset(lacking)) for given, lacking in stages]
    return stage_inputs.difference([{("decoder", stage): [each]} for stage, each in enumerate(taken)])


def profiled(flags: Sequence[str]) -> tuple[int, str]:
    """How ``tools/profile_passes.py`` ends with ``flags``: exit status and all it printed."""
    return run_ranks(1, _profiled, list(flags))[0]


def on_ranks(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``body(*args)`` returns on each of ``world`` ranks, which have no process groups yet, in rank order."""
    return run_ranks(world, body, *args)


def stock_flags() -> dict[str, tuple[object, ...]]:
    """How Megatron's own parser reads each of its flags."""
    return flags_of(add_megatron_arguments(ArgumentParser(add_help=False)))


def hooks() -> list[tuple[str, str, bool, bool]]:
    """Of every hook after two installs: name, reason, whether it is in place, whether it lies on another."""
    return run_ranks(1, _hooks)[0]


def held_and_estimated(
    world: int, flags: Sequence[str], one_kernel: bool = False, adapters: bool = False
) -> tuple[list[dict[str, int]], tuple[RankMemory, ...]]:
    """Bytes that each pipeline rank really holds of each sort, the most of its replicas, and what a dry run says.

    Attention is stock's local one, or one kernel. With ``adapters`` only low-rank ones are trained.
    """
    found = run_ranks(world, _held_and_estimated, list(flags), one_kernel, adapters)
    ranks: list[dict[str, int]] = [{} for _ in found[0][1]]
    for (rank, held), _ in found:
        ranks[rank] = {name: max(size, ranks[rank].get(name, 0)) for name, size in held.items()}
    return ranks, found[0][1]


def compiles_helpers() -> list[bool]:
    """Whether stock compiles the helpers of its data sets: as they came here, and where they can be compiled."""
    return run_ranks(1, _compiles_helpers)[0]


def devices_in_a_backward() -> list[str]:
    """Where a backward's tensors lie that were made on "cuda", moved there, or pinned."""
    return run_ranks(1, _devices_in_a_backward)[0]


def schedule_module() -> str:
    """Where the schedule function comes from that a script gets which has installed us and does not ask for one."""
    return run_ranks(1, _schedule_module)[0]


def _hooks() -> list[tuple[str, str, bool, bool]]:
    found = []
    integration.install()
    integration.install()
    for hook in integration.HOOKS:
        now = getattr(hook.module, hook.name)
        below = getattr(now, "megatron_schedules_stock", None)
        # What is None belongs to a library that is not there.
        replaced = now is None or below is not None
        found.append((hook.name, hook.why, replaced, hasattr(below, "megatron_schedules_stock")))
    return found


def _compiles_helpers() -> list[bool]:
    called: list[bool] = []
    dataset_utils.compile_helpers = lambda: called.append(True)
    integration.install()
    found = []
    for came_compiled in (integration.came_compiled, lambda: False):
        integration.came_compiled = came_compiled
        called.clear()
        dataset_utils.compile_helpers()
        found.append(bool(called))
    return found


def _devices_in_a_backward() -> list[str]:
    found: list[torch.Tensor] = []

    class Making(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            found.extend((torch.zeros(1, device="cuda"), gradient.cuda(), gradient.to("cuda:0"), gradient.pin_memory()))
            return gradient

    Making.apply(torch.ones(1, requires_grad=True)).backward()
    return [tensor.device.type for tensor in found]


def _schedule_module() -> str:
    integration.install()
    return str(training.get_forward_backward_func(pp_size=2, vp_size=None).__module__)


def _ending(flags: list[str], script: str | None = None) -> tuple[int, str]:
    printed = io.StringIO()
    if script is not None:
        reading_script.put_in_place(script)
    sys.argv = ["pretrain_gpt.py", *flags]
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            pretrain_gpt.main()
        except SystemExit as leaving:
            return int(leaving.code or 0), printed.getvalue()
    return 0, printed.getvalue()


def _profiled(flags: list[str]) -> tuple[int, str]:
    torch.set_num_threads(1)
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        return profile_passes.main(flags), printed.getvalue()


def _wrapped_ending(flags: list[str], wrapper: str) -> tuple[int, str]:
    build = GPTModel.__init__

    def built(model: Any, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        WRAPPERS[wrapper]([model])

    GPTModel.__init__ = built
    return _ending(flags)


def _verified(flags: list[str], fault: str | None) -> tuple[int, str]:
    torch.set_num_threads(1)
    if fault is not None:
        planted_faults.FAULTS[fault]()
    return _ending(flags)


def _reductions(flags: list[str]) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []
    kinds = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W", "output_weight": "T"}

    def noted(stages: Any, name: str) -> Any:
        run = getattr(stages, name)

        def act(self: Any, stage: int, *args: Any, **kwargs: Any) -> Any:
            chunk = self._placement.chunk_of(stage)
            seen.append((kinds[name], chunk))
            result = run(self, stage, *args, **kwargs)
            seen.append((f"end of {kinds[name]}", chunk))
            return result

        return act

    for name in kinds:
        setattr(MegatronStages, name, noted(MegatronStages, name))
    add = MegatronStages.add_embedding

    def add_embedding(*args: Any) -> None:
        seen.append(("ADD", 0))
        add(*args)

    MegatronStages.add_embedding = add_embedding
    chunks: dict[Any, int] = {}
    build, start = DistributedDataParallel.__init__, _ParamAndGradBucketGroup.start_grad_sync

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        chunks.update(dict.fromkeys(self.bucket_groups, get_attr_wrapped_model(self, "vp_stage") or 0))

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(("reduce", chunks[self]))
        return start(self, *args, **kwargs)

    DistributedDataParallel.__init__ = built
    _ParamAndGradBucketGroup.start_grad_sync = start_grad_sync
    _rank_main(flags)
    return seen


def _behind_messages(flags: list[str]) -> Recorded:
    found = recorded()
    _rank_main(flags)
    return found


def _layer_runs(flags: list[str]) -> dict[int, list[int]]:
    runs = counted_forwards.put_in_place()
    _rank_main(flags)
    return dict(runs)


def _live_bytes(flags: list[str]) -> list[int]:
    sizes: list[int] = []
    stock_log = training.training_log

    iterations = count(1)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        if next(iterations) % 10 == 0:
            sizes.append(min(_alive() for _ in range(10)))
        return stock_log(*args, **kwargs)

    training.training_log = training_log
    _rank_main(flags)
    return sizes


def _alive() -> int:
    """Bytes of all tensors of this process, after a moment in which gloo's threads may let go of messages."""
    time.sleep(0.02)
    gc.collect()
    tensors = (found for found in gc.get_objects() if isinstance(found, torch.Tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _waits(flags: list[str]) -> list[str]:
    found: list[str] = []
    run, runs = schedule_function.run, count()

    def watched(*args: Any, **kwargs: Any) -> None:
        with detected() as detector:
            run(*args, **kwargs)
        if next(runs):  # what is made once, in the first iteration, costs nothing
            found.extend(detector.found)

    schedule_function.run = watched
    _rank_main(flags)
    return found


def _message_timeouts(flags: list[str]) -> list[list[float]]:
    found: list[list[float]] = []
    run = schedule_function.run

    def watched(program: Any, stages: Any, transport: Any, *args: Any) -> None:
        channels = transport._channels
        groups = [end.group for ends in (channels.outgoing, channels.incoming) for end in ends.values()]
        limits = [group._get_backend(channels.device).options._timeout for group in groups]
        found.append([limit.total_seconds() for limit in limits])
        run(program, stages, transport, *args)

    schedule_function.run = watched
    _rank_main(flags)
    return [found[0], found[-1]]


def _counted(flags: list[str]) -> list[bool]:
    found: list[bool] = []
    run = schedule_function.run

    def watched(program: Any, stages: Any, *args: Any) -> None:
        found.append((stages._meter or stages._store._meter) is not None)
        run(program, stages, *args)

    schedule_function.run = watched
    _rank_main(flags)
    return found


def _copied(flags: list[str], pinned: float, layers: Sequence[int] | None) -> list[tuple[list[Any], int]]:
    copies = LateCopies(pinned)
    setattr(Planner, "layers_offloaded", layers)  # noqa: B010 - a property of it
    model_binding.copies_on = lambda *args, **named: copies
    found: list[tuple[list[Any], int]] = []
    run = schedule_function.run

    def watched(*args: Any) -> None:
        run(*args)
        found.append((copies.moved[:], sum(copies.allocated)))
        del copies.moved[:]

    schedule_function.run = watched
    _rank_main(flags)
    return found


def _stalled(flags: list[str], how: str) -> list[str]:
    stalled_step.put_in_place(how)
    _rank_main(flags)
    return [thread.name for thread in threading.enumerate()]


def _held_and_estimated(
    flags: list[str], one_kernel: bool, adapters: bool
) -> tuple[tuple[int, dict[str, int]], tuple[RankMemory, ...]]:
    sys.argv = ["pretrain_gpt.py", *flags]
    if one_kernel:
        kernel_attention.put_in_place()
    if adapters:
        low_rank.put_in_place(low_rank.OfLinears)
    seen = held_in_jobs.listen()
    _rank_main(flags)
    return held_in_jobs.held(seen), held_in_jobs.estimate_here(one_kernel=one_kernel, model=seen["model"])


def _replanned(
    flags: list[str], names: Sequence[str] | None, failing: int | None, standin_bytes: int, slow_from: int | None
) -> tuple[list[str], list[float], str]:
    os.environ[STANDIN_VARIABLE] = str(standin_bytes)
    seen, programs = _nothing_seen(), replanned_jobs.programs_run()
    _listen(seen)
    if names is None:
        replanned_jobs.never_plan()
    elif names:
        replanned_jobs.propose_at_once(*names)
    else:
        replanned_jobs.wait_for_plans()
    if slow_from is not None and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        replanned_jobs.slow_from(slow_from, 0.04)
    if failing == int(os.environ["RANK"]):
        replanned_jobs.fail_to_prove()
    printed = io.StringIO()
    with redirect_stdout(printed):
        _rank_main(flags)
    return programs, seen["losses"], printed.getvalue()


def _rank_main(flags: list[str]) -> None:
    _save_quickly(flags)
    torch.set_num_threads(1)
    sys.argv = ["pretrain_gpt.py", *flags]
    if "flex" in flags:
        fake_deep_ep.put_in()
    pretrain_gpt.main()
    board = get_tensorboard_writer()
    if board is not None:  # its thread may still be writing, and a forked rank ends without waiting for threads
        board.flush()


def _save_quickly(flags: list[str]) -> None:
    """Stock's writer of checkpoints asks a process of its own for a queue, and starts it by importing all anew."""
    if "--save" in flags:
        filesystem_async.get_write_results_queue(mp_mode="fork")


def packed_sequences(bounds: list[int], length: int) -> tuple[list[int], list[int], int, int]:
    """The bounds and the longest that attention gets for a sample of ``length`` with sequences at ``bounds``."""
    cu_seqlens = torch.tensor([bounds + [length] * (length + 1 - len(bounds))], dtype=torch.int32)
    longest = max(b - a for a, b in pairwise(bounds))
    made = gpt._packed_sequences({"cu_seqlens": cu_seqlens, "max_seqlen": torch.tensor([longest], dtype=torch.int32)})
    return made.cu_seqlens_q.tolist(), made.cu_seqlens_kv.tolist(), made.max_seqlen_q, made.max_seqlen_kv


def _rank(
    flags: list[str],
    samples: str,
    adapters: bool,
    attention: str,
    orders: Sequence[Sequence[Sequence[int]]],
    streams: bool,
) -> dict[str, Any]:
    seen = _nothing_seen()
    _listen(seen)
    seen["passes"] = counted_passes()
    ordered_samples.note(seen["orders"])
    if orders:
        ordered_samples.put_in_place(orders)
    fake_wandb.put_in_place()
    if "--pipeline-schedule" in flags:
        fused_kernels.forget()
    if os.environ.get(ROUNDING_VARIABLE) == "1":
        te_nvfp4.round_to_nearest()
    # Whatever is read or given back too soon is nonsense.
    model_binding.copies_on = lambda *args, **named: LateCopies()
    if attention == "plain":
        plain_attention.put_in_place()
    if adapters:
        low_rank.put_in_place()
    if streams:
        residual_streams.put_in_place()
    if samples == "varied":
        _vary_sizes(seen["shapes"])
    if samples == "cut":
        ordered_samples.cut()
    if samples == "own loader":
        own_loader.put_in_place(flags)
    if samples in ("documents", "packed", "conversations"):
        MockGPTLowLevelDataset.max_sequence_length = 9
    if samples in ("packed", "conversations"):
        _attend_to_packed(seen["shapes"], local="local" in flags)
    if samples in ("Megatron says", "at the ends"):
        reading_script.put_in_place(samples)
    if samples == "hybrid script":
        hybrid_script.put_in_place()
    if samples == "conversations":
        conversations.put_in_place()
        flags = [flag for flag in flags if flag != "--mock-data"]
    if samples == "own loop":
        torch.set_num_threads(1)
        own_loop.run(flags, seen, partial(_recorded, seen=seen))
        return seen
    try:
        _rank_main(flags)
    except SystemExit as leaving:  # at --exit-interval
        if leaving.code:
            raise
    return seen


def _rank_without_us(flags: list[str]) -> dict[str, Any]:
    seen = _nothing_seen()
    _listen(seen)
    _save_quickly(flags)
    stock_script.forget_the_package()
    sys.argv = ["stock_script.py", *flags]
    stock_script.main()
    return seen


def _nothing_seen() -> dict[str, Any]:
    lists: dict[str, Any] = {name: [] for name in ("losses", "evaluations", "iterations", "loss_scales", "orders")}
    sets: dict[str, Any] = {name: set() for name in ("shapes", "passes")}
    return lists | sets | {"shares": False, "pipeline": 0, "gradients": {}, "weights": {}, "peak": 0}


def _joined(ranks: Sequence[dict[str, Any]], what: str) -> dict[tuple[str, int, int], torch.Tensor]:
    """Of all ranks; of a vocabulary that all of a pipeline share, their parts put together as stock has it."""
    found: dict[tuple[str, int, int], torch.Tensor] = {}
    parts: dict[tuple[str, int, int], dict[int, torch.Tensor]] = defaultdict(dict)
    for rank in ranks:
        for key, tensor in rank[what].items():
            if rank["shares"] and key[0] in (EMBEDDING, OUTPUT):
                parts[key][rank["pipeline"]] = tensor
            else:
                found[key] = tensor
    return found | {key: torch.cat([tensors[at] for at in sorted(tensors)]) for key, tensors in parts.items()}


def _attend_to_packed(seen: set[tuple[int, ...]], local: bool) -> None:
    """Attention says what bounds it was given. That of stock's ``local`` layers cannot, and is replaced."""
    if local:
        plain_attention.put_in_place()
    kind = PlainAttention if local else importlib.import_module(_EXTENSIONS).TEDotProductAttention
    attend = kind.forward

    def forward(*args: Any, **named: Any) -> torch.Tensor:
        seen.add(tuple(named["packed_seq_params"].cu_seqlens_q.tolist()))
        return attend(*args, **named)

    kind.forward = forward


def _vary_sizes(seen: set[tuple[int, int]]) -> None:
    """Make a script of this one that feeds microbatches of different numbers and lengths of rows, and says so.

    The first and the last stage read the same samples, the one its tokens and the other its labels, which are the
    tokens moved by one; both take the size from a token that both have.
    """
    parse, next_batch = pretrain_gpt.parse_and_validate_args, gpt._next_batch

    def parse_and_validate_args(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        parsed.variable_seq_lengths = True  # stock has no flag for it, and turns it off when it validates
        return parsed

    def cut(data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
        batch = next_batch(data_iterator, vp_stage)
        tokens, labels, mask = batch["tokens"], batch["labels"], batch["attention_mask"]
        if tokens is None and labels is None:
            return batch
        number = int(labels[0, 0] if tokens is None else tokens[0, 1])
        rows, length = 1 + number % 2, 4 * (1 + number % 4)
        seen.add((rows, length))
        single = {name: None if value is None else value[:rows, :length] for name, value in batch.items()}
        return single | {"attention_mask": None if mask is None else mask[:rows, :, :length, :length]}

    pretrain_gpt.parse_and_validate_args, gpt._next_batch = parse_and_validate_args, cut


def _listen(seen: dict[str, Any]) -> None:
    """Look over stock's shoulder: at the schedule's result, the training log, and evaluation."""
    stock_log, stock_evaluate = training.training_log, training.evaluate

    def training_log(
        loss_dict: Any, total: Any, rate: Any, iteration: int, loss_scale: float, *args: Any, **kwargs: Any
    ) -> Any:
        if "lm loss" in loss_dict:
            seen["losses"].append(float(loss_dict["lm loss"]))
        seen["iterations"].append(iteration)
        seen["loss_scales"].append(loss_scale)
        return stock_log(loss_dict, total, rate, iteration, loss_scale, *args, **kwargs)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = stock_evaluate(*args, **kwargs)
        if result[0] and "lm loss" in result[0]:
            seen["evaluations"].append(float(result[0]["lm loss"]))
        return result

    training.training_log, training.evaluate = training_log, evaluate
    end_call = PeakReport.end

    def end(report: PeakReport) -> None:
        end_call(report)
        seen["peak"] = report.bytes

    PeakReport.end = end
    stock_pretrain = pretrain_gpt.pretrain

    def pretrain(*args: Any, **kwargs: Any) -> None:
        choose = training.get_forward_backward_func
        training.get_forward_backward_func = lambda *a, **k: _recorded(choose(*a, **k), seen)
        stock_pretrain(*args, **kwargs)

    pretrain_gpt.pretrain = pretrain


def _recorded(schedule: Any, seen: dict[str, Any]) -> Any:
    def call(*, model: Any, forward_only: bool = False, **rest: Any) -> Any:
        result = schedule(model=model, forward_only=forward_only, **rest)
        seen["shares"], seen["pipeline"] = (
            parts_of(model) is not None,
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        if not forward_only:
            if not seen["gradients"]:
                seen["gradients"] = by_name(model, lambda parameter: getattr(parameter, "main_grad", None))
        else:
            seen["weights"] = by_name(model, numbers)
        return result

    return call
