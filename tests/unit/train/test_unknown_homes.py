"""A path in the home folder of a user that does not exist is named."""

from pathlib import Path

import pytest

from jaxres.faults import ConfigError
from jaxres.train.session import refuse_unknown_homes


@pytest.mark.parametrize(
    ("section", "key"),
    [({"cache_dir": Path("~nosuchuser/x")}, "cache_dir"), ({"path": "~nosuchuser/x"}, "path")],
)
def test_a_path_of_an_unknown_user_is_refused(section, key):
    text = f"data.{key}=~nosuchuser/x: ~nosuchuser has no home folder here"
    with pytest.raises(ConfigError, match=text):
        refuse_unknown_homes({"data": section})


def test_other_paths_are_let_through(tmp_path):
    refuse_unknown_homes({"data": {"cache_dir": tmp_path, "path": "~/x", "name": "~nosuchuser"}})
