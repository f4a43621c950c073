"""Output files: whole or as they were, whatever goes wrong, and no wait for a pipe that nobody reads."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.schedules.utils import output_files
from megatron.schedules.utils.output_files import objection, write_text

NOBODY = 65534
BEFORE = "what was there before"


@pytest.fixture(params=["new", "replaced"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "out.txt"
    if request.param == "replaced":
        path.write_text(BEFORE)
    return path


def assert_untouched(path: Path, before: list[Path]) -> None:
    assert sorted(path.parent.iterdir()) == before
    if path in before:
        assert path.read_text() == BEFORE


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def within(seconds: float, do: Callable[[], object]) -> None:
    """Fails where ``do`` would hang."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if raised:
        raise raised[0]


def test_the_text_is_written_as_utf_8(target: Path):
    write_text(target, "Füße ░▒▓ 🙂\n")
    assert target.read_bytes() == "Füße ░▒▓ 🙂\n".encode()
    assert [*target.parent.iterdir()] == [target]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_has_the_mode_that_the_umask_allows(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int):
    path = tmp_path / "out"
    path.write_text(BEFORE)
    path.chmod(mode)
    write_text(path, "text")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("text", mode)


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing yet"])
def test_a_link_stays_a_link(tmp_path: Path, there: bool):
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real", tmp_path / "link"
    if there:
        real.write_text(BEFORE)
    link.symlink_to("elsewhere/real")
    write_text(link, "text")
    assert link.is_symlink()
    assert (real.read_text(), not real.is_symlink()) == ("text", True)
    assert [*(tmp_path / "elsewhere").iterdir()] == [real]


def test_the_longest_name_a_folder_takes_can_be_written(tmp_path: Path):
    path = tmp_path / ("x" * 255)
    write_text(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize("call", ["open", "write", "fsync", "close", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_whatever_fails_the_file_is_as_it_was(target: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch):
    before, usual_open = sorted(target.parent.iterdir()), open

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    class Failing:
        """A file whose ``call`` fails."""

        def __init__(self, descriptor: int, *_: object, **__: object) -> None:
            self._file = usual_open(descriptor, "wb", buffering=0)

        def __enter__(self) -> Failing:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()
            if call == "close":
                fail()

        def fileno(self) -> int:
            return self._file.fileno()

        def write(self, data: memoryview) -> int:
            if call == "write":
                self._file.write(data[:3])
                fail()
            return self._file.write(data)

    if call in ("write", "close"):
        monkeypatch.setattr(output_files, "open", Failing, raising=False)
    else:
        monkeypatch.setattr(output_files.os, call, fail)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        write_text(target, "a text that is long enough")
    monkeypatch.undo()
    assert raised.value.filename == str(target)
    assert_untouched(target, before)


def test_an_interrupt_leaves_nothing_behind(target: Path, monkeypatch: pytest.MonkeyPatch):
    before = sorted(target.parent.iterdir())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(output_files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(target, "text")
    monkeypatch.undo()
    assert_untouched(target, before)


def test_a_text_larger_than_a_file_may_be_leaves_the_file_as_it_was(target: Path):
    before = sorted(target.parent.iterdir())
    code = (
        "import sys; from pathlib import Path; from megatron.schedules.utils.output_files import write_text\n"
        "try: write_text(Path(sys.argv[1]), 'x' * 100_000)\n"
        "except OSError as error: sys.exit(error.strerror)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr.strip()) == (1, os.strerror(errno.EFBIG))
    assert_untouched(target, before)


@pytest.mark.parametrize("text", ["half a pair: \ud800", "a byte that was no UTF-8: \udcff"])
def test_a_text_that_cannot_be_encoded_is_an_os_error(target: Path, text: str):
    before = sorted(target.parent.iterdir())
    with pytest.raises(OSError, match="its text cannot be encoded: surrogates not allowed"):
        write_text(target, text)
    assert_untouched(target, before)


@pytest.mark.parametrize("name", ["half \ud800", "a\0b", "x" * 300, "", "none/there", "."])
def test_a_name_that_no_file_can_have_is_an_os_error(tmp_path: Path, name: str):
    with pytest.raises(OSError) as raised:
        write_text(tmp_path / name, "text")
    assert raised.value.strerror
    assert raised.value.filename == str(tmp_path / name)
    assert objection(tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_a_name_that_is_no_utf_8_is_written(tmp_path: Path):
    path = tmp_path / os.fsdecode(b"\xff.csv")
    write_text(path, "text")
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff.csv"]


def test_links_in_a_circle_are_an_os_error(tmp_path: Path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        write_text(tmp_path / "a", "text")


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that this user may read and not write, with a file that the user may write."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to the user that root becomes
        folder = Path(name)
        (folder / "out").write_text(BEFORE)
        (folder / "out").chmod(0o666)
        folder.chmod(0o555)
        user = os.geteuid()
        os.seteuid(user or NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


@pytest.mark.parametrize("name", ["out", "new"])
def test_a_folder_that_takes_no_files_is_named(closed: Path, name: str):
    with pytest.raises(OSError, match=f"no file can be made in {closed}: Permission denied"):
        write_text(closed / name, "text")
    assert (closed / "out").read_text() == BEFORE
    assert objection(closed / name) == f"no file can be made in {closed}: Permission denied"


# --- what is no regular file ---------------------------------------------------------------------------------------


def test_a_pipe_without_a_reader_is_an_error_and_no_wait(fifo: Path):
    with pytest.raises(OSError, match="nobody reads from it"):
        within(60, lambda: write_text(fifo, "text"))
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_pipe_with_a_reader_gets_all_of_a_long_text(fifo: Path):
    text = "0123456789" * 100_000  # more than a pipe holds
    reader, found = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), bytearray()

    def read() -> None:
        while len(found) < len(text):
            with suppress(BlockingIOError):
                found.extend(os.read(reader, 2**16))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    within(60, lambda: write_text(fifo, text))
    thread.join(60)
    os.close(reader)
    assert found == text.encode()
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_reader_that_goes_is_an_os_error(fifo: Path):
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    threading.Timer(0.2, lambda: os.close(reader)).start()
    with pytest.raises(BrokenPipeError):
        within(60, lambda: write_text(fifo, "x" * 1_000_000))


def test_a_device_stays_a_device(tmp_path: Path):
    write_text(Path("/dev/null"), "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    (tmp_path / "link").symlink_to("/dev/null")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert not objection(Path("/dev/null"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_device_behind_a_link_is_an_os_error(tmp_path: Path):
    (tmp_path / "link").symlink_to("/dev/full")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as raised:
        write_text(tmp_path / "link", "text")
    assert raised.value.filename == str(tmp_path / "link")
    assert [*tmp_path.iterdir()] == [tmp_path / "link"]


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
@pytest.mark.parametrize("into", ["a file", "a pipe"])
def test_standard_output_by_name_is_written_where_it_goes(tmp_path: Path, into: str):
    code = (
        "import sys; from pathlib import Path; from megatron.schedules.utils.output_files import write_text\n"
        "write_text(Path('/dev/stdout'), 'text\\n')"
    )
    script = f'echo before; "{sys.executable}" -c "$1"; echo after'
    if into == "a file":
        with (tmp_path / "out").open("a") as file:
            subprocess.run(["bash", "-c", script, "bash", code], stdout=file, check=True)
        assert (tmp_path / "out").read_text() == "before\ntext\nafter\n"
        assert [*tmp_path.iterdir()] == [tmp_path / "out"]
    else:
        found = subprocess.run(["bash", "-c", script, "bash", code], capture_output=True, text=True, check=True)
        assert found.stdout == "before\ntext\nafter\n"


# --- asked ahead ---------------------------------------------------------------------------------------------------


def test_what_can_be_written_meets_no_objection(target: Path):
    assert objection(target) == ""


def test_asking_writes_nothing(target: Path):
    before = sorted(target.parent.iterdir())
    objection(target)
    assert_untouched(target, before)


def test_a_folder_that_is_missing_is_named(tmp_path: Path):
    assert objection(tmp_path / "none" / "out") == f"there is no folder {tmp_path / 'none'}"
