"""The samples of a dataset: from memory, or loaded and stored."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.util import Finalize, register_after_fork
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from stocache import _C
from stocache._cluster.address import shown
from stocache._compare import same
from stocache._dataset import telling, together, until_random
from stocache._dataset.augmenting import Fusing, Passes
from stocache._dataset.comparing import RANDOM, SAME, STALE, UNCUT, Countdown, compare
from stocache._dataset.copying import as_stored, copy_of
from stocache._dataset.doubts import Doubts
from stocache._dataset.stats import CachedDatasetStats, ClusterStats, DiskStats
from stocache._dataset.together import Together, WholeBatch
from stocache._sharing.disk import folder_of, is_temporary, remove, remove_if_unused
from stocache._sharing.division import divided
from stocache._torch.generators import generators_of, random_numbers_kept
from stocache._torch.ipc import is_worker
from stocache.planner import SAMPLES, Plan, say

# How long to wait at least for another process that is loading the same sample, before loading it
# too. It is longer where loading takes longer (rust/core/src/records/waiting.rs).
_PATIENCE_SECONDS = 0.5
# So often in an epoch a process looks what transforms took.
_LOOKS_PER_EPOCH = 64
# How long a process waits at its end for the disk. A DataLoader ends workers that take 5.
_FLUSH_SECONDS = 4.0
# A sample that only a batch has.
_TAKEN = object()


class Records(_C.Records):
    """The native store, which joins the same memory in another process."""

    @property
    def policy(self) -> str:
        policy: str = self.arguments()[2]
        return policy

    @property
    def instance(self) -> str:
        """The random number of this piece of memory."""
        instance: str = self.arguments()[8]
        return instance

    def flush_at_end(self) -> None:
        """What goes to disk is there before this process ends, or one that it forks as
        multiprocessing does, whose children know no atexit."""
        register_after_fork(self, _flush_when_it_ends)
        _flush_when_it_ends(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rejoin, (self.arguments(), self.disk(), self.cluster()))


def _rejoin(
    arguments: tuple[Any, ...],
    disk: tuple[bytes, int, str, bytes, int, str] | None,
    cluster: tuple[str, str, str, bytes, int] | None,
) -> Records:
    records = Records()
    records.open(*arguments)
    if disk is not None:
        try:
            records.open_disk(*disk)
        except Exception as error:  # its folder is gone, say: no reason to end an epoch
            telling.of_no_disk(records, error)
    if cluster is not None:
        records.open_cluster(*cluster)
    if disk is not None or cluster is not None:
        records.flush_at_end()
    return records


class Samples:
    """What a CachedDataset consists of, apart from its transform. It is one attribute of it: other
    names cannot meet those of subclasses and of wrapped datasets."""

    def __init__(
        self, source: Any, records: Records, length: int, *, allow_pickle: bool, strict: bool,
        probe: int, looks: int, named: bool, says_what_fits: bool, verbose: bool,
    ) -> None:  # fmt: skip
        self.source = source
        self.records = records
        self.length = length
        self.allow_pickle = allow_pickle
        self._strict = strict
        self._named = named
        self._made_by = os.getpid()
        self._has_disk = records.disk() is not None
        self._has_cluster = records.cluster() is not None
        if self._has_below:
            records.flush_at_end()
        self._says_what_fits = says_what_fits
        self._verbose = verbose
        self._together = Together(source)
        self.passes = Passes(length)
        self._transformed = 0  # samples, by this process
        self._doubts = Doubts(looks, telling.FIRST_LOOK)
        # Whether the dataset takes -1 for its last sample. Not known before somebody asks for such.
        self._counts_from_end: bool | None = None
        # Cached samples still to be compared with the dataset's: when one is asked for, by whom it
        # is asked for, who would have loaded it without a cache.
        self._uncompared = Countdown(probe) if probe else None
        # Counted down when the cached samples are found to be others than the dataset's, or become
        # so in a new epoch; only where that can be.
        may_differ = probe or hasattr(source, "set_epoch") or until_random.is_cut(source)
        self._until_others = Countdown(1) if may_differ else None

    @property
    def _has_below(self) -> bool:
        return self._has_disk or self._has_cluster

    @property
    def asks_servers(self) -> bool:
        """Whether what is not on this node may be on servers."""
        return self._has_cluster

    # One sample

    def get_by(self, index: Any, load: Callable[[Any], Any]) -> Any:
        """A sample that this function loads, if it is nowhere: it stands for the dataset."""
        place = self.place(index)
        with self.records.acquire([place], _PATIENCE_SECONDS) as acquired:
            if not acquired.to_load():
                sample = self._given(acquired, place)
                return load(index) if sample is _C.MISS else sample
            sample = load(index)
            self._store(acquired, place, sample)
            return sample

    def get(self, index: Any, to_edit: bool) -> Any:
        """A sample. Who means ``to_edit`` it never gets what belongs to the dataset."""
        place = self._place(index)
        if place is None or not self._may_use([place]):
            return self._pass_on(index, place is None, to_edit)
        return self._get(place, to_edit)

    def _get(self, place: int, to_edit: bool) -> Any:
        sample = self._read(place)
        return self.load(place, to_edit) if sample is _C.MISS else sample

    def _read(self, place: int, counted: bool = True) -> Any:
        """A sample in memory, or ``_C.MISS``; that also if it cannot be made any more: its class
        has another name now, or pickle is not allowed here."""
        try:
            return self.records.get(place, self.allow_pickle, counted)
        except Exception as error:
            return self._unreadable(place, error)

    def _given(self, acquired: _C.Acquiring, place: int) -> Any:
        """Likewise for one that was waited for, or read from below memory. On servers there may be
        those of another dataset: the first are compared before they are handed out."""
        if not self.is_used():  # one that came together with it was another
            return _C.MISS
        try:
            sample = acquired.get(place, self.allow_pickle)
        except Exception as error:
            return self._unreadable(place, error)
        if sample is _C.MISS:
            sample = self._read(place)
        else:
            self.records.note(1, 0)
        is_new = self._has_cluster and sample is not _C.MISS and self._has_to_compare()
        if is_new and not self._take_note(place, self._compared(place, sample)):
            return _C.MISS
        return sample

    def _has_to_compare(self) -> bool:
        return self._uncompared is not None and self._uncompared.left > 0 and self.is_used()

    def _unreadable(self, place: int, error: Exception) -> Any:
        if isinstance(error, MemoryError) or self._strict or not self.records.is_open():
            raise error
        telling.of_unreadable(self.records, place, error)
        return _C.MISS

    def load(
        self, index: int, to_edit: bool = False, asked_for: bool = True,
        function: together.Function | None = None,
    ) -> Any:  # fmt: skip
        """A sample that is not cached: loaded once per node, by whoever is first. If that is
        another process it is a hit, otherwise a miss if the sample was ``asked_for``. With the
        dataset's ``function`` for many, if given: it may have no other way."""
        with self.records.acquire([index], _PATIENCE_SECONDS) as acquired:
            todo = acquired.to_load()
            if not todo:  # it came from below, or somebody has stored it meanwhile
                sample = self._given(acquired, index)
                if sample is not _C.MISS:
                    return sample
            sample = self._load(index, asked_for, function)
            stored = bool(todo) and self._store(acquired, index, sample)
        if stored:
            sample = self._look_again(index, sample)
        if asked_for:
            return self._copied(index, sample) if to_edit else sample
        return None

    def _load(
        self, index: Any, asked_for: bool = True, function: together.Function | None = None
    ) -> Any:
        if function is not None:
            return self._load_together(function, [index])[index]
        self.records.note(0, int(asked_for))
        watched = self._doubts.before_load(self.source)
        began = time.perf_counter()
        sample = self.source[index]
        seconds = time.perf_counter() - began
        self.records.note_loads(1, seconds)
        self._doubts.after_load(watched, seconds)
        return sample

    def _pass_on(self, key: Any, is_other: bool, to_edit: bool) -> Any:
        """What the dataset gives for a key, uncached."""
        sample = self._load(key)
        if is_other:
            self._tell_of_key(key)
        return copy_of(sample, self.allow_pickle) if to_edit else sample

    # Many

    def get_many(self, indices: Sequence[Any], to_edit: bool = False, whole: bool = False) -> Any:
        """A list of samples. ``whole``: or a batch, if that is what the dataset gives."""
        try:
            indices, places = self._usable(indices, to_edit, whole)
            loaded = self._with_missing(indices, places, to_edit, whole)
        except _Given as given:
            return given.batch
        return self._filled_up(places, loaded, to_edit)

    def batch(self, indices: Sequence[Any], fusing: Fusing | None = None) -> Any:
        """What default_collate makes of these samples, gathered natively where that can be done."""
        whole = fusing is None  # or samples are wanted, to be made one by one
        try:
            asked, places = self._usable(indices, to_edit=False, whole=whole)
            # What is in memory is copied while the rest is loaded.
            native = None if fusing is None else fusing.native(places)
            gathering = self.records.gather(places, self._threads(), is_worker(), None, native)
            loaded = self._with_missing(
                asked, places, to_edit=False, whole=whole, gathering=gathering
            )
        except _Given as given:
            if fusing is None:
                return default_collate(given.batch)
            return self.stacked(fusing.samples(given.batch, indices))
        batch = finished(gathering, len(loaded), loaded)
        if batch is not _C.MISS:
            return batch
        samples = self._filled_up(places, loaded, to_edit=False)
        if fusing is None:
            return default_collate(samples)
        return self.stacked(fusing.samples(samples, places))

    def stacked(self, samples: Any) -> Any:
        """What default_collate makes of samples that were handed out: in memory that was used for
        such batches before, where that can be done."""
        if type(samples) is list:
            with contextlib.suppress(ValueError, RuntimeError):  # unreadable texts; a closed cache
                batch = self.records.stack(samples, self._threads(), is_worker())
                if batch is not _C.MISS:
                    return batch
        return default_collate(samples)

    def rest_of_batch(
        self, indices: Sequence[Any], rows: Sequence[int], alone: bool = False
    ) -> tuple[dict[int, Any], int] | None:
        """These rows of a batch that another process gathers, as far as it will not find them in
        memory; and how many were counted as they came. None if it cannot gather them. ``alone``:
        each is asked of the dataset by itself."""
        whole = not alone
        try:
            asked, places = self._usable([indices[row] for row in rows], to_edit=False, whole=whole)
            if alone:
                missing = self.records.missing(places)
                loaded = {k: self.load(places[k], to_edit=False) for k in missing}
            else:
                loaded = self._with_missing(asked, places, to_edit=False, whole=whole)
        except _Given:
            return None
        if self.recycles():  # what is there now may be gone when the batch is put together
            samples = self._filled_up(places, loaded, to_edit=False)
            return dict(zip(rows, samples, strict=True)), len(rows)
        mine = list(loaded)
        left = [mine[k] for k in self.records.missing([places[k] for k in mine])]
        return {rows[k]: loaded[k] for k in left}, len(loaded)

    def _threads(self) -> int:
        """So many gather batches here: a worker is one of several."""
        return 1 if is_worker() else max(1, len(os.sched_getaffinity(0)))

    def counted_from_start(self, indices: Sequence[Any] | Tensor) -> list[int] | None:
        """The same indices, where some are counted from the end; else None."""
        places = self._places(indices, may_load=False)
        return None if places is None or places == as_numbers(indices) else places

    def in_memory(self, indices: Sequence[Any]) -> list[Any] | None:
        """These samples, if all are cached and can be read. None is loaded."""
        places = self._places(indices, may_load=False)
        if places is None or self.records.missing(places):
            return None
        samples = self._cached(places, counted=False)
        if any(sample is _C.MISS for sample in samples):
            return None
        self.records.note(len(samples), 0)
        return samples

    def _usable(
        self, indices: Sequence[Any], to_edit: bool, whole: bool
    ) -> tuple[Sequence[Any], list[int]]:
        """The indices, and the places of their samples, which may be cached."""
        if hasattr(indices, "__next__"):  # it gives them once
            indices = list(indices)
        places = self._places(indices)
        if places is None or not self._may_use(places):
            raise _Given(self._pass_many_on(indices, places is None, to_edit, whole))
        if whole and self._together.gives_whole_batches():
            raise _Given(self._whole_batch(indices))
        return indices, places

    def _with_missing(
        self, indices: Sequence[Any], places: list[int], to_edit: bool, whole: bool,
        gathering: _C.Gathering | None = None,
    ) -> dict[int, Any]:  # fmt: skip
        """What is not cached of these samples, loaded together: by its position in the places; but
        for what a ``gathering`` of them took from servers."""
        missing = self.records.missing(places)
        # What a batch takes from servers by itself, nobody looks at.
        asks = gathering is not None and self._has_cluster and not self._has_to_compare()
        try:
            loaded = self._load_many(
                [places[k] for k in missing], to_edit, whole, gathering if asks else None
            )
            self._if_found_meanwhile(whole)
        except _FoundMeanwhile:
            raise _Given(self._whole_batch(indices)) from None
        except WholeBatch as found:
            telling.of_whole_batches(self.records, self.source, found.why)
            all_of_it = found.indices == places
            raise _Given(found.batch if all_of_it else self._whole_batch(indices)) from None
        made = zip(missing, loaded, strict=True)
        return {k: sample for k, sample in made if sample is not _TAKEN}

    def _filled_up(self, places: list[int], loaded: dict[int, Any], to_edit: bool) -> list[Any]:
        rest = [k for k in range(len(places)) if k not in loaded]
        samples = {
            **loaded,
            **dict(zip(rest, self._cached([places[k] for k in rest]), strict=True)),
        }
        return [
            self._get(place, to_edit) if samples[k] is _C.MISS else samples[k]
            for k, place in enumerate(places)
        ]

    def _cached(self, places: list[int], counted: bool = True) -> list[Any]:
        """Samples from memory, and from below, read together; ``_C.MISS`` for each that is in
        neither or cannot be made any more."""
        with contextlib.suppress(Exception):  # of which is told sample by sample
            return self.records.get_many(places, self.allow_pickle, counted)
        return [self._read(place, counted) for place in places]

    def _load_many(
        self, indices: list[int], to_edit: bool, whole: bool,
        gathering: _C.Gathering | None = None,
    ) -> list[Any]:  # fmt: skip
        """These samples, or ``_TAKEN`` for one that a ``gathering`` took from servers: it alone may
        have it."""
        function = together.function_of(self.source)
        gives_whole_batches = self._if_found_meanwhile(whole)
        if function is None or not indices or gives_whole_batches:
            if self._has_cluster and len(indices) > 1:
                return self._load_each(indices, to_edit, gathering)
            return [self.load(index, to_edit) for index in indices]
        loaded: dict[int, Any] = {}
        stored: list[int] = []
        with self.records.acquire(indices, _PATIENCE_SECONDS) as acquired:
            taken = _taken(acquired, gathering)
            if taken.issuperset(indices):
                return [_TAKEN] * len(indices)
            fetched: dict[int, Any] = {}
            while todo := acquired.to_load():
                # Who was waited for may have found that what comes together are no such samples.
                if self._if_found_meanwhile(whole):
                    break
                try:
                    samples = self._load_together(function, todo)
                except WholeBatch:
                    if whole:
                        raise
                    loaded.clear()
                    break
                stored += [
                    index
                    for index, sample in samples.items()
                    if self._store(acquired, index, sample)
                ]
                loaded |= samples
                # Another process may have found them in doubt, and emptied the store before.
                self._clear_if_in_doubt()
            else:
                fetched = self._fetched(acquired, indices, {*taken, *loaded})
        for index in stored:
            if index in loaded:
                loaded[index] = self._look_again(index, loaded[index])

        def hand_out(index: int) -> Any:
            # Each is handed out once: an index that comes twice gets two samples.
            if index in taken:
                return _TAKEN
            if (sample := fetched.pop(index, _C.MISS)) is not _C.MISS:
                return sample
            if index not in loaded:
                return self._load_alone(function, index, to_edit, whole)
            sample = loaded.pop(index)
            return self._copied(index, sample) if to_edit else sample

        return [hand_out(index) for index in indices]

    def _load_each(
        self, indices: list[int], to_edit: bool, gathering: _C.Gathering | None = None
    ) -> list[Any]:
        """Each loaded by itself, after servers were asked for all of them together."""
        loaded: dict[int, Any] = {}
        stored: list[int] = []
        with self.records.acquire(indices, _PATIENCE_SECONDS) as acquired:
            taken = _taken(acquired, gathering)
            if taken.issuperset(indices):
                return [_TAKEN] * len(indices)
            while todo := acquired.to_load():
                for index in todo:
                    loaded[index] = self._load(index)
                    if self._store(acquired, index, loaded[index]):
                        stored.append(index)
            fetched = self._fetched(acquired, indices, {*taken, *loaded})
        for index in stored:
            loaded[index] = self._look_again(index, loaded[index])

        def hand_out(index: int) -> Any:
            # Each is handed out once: an index that comes twice gets two samples.
            if index in taken:
                return _TAKEN
            if index in loaded:
                sample = loaded.pop(index)
                return self._copied(index, sample) if to_edit else sample
            sample = fetched.pop(index, _C.MISS)
            return self.load(index, to_edit) if sample is _C.MISS else sample

        return [hand_out(index) for index in indices]

    def _fetched(
        self, acquired: _C.Acquiring, indices: list[int], others: set[int]
    ) -> dict[int, Any]:
        """Those that are not among the others: they came from below, or another process loaded
        them; ``_C.MISS`` for what did not come."""
        rest = [index for index in dict.fromkeys(indices) if index not in others]
        return {index: self._given(acquired, index) for index in rest}

    def _if_found_meanwhile(self, whole: bool) -> bool:
        """Whether the dataset gives whole batches; where one is wanted, no sample of it is made
        alone. Another process may have found it at any moment."""
        found = self._together.gives_whole_batches()
        if found and whole:
            raise _FoundMeanwhile
        return found

    def _load_alone(
        self, function: together.Function, index: int, to_edit: bool, whole: bool
    ) -> Any:
        """One of many: another process was about to load it, or it comes twice."""
        try:
            given_whole = self._if_found_meanwhile(whole)
            return self.load(index, to_edit, function=None if given_whole else function)
        except WholeBatch:
            if whole:
                raise
            return self.load(index, to_edit)

    def _load_together(self, function: together.Function, indices: list[int]) -> dict[int, Any]:
        given = self._ask(function, list(indices))  # it may sort them in their place
        try:
            samples = self._together.samples(self.source, function, indices, given)
        except WholeBatch:
            self._clear_if_in_doubt()
            raise
        return dict(zip(indices, samples, strict=True))

    def _clear_if_in_doubt(self) -> None:
        """Empties the store if samples that came together are none: earlier ones are in it."""
        if self._together.gives_others():
            try:
                self.clear()
            except RuntimeError:  # others keep it as it is: then nothing of it is used here
                self._until_others = Countdown(0)

    def _ask(self, function: together.Function, keys: list[Any]) -> Any:
        self.records.note(0, len(keys))
        watched = self._doubts.before_load(self.source)
        began = time.perf_counter()
        given = function(keys)
        seconds = time.perf_counter() - began
        self.records.note_loads(len(keys), seconds)
        self._doubts.after_load(watched, seconds, len(keys))
        return given

    def _pass_many_on(
        self, keys: Sequence[Any], are_others: bool, to_edit: bool, whole: bool
    ) -> Any:
        """What the dataset gives for these, uncached, asked for as torch does it."""
        if whole and together.function_of(self.source) is not None:
            batch = self._whole_batch(keys)
            if are_others:
                other = next(key for key in keys if self._place(key) is None)
                self._tell_of_key(other, len(keys))
            return batch
        return [self._pass_on(key, self._place(key) is None, to_edit) for key in keys]

    def _whole_batch(self, keys: Sequence[Any]) -> Any:
        function = together.function_of(self.source)
        assert function is not None
        return self._ask(function, list(keys))

    # Places

    def place(self, index: Any) -> int:
        """The number of a sample from 0 on, or an IndexError."""
        place = operator.index(index)
        if not -self.length <= place < self.length:
            raise IndexError(
                f"index {index} is out of bounds of a dataset of {self.length} samples"
            )
        return place % self.length

    def _place(self, index: Any, may_load: bool = True) -> int | None:
        """The number of a sample from 0 on. None for what only the dataset may know."""
        try:
            place = operator.index(index)
        except TypeError:
            return None
        if 0 <= place < self.length:
            return place
        if -self.length <= place < 0 and self._is_from_end(place, may_load):
            return place + self.length
        return None

    def _is_from_end(self, index: int, may_load: bool) -> bool:
        """Whether the dataset counts such an index from its end, and gives it no meaning of its
        own. It is asked once, by who would load this sample without a cache."""
        if self._counts_from_end is None and may_load:
            self._counts_from_end = False
            with random_numbers_kept(), contextlib.suppress(Exception):
                sample = as_stored(self.source[index])
                again = self.source[index + self.length]
                self._counts_from_end = same(sample, again) is True
        return self._counts_from_end is True

    def _places(self, indices: Sequence[Any] | Tensor, may_load: bool = True) -> list[int] | None:
        """Likewise for many; None if that is so for any of them."""
        try:
            places = [operator.index(index) for index in indices]
        except TypeError:
            return None
        # The usual case without a call per index.
        if places and min(places) >= 0 and max(places) < self.length:
            return places
        found = [self._place(place, may_load) for place in places]
        return None if None in found else found  # type: ignore[return-value]

    # Storing

    def _store(self, acquired: _C.Acquiring, index: int, sample: Any) -> bool:
        """Stores a sample that was loaded here, if it can be. Whatever comes of it, it can be
        handed out."""
        if not self.is_used():  # it may be of a new epoch
            return False
        outcome = None
        try:
            outcome = acquired.put(index, sample, self.allow_pickle)
        except Warning:  # asked for as an error
            raise
        except Exception as error:
            if self._strict:
                raise
            self.records.note_unsupported()
            telling.of_unsupported(self.records, index, error)
            if until_random.is_never_cut(sample):
                self._use_no_more()
        else:
            if outcome is _C.Put.TOO_LARGE:
                telling.of_size(self.records, index)
        self.watch_below()
        if self._says_what_fits:
            self._say_what_fits()
        return outcome is _C.Put.STORED

    def watch_below(self) -> None:
        """Tells what levels below have to say: after something was given to them, or did not
        come."""
        if self._has_below and (news := self.records.news()):
            telling.warn(news)

    def _copied(self, index: int, sample: Any) -> Any:
        """A copy that may be edited: what the dataset gave may be its own."""
        cached = self._read(index, counted=False)
        return copy_of(sample, self.allow_pickle) if cached is _C.MISS else cached

    def clear(self) -> None:
        self.records.clear()

    def close(self) -> None:
        if self._has_below and self.records.is_open():
            _end(self.records)
        self.records.close()

    def delete(self) -> None:
        folder, name = folder_of(self.records), self.records.location()["name"]
        self.records.close()
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # it is gone, or in use
            _C.remove_cache(name, False)
        if folder is not None:
            remove(folder)

    # Whether the cache is used

    def is_used(self) -> bool:
        """Whether samples are still those that are cached: nobody found others, and no new epoch
        has made others."""
        return self._until_others is None or self._until_others.left > 0

    def _use_no_more(self) -> None:
        """From here on samples come from the dataset alone, in all processes that have this one."""
        if self._until_others is not None and self._until_others.left:
            self._until_others.count()

    def _may_use(self, places: Sequence[int]) -> bool:
        """The same, after a look at the first of them where that is still to be done."""
        if self._uncompared is not None and self.is_used():
            self._compare_first(places)
        return self.is_used()

    def is_settled(self) -> bool:
        """Whether samples come from memory as far as they are there, and none has to be compared
        any more."""
        left = 0 if self._uncompared is None else self._uncompared.left
        return not left and self.is_used() and not self._together.gives_whole_batches()

    def recycles(self) -> bool:
        """Whether samples may leave memory again, for others."""
        return self.records.policy == "lru"

    def is_complete(self) -> bool:
        """Whether every sample is cached."""
        return self.length == 0 or self.records.is_complete()

    def with_source(self, source: Any) -> Samples:
        """The same over another dataset. What is in the cache is not of that one, and others go on
        using it, so from then on samples come from the dataset alone."""
        other = copy.copy(self)
        other.source, other.length = source, len(source)
        other._together, other._until_others = Together(source), Countdown(0)
        other._counts_from_end = None
        other._doubts = Doubts(0, telling.FIRST_LOOK)
        telling.of_replaced(source)
        return other

    def set_epoch(self, *arguments: Any, **options: Any) -> Any:
        """As the dataset's, which may give other samples afterwards: from now on they come from it
        alone. What is loaded at this moment, by whom it may be, is not stored either."""
        if self._until_others is None:
            self._until_others = Countdown(1)
        if self._until_others.left:
            self._until_others.count()
            telling.of_epochs(self.source)
        return self.source.set_epoch(*arguments, **options)

    # Comparing

    def _compare_first(self, places: Sequence[int]) -> None:
        for place in places:
            if self._uncompared is None or self._uncompared.left == 0:
                self._uncompared = None
                return
            if not self.records.contains(place):
                continue
            if not self._take_note(place, self._compared(place)):
                return

    def _compared(self, place: int, stored: Any = _C.MISS) -> str:
        outcome = SAME
        with contextlib.suppress(Exception):  # what cannot be loaded now was cached in time
            outcome = compare(self.records, self.source, place, self.allow_pickle, stored)
        return outcome

    def _take_note(self, place: int, outcome: str) -> bool:
        """Tells what a comparison came to; whether samples are used after it."""
        if outcome == UNCUT:  # here; or it was cut wrongly
            telling.of_unsupported(self.records, place, until_random.why_not(self.source))
            self._use_no_more()
            return False
        if outcome == STALE and self._named:
            raise telling.stale(self.records, place)
        if outcome == STALE:  # nobody asked for this sharing, so that it must not end a run
            self._use_no_more()
            folder, cluster = folder_of(self.records), self.records.cluster()
            if cluster is not None:
                telling.of_other_dataset(place, shown(cluster[0]))
            elif folder is None:
                telling.of_other_rank(place)
            else:
                telling.of_stale_disk(place, folder)
            return False
        if outcome == RANDOM:
            telling.of_random(self.records, place)
        if self._uncompared is not None:
            self._uncompared.count()
        return True

    def _look_again(self, index: int, sample: Any) -> Any:
        """A sample that was just stored, after it was loaded once more and compared if it is its
        turn."""
        if not self._doubts.are_due(self.records):
            return sample
        kept = as_stored(sample)  # who is asked again may answer in the same memory
        began = time.perf_counter()
        outcome = SAME
        with random_numbers_kept(generators_of(self.source)), contextlib.suppress(Exception):
            outcome = compare(self.records, self.source, index, self.allow_pickle)
        self._doubts.looked(time.perf_counter() - began, outcome == RANDOM)
        if outcome == RANDOM:
            telling.of_random(self.records, index)
        return kept if same(kept, sample) is False else sample

    # Ahead of training

    def missing(self, wanted: Sequence[int]) -> int:
        """How many of these are not cached and could be."""
        contains = self.records.contains
        return sum(not contains(i) for i in wanted) if self.is_used() else 0

    def warmed(self, wanted: Sequence[int], load: Callable[[Iterable[int]], Any]) -> Iterator[Any]:
        """Goes on with each of these that ``load`` has loaded. Of several nodes each loads a part,
        and gets the others' from the servers."""
        contains = self.records.contains
        cluster = self.records.cluster()
        name = "" if cluster is None else f"warm {cluster[1]} {cluster[2]}"
        division = divided(name, len(wanted)) if name else None
        if division is None:
            yield from load([i for i in wanted if not contains(i)])
            return
        yield from load(i for at in division.mine() if not contains(i := wanted[at]))
        self.records.flush(60.0)
        division.finish()
        if not self.stats().frozen:  # there is room for them
            yield from load([i for at in division.all() if not contains(i := wanted[at])])

    # Transforms

    def transformed(
        self, transform: Callable[[Any], Any], samples: Iterable[Any], indices: Iterable[Any]
    ) -> list[Any]:
        """These samples as a function of the program's makes them."""
        began = time.perf_counter()
        # Not by map(), which a StopIteration of the transform would end without a word.
        if isinstance(transform, until_random.Rest):
            pairs = zip(samples, indices, strict=True)
            made = [transform(sample, index) for sample, index in pairs]
        else:
            made = [transform(sample) for sample in samples]
        self._note_transforms(transform, len(made), time.perf_counter() - began)
        return made

    def _note_transforms(self, transform: Any, samples: int, seconds: float) -> None:
        """Counts them, and says at the end of an epoch what they took of it, if that is most."""
        if not self.records.is_open():
            return
        self.records.note_transforms(samples, seconds)
        before, self._transformed = self._transformed, self._transformed + samples
        every = max(1, self.length // _LOOKS_PER_EPOCH)
        if not self._verbose or before // every == self._transformed // every:
            return
        stats = self.stats()
        ended = stats.transforms >= self.length - self.length // 16
        if ended and stats.transform_share > 0.5:
            self._verbose = False
            self.tell_once(*telling.slow_transform(transform, stats))

    # What is told

    def stats(self) -> CachedDatasetStats:
        # There is a place for one sample at least, also where there is none.
        found = {**self.records.stats(), "dataset_len": self.length}
        if self._has_disk:
            found["disk"] = DiskStats(**self.records.disk_stats())
        if self._has_cluster:
            found["cluster"] = ClusterStats(**self.records.cluster_stats())
        return CachedDatasetStats(**found)

    def _say_what_fits(self) -> None:
        stats = self.stats()
        tried = stats.fills + stats.dropped + stats.too_large + stats.unsupported
        if tried >= min(SAMPLES, self.length):
            self._says_what_fits = False
            if stats.fills:
                self.tell_once(telling.WHAT_FITS, str(Plan.of(stats)))

    def tell_once(self, what: int, line: str) -> None:
        """Prints a line, unless another process of the node has."""
        if self.records.is_first_to_tell(what):
            say(line, inherited=os.getpid() != self._made_by)

    def _tell_of_key(self, key: Any, samples: int = 1) -> None:
        for _ in range(samples):
            self.records.note_unsupported()
        telling.of_key(self.records, key, self.length)


def _flush_when_it_ends(records: Records) -> None:
    Finalize(None, _flush, (weakref.ref(records),), exitpriority=0)
    folder = folder_of(records)
    if folder is not None and is_temporary(folder):
        # When those that it has started have ended, too.
        Finalize(None, _end_of, (weakref.ref(records), folder), exitpriority=-10)


def _end(records: Records) -> None:
    """Lets go of a store with levels below: what is to stay there is there then, and what is not to
    stay is gone with its last process."""
    folder = folder_of(records)
    temporary = folder is not None and is_temporary(folder)
    if not temporary:
        _flush_in_time(records)
    records.close()
    if folder is not None and temporary:
        remove_if_unused(folder)


def _end_of(records: weakref.ref[Records], folder: str) -> None:
    with contextlib.suppress(Exception):
        if (mine := records()) is not None:
            mine.close()
        remove_if_unused(folder)


def _flush(records: weakref.ref[Records]) -> None:
    with contextlib.suppress(Exception):  # it was closed, which is in order
        if (mine := records()) is not None:
            _flush_in_time(mine)


def _flush_in_time(records: Records) -> None:
    """What did not go in time is told: nobody will be asked for it any more."""
    if records.flush(_FLUSH_SECONDS):
        return
    if waiting := records.disk_stats()["waiting"]:
        telling.of_unwritten(records, waiting)
    while news := records.news():
        telling.warn(news)


class _FoundMeanwhile(Exception):
    """Another process has found that the dataset gives whole batches."""


class _Given(Exception):
    """A batch that the dataset gave, of which the cache has no part."""

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.batch = batch


def _taken(acquired: _C.Acquiring, gathering: _C.Gathering | None) -> frozenset[int]:
    """What a batch took of what comes from servers."""
    return frozenset() if gathering is None else frozenset(acquired.fetch(gathering))


def as_numbers(indices: Sequence[Any] | Tensor) -> list[int]:
    if isinstance(indices, Tensor):
        return indices.tolist()
    return [operator.index(index) for index in indices]


def finished(
    gathering: _C.Gathering, counted: int | list[int], samples: dict[int, Any] | None = None,
    packed: list[Any] | None = None,
) -> Any:  # fmt: skip
    """The batch as default_collate makes it: from memory, and what is not there from these
    ``samples`` or ``packed`` records. ``_C.MISS`` if one is in neither, or if these samples must be
    collated in Python. ``counted`` of them were counted as they came; the others are hits."""
    try:
        return gathering.finish(counted, samples, packed)
    except ValueError:  # they cannot be read, of which is told sample by sample
        return _C.MISS


class Rest:
    """What a worker adds to a batch that the trainer gathers: records that are not in memory."""

    __slots__ = ("counted", "of", "packed")

    def __init__(self, packed: Any, counted: list[int], of: Any) -> None:
        self.packed = packed
        self.counted = counted  # per store: misses, or hits that were waited for
        self.of = of  # of which stores, and of which indices
