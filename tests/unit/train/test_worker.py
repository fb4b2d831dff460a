"""What a worker prints in a notebook, and how it ends if storage fails at its first access."""

import errno
import io
import os
import sys

import pytest
import rich.console

from jaxres.exit_codes import ExitCode
from jaxres.storage import files
from jaxres.telemetry.heartbeat import decode
from jaxres.train import worker
from jaxres.train.worker import _terminal


@pytest.mark.parametrize("in_notebook", [False, True])
def test_the_console_writes_plain_lines_to_the_stream_also_in_a_notebook(monkeypatch, in_notebook):
    """In a notebook rich would send them to its display, and a kernel's stream says it is a tty."""
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: in_notebook)
    stream = io.StringIO()
    if in_notebook:
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    terminal = _terminal(stream)
    terminal.print("step 1")
    assert stream.getvalue() == "step 1\n"
    assert not terminal.is_terminal


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_worker_whose_first_access_to_storage_fails_says_so(monkeypatch, tmp_path, capsys, hosts):
    """Else its supervisor takes it for a bug."""

    def fails(folder):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    def exits(code):
        raise SystemExit(code)

    for name in ("kill_me_with_parent", "name_process"):
        monkeypatch.setattr(worker, name, lambda _: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(files, "make_dir", fails)
    monkeypatch.setattr(os, "_exit", exits)
    receiving, sending = os.pipe()
    arguments = [str(tmp_path), "--attempt", "1", "--parent", "1", "--status-fd", str(sending)]
    with open(receiving, "rb") as received, open(sending, "wb"):
        with pytest.raises(OSError, match="Input/output error") as raised:
            worker.main([*arguments, "--num-hosts", str(hosts)])
        with pytest.raises(SystemExit) as ended:
            sys.excepthook(raised.type, raised.value, raised.tb)
        message = decode(received.readline())
    assert (ended.value.code, message.exit) == (ExitCode.STORAGE, ExitCode.STORAGE)
    assert "storage failed" in message.reason
    assert "Traceback" not in "".join(capsys.readouterr())
