"""End to end: torchrun, the real ``pretrain_gpt.py``, real text; another person's script; a rank that dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.results import MODEL, UNTIED
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
V_HALF = "--pipeline-schedule v-half --global-batch-size 4 --pipeline-model-parallel-size".split()


def start(ranks: int, script: Path, flags: list[str]) -> subprocess.Popen[str]:
    command = [*TORCHRUN, str(ranks), str(script), *flags, *V_HALF, str(ranks)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"lm loss: (\S+)", output)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small byte-level data set, made from the sources of this very package."""
    folder = tmp_path_factory.mktemp("text")
    sources = sorted(map(str, (ROOT / "megatron" / "schedules").rglob("*.py")))
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--append-eod"]
    subprocess.run([*tool, "--output-prefix", str(folder / "code"), "--input", *sources], check=True, timeout=HANGS_S)
    return folder / "code_text_document"


@pytest.mark.nightly
def test_real_text_trains_under_v_half_on_four_ranks(text: Path) -> None:
    flags = [flag for flag in [*MODEL, *UNTIED] if flag != "--mock-data"]
    flags += [
        "--data-path",
        str(text),
        "--split",
        "8,1,1",
        "--vocab-size",
        "257",
        "--make-vocab-size-divisible-by",
        "1",
    ]
    run = start(4, ROOT / "pretrain_gpt.py", [*flags, "--train-iters", "20", "--lr", "1e-2"])
    output, _ = run.communicate(timeout=HANGS_S)
    assert run.returncode == 0, output[-4000:]
    assert "planned bubble" in output
    assert re.search(r"planned peak activation memory \d+\.\d\d MiB, 7\d\.\d % of 1F1B's", output), output[-200:]
    assert output.count("pipeline schedule: found ") == 1, "one rank says which GPU libraries there are"
    seen = losses(output)
    assert len(seen) == 20
    assert sum(seen[-5:]) / 5 < seen[0] - 0.5, "it does not learn"
    assert "validation loss at iteration 20 on test set" in output


SCRIPT = '''
"""A training script as somebody else would have it: a model provider, stock helpers, and our one call."""
import os
os.environ["TORCHDYNAMO_DISABLE"] = "1"
import megatron.schedules
megatron.schedules.without_gpu()
from megatron.schedules.integration import gpt
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args), transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size, max_sequence_length=args.seq_length, pre_process=pre_process,
        post_process=post_process, vp_stage=vp_stage, pg_collection=pg_collection,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=True,
    )

def more_flags(parser):
    parser.add_argument("--a-flag-of-mine", action="store_true")
    return parser

megatron.schedules.install()
args = parse_and_validate_args(extra_args_provider=more_flags)
assert args.a_flag_of_mine
pretrain(pretrain_cfg_container_from_args(args, None), gpt.datasets_provider, ModelType.encoder_or_decoder,
         gpt.forward_step, model_provider)
'''


@pytest.mark.nightly
def test_another_script_needs_one_import_and_one_call(tmp_path: Path) -> None:
    script = tmp_path / "their_script.py"
    script.write_text(SCRIPT)
    run = start(2, script, [*MODEL, "--train-iters", "2", "--a-flag-of-mine"])
    output, _ = run.communicate(timeout=HANGS_S)
    assert run.returncode == 0, output[-4000:]
    assert len(losses(output)) == 2


@pytest.mark.nightly
def test_where_there_is_no_gpu_a_script_is_told_what_to_call(tmp_path: Path) -> None:
    script = tmp_path / "their_script.py"
    script.write_text(
        SCRIPT.replace("megatron.schedules.without_gpu()", "").replace("from megatron.schedules.integra", "#")
    )
    asked = [*MODEL, *V_HALF, "1", "--pipeline-model-parallel-size", "2", "--a-flag-of-mine"]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *asked],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert run.returncode == 2, run.stderr[-4000:]
    said = run.stderr.strip().splitlines()[-1]
    assert said.startswith("their_script.py: error: no CUDA device here, and Megatron requires one")
    assert "call megatron.schedules.without_gpu() before Megatron is imported (docs/getting-started.md" in said


@pytest.mark.job
def test_a_rank_killed_in_an_iteration_ends_the_job_with_a_message() -> None:
    run = start(2, ROOT / "pretrain_gpt.py", [*MODEL, *UNTIED, "--train-iters", "100000"])
    assert run.stdout is not None
    try:
        seen = next(line for line in run.stdout if "lm loss" in line)
        assert seen
        ranks = [
            p for p in psutil.Process(run.pid).children(recursive=True) if "pretrain_gpt.py" in " ".join(p.cmdline())
        ]
        assert len(ranks) == 2
        ranks[0].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        output, _ = run.communicate(timeout=HANGS_S)
        assert time.monotonic() - killed < 60
        assert run.returncode != 0
        assert "SIGKILL" in output or "Connection closed by peer" in output, output[-3000:]
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)
    finally:
        run.kill()
