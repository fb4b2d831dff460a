"""Makes docs/report.png: a small model is trained, killed and preempted; a picture of its report.

    python tools/report_picture.py [--run FOLDER] [--out docs/report.png]

Needs chromium (Debian: apt-get install chromium). `--run`: a run that is there already.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from jaxres.runlog.event_log import read_json_lines

ROOT = Path(__file__).resolve().parents[1]
STOPS = {1: (230, signal.SIGKILL), 2: (370, signal.SIGTERM), 3: (610, signal.SIGKILL)}
"""Attempt -> step after which it gets a signal."""
OVERRIDES = (
    *("train.steps=800", "checkpoint.save_every_steps=50", "run.name=small GPT, killed twice"),
    *("model.dropout=0", "evaluation.every_steps=200", "checkpoint.keep_last=10"),
)
WIDTH, HEIGHT = 1000, 1400


def train(run: Path) -> None:
    """Trains to the end; each attempt of STOPS is ended on the way."""
    config = ROOT / "tests" / "promises" / "tiny.yaml"
    command = [sys.executable, "-m", "jaxres.train", str(config), f"run.dir={run}", *OVERRIDES]
    for attempt in (*STOPS, len(STOPS) + 1):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            if attempt in STOPS:
                step, number = STOPS[attempt]
                metrics = run / "attempts" / f"{attempt:04d}" / "metrics.jsonl"
                while not _has_reached(metrics, step) and process.poll() is None:
                    time.sleep(0.05)
                process.send_signal(number)


def _has_reached(metrics: Path, step: int) -> bool:
    lines = read_json_lines(metrics) if metrics.exists() else []
    return bool(lines) and lines[-1]["step"] >= step


def main() -> None:
    """Trains, writes the report, takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "report.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run, page = Path(scratch) / "runs" / "small-gpt", Path(scratch) / "report.html"
        run.parent.mkdir()
        if options.run:
            run.symlink_to(options.run.resolve())
        else:
            train(run)
        report = [sys.executable, "-m", "jaxres", "report", "runs/small-gpt", "--out", str(page)]
        subprocess.run(report, check=True, cwd=scratch)
        page.write_text(page.read_text().replace(f"{scratch}/", ""))
        browser = ["chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars"]
        browser += [f"--user-data-dir={scratch}/profile", f"--window-size={WIDTH},{HEIGHT}"]
        picture = [f"--screenshot={options.out.resolve()}", page.as_uri()]
        subprocess.run([*browser, *picture], check=True, stderr=subprocess.DEVNULL)
    Image.open(options.out).quantize(160).save(options.out, optimize=True)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
