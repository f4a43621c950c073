"""Training frameworks on megatron-core: what is installed of them, what is left out, and jobs of theirs.

They and what they import are downloaded once, to a cache outside the checkout.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.server import ROOT, VERSIONS

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron-schedules-tests"


class Framework(NamedTuple):
    """A framework.

    Args:
        job: module of its job, in this folder.
        left_out: packages that it imports and that :mod:`.absent` replaces, with the reason.
    """

    job: str
    left_out: dict[str, str]


_BRIDGE = {
    "nvidia_resiliency_ext": "from 0.6 on no wheel for glibc 2.36; for restarts and stragglers, off by default",
    "modelopt": "for quantization and distillation",
    "diffusers": "for diffusion models",
    "megatron.energon": "for multimodal data sets",
}
FRAMEWORKS = {
    "Megatron-Bridge": Framework("bridge_job", _BRIDGE),
    "verl": Framework("verl_job", {**_BRIDGE, "ray": "starts the workers, which are forked here"}),
    "ms-swift": Framework("swift_job", {"pydantic": "for its servers"}),
}


class Job(NamedTuple):
    """A job.

    Args:
        pipeline: pipeline ranks.
        chunks: model chunks of a rank.
        schedule: ours; None for a job without this package.
        experts: ranks over which a mixture of experts is spread: weight gradients hide their messages; 0 without.
        clip: the gradient norm from which gradients are clipped; 0 for no clipping.
        checkpoint: folder of a checkpoint of iteration 2, which the job writes, or starts from if it is there; empty
            without one.
    """

    pipeline: int
    chunks: int
    schedule: str | None
    experts: int = 0
    clip: float = 0.0
    checkpoint: str = ""


class Outcome(NamedTuple):
    """What each rank of a job returned, or why it failed.

    Args:
        losses: losses that the rank has.
        passes: number of our passes that ran on it, by kind.
        gradients: digest of each parameter's gradient in the last iteration.
        error: why the job failed; empty if it did not.
    """

    losses: list[Any]
    passes: list[dict[str, int]]
    gradients: list[dict[str, str]]
    error: str


class UnreachableError(Exception):
    """The package index cannot be reached, or lacks a package."""


def site() -> Path:
    """Returns the folder of all installed packages; downloads them if it is not there.

    Raises:
        UnreachableError: they cannot be downloaded.
    """
    folder = CACHE / f"loops-{hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()[:16]}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        target = Path(made, "site")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*pip, "--target", target, "-r", _REQUIREMENTS], capture_output=True, text=True)
        if done.returncode:
            raise UnreachableError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
        for name in ("tests", "scripts"):  # verl's wheel has its own, which would hide ours
            shutil.rmtree(target / name, ignore_errors=True)
        target.rename(folder)
    return folder


def outcomes(name: str, jobs: list[Job], folder: Path) -> list[Outcome]:
    """Runs ``jobs`` of a framework in ranks forked from one process, which has imported it once.

    Args:
        name: key of :data:`FRAMEWORKS`.
        jobs: the jobs.
        folder: for what they write.
    """
    engine = ROOT / ".venv/transformer_engine" / VERSIONS[-1]
    # Scripted functions cannot be compiled while the stand-in for CUDA is in place.
    more = {"PYTORCH_JIT": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    more["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, engine, site())))
    command = [sys.executable, "-W", "ignore", "-m", "tests.loops.jobs", name, json.dumps(jobs), str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True)
    results = folder / "outcomes.json"
    assert done.returncode == 0 and results.exists(), f"{done.stdout}\n{done.stderr}"[-6000:]
    return [Outcome(*outcome) for outcome in json.loads(results.read_text())]
