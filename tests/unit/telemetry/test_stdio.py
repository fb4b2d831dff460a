import dataclasses
import errno
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console as Terminal

from jaxres import __main__
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageUnavailable
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, RunLog
from jaxres.telemetry.console import Console
from jaxres.telemetry.stdio import SafeStream, eprint, escaped, write_result
from tests.unit.runlog.example_records import CLAIM


class FullStream(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        raise BrokenPipeError


def test_a_failed_write_is_ignored():
    stream = SafeStream(FullStream())
    assert stream.write("output") == 6
    stream.flush()


def test_a_full_standard_output_is_named_and_no_run_directory(monkeypatch, capsys):
    stream = FullStream()
    stream.name = "<stdout>"
    monkeypatch.setattr(sys, "stdout", stream)
    assert __main__.main(["--help"]) == ExitCode.STORAGE
    text = capsys.readouterr().err
    assert "standard output: can't be written (No space left on device)" in text
    assert "run directory" not in text
    with pytest.raises(BrokenPipeError):
        SafeStream(FullStream(), drops=False).flush()


def test_a_result_that_is_not_written_is_an_error_also_where_other_output_is_dropped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SafeStream(FullStream()))
    sys.stdout.write("progress")
    with pytest.raises(StorageUnavailable, match="can't be written"):
        write_result("a manifest")


def test_output_is_written_and_other_attributes_are_those_of_the_wrapped_stream():
    wrapped = io.StringIO()
    SafeStream(wrapped).write("output")
    assert wrapped.getvalue() == "output"
    assert SafeStream(wrapped).isatty() is False


HOSTILE = "a\x1b]52;c;aGk=\x07\x9b31m\rb\u202egpj.exe\u2066\n\tc\x7f"
SHOWN = "a\\x1b]52;c;aGk=\\x07\\x9b31m\\rb\\u202egpj.exe\\u2066\n\tc\\x7f"


def test_a_library_that_closes_what_it_logs_to_ends_no_output():
    """absl's log handler does so at the exit of the process."""
    wrapped = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream = SafeStream(wrapped)
    stream.writelines(["a\n", "\x1b[2J\n"])
    stream.close()
    stream.write("b\n")
    stream.flush()
    assert wrapped.buffer.getvalue() == b"a\n\\x1b[2J\nb\n"
    assert stream.buffer is wrapped.buffer
    assert not stream.closed


def test_control_characters_are_escaped_and_newlines_and_tabs_are_kept():
    wrapped = io.StringIO()
    SafeStream(wrapped).write(HOSTILE)
    assert wrapped.getvalue() == SHOWN
    SafeStream(wrapped, escapes=False).write("\x1b[0m")
    assert wrapped.getvalue() == f"{SHOWN}\x1b[0m", "custom code may print colours"


def test_every_printable_character_is_kept():
    text = "".join(chr(n) for n in range(0xA0, 0xD800) if chr(n).isprintable())
    assert escaped(text) == text


def test_messages_on_standard_error_are_escaped(capsys):
    eprint(HOSTILE)
    assert capsys.readouterr().err == SHOWN


def test_commands_escape_what_a_record_holds(tmp_path, capsys):
    """The owner of a shared run directory may be hostile to who looks at it."""
    run_dir = RunDir(tmp_path / "run")
    claim = dataclasses.replace(CLAIM, host=HOSTILE)
    log = RunLog.claim(run_dir.log, claim, after=[], clock=SystemClock())
    log.append(AttemptEnded(exit=70, reason=HOSTILE, committed=False))
    before = sys.stdout, sys.stderr
    for command in (["status"], ["history", "--attempts"], ["checkpoints", "verify"]):
        __main__.main([*command, str(run_dir.root)])
        printed = "".join(capsys.readouterr())
        assert not set(printed) & set("\x1b\x07\x9b\r\u202e\x7f"), (command, printed)
    __main__.main(["status", str(run_dir.root), "--json"])
    assert capsys.readouterr().out.isascii()
    assert (sys.stdout, sys.stderr) == before


def test_the_console_escapes_messages_and_keeps_its_own_live_progress():
    terminal = io.StringIO()
    shown = Terminal(file=SafeStream(terminal, escapes=False), force_terminal=True, width=100)
    with Console(attempt=1, log_every_seconds=1.0, clock=SystemClock(), terminal=shown) as console:
        console.print(HOSTILE)
    assert "]52;c;aGk=\x07" not in terminal.getvalue()
    assert SHOWN.splitlines()[0] in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue(), "no live progress"


PROGRAM = """
import subprocess, sys
from jaxres.telemetry import stdio
stdio.install_safe_stdio(escapes=True)
with open(sys.argv[1], "w") as file:  # Would have the number of a closed stream.
    print("größer \\u4e2d")
    sys.stderr.write("\\u28ff\\n")
    subprocess.run(["sh", "-c", "echo printed; echo told >&2"], check=True)
    file.write("own")
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_what_is_printed_to_a_closed_stream_is_dropped_and_reaches_no_file(tmp_path, closed):
    command = f'exec "{sys.executable}" -c "$0" "$1" {closed}'
    path = tmp_path / "file"
    ended = subprocess.run(["sh", "-c", command, PROGRAM, path], capture_output=True)
    assert (ended.returncode, path.read_text()) == (0, "own")
    assert (b"printed" in ended.stdout) == (closed.replace("2>", "").find(">") < 0)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_character_that_a_stream_does_not_have_is_escaped_and_ends_nothing(tmp_path, encoding):
    env = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
    command = [sys.executable, "-c", PROGRAM, tmp_path / "file"]
    ended = subprocess.run(command, capture_output=True, env=env)
    shown = {"ascii": b"gr\\xf6\\xdfer \\u4e2d", "latin-1": b"gr\xf6\xdfer \\u4e2d"}[encoding]
    assert ended.returncode == 0
    assert shown in ended.stdout
    assert b"\\u28ff" in ended.stderr


@pytest.mark.slow
def test_a_command_with_closed_streams_has_its_exit_code():
    command = f'exec "{sys.executable}" -m jaxres status /nowhere <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command]).returncode == ExitCode.USAGE
