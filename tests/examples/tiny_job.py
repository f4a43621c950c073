"""What the tests of examples/slurm share: a job that trains on this machine's CPU, and a sweep of such."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "examples" / "slurm"

_MODEL = """
GPUS={gpus}
MODEL_FLAGS=(--num-layers {layers} --hidden-size 32 --num-attention-heads 4)
PARALLEL_FLAGS=(
  --pipeline-model-parallel-size {gpus}
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
)
GLOBAL_BATCH_SIZE=${{GLOBAL_BATCH_SIZE:-4}}
"""
CPU = "--distributed-backend gloo --no-bias-dropout-fusion --make-vocab-size-divisible-by 1 --lr-warmup-fraction 0.5"


def model(gpus: int) -> str:
    """A model file, as those in examples/slurm/models: the smallest that a pipeline over so many ranks can have."""
    return _MODEL.format(gpus=gpus, layers=2 * gpus - 2)


def make_text(folder: Path) -> Path:
    """The prefix of a small byte-level data set."""
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--append-eod"]
    sources = sorted(map(str, (ROOT / "megatron" / "schedules" / "planner").glob("*.py")))
    subprocess.run([*tool, "--output-prefix", str(folder / "code"), "--input", *sources], check=True, timeout=120)
    return folder / "code_text_document"


def set_all(patch: pytest.MonkeyPatch, **settings: object) -> None:
    """Put settings into the environment."""
    for name, value in settings.items():
        patch.setenv(name, str(value))


def prepare(folder: Path, text: Path, patch: pytest.MonkeyPatch) -> None:
    """A model for two ranks in ``folder``, ``tiny.sh``, and all settings but the GPUs of a node in the environment."""
    (folder / "tiny.sh").write_text(model(2))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        patch.delenv(name)
    set_all(
        patch,
        PYTHON=sys.executable,
        RUN=folder / "run",
        SEQ_LENGTH=16,
        EVAL_ITERS=0,
        DATA_PATH=text,
        SPLIT="8,1,1",
        TOKENIZER_FLAGS="--tokenizer-type NullTokenizer --vocab-size 257",
        EXTRA_FLAGS=f"{CPU} --num-workers 0",
        OMP_NUM_THREADS=1,
        TORCHDYNAMO_DISABLE=1,
        GLOO_SOCKET_IFNAME="lo",
        CUDA_VISIBLE_DEVICES="",
    )


def run(*command: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """A command in the repository's root, and what it said."""
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


def iterations(output: str) -> list[int]:
    """The iterations that a job has printed."""
    return [int(found) for found in re.findall(r"\] iteration +(\d+)/", output)]


def candidates(folder: Path, *flags: str) -> None:
    """A sweep's candidates.csv, with a row for each text of flags."""
    folder.mkdir(exist_ok=True)
    with (folder / "candidates.csv").open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow("method,data,tensor,pipeline,micro_batch_size,mfu,memory_gib,iteration_seconds,flags".split(","))
        for each in flags:
            method = each.split()[1] if each.startswith("--pipeline-schedule") else "1f1b"
            rows.writerow([method, 1, 1, 2, 1, 0.5, 30.5, 2.0, each])


_GRID_SEARCH = """
import shutil, sys
expected = "--model tiny --gpus 2 --sequence-length 16 --batch-size 4 --top 2 --format csv".split()
sys.exit(f"called with {sys.argv[1:]}") if sys.argv[1:] != expected else print(open(%r).read(), end="")
"""
_PIPELINE = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4"
_ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


def prepare_sweep(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """After :func:`prepare`: two candidates from a grid search that knows them; the sweep's folder."""
    good = f"--pipeline-schedule v-half --pipeline-costs 1,1,1,0 {_PIPELINE} {_ENDS}"
    bad = f"--pipeline-schedule v-min {_PIPELINE}"  # two layers do not make four stages
    candidates(folder / "made", bad, good)
    (folder / "grid_search.py").write_text(_GRID_SEARCH % str(folder / "made" / "candidates.csv"))
    set_all(
        patch,
        MODEL_FILE=folder / "tiny.sh",
        GRID_SEARCH=folder / "grid_search.py",
        SWEEP=folder / "sweep",
        GPUS_PER_NODE=2,
        ITERATIONS=4,
        TRANSFORMER_IMPL="local",
    )
    return folder / "sweep"
