"""Sizes are refused below the least and above the most that anybody trains with."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.bounds import BOUNDS, check_bounds
from megatron.schedules.estimate.models import find_model
from megatron.schedules.utils.errors import PlanError

SIZES = [flag for flag in BOUNDS if flag.startswith("--") and not flag.startswith("--pipeline-schedule")]
OF_A_FILE = [flag for flag, (kind, _) in megatron_flags.FLAGS.items() if kind is int]
MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 128 --num-experts 4"


def test_every_size_of_a_model_has_bounds():
    assert set(OF_A_FILE) <= set(SIZES)


@pytest.mark.parametrize("flag", SIZES)
def test_a_size_out_of_bounds_names_its_flag(flag: str):
    least, most = BOUNDS[flag]
    name = megatron_flags.attribute(flag)
    for value in (least, most):
        check_bounds(SimpleNamespace(**{name: value}))
    for value, said in ((least - 1, f"{flag} must be {least} or more"), (most + 1, f"{flag} must be {most} or less")):
        with pytest.raises(PlanError, match=f"{said}, not {value}"):
            check_bounds(SimpleNamespace(**{name: value}))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *itertools.product(OF_A_FILE, ["-1", "99999999999999999999", "9" * 5000, "²"]),
        *itertools.product(["--moe-layer-freq"], ["0", "[0]*9**9**9", "[0]*8+", "[0],[1]", "x"]),
    ],
    ids=lambda value: value[:24],
)
def test_a_hostile_size_in_a_models_file_is_refused_in_one_line(tmp_path: Path, flag: str, value: str):
    file = tmp_path / "model.sh"
    file.write_text(f"{MODEL} {flag} {value}")
    with pytest.raises(PlanError, match=flag) as refused:
        find_model(str(file))
    assert str(refused.value).startswith(f"{file} holds no model in Megatron's flags: ")
    assert "\n" not in str(refused.value)


def test_sizes_of_zero_that_would_divide_are_refused(tmp_path: Path):
    for flag in ("--tensor-model-parallel-size", "--expert-model-parallel-size", "--make-vocab-size-divisible-by"):
        file = tmp_path / "model.sh"
        file.write_text(f"{MODEL} {flag} 0")
        with pytest.raises(PlanError, match=f"{flag} must be 1 or more, not 0"):
            find_model(str(file))
