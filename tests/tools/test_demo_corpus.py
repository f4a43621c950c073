"""tools/demo_corpus.py: the corpus is bounded, the same every time, and made of real source files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tools import demo_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    files = {
        "a.py": "a = 1\n",
        "b/c.py": "c = 2\n" * 10,
        "b/empty.py": "\n",
        "latin.py": "# -*- coding: latin-1 -*-\n# caf\xe9\n",
        "test/t.py": "t = 3\n",
        "site-packages/s.py": "s = 4\n",
        "notes.txt": "not Python",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode("latin-1"))
    (folder / "broken.py").write_bytes(b"# \xff in no declared encoding\n")
    return folder


def test_takes_source_files_but_no_tests_nor_installed_packages(library: Path) -> None:
    taken = dict(demo_corpus.documents(library, 10_000))
    assert set(taken) == {"a.py", "b/c.py", "latin.py"}
    assert taken["latin.py"].endswith("caf\xe9\n")


def test_is_bounded_and_skips_what_does_not_fit(library: Path) -> None:
    assert {path for path, _ in demo_corpus.documents(library, 50)} == {"a.py", "latin.py"}


def test_the_same_corpus_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        assert demo_corpus.main(["--output", str(tmp_path / name), "--megabytes", "0.5"]) == 0
    one = (tmp_path / "one").read_bytes()
    assert one == (tmp_path / "two").read_bytes()
    texts = [json.loads(line)["text"] for line in one.splitlines()]
    assert 450_000 < sum(len(text.encode()) for text in texts) <= 500_000
    assert f"{len(texts)} source files" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


@pytest.mark.parametrize("size", ["0", "-1", "nan"])
def test_a_size_that_is_none(tmp_path: Path, size: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo_corpus.main(["--output", str(tmp_path / "x"), "--megabytes", size])
    assert stopped.value.code == 2


def test_a_full_disk_leaves_the_corpus_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("before")
    found = subprocess.run(
        [sys.executable, demo_corpus.__file__, "--output", str(tmp_path / "corpus"), "--megabytes", "0.1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert found.returncode == 2
    assert found.stderr.endswith(f"cannot write {tmp_path / 'corpus'}: File too large\n")
    assert [*tmp_path.iterdir()] == [tmp_path / "corpus"]
    assert (tmp_path / "corpus").read_text() == "before"
