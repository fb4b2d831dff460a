"""A text in a script of the shell, such as the config of a run. Pure."""

from __future__ import annotations

END = "END_OF_CONFIG"


def here_document(command: str, text: str) -> str:
    r"""Returns the lines of a script that give a text to a command as its input, unchanged.

    Args:
      command: quoted for the shell.
      text: lines, of which none is END, such as the YAML of a config.

    >>> here_document("cat > file", "a: $b\n")
    "cat > file <<'END_OF_CONFIG'\na: $b\nEND_OF_CONFIG"
    """
    return f"{command} <<'{END}'\n{text}{END}"
