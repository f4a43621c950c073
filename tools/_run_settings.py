"""Runs a setting of the grid search for real on this machine's GPUs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.schedules.estimate.models import Model
from tools._iteration import Estimate
from tools._pasted import flags as flags_of
from tools.collect_sweep import Outcome, read_outcome

_ROOT = Path(__file__).resolve().parents[1]
_ITERATIONS = 8
# torchrun ends its ranks when it is told to end. Killed, it would leave them.
_LAUNCH = """
import runpy, signal, sys
from megatron.schedules.utils.child_processes import end_with_parent
end_with_parent(int(sys.argv.pop(1)), signal.SIGTERM)
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""


def gpus_here() -> int:
    """Returns the number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def model_flags(model: Model) -> str:
    """Returns flags of ``pretrain_gpt.py`` that describe ``model``, with mock data."""
    return f"{model.flags} --tokenizer-type NullTokenizer --mock-data"


def run_setting(found: Estimate, folder: Path, more: Sequence[str] = ()) -> Outcome:
    """Runs a few iterations of ``pretrain_gpt.py``, one process a GPU; returns what their logs report.

    Args:
        found: what to run.
        folder: for the ranks' logs.
        more: flags beside the model's and the setting's.
    """
    setting = found.setting
    launch = ["-c", _LAUNCH, str(os.getpid()), "--standalone", f"--nproc-per-node={setting.gpus}"]
    logs = ["--redirects=3", f"--log-dir={folder}"]
    train = f"--train-iters {_ITERATIONS} --lr 1e-5 --eval-iters 0 --eval-interval 1000 --log-interval 1"
    flags = shlex.split(f"{model_flags(setting.model)} {flags_of(found)} {train}")
    command = [sys.executable, *launch, *logs, "pretrain_gpt.py", *flags, *more]
    # What Megatron wants of tensor and context parallel communication.
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if setting.tensor > 1 else {}
    output = folder / "job.out"
    folder.mkdir(parents=True, exist_ok=True)
    with (
        output.open("w") as file,
        subprocess.Popen(command, cwd=_ROOT, env=os.environ | environment, stdout=file, stderr=file) as job,
    ):
        try:
            job.wait()
        except BaseException:
            job.terminate()
            job.wait()
            raise
    return read_outcome(folder, output)
