"""docs/accuracy.md: its rows, what is fitted to them, and the words about errors that a dry run prints."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import fit
from benchmarks.accuracy.layers import measured_layers
from benchmarks.accuracy.report import Predicted, Report, measured
from benchmarks.accuracy.rows import Row, even_layers, read
from megatron.schedules.estimate.calibration import CALIBRATED, ERRORS
from megatron.schedules.estimate.devices import DEVICES
from megatron.schedules.estimate.roofline import Roofline

PAGE = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text()
ROWS = read(measured())


def row(**changes: object) -> Row:
    return replace(next(each for each in ROWS if each.name == "Qwen3-30B-A3B"), **changes)  # type: ignore[arg-type]


def test_a_dry_run_says_the_errors_of_the_page():
    """In percent, without a row's own model: the median error of all rows, and what nine of ten are within."""
    found = re.search(
        r"^\| all \| (\d+) \| [\d.]+ \| (?:[\d.]+ % \| ){3}([\d.]+) % \| [\d.]+ % \| ([\d.]+) %", PAGE, re.MULTILINE
    )
    said = re.search(r"(\d+) % \(median\) to (\d+) % \(one in ten\)", ERRORS)
    assert found is not None and said is not None
    assert int(found[1]) == sum(each.is_pretraining for each in ROWS)
    assert [round(float(found[2])), round(float(found[3]))] == [int(said[1]), int(said[2])]


def test_the_page_has_every_row_that_is_counted():
    for each in ROWS:
        written = f"| {each.release} | {each.name} | {each.gpus} {each.gpu} | {each.precision} |"
        assert (written in PAGE) == any(
            other.is_pretraining or other.adapters
            for other in ROWS
            if (other.release, other.name, other.gpus, other.gpu, other.precision)
            == (each.release, each.name, each.gpus, each.gpu, each.precision)
        )


def test_training_adapters_takes_as_long_as_measured():
    """Nothing is fitted to these rows. Counted as training of all weights they would take a fifth longer."""
    rows = [each for each in ROWS if each.adapters]
    assert len(rows) == 5 and not any(each.is_pretraining for each in rows)
    for each in rows:
        assert each.predicted() == pytest.approx(each.measured, rel=0.06)
        assert replace(each, adapters=0).predicted() > 1.2 * each.predicted()
        assert re.search(rf"^\| 26.06 \| Llama-3-70B \| 8 {each.gpu} \| {each.precision} \|", PAGE, re.MULTILINE)


def test_a_release_without_a_known_recipe_has_that_of_the_one_before():
    record = {"model": "Qwen3_235B_a22B", "gpu": "GB200", "precision": "MXFP8", "release": "26.06", "gpus": 256}
    record |= {"gbs": 8192, "mbs": 1, "seq": 4096, "tp": 1, "pp": 8, "cp": 1, "vp": 3, "ep": 32, "tokens": 1.0}
    known = {**record, "cuda_graph_impl": "full_iteration", "moe_a2a_overlap": True}
    old = {**known, "release": "25.11", "cuda_graph_impl": "transformer_engine"}
    graphs = [each.graphs for each in read([old, known, {**record, "release": "26.08"}])]
    assert graphs == ["transformer_engine", "full_iteration", "full_iteration"]


def test_layers_are_placed_as_recipes_place_them():
    assert even_layers(80, 4) == (20, 20, 20, 20)
    assert even_layers(126, 32) == (3, *(4,) * 30, 3)
    assert even_layers(61, 8) == (*(8,) * 7, 5)


def test_a_captured_iteration_waits_for_no_host_and_partial_graphs_less():
    none, partial, whole = (
        row(graphs=graphs, backend="deepep").busiest() for graphs in ("", "transformer_engine", "full_iteration")
    )
    layers, experts = 24 * row().microbatches, 16 * CALIBRATED.each_expert
    assert none - whole == pytest.approx(layers * (CALIBRATED.experts_host + experts))
    assert partial - whole == pytest.approx(layers * (CALIBRATED.experts_host * CALIBRATED.partial_graphs + experts))


def test_a_dispatcher_that_permutes_leaves_a_part_of_permuting_and_waiting():
    """HybridEP against DeepEP, without graphs and with a captured iteration, where no host is waited for."""
    for graphs in ("", "full_iteration"):
        apart, fused = (row(graphs=graphs, backend=backend).busiest() for backend in ("deepep", "hybridep"))
        none = row(graphs=graphs, backend="deepep").busiest(replace(CALIBRATED, routed_passes=0.0, experts_host=0.0))
        assert fused - none == pytest.approx(CALIBRATED.fused_dispatch * (apart - none))


def test_the_vectors_of_a_fit_are_a_calibration():
    numbers = fit.numbers(CALIBRATED)
    assert len(numbers) == len(fit.NAMES)
    again = fit.calibration(numbers)
    assert np.allclose(fit.numbers(again), numbers)
    assert {device.architecture for device in DEVICES.values()} <= set(again.reached)


def test_a_pair_is_in_order_if_the_faster_setting_is_predicted_to_be_faster():
    fast, slow = row(gpu="GB200", tokens=200.0), row(gpu="H100", tokens=100.0)
    for first, second, right in ((1.0, 2.0, 1), (2.0, 1.0, 0)):
        report = Report([Predicted(fast, first), Predicted(slow, second)])
        assert report.pairs == {"GPU": (right, 1), "setting": (0, 0)}


def test_the_page_has_the_layers_that_were_measured():
    """Predicted as now, beside what was measured; what a microbatch keeps is counted to a percent."""
    layers = measured_layers().layers
    for layer in layers:
        assert f"| {layer.name} | {layer.forward[0]:.1f} | {layer.forward[1]:.1f} |" in PAGE
        assert layer.kept is None or layer.kept[0] == pytest.approx(layer.kept[1], rel=0.01)
    assert any(layer.kept for layer in layers)
    for layer in measured_layers().experts:
        for predicted, found in layer[1:]:
            assert predicted == pytest.approx(found, rel=0.01) and f"| {predicted:.1f} | {found:.1f} |" in PAGE
    assert measured_layers().experts


def test_a_backward_is_divided_as_on_the_gpu_that_was_measured():
    """I over W is within 5 % of what was measured. I and W together are what whole jobs take, with no price on top."""
    split = [layer for layer in measured_layers().layers if layer.input_grad and layer.weight_grad]
    assert split
    for layer in split:
        (input_grad, measured_i), (weight_grad, measured_w) = layer.input_grad, layer.weight_grad
        assert input_grad / weight_grad == pytest.approx(measured_i / measured_w, rel=0.05)
        assert input_grad + weight_grad == pytest.approx(layer.whole[0])


def test_only_amd_gpus_have_a_price_of_splitting():
    prices = {name: Roofline(device).splitting for name, device in DEVICES.items()}
    assert {name for name, price in prices.items() if price} == {"MI300X", "MI355X"}
