import dataclasses
import errno
import io
import sys

from rich.console import Console as Terminal

from jaxres import __main__
from jaxres.clock import SystemClock
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, RunLog
from jaxres.telemetry.console import Console
from jaxres.telemetry.stdio import SafeStream, eprint, escaped
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
