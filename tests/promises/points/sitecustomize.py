"""Fault points outside the code: a signal at the n-th file operation of a kind.

Python imports this at its start if PYTHONPATH has this folder. FAULT is `<point>:<n>:<signal>`;
the signal is sent right before the operation. No code of jaxres depends on it.
"""

import os
import sys


def _kind(path):
    """Returns the record kind of a file that is about to be renamed."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError:
        return ""
    return text.partition(b'"kind":"')[2].partition(b'"')[0].decode()


def _point(event, args):
    """Returns the name of the point that an operation is, if it is one."""
    paths = [os.fspath(a) for a in args if isinstance(a, str | os.PathLike)]
    if not paths:
        return None
    if event == "os.link":
        return "frozen linked" if "/frozen/" in paths[1] else _kind(paths[0])
    if event == "os.mkdir":
        return "directory made" if paths[0].rstrip("/").endswith(".orbax-checkpoint-tmp") else None
    if event == "os.rename" and len(paths) == 2:
        name = os.path.basename(paths[1])
        if paths[0].rstrip("/").endswith(".orbax-checkpoint-tmp") and "/checkpoints/" in paths[0]:
            return "step renamed" if name[:8].isdigit() else None
        if name.endswith(".trash"):
            return "trash"
        return {"progress.json": "facts", "MANIFEST.json": "manifest"}.get(name)
    if event == "os.remove" and args[1] != -1:  # As rmtree does, by the folder's descriptor.
        return "bytes"
    return None


def arm(fault):
    """Sends this process a signal right before an operation, `<point>:<n>:<signal>`."""
    point, count, signal = fault.split(":")
    seen = []
    busy = []

    def hook(event, args):
        if event not in ("os.link", "os.mkdir", "os.rename", "os.remove") or busy:
            return
        busy.append(1)
        try:
            hit = _point(event, args) == point
        finally:
            busy.pop()
        if hit:
            seen.append(1)
            if len(seen) == int(count):
                os.kill(os.getpid(), int(signal))

    sys.addaudithook(hook)


if "FAULT" in os.environ:
    arm(os.environ["FAULT"])
