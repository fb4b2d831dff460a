"""Fixtures: the fake of NVIDIA's library."""

import pytest

from jaxres_emulators.nvml import FakeNvml


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpus(built):
    built.set()
    return built
