"""A user without a name and a home folder gets a private one; any other keeps its own."""

import os
import pwd
import stat
import tempfile

import pytest

from jaxres.faults import ConfigError
from jaxres.storage import home


@pytest.fixture
def unknown(monkeypatch, tmp_path):
    """Makes this process's user one that the system does not know; returns the private folder."""

    def none(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", none)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"jaxres-home-{os.getuid()}"


@pytest.mark.parametrize("given", [{}, {"HOME": ""}])
def test_a_user_without_a_name_gets_a_private_home(unknown, given):
    for _ in range(2):
        environment = dict(given)
        home.ensure(environment)
        assert environment == {"HOME": str(unknown)}
    assert stat.S_IMODE(unknown.stat().st_mode) == 0o700


def test_a_home_that_others_can_use_is_refused(unknown):
    """They would plant compiled programs."""
    unknown.mkdir(mode=0o755)
    unknown.chmod(0o755)
    with pytest.raises(ConfigError, match="expected a folder of this account"):
        home.ensure({})


def test_a_home_that_is_given_or_known_stays(monkeypatch, tmp_path):
    environment = {"HOME": "/somewhere"}
    home.ensure(environment)
    assert environment == {"HOME": "/somewhere"}
    nothing: dict[str, str] = {}
    home.ensure(nothing)
    assert nothing == {}
    empty = {"HOME": ""}
    home.ensure(empty)
    assert empty == {"HOME": pwd.getpwuid(os.getuid()).pw_dir}, "~ would be the root folder"
