"""Every part of tools/gpu/check.py passes on this machine's GPU."""

import shutil

import pytest

from tools.gpu import check


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU: nvidia-smi is not there")
@pytest.mark.parametrize("part", [part.name for part in check.PARTS])
def test_the_part_passes(part, tmp_path):
    assert check.main(["--only", part, "--out", str(tmp_path)]) == 0, (
        tmp_path / "results.jsonl"
    ).read_text()
