"""Which of many servers a node uses: as many neighbours as hold one copy of a dataset together."""

from __future__ import annotations

from stocache._cluster.address import split


def cell(servers: int, size: int, capacity: int, node: int, nodes: int) -> tuple[int, int]:
    """The first and the last server of that node's cell, by position.

    Each has room for ``capacity`` bytes, and the dataset takes ``size``. Cells are equal but for
    one server, none is too small for a copy unless all servers together are, and neighbouring
    nodes have the same.
    """
    together = min(servers, max(1, -(-size // capacity)))
    cells = servers // together
    mine = node * cells // nodes
    return -(-mine * servers // cells), -(-(mine + 1) * servers // cells) - 1


def in_cell(url: str, first: int, last: int) -> str:
    """The same servers, of which this node uses these. All are known, so that ``clear()`` reaches
    them."""
    return f"{url}{'&' if split(url)[1] else '?'}cell={first}-{last}"
