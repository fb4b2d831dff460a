"""One place for each test's runs; the caches of corpora and compiled steps are shared by all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises.trainer import Place


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture
def place(tmp_path: Path, caches: Path) -> Iterator[Place]:
    place = Place(tmp_path, caches)
    yield place
    place.end_all()
