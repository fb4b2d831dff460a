"""A limit of the machine is no bug of jaxres: it is named, with how it is raised."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.host import signals
from jaxres.host.limits import error_of_limit
from jaxres.supervisor import attempt_runner


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RuntimeError("can't start new thread"), ExitCode.UNHEALTHY, "ulimit -u"),
        (OSError(errno.EMFILE, "Too many open files"), ExitCode.UNHEALTHY, "ulimit -n"),
        (OSError(errno.ENFILE, "File table overflow"), ExitCode.UNHEALTHY, "fs.file-max"),
        (OSError(errno.ENOMEM, "Cannot allocate"), ExitCode.OUT_OF_MEMORY, "ulimit -v"),
        (ImportError("x.so: failed to map segment"), ExitCode.OUT_OF_MEMORY, "ulimit -v"),
        (OSError(errno.ENAMETOOLONG, "too long", "x" * 999), ExitCode.CONFIG, "a shorter path"),
        (MemoryError(), ExitCode.OUT_OF_MEMORY, "memory.max"),
    ],
)
def test_a_limit_of_the_machine_has_its_own_exit_and_remedy(
    error: BaseException, code: int, says: str
) -> None:
    found = error_of_limit(error)
    assert found is not None
    assert found.exit_code == code
    assert says in str(found)


def test_other_errors_are_none_of_a_limit() -> None:
    for error in (OSError(errno.EPIPE, "x"), ImportError("no module x"), RuntimeError("x")):
        assert error_of_limit(error) is None


def test_a_command_that_reaches_a_limit_ends_with_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with signals.restored():
        assert attempt_runner.run_with_exit_code(command) == ExitCode.UNHEALTHY
    assert "opens no more files" in capsys.readouterr().err


def test_a_directory_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        Path("x").absolute()
    found = error_of_limit(caught.value)
    assert found is not None
    assert found.exit_code == ExitCode.CONFIG
    assert "the current directory does not exist any more" in str(found)
    monkeypatch.chdir(tmp_path)
    assert error_of_limit(caught.value) is None
