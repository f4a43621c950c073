"""Runs jobs of one framework: imports it once and forks the ranks of each job. Run by :func:`.frameworks.outcomes`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tests.integration.forked_ranks import JobError, run_ranks
from tests.loops.absent import leave_out
from tests.loops.frameworks import FRAMEWORKS, Job, Outcome
from tests.support.te_python import without_gpu


def main(name: str, jobs: str, folder: Path) -> None:
    """Writes the outcomes of ``jobs`` to ``folder``."""
    framework = FRAMEWORKS[name]
    # Both look for packages that are left out, and do without.
    importlib.import_module("transformers")
    without_gpu()
    leave_out(tuple(framework.left_out))
    job = importlib.import_module(f"tests.loops.{framework.job}")
    job.prepare(folder)
    outcomes = []
    for each in (Job(*fields) for fields in json.loads(jobs)):
        try:
            ranks = run_ranks(each.pipeline * max(1, each.experts), job.train, each, folder)
            losses, passes, gradients = zip(*ranks, strict=True)
            outcomes.append(Outcome(list(losses), list(passes), list(gradients), ""))
        except JobError as error:
            outcomes.append(Outcome([], [], [], str(error)))
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
