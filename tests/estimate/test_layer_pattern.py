"""Lists of layers are read as Megatron reads them, and nothing in them is carried out."""

from __future__ import annotations

import argparse

import pytest

from megatron.schedules.estimate.bounds import MOST_LAYERS
from megatron.schedules.estimate.layer_pattern import moe_freq_type


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2", 2),
        ("[0,1,1]", [0, 1, 1]),
        ("[0]*1+[1]*3", [0, 1, 1, 1]),
        ("([1]+[0]*3)*2", [1, 0, 0, 0, 1, 0, 0, 0]),
        ("2*[1,0]", [1, 0, 1, 0]),
        ("[1]*(1+2)", [1, 1, 1]),
        ("[1,]", [1]),
    ],
)
def test_documented_forms_are_read(text: str, found: int | list[int]):
    assert moe_freq_type(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "[0]*8+",
        "[0],[1]",
        "[2]*8",
        "[0]**8",
        "[[0]]*8",
        "[0]*[1]",
        "[0]+1",
        "[True]",
        "[0]*x",
        "[0]*٣",
        "[",
        "(" * 300 + "[0]" + ")" * 300,
        "[0]" + "+[0]" * 9000,
        "[0]*" + "9" * 5000,
    ],
)
def test_what_is_no_list_of_layers_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number, or a list of zeros and ones such as"):
        moe_freq_type(text)


@pytest.mark.timeout(20)  # computed, some of them would take all memory there is
@pytest.mark.parametrize("text", ["[0]*9**9**9", "[0]*999999999999", "[1]*9999*9999*9999", f"[0]*{MOST_LAYERS}+[1]"])
def test_a_list_too_long_is_refused_without_being_made(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match=r"has more than 2000 layers|is not a whole number"):
        moe_freq_type(text)


@pytest.mark.parametrize("text", ["0", "-2", "2001"])
def test_every_so_many_layers_is_one_or_more(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is not from 1 to 2000"):
        moe_freq_type(text)
