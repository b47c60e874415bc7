"""What a CachedDataset did."""

from __future__ import annotations

from dataclasses import dataclass

from stocache import _html
from stocache.sizes import show_bytes


@dataclass(frozen=True)
class DiskStats:
    """What the disk below a cache did so far, summed over all processes of the node that use it."""

    hits: int
    """Samples that came from disk."""
    fills: int
    """Samples written."""
    filled: int
    """Samples on disk now."""
    used_bytes: int
    """Bytes they take."""
    data_bytes: int
    """Bytes there are for them."""
    evicted: int
    """Samples that made room for others (policy "lru")."""
    dropped: int
    """Samples not written: for lack of room or time, or because of an error."""
    waiting: int
    """Samples of this process that wait to be written."""
    errors: int
    """Reads and writes that failed."""
    writes: bool
    """Whether this process writes to it. One job does; others with the same data read beside it."""

    def __str__(self) -> str:
        return (
            f"{self.filled} on disk ({show_bytes(self.used_bytes)} of "
            f"{show_bytes(self.data_bytes)}), {self.hits} hits there"
            + (f", {self.errors} errors" if self.errors else "")
        )


@dataclass(frozen=True)
class ClusterStats:
    """What the processes of this node got from the servers of a cluster, and gave them."""

    hits: int
    """Samples that came from a server."""
    misses: int
    """Samples that the servers were asked for in vain."""
    fills: int
    """Samples sent to a server."""
    dropped: int
    """Samples that no server took: it is full, or in trouble."""
    errors: int
    """Times that a server was in trouble while samples were asked for."""

    def __str__(self) -> str:
        return f"{self.hits} from the cluster" + (
            f" ({self.errors} times in trouble)" if self.errors else ""
        )


@dataclass(frozen=True)
class CachedDatasetStats:
    """What a cache did so far, summed over all processes of the node that used it."""

    hits: int
    """Samples that were cached: in memory, on disk, or on a server."""
    misses: int
    """Samples that did not."""
    fills: int
    """Samples stored."""
    bytes: int
    """Bytes of samples stored."""
    waits: int
    """Waits for another process that was loading the same sample."""
    lost: int
    """Samples not stored because another process had just done it."""
    dropped: int
    """Samples not stored for lack of room."""
    loads: int
    """Samples loaded from the source."""
    load_seconds: float
    """Seconds spent loading them, over all processes."""
    transforms: int
    """Samples that ``transform`` changed, where it is a function and not fused."""
    transform_seconds: float
    """Seconds spent in it, over all processes."""
    too_large: int
    """Samples not stored because they are larger than the cache can hold."""
    evicted: int
    """Samples that made room for others (policy "lru")."""
    unsupported: int
    """Samples handed out without being stored, because they are of a type that cannot be."""
    filled: int
    """Samples in memory now."""
    used_bytes: int
    """Bytes they take."""
    data_bytes: int
    """Bytes there are for them."""
    dataset_len: int
    """Samples in the dataset."""
    frozen: bool
    """No more samples are taken until clear(): the memory ran out."""
    disk: DiskStats | None = None
    """Of the level below memory, if there is one."""
    cluster: ClusterStats | None = None
    """Of the servers below that, if there are any."""

    @property
    def hit_rate(self) -> float:
        """Share of samples that were cached; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def seconds_saved(self) -> float:
        """What loading the hits from the source would have taken."""
        return self.hits * self.load_seconds / max(1, self.loads)

    @property
    def transform_share(self) -> float:
        """Share of ``transform`` in the time that loading and transforming samples took."""
        return self.transform_seconds / max(1e-9, self.transform_seconds + self.load_seconds)

    def _levels(self) -> list[_html.Level]:
        """What is where, for people."""
        found: list[_html.Level] = [
            ("memory", self.used_bytes, self.data_bytes, self._part(self.filled))
        ]
        if self.disk is not None:
            disk = self.disk
            found.append(("disk", disk.used_bytes, disk.data_bytes, self._part(disk.filled)))
        return found

    def _part(self, samples: int) -> str:
        return f"{samples} of {self.dataset_len} samples"

    def _repr_html_(self) -> str:
        return _html.table(type(self).__name__, self._levels(), str(self))

    def __str__(self) -> str:
        return (
            f"{self.filled} of {self.dataset_len} samples in memory "
            f"({show_bytes(self.used_bytes)} of {show_bytes(self.data_bytes)}), "
            + (f"{self.disk}, " if self.disk else "")
            + (f"{self.cluster}, " if self.cluster else "")
            + f"{self.hits} hits, {self.misses} misses ({self.hit_rate:.1%} hit rate), "
            f"{self.seconds_saved:.3g} s of loading saved"
            + (
                f", {self.transform_seconds:.3g} s in transform ({self.transform_share:.0%} of the "
                "time that loading and transforming took)"
                if self.transforms
                else ""
            )
            + (f", {self.too_large} too large to store" if self.too_large else "")
            + (f", {self.unsupported} of types that are not stored" if self.unsupported else "")
            + (", frozen" if self.frozen else "")
        )
