"""Who keeps how much: from what ranks say of themselves to the positions of each."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from stocache import _C
from stocache._sharing.ranks import Rank
from stocache.planner import in_room
from stocache.sizes import show_bytes


@dataclass(frozen=True)
class Terms:
    """What is the same for all ranks."""

    samples: int
    seed: int
    mode: str
    shuffle: bool
    chunk: int
    overflow: float
    min_elements: int
    equal: bool
    num_replicas: int


@dataclass(frozen=True)
class Report:
    """What a rank tells the others."""

    rank: int
    node: str
    terms: Terms
    memory: int
    """Bytes that its node has for samples in memory."""
    disk: int
    """Likewise on disk."""
    sample_bytes: float
    """What a sample takes, on average."""
    trouble: str = ""
    """Why it cannot say."""

    @classmethod
    def of_trouble(cls, rank: int, node: str, error: Exception) -> Report:
        nothing = Terms(0, 0, "", False, 1, 0.0, 0, False, 0)
        return cls(rank, node, nothing, 0, 0, 1.0, str(error) or type(error).__name__)


@dataclass(frozen=True)
class Share:
    """What a rank visits in an epoch, of what its node keeps."""

    start: int
    """The first position that the node keeps."""
    length: int
    """How many it keeps, or has room for between."""
    first: int
    """The first that the rank visits, counted from the node's first; of its holder."""
    held: int
    """How many its holder has: the rank itself, or all of its node."""
    holder: int
    """The number of that."""
    step: int
    offset: int
    """The rank visits every ``step``-th of them from ``offset`` on."""
    visits: int
    total: int
    """How many all ranks visit together."""


def check_agreement(reports: list[Report]) -> None:
    """Each is told what the others have."""
    troubles = [f"rank {each.rank}: {each.trouble}" for each in reports if each.trouble]
    if troubles:
        raise ValueError(troubles[0])
    numbers = [each.rank for each in reports]
    if sorted(numbers) != list(range(len(reports))):
        raise ValueError(f"the ranks call themselves {numbers}; each needs a number of its own")
    first = asdict(reports[0].terms)
    for other in reports[1:]:
        terms = asdict(other.terms)
        differing = [what for what in terms if terms[what] != first[what]]
        if differing:
            theirs = ", ".join(f"{what}={terms[what]!r}" for what in differing)
            ours = ", ".join(f"{what}={first[what]!r}" for what in differing)
            raise ValueError(
                f"the ranks disagree: rank {reports[0].rank} has {ours}, rank {other.rank} has "
                f"{theirs}; all must construct it alike"
            )


def share_of(rank: Rank, terms: Terms, of_node: list[Report], agreed: bool) -> Share:
    """``of_node``: what one rank of each node says; where they cannot be asked, what this one
    would say for all."""
    capacities = [_capacity(report, terms) for report in of_node]
    by_rank = terms.mode == "rank"
    if by_rank:
        spread = zip(rank.ranks_on, capacities, strict=True)
        holders = [(1, capacity // ranks) for ranks, capacity in spread for _ in range(ranks)]
    else:
        holders = list(zip(rank.ranks_on, capacities, strict=True))
    parts = _C.deal_out(terms.samples, terms.chunk, holders, agreed)
    before = sum(rank.ranks_on[: rank.node])
    mine = before + rank.local if by_rank else rank.node
    of_mine = parts[before : before + rank.ranks_on[rank.node]] if by_rank else [parts[mine]]
    start, end = of_mine[0][0], sum(of_mine[-1])
    # How many each rank visits, in the order of the holders.
    each = (
        [held for _, held in parts]
        if by_rank
        else [
            -(-max(0, held - k) // ranks)
            for (_, held), ranks in zip(parts, rank.ranks_on, strict=True)
            for k in range(ranks)
        ]
    )
    _check_sizes(rank, terms, of_node, capacities, each)
    visits = min(each) if terms.equal else each[before + rank.local]
    return Share(
        start=start, length=end - start, first=parts[mine][0] - start, held=parts[mine][1],
        holder=mine, step=1 if by_rank else rank.ranks_on[rank.node],
        offset=0 if by_rank else rank.local, visits=visits,
        total=visits * len(each) if terms.equal else sum(each),
    )  # fmt: skip


def _capacity(report: Report, terms: Terms) -> int:
    memory = 0 if _is_on_disk_alone(report, terms) else report.memory
    fits = in_room(memory, report.disk, report.sample_bytes)
    return min(1 << 62, int(fits * (1 + terms.overflow)))


def _is_on_disk_alone(report: Report, terms: Terms) -> bool:
    """Whether memory keeps nothing for a node: what is in that of one rank alone, another would
    load again in the next epoch."""
    return terms.mode == "disk" and report.disk > 0


def _check_sizes(
    rank: Rank, terms: Terms, of_node: list[Report], capacities: list[int], each: list[int]
) -> None:
    """Of all ranks, so that none goes on where another cannot."""
    fair = terms.samples // rank.ranks
    least = terms.min_elements or min(1, fair)
    if min(each) >= least:
        return
    if fair < least:
        raise ValueError(
            f"min_elements is {least}, but {terms.samples} samples over {rank.ranks} ranks are "
            f"{fair} each; use {fair} or less"
        )
    asked = f"min_elements is {least}, but a" if terms.min_elements else "a"
    pieces = -(-terms.samples // terms.chunk)
    if pieces // rank.ranks * terms.chunk < least:
        raise ValueError(
            f"{asked} rank gets {min(each)}: chunk is {terms.chunk}, so {terms.samples} samples "
            f"are {pieces} pieces for {rank.ranks} ranks; use chunk={fair} or less"
        )
    fewest = each.index(min(each))
    nodes = [node for node, ranks in enumerate(rank.ranks_on) for _ in range(ranks)]
    node = nodes[fewest]
    report = of_node[node]
    rooms = [] if _is_on_disk_alone(report, terms) else [f"{show_bytes(report.memory)} of memory"]
    rooms += [f"{show_bytes(report.disk)} on disk"] if report.disk else []
    lower = "lower min_elements, or " if terms.min_elements else ""
    raise ValueError(
        f"{asked} rank of node {node} gets {each[fewest]}: {' and '.join(rooms)} hold about "
        f"{capacities[node]} samples of {show_bytes(report.sample_bytes)} for "
        f"{rank.ranks_on[node]} ranks; {lower}give more memory_size, disk_size or overflow"
    )
