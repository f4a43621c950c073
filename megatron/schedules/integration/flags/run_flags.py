"""Megatron's flags that a training job reads, after Megatron has validated them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from megatron.schedules.measure.profile_facts import Facts


class GroupFlags(NamedTuple):
    """Settings of process groups.

    Args:
        timeout: value of ``--distributed-timeout-minutes``.
        nccl_file: value of ``--nccl-communicator-config-path``.
        high_priority: whether ``pp`` is among ``--high-priority-stream-groups``.
    """

    timeout: timedelta
    nccl_file: Path | None = None
    high_priority: bool = False


class RunFlags(NamedTuple):
    """Settings that a job reads when its training begins.

    Args:
        groups: settings of process groups.
        model: sizes of the model and of its parallelism, for a cost profile.
        log_interval: Megatron logs every this many iterations.
        profiles: whether Megatron's ``--profile`` is given.
        begun: iterations already done.
        train_iters: iterations of the whole training.
        end: last iteration of this run.
    """

    groups: GroupFlags
    model: Facts
    log_interval: int
    profiles: bool
    begun: int
    train_iters: int
    end: int


def run_flags(args: Any) -> RunFlags:
    """Reads Megatron's validated arguments."""
    begun, whole, interval = args.iteration, args.train_iters or 0, args.exit_interval
    end = min(whole, (begun // interval + 1) * interval) if interval else whole
    return RunFlags(group_flags(args), _facts(args), args.log_interval, bool(args.profile), begun, whole, end)


def group_flags(args: Any) -> GroupFlags:
    """Reads the settings of process groups."""
    path = args.nccl_communicator_config_path
    return GroupFlags(
        timedelta(minutes=args.distributed_timeout_minutes),
        None if path is None else Path(path),
        "pp" in (args.high_priority_stream_groups or ()),
    )


def _facts(args: Any) -> Facts:
    return Facts(
        device="",
        layers=args.num_layers,
        hidden_size=args.hidden_size,
        heads=args.num_attention_heads,
        sequence_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        tensor_parallel=args.tensor_model_parallel_size,
        context_parallel=args.context_parallel_size,
        vocabulary=args.padded_vocab_size or 0,
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        recompute=args.recompute_granularity,
    )
