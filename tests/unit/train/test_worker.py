"""What a worker prints in a notebook."""

import io

import pytest
import rich.console

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
