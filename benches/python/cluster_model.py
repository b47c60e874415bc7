"""When servers of all nodes pay: a closed form, for 4 to 1,024 nodes; prints a table and plots it.

python benches/python/cluster_model.py [PNG]

A node trains as fast as its slowest part lets it. Of an epoch it visits one sample of N, in random
order: what it needs is anywhere. Without a cluster its memory M holds a share h = M / D of
the dataset, and the rest comes from the source. With a cluster 1 / N of the dataset lies on each
node's server, which leaves M - D / N in front, and the rest comes from other nodes.

    without    (1 - h) · max(size / source per node, preparing / cores)
    with       (1 - h + 1 / N) · max(size / network, (client + server) / cores)

Assumptions: the dataset fits into all nodes together (N · h >= 1); a network gives 80 % of its rate
in both directions at once, whoever talks to whom; what server and client take of a core for a
sample is assumed, not measured (``reads`` of cluster.py shows it for a machine), and preparing and
they may use all cores that loading has; the source is shared evenly by all nodes, and a node gets
no more than its own link to it. First epochs, and what training itself takes, are left out: this is
the speed of loading alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

SIZE = 150_528  # bytes of a sample
CORES = 16  # of a node that load
CLIENT, SERVER = 90e-6, 60e-6  # seconds of a core for a sample: assumed
NETWORK_SHARE = 0.8
NETWORKS = (10, 25, 100)  # Gbit/s
NODES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
LOCAL = (0.25, 0.5, 0.9)  # shares of the dataset that the memory of a node holds
PLOT = Path(__file__).resolve().parents[2] / "docs" / "cluster-pays.png"


@dataclass(frozen=True)
class Source:
    """Where samples come from, and what is done with each."""

    name: str
    total: float  # bytes per second for all nodes
    node: float  # bytes per second for one, at the most
    prepare: float = 0.0  # seconds of a core


SOURCES = (
    Source("a file server of 2 GB/s", 2e9, 1.2e9),
    Source("an object store, 0.5 GB/s a node", 1e12, 0.5e9),
    Source("parallel storage of 200 GB/s", 200e9, 10e9),
    Source("the same, 20 ms to prepare", 200e9, 10e9, 20e-3),
)


def without(source: Source, nodes: int, local: float) -> float:
    """Seconds of a node for a sample that it visits."""
    per_node = min(source.node, source.total / nodes)
    return (1 - local) * max(SIZE / per_node, source.prepare / CORES)


def with_cluster(gigabits: float, nodes: int, local: float) -> float | None:
    """The same; None if the dataset does not fit."""
    if nodes * local < 1:
        return None
    network = NETWORK_SHARE * gigabits * 1e9 / 8
    return (1 - local + 1 / nodes) * max(SIZE / network, (CLIENT + SERVER) / CORES)


def gain(source: Source, gigabits: float, nodes: int, local: float) -> float | None:
    """How many times as fast a node loads with a cluster."""
    mine = with_cluster(gigabits, nodes, local)
    return None if mine is None else without(source, nodes, local) / mine


def rows() -> list[tuple[str, float, str]]:
    """For a table: what, the gain at 64 nodes with 25 Gbit, all of them in words."""
    found = []
    for source in SOURCES:
        for local in LOCAL[:2]:
            shown = []
            for gigabits in NETWORKS:
                gains = [gain(source, gigabits, nodes, local) for nodes in (4, 16, 64, 1024)]
                cells = ["-" if each is None else f"{each:.2g}" for each in gains]
                shown.append(f"{gigabits} Gbit {' '.join(cells)}")
            middle = gain(source, 25, 64, local) or 0.0
            what = f"{source.name}, {local:.0%} local: gain at 4 16 64 1024 nodes"
            found.append((what, middle, "; ".join(shown)))
    return found


def plot(path: Path) -> None:
    """Gains over nodes: one picture for each source, a line for each network and local share."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(2, 2, figsize=(9.5, 7), sharex=True, sharey=True)
    colours = dict(zip(NETWORKS, ("#b8651b", "#2a6f97", "#3a7d44"), strict=True))
    styles = dict(zip(LOCAL, ("-", "--", ":"), strict=True))
    for axes, source in zip(all_axes.flat, SOURCES, strict=True):
        axes.axhspan(1e-3, 1, color="#eeeeee", zorder=0)
        axes.axhline(1, color="#555555", linewidth=0.8)
        for gigabits in NETWORKS:
            for local in LOCAL:
                points = [(n, gain(source, gigabits, n, local)) for n in NODES]
                there = [(n, each) for n, each in points if each is not None]
                axes.plot(
                    *zip(*there, strict=True), styles[local], color=colours[gigabits],
                    marker="o", markersize=2.5, linewidth=1.3,
                )  # fmt: skip
        axes.set_title(source.name, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(0.02, 8000)
        axes.set_xticks(NODES, [str(n) for n in NODES])
        axes.grid(alpha=0.25)
        axes.text(1024, 0.026, "source alone is faster", fontsize=8, color="#555555", ha="right")
    for axes in all_axes[1]:
        axes.set_xlabel("nodes")
    for axes in all_axes[:, 0]:
        axes.set_ylabel("times as fast with a cluster")
    lines = [mpl.lines.Line2D([], [], color=colours[g], label=f"{g} Gbit/s") for g in NETWORKS] + [
        mpl.lines.Line2D([], [], color="#333333", linestyle=styles[h], label=f"{h:.0%} in memory")
        for h in LOCAL
    ]
    figure.legend(handles=lines, loc="lower center", ncols=6, frameon=False, fontsize=9)
    figure.suptitle("Loading samples of 150 KB: with servers on all nodes against the source alone")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    for what, _, words in rows():
        print(f"{what}: {words}")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PLOT
    plot(target)
    print(f"saved {target}")
