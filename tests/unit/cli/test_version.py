import platform
from importlib.metadata import version

import jaxres
from jaxres.__main__ import main


def test_the_versions_that_decide_about_bits_are_printed(capsys):
    assert main(["--version"]) == 0
    expected = f"jaxres {jaxres.__version__}, jax {version('jax')}, flax {version('flax')}, "
    printed = capsys.readouterr().out
    assert printed.startswith(expected)
    assert printed.endswith(f"Python {platform.python_version()}\n")
