"""Images of two classes, for promise tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def photos(folder: Path) -> list[bytes]:
    """Writes 30 images of each of two classes, told apart by their color."""
    rng, contents = np.random.default_rng(0), []
    for name, color in (("cat", (200, 40, 40)), ("dog", (40, 40, 200))):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            pixels = np.clip(rng.normal(color, 60, (30, 40, 3)), 0, 255).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG")
            (folder / name / f"{number}.jpg").write_bytes(file.getvalue())
            contents.append(file.getvalue())
    return contents
