"""The comparison of schedules."""

from __future__ import annotations

import csv
import io
import json

import pytest

from megatron.schedules.report import table
from megatron.schedules.report.figures import figures
from tests.report.made import saved, timeline

REASON = "interleaved-1f1b needs at least 2 chunks a rank, not 1"


@pytest.fixture(scope="module")
def rows():
    base, half = (figures(timeline(name, 4, 8)) for name in ("1f1b", "v-half"))
    return [
        table.Row("1f1b", base, 1.0),
        table.Row("interleaved-1f1b", REASON),
        table.Row("v-half", half, base.makespan / half.makespan),
    ]


def test_text_is_aligned_and_gives_the_reason(rows):
    lines = table.as_text(rows).splitlines()
    assert lines[0].split() == "schedule bubble span bubble peak memory of 1F1B's chunks throughput".split()
    assert lines[3].split() == "1f1b 27.27 % 27.27 % 4 100.0 % 1 1.000".split()
    assert lines[4] == f"interleaved-1f1b  {REASON}"
    assert len(lines[0]) == len(lines[3]) == len(lines[5]) == len(lines[2])
    assert lines[5].split()[-3:-1] == ["%", "2"]


def test_only_reasons_make_a_table_too():
    assert table.as_text([table.Row("v-half", "no")]).splitlines()[-1] == "v-half    no"


def test_markdown_has_as_many_cells_in_every_row(rows):
    lines = table.as_markdown(rows).splitlines()
    assert {line.count("|") for line in lines} == {8}


def test_csv_and_json_have_every_figure_unrounded(rows):
    read = list(csv.DictReader(io.StringIO(table.as_csv(rows))))
    half = timeline("v-half", 4, 8)
    assert float(read[2]["bubble"]) == pytest.approx(half.bubble, abs=1e-11)
    assert read[1]["reason"] == REASON
    assert read[1]["bubble"] == ""
    objects = json.loads(table.as_json(rows))
    assert objects[1] == {"schedule": "interleaved-1f1b", "reason": REASON}
    assert objects[2]["memory_of_1f1b"] == 0.75
    assert objects[2]["throughput_of_1f1b"] == pytest.approx(66 / half.makespan)


def test_hidden_and_exposed_messages_are_columns_where_there_are_any(rows):
    assert "exposed" not in table.as_text(rows) and "exposed" not in table.as_json(rows)
    found = timeline("v-zb", 4, 8, "1.3,1.4,1,0,0.3")
    hidden, exposed = found.messages
    assert hidden > 0 and exposed > 0
    shown = [*rows, table.Row("v-zb", figures(found), 1.1)]
    lines = table.as_text(shown).splitlines()
    assert lines[0].split()[-2:] == ["messages", "messages"] and lines[1].split()[-2:] == ["hidden", "exposed"]
    assert lines[-1].split()[-4:] == [f"{100 * hidden:.1f}", "%", f"{100 * exposed:.1f}", "%"]
    last = json.loads(table.as_json(shown))[-1]
    assert (last["hidden"], last["exposed"]) == (hidden, exposed)


def test_memory_is_in_gib_too_where_a_model_says_what_a_microbatch_takes(rows):
    assert "GiB" not in table.as_text(rows) and "peak_memory_bytes" not in table.as_json(rows)
    half = table.Row("v-half", figures(timeline("v-half", 4, 8), 0.5 * 2**30), 1.2)
    headings, units, _, *lines = table.as_text([*rows[1:2], half]).splitlines()
    assert headings.split()[4:9] == "peak memory peak memory of".split()
    assert units.split() == "microbatches GiB memory a rank to 1F1B's".split()
    assert lines[1].split()[5:9] == ["3", "1.50", "75.0", "%"]
    assert len({line.count("|") for line in table.as_markdown([*rows[1:2], half]).splitlines()}) == 1
    assert json.loads(table.as_json([half]))[0]["peak_memory_bytes"] == 1.5 * 2**30
    assert next(csv.DictReader(io.StringIO(table.as_csv([half]))))["peak_memory_bytes"] == str(1.5 * 2**30)


def test_what_is_done_again_and_copied_has_columns_where_there_is_any(rows):
    line = saved()
    more = [*rows, table.Row("file", figures(line), 1.5)]
    lines = table.as_text(more).splitlines()
    assert "recomputed" in lines[0] and "recomputed" not in table.as_text(rows)
    shares = [f"{100 * share:.1f}" for share in (line.recomputed, line.copying)]
    assert lines[-1].split()[-4::2] == shares
    assert lines[3].split()[-4::2] == ["0.0", "0.0"]
    assert {line.count("|") for line in table.as_markdown(more).splitlines()} == {10}
    objects = json.loads(table.as_json(more))
    assert (objects[3]["recomputed"], objects[3]["copying"]) == pytest.approx((line.recomputed, line.copying))
    assert objects[3]["useful"] == pytest.approx((1 - line.bubble) * (1 - line.recomputed))
