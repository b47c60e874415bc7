"""Tests with the libraries that people train with, as PyPI has them: `make test-ecosystem`."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import stocache

# What the other tests use as well: pictures of samples, datasets.
sys.path.append(str(Path(__file__).parents[1] / "python"))


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="generate many more scripts")


def pytest_configure(config):
    config.addinivalue_line("markers", "parts(count): of the tests beside these")


@pytest.fixture
def scale(request):
    """scale(quick, full): the count to use in this run."""
    long = request.config.getoption("--long")
    return lambda quick, full: full if long else quick


@pytest.fixture
def seed():
    """A fresh seed, printed so that a failure can be repeated with STOCACHE_TEST_SEED."""
    value = int(os.environ.get("STOCACHE_TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"STOCACHE_TEST_SEED={value}")
    return value


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
