"""An epoch that was left in its middle goes on in another process: state_dict, load_state_dict."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pickle
import random
import re

import hypothesis
import numpy as np
import pytest
import stocache
import torch
from differential import SAMPLERS, Case, order_options
from hypothesis import given
from hypothesis import strategies as st
from sources import INDEX
from stocache._loading import gatherer
from stocache._torch import progress
from test_differential import limits
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler

LENGTH = 29


class Numbers(torch.utils.data.Dataset):
    """Notes what it loads."""

    loaded: list[int]

    def __init__(self, length=LENGTH):
        self.length = length
        self.loaded = []

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        idx %= self.length
        self.loaded.append(idx)
        return torch.full((4,), idx), idx


class OwnGenerators:
    """A batch sampler that draws from generators of all kinds, its own and the program's: from the
    latter what is of no consequence for later batches, for the program draws in between."""

    def __init__(self, length, batch):
        self.length, self.batch = length, batch
        self.python, self.numpy = random.Random(4), np.random.default_rng(4)
        self.old, self.torch = np.random.RandomState(4), torch.Generator().manual_seed(4)

    def __iter__(self):
        order = torch.randperm(self.length, generator=self.torch).tolist()
        self.python.shuffle(order)
        while order:
            size = int(self.numpy.integers(1, self.batch + 1)) + int(self.old.randint(2))
            batch, order = order[:size], order[size:]
            random.shuffle(batch)
            np.random.shuffle(batch)
            yield [batch[idx] for idx in torch.randperm(len(batch)).tolist()]


class KnowsItself:
    """A sampler with a state of its own; its generator is where its epoch began."""

    def __init__(self, length):
        self.length, self.epoch, self.at = length, 0, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        while self.at < self.length:
            self.at += 1
            yield order[self.at - 1]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class KnowingIterator:
    """A batch sampler whose iterators have a state."""

    def __init__(self, length, batch):
        self.length, self.batch = length, batch

    class Iterator:
        def __init__(self, order, batch):
            self.order, self.batch = order, batch

        def __iter__(self):
            return self

        def __next__(self):
            if not self.order:
                raise StopIteration
            batch, self.order = self.order[: self.batch], self.order[self.batch :]
            return batch

        def state_dict(self):
            return {"order": self.order}

        def load_state_dict(self, state):
            self.order = state["order"]

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        return self.Iterator(order, self.batch)


OWN = ("own generators", "knows itself", "knowing iterator", "lists")
TORCHS = ("in order", "shuffle", "random", "random, twice", "replacement", "weighted",
          "subset random", "distributed", "lists")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """A program that trains for some epochs."""

    sampler: str = "shuffle"
    batch: int | None = 3
    workers: int = 0
    persistent: bool = False
    prefetch: int = 2
    share: str = "all"
    """What is in memory before the first epoch, or that a transform is there."""
    generator: bool = False
    draws: bool = False
    epochs: int = 2
    ahead: bool = False
    length: int = LENGTH

    def loader(self, cached, **options):
        memory = INDEX + 6000 if self.share == "some" else "8MiB"
        transform = doubled_label if self.share == "transform" else None
        source = Numbers(self.length)
        dataset = cached(source, memory, fingerprint="x", transform=transform)
        if self.share in ("all", "some"):  # without a process that warms it
            [dataset[idx] for idx in range(0, self.length, 1 if self.share == "all" else 2)]
        source.loaded.clear()
        if self.workers:
            options.update(prefetch_factor=self.prefetch, persistent_workers=self.persistent)
        if self.generator:
            options["generator"] = torch.Generator().manual_seed(8)
        options.update(self.order(dataset))
        return stocache.DataLoader(dataset, num_workers=self.workers, **options)

    def order(self, dataset):
        if self.sampler == "own generators":
            return {"batch_sampler": OwnGenerators(self.length, 3)}
        if self.sampler == "knowing iterator":
            return {"batch_sampler": KnowingIterator(self.length, 3)}
        if self.sampler == "knows itself":
            return {"sampler": KnowsItself(self.length), "batch_size": self.batch}
        if self.sampler == "lists":
            order = [[idx, (idx * 7) % self.length] for idx in range(0, self.length, 3)]
            return {"batch_sampler": order}
        case = Case(sampler=self.sampler, batch=self.batch, length=self.length, seed=3)
        return order_options(case, dataset)


def doubled_label(sample):
    return sample[0], sample[1] * 2


def random_states():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_states(states):
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def same_states(one, other):
    return torch.equal(one[0], other[0]) and str(one[1:]) == str(other[1:])


def seeded(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def trained(run, loader, first=0, save_at=None):
    """What the epochs give from the first on, up to where the state is to be saved."""
    seen = []
    for epoch in range(first, run.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            if run.draws:
                torch.rand(1), random.random(), np.random.rand()
            seen.append((epoch, batch[1].tolist()))
            if save_at == len(seen):
                return seen
        seen.append((epoch, "ends"))
        if save_at == len(seen):
            return seen
    return seen


def straight_and_resumed(cached, run, save_at, later=None, change=None):
    """What is seen by a program that is not interrupted, and by one that goes on elsewhere."""
    seeded(1)
    straight = trained(run, run.loader(cached))
    save_at = 1 + save_at % len(straight)
    seeded(1)
    loader = run.loader(cached)
    seen = trained(run, loader, save_at=save_at)
    state, states = loader.state_dict(), random_states()
    del loader
    state = json.loads(json.dumps(state))
    if change is not None:
        change(state)
    seeded(77)  # another process
    run = later or run
    loader = run.loader(cached)
    set_random_states(states)
    loader.load_state_dict(state)
    epoch = seen[-1][0] + (seen[-1][1] == "ends")
    return straight, seen + trained(run, loader, first=epoch)


@st.composite
def runs(draw, workers):
    workers = draw(st.sampled_from(workers))
    return Run(
        sampler=draw(st.sampled_from([*SAMPLERS, *OWN])),
        batch=draw(st.sampled_from([1, 3, 4, 8])),
        workers=workers,
        persistent=bool(workers) and draw(st.booleans()),
        prefetch=draw(st.sampled_from([1, 2, 3])),
        share=draw(st.sampled_from(["all", "some", "none", "transform"])),
        generator=draw(st.booleans()),
        draws=draw(st.booleans()),
        epochs=draw(st.sampled_from([2, 3])),
        ahead=draw(st.booleans()),
        length=draw(st.integers(7, 30)),
    )


@pytest.mark.parametrize("workers", [[0], [1, 2]], ids=["without workers", "with workers"])
@pytest.mark.parts(3)
def test_a_program_that_goes_on_sees_what_it_would_have_seen(
    cached, monkeypatch, seed, scale, workers
):
    @hypothesis.seed(seed)
    @limits(scale(30, 1500) if workers == [0] else scale(8, 600))
    @given(run=runs(workers), save_at=st.integers(0, 200))
    def check(run, save_at):
        monkeypatch.setattr(gatherer, "WORTH_A_THREAD", 0 if run.ahead else 1 << 20)
        straight, resumed = straight_and_resumed(cached, run, save_at)
        assert resumed == straight, run

    check()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_may_be_left_more_than_once(cached, workers):
    for sampler in ("shuffle", "own generators", "knows itself"):
        run = Run(sampler, workers=workers, epochs=1, share="some")
        seeded(1)
        straight = trained(run, run.loader(cached))
        seeded(1)
        loader, seen = run.loader(cached), []
        for _ in range(3):
            seen += trained(run, loader, save_at=2)
            state, states = loader.state_dict(), random_states()
            loader = run.loader(cached)
            set_random_states(states)
            loader.load_state_dict(state)
            assert loader.state_dict() == state, "until it is used"
        assert seen + trained(run, loader) == straight


def harmed(harm, **options):
    """Whether a program notices this harm to its state."""

    def check(cached):
        straight, resumed = straight_and_resumed(cached, Run(**options), 2, change=harm)
        return straight != resumed

    return check


def one_too_many(state):
    state["epoch"]["first"] += 1


def nothing_ahead(state):
    state["epoch"]["ahead"] = []


def from_another_state(state):
    state["epoch"]["at_first"] = state["epoch"]["at_iter"]


HARMS = {
    "a batch is left out": harmed(one_too_many),
    "what was given ahead is lost": harmed(nothing_ahead, sampler="draws per batch", workers=1),
    "the order is drawn from another state": harmed(from_another_state),
}


@pytest.mark.parametrize("harm", HARMS)
def test_control_a_harm_to_the_state_is_seen(cached, harm):
    assert HARMS[harm](cached)


def test_in_a_process_of_its_own(run_script, tmp_path):
    source = """
        import sys, torch, stocache
        state, mode = sys.argv[1:]
        torch.manual_seed(7 if mode == "first" else 8)
        samples = [torch.tensor(idx) for idx in range(20)]
        dataset = stocache.CachedDataset(samples, "8MiB", verbose=False)
        loader = stocache.DataLoader(dataset, 3, shuffle=True, num_workers=2)
        if mode == "second":
            loader.load_state_dict(torch.load(state))
        for n, batch in enumerate(loader):
            print(*batch.tolist())
            if mode == "first" and n == 2:
                torch.save(loader.state_dict(), state)
    """
    state = tmp_path / "state"
    lines = run_script(source, state, "first").stdout.splitlines()
    assert len(lines) == 7
    assert run_script(source, state, "second").stdout.splitlines() == lines[3:]


@pytest.mark.parametrize("sampler", ["shuffle", "own generators", "knows itself", "lists"])
def test_nothing_that_was_handed_out_is_loaded_again(cached, sampler):
    run = Run(sampler, epochs=1, share="none")
    loader = run.loader(cached)
    before = trained(run, loader, save_at=3)
    state = loader.state_dict()
    loader = run.loader(cached)
    loader.load_state_dict(state)
    after = trained(run, loader)[:-1]
    loaded = loader.dataset.dataset.loaded
    assert loaded == list(dict.fromkeys(idx for _, batch in after for idx in batch))
    if sampler != "lists":  # some of its samples come twice
        assert not set(loaded) & {idx for _, batch in before for idx in batch}


def disturbs(cached, sampler, workers, generator):
    """Whether the program's random states are other ones after a state was loaded and used."""
    run = Run(sampler, workers=workers, generator=generator)
    seeded(1)
    loader = run.loader(cached)
    trained(run, loader, save_at=2)
    state = loader.state_dict()
    loader = run.loader(cached)
    seeded(5)
    states = random_states()
    loader.load_state_dict(state)
    batches = iter(loader)
    undisturbed = same_states(states, random_states())
    if sampler in TORCHS:
        next(batches)
        undisturbed = undisturbed and same_states(states, random_states())
    return not undisturbed


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sampler", [*SAMPLERS, *OWN])
def test_the_programs_random_numbers_stay_as_they_are(cached, sampler, workers):
    for generator in (False, True):
        assert not disturbs(cached, sampler, workers, generator)


@pytest.mark.parametrize("sampler", ["shuffle", "draws in iter"])
def test_control_an_order_that_is_drawn_from_the_programs_generator_disturbs_it(
    cached, monkeypatch, sampler
):
    monkeypatch.setattr(progress, "_random_states_kept", lambda *_, **__: contextlib.nullcontext())
    assert disturbs(cached, sampler, 0, False)


def test_control_a_seed_that_is_drawn_again_disturbs_it(cached, monkeypatch):
    resume = progress.Progress.resume

    def without_seed(self, samplers):
        resume(self, samplers)
        self.seed = None

    monkeypatch.setattr(progress.Progress, "resume", without_seed)
    assert disturbs(cached, "in order", 1, False)


@pytest.mark.parametrize("share", ["all", "some", "transform"])
@pytest.mark.parametrize("sampler", TORCHS)
def test_with_torchs_samplers_the_number_of_workers_may_be_another(cached, sampler, share):
    for workers, later in ((0, 1), (2, 0)):
        run = Run(sampler, workers=workers, share=share)
        other = dataclasses.replace(run, workers=later, share="all" if share == "some" else share)
        straight, resumed = straight_and_resumed(cached, run, 3, other)
        if sampler != "lists" and sampler != "in order" and sampler != "distributed":
            # The seed of the workers is drawn at another time in the next epoch.
            straight = [entry for entry in straight if entry[0] == 0]
            resumed = [entry for entry in resumed if entry[0] == 0]
        assert resumed == straight


def test_the_state_of_one_rank_is_good_for_all_with_torchs_sampler(cached):
    def of_rank(rank, state=None):
        dataset = cached(Numbers())
        sampler = DistributedSampler(dataset, 2, rank, seed=6)
        loader = stocache.DataLoader(dataset, 2, sampler=sampler)
        sampler.set_epoch(4)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    expected = [batch[1].tolist() for batch in of_rank(1)]
    loader = of_rank(0)
    batches = iter(loader)
    next(batches), next(batches)
    resumed = [batch[1].tolist() for batch in of_rank(1, loader.state_dict())]
    assert resumed == expected[2:]


def test_another_epoch_than_that_of_the_state_is_refused(cached):
    dataset = cached(Numbers())
    sampler = DistributedSampler(dataset, 2, 0)
    loader = stocache.DataLoader(dataset, 2, sampler=sampler)
    sampler.set_epoch(3)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch[1].tolist() for batch in batches]
    sampler.set_epoch(0)
    loader.load_state_dict(state)
    assert sampler.epoch == 3
    sampler.set_epoch(0)
    with pytest.raises(ValueError, match=r"set_epoch\(0\) was called after .* epoch 3; go on with"):
        iter(loader)
    sampler.set_epoch(3)
    assert [batch[1].tolist() for batch in loader] == rest


@pytest.mark.parametrize("gathered", [False, True])
def test_without_order_every_batch_comes_once(cached, gathered):
    class Uneven(Numbers):
        def __getitem__(self, idx):
            if idx % 5 == 0:
                torch.linalg.svd(torch.rand(150, 150))
            return super().__getitem__(idx)

    dataset = cached(Uneven(40))
    if gathered:
        dataset.warm(progress=False)
    options = {"num_workers": 2, "in_order": False, "prefetch_factor": 3}
    for sampler in (None, list(range(40))):
        loader = stocache.DataLoader(dataset, 2, sampler=sampler, **options)
        seen = []
        for _ in range(3):
            batches = iter(loader)
            seen += [next(batches)[1].tolist() for _ in range(4)]
            loader.load_state_dict(loader.state_dict())
            del batches
        seen += [batch[1].tolist() for batch in loader]
        assert sorted(seen) == [[n, n + 1] for n in range(0, 40, 2)]


def labels(batches):
    return [batch[1].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_state_means_before_between_and_after(cached, workers):
    run = Run(workers=workers, generator=True)

    def loaded(state):
        loader = run.loader(cached)
        loader.load_state_dict(state)
        return loader

    straight = run.loader(cached)
    epochs = [labels(straight) for _ in range(3)]
    loader = run.loader(cached)
    # Before an epoch: all of it, and those that follow.
    before = loaded(loader.state_dict())
    assert [labels(before) for _ in range(3)] == epochs
    # Begun, with nothing handed out: all of it.
    batches = iter(loader)
    assert [labels(loader_) for loader_ in [loaded(loader.state_dict())] * 2] == epochs[:2]
    # After the last batch, before anybody asked for more: nothing, then the next epoch.
    for _ in epochs[0]:
        next(batches)
    last = loaded(loader.state_dict())
    assert labels(last) == [] and labels(last) == epochs[1]
    # After the end: the next epoch.
    assert next(batches, None) is None
    assert labels(loaded(loader.state_dict())) == epochs[1]
    # After a break: the rest.
    for _ in loader:
        break
    state = loader.state_dict()
    assert labels(loaded(state)) == epochs[1][1:]
    # In the same process, what was loaded counts; without it an epoch begins anew.
    loader.load_state_dict(state)
    assert labels(loader) == epochs[1][1:] and labels(loader) == epochs[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_without_batches(cached, workers):
    dataset = cached(Numbers(9))
    options = {"batch_size": None, "shuffle": True, "num_workers": workers}
    loader = stocache.DataLoader(dataset, **options)
    batches = iter(loader)
    next(batches), next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [idx for _, idx in batches]
    again = stocache.DataLoader(dataset, **options)
    again.load_state_dict(state)
    assert [idx for _, idx in again] == rest and len(rest) == 7


class Fails(Numbers):
    def __getitem__(self, idx):
        if idx == 4:
            raise OSError("disk on fire")
        return super().__getitem__(idx)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_fails_does_not_come_again(cached, workers):
    dataset = cached(Fails(12))
    loader = stocache.DataLoader(dataset, 3, num_workers=workers)
    batches = iter(loader)
    next(batches)
    with pytest.raises(OSError, match="on fire"):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    assert labels(batches) == labels(loader) == [[6, 7, 8], [9, 10, 11]]


def test_an_epoch_that_workers_take_over_in_its_middle(cached):
    """Where a loader without order finds that samples are gone."""
    dataset = cached(Numbers(40))
    dataset.warm(progress=False)
    loader = stocache.DataLoader(dataset, 2, num_workers=2, in_order=False)
    batches = iter(loader)
    seen = labels([next(batches), next(batches)])
    dataset.clear()
    seen += labels([next(batches), next(batches)])
    loader.load_state_dict(loader.state_dict())
    assert sorted(seen + labels(loader)) == [[n, n + 1] for n in range(0, 40, 2)]


class Stumbles:
    """A batch sampler whose second epoch fails to begin at first."""

    def __init__(self):
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        if self.calls == 2:
            raise OSError("not now")
        return iter([[0], [1], [2]])


def test_a_state_is_kept_until_an_epoch_has_begun(cached):
    dataset = cached(Numbers())
    loader = stocache.DataLoader(dataset, batch_sampler=Stumbles())
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    states = random_states()
    with pytest.raises(OSError, match="not now"):
        iter(loader)
    assert same_states(states, random_states())
    assert labels(loader) == [[1], [2]]


def test_a_loader_can_be_copied_and_pickled_as_before(cached):
    loader = Run().loader(cached)
    batches = iter(loader)
    next(batches)
    other = copy.deepcopy(Run(share="none").loader(lambda source, *_, **options: source))
    for copy_of in (copy.copy(loader), pickle.loads(pickle.dumps(loader)), other):
        assert len(labels(copy_of)) == 10
    assert loader.state_dict()["epoch"] is None, "a shallow copy is the same loader"
    assert pickle.loads(pickle.dumps(loader)).state_dict()["epoch"] is None


# Refused


def refused(cached, state, **changed):
    with pytest.raises((TypeError, ValueError)) as caught:
        dataclasses.replace(Run(), **changed).loader(cached).load_state_dict(state)
    return str(caught.value)


def test_states_of_other_loaders_are_refused(cached):
    loader = Run().loader(cached)
    next(iter(loader))
    state = loader.state_dict()
    Run().loader(cached).load_state_dict(state)
    for changed, words in {
        "length": "a dataset of length 29, and this one has 30; make the loader as it was",
        "batch": "batch_size 3, and this one has 4; make",
        "sampler": "a BatchSampler of RandomSampler with the generators .*BatchSampler of Seq",
        "generator": r"with the generators \[\], and .* with \['generator'\]; make the",
    }.items():
        value = {"length": 30, "batch": 4, "sampler": "in order", "generator": True}[changed]
        assert re.search(words, refused(cached, state, **{changed: value}))
    assert "version 2, and this stocache reads version 1; go on" in refused(
        cached, {**state, "version": 2}
    )
    for wrong in ([], {}, None, "x"):
        assert "without a version; give what state_dict()" in refused(cached, wrong)


def test_the_state_of_another_rank_is_refused_where_it_says_what_comes_next(cached):
    class Own(DistributedSampler):
        pass

    def loader(rank, replicas, kind):
        dataset = cached(Numbers(24))
        return stocache.DataLoader(dataset, 2, sampler=kind(dataset, replicas, rank))

    for kind, rank, replicas in ((Own, 1, 2), (Own, 0, 3), (DistributedSampler, 0, 3)):
        state = loader(0, 2, kind).state_dict()
        loader(0, 2, kind).load_state_dict(state)
        state["batches_per_epoch"] = len(loader(rank, replicas, kind))
        with pytest.raises(ValueError, match="state is of rank 0 of 2, and this loader's"):
            loader(rank, replicas, kind).load_state_dict(state)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


def test_a_dataset_without_an_order_has_no_state():
    loader = stocache.DataLoader(Stream(), 2)
    assert next(batch.tolist() for batch in loader) == [0, 1]
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(TypeError, match="Stream is an IterableDataset, which has no order"):
            call()


def test_a_generator_that_the_program_draws_from_is_no_samplers_own(cached):
    dataset = cached(Numbers())
    sampler = RandomSampler(dataset, generator=torch.default_generator)
    loader = stocache.DataLoader(dataset, batch_sampler=BatchSampler(sampler, 3, False))
    next(iter(loader))
    assert loader.state_dict()["generators"] == {}
    seeded(3)
    states = random_states()
    loader.load_state_dict(loader.state_dict())
    assert same_states(states, random_states())
