"""Tests with the libraries that people train with, as PyPI has them: `make test-ecosystem`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import stocache

# What the other tests use as well: pictures of samples, datasets.
sys.path.append(str(Path(__file__).parents[1] / "python"))


def pytest_configure(config):
    config.addinivalue_line("markers", "parts(count): of the tests beside these")


@pytest.fixture
def cached():
    """Makes CachedDatasets, which are closed at the end."""
    made = []

    def make(dataset, memory="64MiB", **options):
        made.append(stocache.CachedDataset(dataset, memory, verbose=False, strict=True, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()
