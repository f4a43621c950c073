"""benchmarks/retune: docs/retuned.md is written from its results, and claims no more than they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.retune.__main__ import as_json, main, pairs, read
from benchmarks.retune.page import as_page
from benchmarks.retune.retuned import NUMBERS, Figures, Retuned
from megatron.schedules.cli.ending import run
from megatron.schedules.estimate.device_memory import RESERVED
from tools._job_specs import MOST_WITH_A_LARGER_BUBBLE

ROOT = Path(__file__).parents[2]
JSON, PAGE = ROOT / "docs" / "retuned.json", ROOT / "docs" / "retuned.md"
PAIRS = {("a", "H100"), ("b", "H100")}
FIGURES = Figures("v-half", "TP2 PP4 MB1", 32, "", 10.0, 0.4, 0.05, 60.0, "4,4,4,4,4,4,4,4")


def test_the_page_is_written_from_its_results():
    results = list(read(JSON).values())
    assert results
    assert PAGE.read_text() == as_page(results, pairs())
    assert JSON.read_text() == as_json(results)


def test_stock_is_never_slower_than_nvidias_setting_and_what_is_found_fits():
    for each in read(JSON).values():
        if each.own is not None and each.stock is not None:
            assert each.stock.seconds <= each.own.seconds, each.name
        for figures in (each.stock, each.ours):
            if figures is not None and figures != each.own:
                assert figures.gib <= (1 - RESERVED) * each.gib + 0.1, each.name


def test_little_is_claimed_over_the_same_sizes_with_a_smaller_bubble():
    for each in read(JSON).values():
        ours, beside, stock = each.ours, each.beside, each.stock
        if ours is None or beside is None or stock is None or each.over_stock is None:
            continue
        if beside.gib <= (1 - RESERVED) * each.gib and beside.bubble < ours.bubble:
            least = max(ours.seconds, (1 - MOST_WITH_A_LARGER_BUBBLE) * beside.seconds)
            assert each.over_stock <= stock.seconds / least + 0.001, each.name


def test_the_page_says_what_changed_and_why():
    own = replace(FIGURES, schedule="1f1b", sizes="TP4 PP4 MB1", seconds=12.0)
    beside = replace(FIGURES, schedule="1f1b", gib=90.0)
    names = ("a_pretrain_64gpu_h100_bf16", 64, "H100", 80.0, "bf16")
    found = Retuned(*names, own, own, FIGURES, beside, 1.2, 1.2, False, ("cuda_graph_impl",), (), 0.03)
    page = as_page([found], PAIRS)
    assert "TP4 PP4 MB1 → TP2 PP4 MB1, 1f1b → v-half" in page
    assert "stock's 1f1b of the same sizes needs 90 GiB of 72, ours 60" in page
    assert "ours loses `cuda_graph_impl`" in page and "up to 3 % faster" in page
    assert "1 recipes were searched, of 1 of 2 pairs of model and GPU" in page
    assert "at least 1 % faster than the best of stock for 1 of 1 recipes" in page
    assert "1 of 1 recipes, marked †, were searched with" in page and "64 H100, bf16 † |" in page
    now = as_page([replace(found, numbers=NUMBERS)], PAIRS)
    assert "earlier numbers" not in now and "†" not in now
    slower = replace(found, beside=replace(beside, gib=70.0), over_stock=0.9, gap=0.0)
    assert "**stock is as fast or faster**" in as_page([slower], PAIRS)
    assert "bubbles are 5.0 % of stock's 1f1b of the same sizes" in as_page([slower], PAIRS)


def test_recipes_without_a_wheel_are_refused_in_a_line(capsys: pytest.CaptureFixture[str]):
    assert run(main, "retune", ["llama"]) == 2
    error = capsys.readouterr().err
    assert "--bridge is missing" in error and error.count("\n") == 1
