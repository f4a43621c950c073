"""Counts the files of the package whose functions run between the command line and a job's first pass, and checks.

    torchrun --nproc-per-node 2 scripts/files_to_first_pass.py

The job is a small one on two CPUs under v-half; flags of pretrain_gpt.py may be added. The first rank counts, in its
main thread. What a file runs when it is imported does not count.
"""

from __future__ import annotations

import argparse
import inspect
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT / 'megatron' / 'schedules'}{os.sep}"
JOB = """--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--vocab-size 96 --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --global-batch-size 8 --train-iters 1
--lr 1e-3 --num-workers 0 --eval-interval 1000 --distributed-backend gloo --transformer-impl local
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
--pipeline-model-parallel-size 2 --pipeline-schedule v-half"""
# Functions whose calls are counted: the checks of all flags, reads of a cost file, and plans made or read.
COUNTED = ("flags/checks.py", "checked"), ("measure/cost_file.py", "read_costs"), ("planner/service.py", "make_plan")
files: set[str] = set()
calls: Counter[str] = Counter()


def note(frame: FrameType, event: str, _argument: object) -> None:
    """Adds the file of a function that is called; prints all files when the engine starts."""
    code, name = frame.f_code, frame.f_code.co_filename
    if event != "call" or not name.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
        return
    if any(name.endswith(file) and code.co_name == function for file, function in COUNTED):
        calls[code.co_name] += 1
    if name not in files and not is_imported(frame):
        files.add(name)
    if name.endswith(os.path.join("runtime", "engine.py")) and code.co_name == "run":
        sys.setprofile(None)
        shown = "\n".join(sorted(name.removeprefix(PACKAGE) for name in files))
        print(", ".join(f"{function}() runs {calls[function]} times" for _, function in COUNTED))
        print(f"{shown}\n{len(files)} files from the command line to the first pass", flush=True)


def is_imported(frame: FrameType | None) -> bool:
    """Returns whether a file of the package is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sys.argv = [str(ROOT / "pretrain_gpt.py"), *JOB.split(), *parser.parse_known_args()[1]]
    sys.path.insert(0, str(ROOT))
    if os.environ.get("RANK", "0") == "0":
        sys.setprofile(note)
    runpy.run_path(sys.argv[0], run_name="__main__")
