"""Writes the golden files: resolved configs, tables in docs/, manifests; `--check` compares only.

Their diff shows what a change does to every run.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxres import config, exit_codes, faults  # noqa: E402
from jaxres.launch.k8s import command as k8s  # noqa: E402
from tools import module_tables  # noqa: E402

K8S_EXAMPLE = (
    *("quickstart", "run.dir=gs://my-bucket/runs/first", "--image", "my-registry/jaxres:1"),
    *("--nodes", "3", "--gpus-per-node", "8", "--service-account", "trainer", "--print"),
)


def golden_files() -> dict[Path, str]:
    """Returns path -> expected text."""
    files = {
        ROOT / "docs" / "FAULTS.md": faults.table(),
        ROOT / "docs" / "exit-codes.md": exit_codes.table(),
        **module_tables.pages(),
    }
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        loaded = config.load(path)
        text = f"# trajectory digest: {config.digest(loaded.config)}\n"
        files[ROOT / "tests" / "golden" / path.name] = text + config.dump_yaml(loaded.config)
    for kind in ("jobset", "job"):
        files[ROOT / "examples" / "k8s" / f"{kind}.yaml"] = _manifest("--kind", kind)
    return files


def _manifest(*flags: str) -> str:
    """Returns the output of `launch k8s` without the ConfigMap."""
    command = [*K8S_EXAMPLE, *flags]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        k8s.main(command, env={})
    text = (
        f"# Printed by `python -m jaxres.launch k8s {' '.join(command)}`,\n# after a ConfigMap.\n"
    )
    return text + printed.getvalue().partition("---\n")[2]


def main(arguments: list[str]) -> int:
    """Writes the golden files, or compares them and shows the differences."""
    stale = 0
    for path, text in golden_files().items():
        there = path.read_text() if path.exists() else ""
        if there == text:
            continue
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            continue
        stale += 1
        name = str(path.relative_to(ROOT))
        diff = difflib.unified_diff(there.splitlines(), text.splitlines(), name, "now", lineterm="")
        sys.stdout.write("\n".join(diff) + "\n")
    if stale:
        sys.stdout.write("golden files differ; if that is right: python tools/golden.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
