"""Modules of the package know each other without circles: each can be read after those it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import stocache

PACKAGE = Path(stocache.__file__).parent


def modules() -> dict[str, str]:
    """Their names and sources; but for tables of contents, which know all below them."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found[".".join(parts)] = path.read_text()
    return found


def imported(source: str, names: Iterable[str]) -> set[str]:
    """Which of these modules a source imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(names)


def in_order(sources: dict[str, str]) -> list[str]:
    graph = {name: imported(source, sources) for name, source in sources.items()}
    return list(TopologicalSorter(graph).static_order())


def test_modules_have_an_order():
    sources = modules()
    order = in_order(sources)
    assert len(order) > 60
    assert order.index("stocache.cached_dataset") < order.index("stocache.loader")


def test_control_a_circle_is_noticed():
    sources = modules()
    sources["stocache.sizes"] += "\ndef late():\n    from stocache import cached_dataset\n"
    with pytest.raises(CycleError):
        in_order(sources)
