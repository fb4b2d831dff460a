"""Output of a program: whole lines, files of bounded size, and no wait for a terminal."""

import os
from types import SimpleNamespace

from jaxres.program import output
from jaxres.program.output import MOST_LINE_BYTES, Lines, OutputFile, Terminal


def test_only_whole_lines_are_copied_and_a_carriage_return_ends_one():
    lines = Lines()
    assert lines.add(b"one\ntw") == b"one\n"
    assert lines.add(b"o") == b""
    assert lines.add(b"\rthree") == b"two\r"
    assert lines.end() == b"three\n"
    assert lines.end() == b""


def test_a_line_without_end_is_copied_in_parts():
    lines = Lines()
    assert lines.add(b"x" * MOST_LINE_BYTES) == b""
    assert lines.add(b"y") == b"x" * MOST_LINE_BYTES + b"y"
    assert lines.end() == b""


def test_the_newest_output_is_kept_and_older_files_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MOST_FILE_BYTES", 2**20)
    path, older = tmp_path / "output.txt", tmp_path / "older.txt"
    file = OutputFile(path, older)
    for number in range(6):
        file.write(b"%d" % number * (2**19 - 1) + b"\n")
    file.close()
    assert older.read_bytes()[-2:] == b"4\n"
    note, newest = path.read_bytes().splitlines()
    assert note.startswith(b"jaxres: 1 MiB before this are in older.txt")
    assert newest == b"5" * (2**19 - 1)
    assert older.stat().st_size <= 2**20


def test_a_disk_that_is_full_is_reported_once_and_stops_nothing(tmp_path, capsys, monkeypatch):
    file = OutputFile(tmp_path / "output.txt", tmp_path / "older.txt")
    monkeypatch.setattr(output, "_write", _no_space)
    file.write(b"one\n")
    file.write(b"two\n")
    monkeypatch.undo()
    file.write(b"three\n")
    file.close()
    assert capsys.readouterr().err.count("output is lost (No space left on device)") == 1
    assert (tmp_path / "output.txt").read_bytes() == b"three\n"


def _no_space(descriptor: int, data: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_a_terminal_that_nothing_reads_gets_no_more_lines(monkeypatch):
    waits, select = [], output.select.select

    def wait(*arguments):
        waits.append(arguments[-1])
        return select(*arguments[:-1], 0.0)

    monkeypatch.setattr(output, "select", SimpleNamespace(select=wait, PIPE_BUF=4096))
    read_end, write_end = os.pipe()
    terminal = Terminal(write_end)
    for _ in range(100):
        terminal.write(b"x" * 4095 + b"\n")
    os.set_blocking(read_end, False)
    assert 0 < len(os.read(read_end, 2**22)) < 100 * 4096
    assert waits[-1] == 0.0, "after the first wait it is not waited for any more"
    terminal.write(b"again\n")
    assert os.read(read_end, 2**22) == b"again\n"
    os.close(read_end)
    terminal.write(b"gone\n")
    os.close(write_end)
