import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]

MINIMAL = """
data:
  source: {kind: text, path: "{stdlib}"}
train:
  steps: 30
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a config file, the minimal one by default, and makes its folder the current one."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str = MINIMAL, name: str = "x.yaml") -> Path:
        Path(name).write_text(textwrap.dedent(text).lstrip("\n"))
        return Path(name)

    return write_file
