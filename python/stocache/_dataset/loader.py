"""A CachedDataset in the words of Bagua's: its cache_loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stocache._dataset.samples import Samples


class DatasetStore:
    """The servers below a dataset, as far as Bagua's stores have words for them."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def num_keys(self) -> int:
        """How many values the servers have, those of other datasets included."""
        self._samples.records.flush(60.0)
        return sum(each["values"] for each in self._samples.records.cluster_servers(True))

    def clear(self) -> None:
        """Removes the samples of this dataset, and no others, from all levels."""
        self._samples.clear()

    def status(self) -> bool:
        """Whether all servers answer."""
        servers = self._samples.records.cluster_servers(True)
        return all(each["samples"] is not None for each in servers)

    def shutdown(self) -> None:
        """Lets the servers go, with the dataset."""
        self._samples.close()


class DatasetLoader:
    """What gives a dataset its samples: ``get``, ``num_keys``, ``store``."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.store = DatasetStore(samples)

    def get(self, key: int, load_fn: Callable[[int], Any]) -> Any:
        """The sample of that index; ``load_fn(key)``, which is kept, if it is nowhere."""
        return self._samples.get_by(key, load_fn)

    def num_keys(self) -> int:
        """How many values the servers have, those of other datasets included."""
        return self.store.num_keys()
