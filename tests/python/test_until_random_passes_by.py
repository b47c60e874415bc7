"""A dataset whose transform cannot be cut: its samples pass the cache by, and are as without it."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import multiprocessing
import os
import random
import warnings

import numpy as np
import pytest
import torch
from augmented import Noise, Pictures, Step, agrees, shown, steps
from differential import random_states
from stocache import UnsupportedSample
from stocache._dataset import sealed, until_random
from torch.utils.data import DataLoader, get_worker_info

# What a dataset does with what its transform gave


class Plain:
    """An object that the cache knows nothing of."""

    def __init__(self, x):
        self.x = x
        self.mean = None

    def __eq__(self, other):
        return type(other) is Plain and torch.equal(self.x, other.x) and self.mean == other.mean

    def __repr__(self):
        return f"Plain({self.x.tolist()}, {self.mean})"


class Flip(torch.nn.Module):
    """Leaves half of the pictures as they are."""

    def forward(self, picture):
        return -picture if isinstance(picture, torch.Tensor) and random.random() < 0.5 else picture


def edited(given, draw):
    given += draw
    return given


def edited_through_numpy(given, draw):
    given.numpy()[0] = draw
    return given


def retried(given, draw):
    try:
        return given * draw
    except Exception:
        return given


USES = {
    "another": (lambda given, draw: given * draw, "(mul)"),
    "edited": (edited, "(add)"),
    "edited through numpy": (edited_through_numpy, "(.numpy)"),
    "its size": (lambda given, draw: (given, given.shape[-1]), "(.shape)"),
    "its value": (lambda given, draw: (given, int(given[0])), "(int)"),
    "a slice": (lambda given, draw: given[:1], "(a slice)"),
    "its type": (lambda given, draw: (given, isinstance(given, torch.Tensor)), "(isinstance)"),
    "its sum": (lambda given, draw: sum(given), "unpacks what its transform gave"),
    "an attribute, if it is there": (lambda given, draw: (given, hasattr(given, "x")), "(.x)"),
    "its truth": (lambda given, draw: (given, given.any() or 1), "(.any)"),
    "a copy": (lambda given, draw: given.clone(), "(.clone)"),
    "a text": (lambda given, draw: (given, f"{given}"), "(format)"),
    "an operand": (lambda given, draw: torch.ones(2) + given, "looks at"),
    "an array": (lambda given, draw: (given, np.asarray(given).size), "(.__array"),
    "a stack": (lambda given, draw: torch.stack([given, given]), "looks at"),
    "a native function": (lambda given, draw: torch.relu(given), "looks at"),
    "what fails is caught": (retried, "(mul)"),
    "nothing": (lambda given, draw: draw, "does not put what its transform gave into its sample"),
}


class Using(Pictures):
    def __init__(self, transform, how):
        super().__init__(transform)
        self.how = how

    def __getitem__(self, i):
        draw = random.random()
        given = self.transform(torch.full((2,), float(i)))
        return USES[self.how][0](given, draw), i


@pytest.mark.parametrize("how", USES)
@pytest.mark.parametrize("count", [0, 2])
def test_a_dataset_that_looks_at_what_its_transform_gave_passes_by(cut, how, count):
    dataset = cut(Using(steps(), how), steps=count)
    agrees(dataset, Using(steps(), how), USES[how][1])
    assert dataset.stats().filled == 0 and dataset.stats().unsupported == 18
    strict = cut(Using(steps(), how), steps=count, strict=True)
    with pytest.raises(UnsupportedSample, match="random steps cannot go on after the cache"):
        strict[0]


@pytest.mark.parametrize("how", ["its value", "another"])
def test_that_is_seen_though_the_first_draws_change_nothing(cut, how):
    """Of a flip that leaves the first pictures as they are, a comparison would find nothing."""
    transform = torch.nn.Sequential(Step(1), Flip())
    dataset, plain = cut(Using(transform, how), steps=1), Using(transform, how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        random.seed(next(n for n in range(99) if random.Random(n).random() < 2))
        dataset[0]
    assert dataset.stats().filled == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(dataset, plain)


def test_control_a_look_that_is_not_noted_is_lost_where_its_error_is_caught(cut, monkeypatch):
    monkeypatch.setattr(sealed.Load, "cannot", lambda self, does: sealed.CannotBeCut(does))
    with pytest.raises(AssertionError):
        agrees(
            cut(Using(steps(), "what fails is caught"), probe=0),
            Using(steps(), "what fails is caught"),
        )


class Calling(Pictures):
    """Calls its transform in a way that cannot be followed."""

    def __init__(self, transform, how):
        super().__init__(transform)
        self.how = how
        self.memory = torch.empty(2)

    def __getitem__(self, i):
        picture = torch.full((2,), float(i))
        if self.how == "with what it gave":
            return self.transform(self.transform(picture)), i
        if self.how == "in a thread":
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return pool.submit(self.transform, picture).result(), i
        if self.how == "not for each":
            return (picture if i % 2 else self.transform(picture)), i
        if self.how == "drawing itself":
            return (torch.rand(2) if i % 2 else self.transform(picture)), i
        if self.how == "seeding":
            torch.manual_seed(100 + i)
        if self.how == "from one memory":
            i += 1
            return self.transform(self.memory.fill_(i)), self.transform(self.memory.fill_(-i))
        if self.how == "editing it afterwards":
            given = self.transform(picture)
            picture += 5
            return given, i
        if self.how == "asking it":
            return self.transform(picture), hasattr(self.transform, "training")
        if self.how == "by its kind" and not isinstance(self.transform, torch.nn.Sequential):
            raise ValueError("transform must be a Sequential")
        return self.transform(picture), i


CALLS = {
    "with what it gave": "calls its transform with what its transform gave",
    "in a thread": "calls its transform from another thread",
    "not for each": "does not call its transform for every sample",
    "drawing itself": "does not call its transform for every sample",
    "seeding": "draws random numbers itself, or seeds them",
    "from one memory": "edits what it gave its transform",
    "editing it afterwards": "edits what it gave its transform",
    "asking it": "looks at its transform",
    "by its kind": "must be a Sequential",
}
SOME = {"not for each": 3, "drawing itself": 3}  # where the first sample is one that can be


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_call_that_cannot_be_followed_passes_by(cut, how, count, allow_pickle):
    if (how, count) == ("editing it afterwards", 2):
        pytest.skip("the first steps have seen it by then")
    if (how, count) == ("from one memory", 2):
        pytest.skip("the first steps have made another of it")
    dataset = cut(Calling(steps(), how), steps=count, allow_pickle=allow_pickle)
    agrees(dataset, Calling(steps(), how), CALLS[how])
    assert dataset.stats().filled == SOME.get(how, 0)


def test_control_arguments_that_are_edited_later_are_lost(cut, monkeypatch):
    monkeypatch.setattr(sealed.Load, "encoded", lambda self, value: None)
    source, plain = (Calling(steps(), "from one memory") for _ in range(2))
    with pytest.raises(AssertionError):
        agrees(cut(source, probe=0), plain)


# Samples that cannot be stored


class Holding(Pictures):
    def __init__(self, transform, how):
        super().__init__(transform)
        self.how = how

    def __getitem__(self, i):
        picture = torch.full((2,), float(i))
        if self.how == "an object":
            made = self.transform(Plain(picture))
            made.mean = float(made.x.mean())
            return made, i
        if self.how == "in an object":
            return Plain(self.transform(picture)), i
        given = self.transform(picture)
        return {"x": given, "size": int(given.abs().sum()), "beside": Plain(picture)}


def of_object(value):
    x = (value.x if isinstance(value, Plain) else value) + random.randrange(1000)
    return Plain(x) if isinstance(value, Plain) else x


@pytest.mark.parametrize("how", ["an object", "in an object", "one entry"])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_samples_that_cannot_be_stored_are_the_same(cut, how, allow_pickle):
    dataset = cut(Holding(of_object, how), allow_pickle=allow_pickle)
    agrees(dataset, Holding(of_object, how), "random steps cannot go on after the cache")
    assert dataset.stats().filled == 0


def test_a_sample_with_an_object_beside_is_cut_and_not_stored(cut):
    class Beside(Pictures):
        def __getitem__(self, i):
            return self.transform(torch.full((2,), i)), Plain(torch.full((1,), float(i)))

    dataset = cut(Beside(steps()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            seen = []
            for source in (Beside(steps()), dataset):
                torch.manual_seed(epoch)
                seen.append([repr(source[i]) for i in range(6)])
            assert seen[0] == seen[1]
    assert len(caught) == 1 and "Plain" in str(caught[0].message)
    pickled = cut(Beside(steps()), allow_pickle=True)
    agrees(pickled, Beside(steps()))


# What a dataset remembers


class Remembering(Pictures):
    def __init__(self, transform, how):
        super().__init__(transform)
        self.how = how
        self.made = {}
        self.last = None

    def __getitem__(self, i):
        if self.how == "each":
            if i not in self.made:
                self.made[i] = (self.transform(torch.full((2,), i)), i)
            return self.made[i]
        if self.how == "by a function":
            return self.remembered(i)
        if self.how == "some" and i > 2:
            return self.made.setdefault(i, (self.transform(torch.full((2,), i)), i))
        sample = self.transform(torch.full((2,), i)), i
        if self.how == "the last":
            self.last = sample
        return sample

    @functools.lru_cache(maxsize=9)  # noqa: B019
    def remembered(self, i):
        return self.transform(torch.full((2,), i)), i


@pytest.mark.parametrize("how", ["each", "by a function"])
def test_a_dataset_that_remembers_its_samples_goes_on_to_do_so(cut, how):
    source = Remembering(steps(), how)
    dataset = cut(source)
    with pytest.warns(RuntimeWarning, match="is not cached") as caught:
        first = [shown(dataset[i]) for i in range(6)]
        assert [shown(dataset[i]) for i in range(6)] == first
    assert len(caught) == 1 and dataset.stats().filled == 0
    assert [shown(source[i]) for i in range(6)] == first, "these are no sealed things"


def test_what_a_dataset_keeps_of_a_sample_is_a_whole_one(cut):
    source = Remembering(steps(), "the last")
    dataset = cut(source)
    agrees(dataset, Remembering(steps(), "the last"), "keeps what its transform gave")
    assert shown(source.last) is not None and dataset.stats().filled == 0


def test_a_sealed_thing_that_comes_back_is_an_error_and_no_sample(cut):
    """It was kept from a later sample than the first, when that was not looked at."""
    dataset = cut(Remembering(steps(), "some"), probe=0)
    with pytest.warns(RuntimeWarning, match="keeps what its transform gave"):
        assert len(dataset[0]) == 2
        with pytest.raises(RuntimeError, match="keeps what its transform gave, and gives it again"):
            dataset[3]
        assert type(dataset[1][0]) is torch.Tensor
    assert dataset.stats().filled == 1


class Closing(Pictures):
    """Closes its file when it goes."""

    file = None

    def __getitem__(self, i):
        if self.file is None:
            self.file = open(os.devnull, "rb")  # noqa: SIM115
        self.file.read(1)
        return super().__getitem__(i)

    def __del__(self):
        if self.file is not None:
            self.file.close()


def test_files_of_the_dataset_stay_open(cut):
    source = Closing(steps())
    source[0]
    dataset = cut(source)
    assert len(dataset[1]) == 2
    dataset.close()
    del dataset
    gc.collect()
    assert not source.file.closed and len(source[2]) == 2


# A dataset that is random by itself

GENERATOR = np.random.default_rng(5)


class OfItsOwn(Pictures):
    def __init__(self, transform, how):
        super().__init__(transform)
        self.how = how
        self.aug = transform

    def __getitem__(self, i):
        picture = torch.full((2,), float(i))
        if self.how == "made for each":
            picture += np.random.default_rng().integers(1 << 40)
        if self.how == "of the module":
            picture += GENERATOR.integers(1 << 40)
        if self.how == "of the system":
            picture += int.from_bytes(os.urandom(5), "little")
        if self.how == "another name":
            picture = self.aug(picture)
        return self.transform(picture), i


BY_ITSELF = "gives another sample every time by itself"


@pytest.mark.parametrize(
    "how, words",
    [
        ("made for each", BY_ITSELF),
        ("of the module", "draws random numbers itself"),
        ("of the system", BY_ITSELF),
    ],
)
def test_a_dataset_that_is_random_by_itself_passes_by(cut, how, words):
    dataset = cut(OfItsOwn(steps(), how), steps=2)
    with pytest.warns(RuntimeWarning, match=words) as caught:
        assert len({dataset[1][0][0].item() for _ in range(6)}) == 6
    assert len(caught) == 1 and dataset.stats().filled == 0


def test_a_transform_by_another_name_is_random_there(cut):
    dataset = cut(OfItsOwn(steps(), "another name"), steps=2)
    agrees(dataset, OfItsOwn(steps(), "another name"), "draws random numbers itself")


class LazyByItself(Pictures):
    generator = None

    def __getitem__(self, i):
        if self.generator is None:
            self.generator = np.random.default_rng(8)
        return self.transform(torch.full((2,), i)), int(self.generator.integers(1000))


def test_a_generator_that_a_dataset_makes_is_made_once(cut):
    dataset = cut(LazyByItself(steps()), steps=2)
    agrees(dataset, LazyByItself(steps()), "draws random numbers itself")


class Clock(torch.nn.Module):
    """Random, by a generator that nobody finds."""

    def forward(self, picture):
        return picture + int.from_bytes(os.urandom(4), "little")


def test_what_is_random_in_a_way_of_its_own_is_no_difference(cut):
    dataset = cut(Pictures(torch.nn.Sequential(Step(1), Clock())), steps=1)
    assert len({tuple(dataset[1][0].tolist()) for _ in range(4)}) > 1
    assert dataset.stats().filled == 1 and dataset.stats().unsupported == 0


# What can be found by a comparison alone


class Telling(torch.nn.Module):
    """Says of itself what it did last."""

    def __init__(self, largest=1000):
        super().__init__()
        self.largest = largest
        self.last = 0

    def forward(self, picture):
        self.last = random.randrange(self.largest)
        return picture + self.last


class Asking(Pictures):
    """Asks a step of its transform, by a way of its own, what it did."""

    def __init__(self, transform):
        super().__init__(transform)
        self.step = transform[-1]

    def __getitem__(self, i):
        return self.transform(torch.full((2,), i)), self.step.last


def asking(largest=1000):
    return Asking(torch.nn.Sequential(Step(1), Telling(largest)))


def test_who_asks_a_step_what_it_did_is_found(cut):
    dataset = cut(asking(), steps=1)
    agrees(dataset, asking(), "gives other samples if a part of its transform runs later")
    assert dataset.stats().filled == 0


def test_control_without_a_look_it_is_not(cut):
    with pytest.raises(AssertionError):
        agrees(cut(asking(), steps=1, probe=0), asking())


class Speckle(torch.nn.Module):
    """Draws a number for each of a picture, as they lie in memory."""

    def forward(self, picture):
        return picture + torch.randint_like(picture, 1000)


class Turned(Pictures):
    """Its pictures lie in memory as files have them: columns beside each other."""

    def __getitem__(self, i):
        return self.transform(torch.full((5, 3), i).t()), i


def test_numbers_that_are_drawn_as_a_picture_lies_in_memory_are_no_difference(cut):
    dataset = cut(Turned(torch.nn.Sequential(Step(1), Speckle())), steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = [dataset[i][0] for i in range(6) for _ in range(2)]
    assert dataset.stats().filled == 6 and len({str(sample) for sample in samples}) == 12
    assert all(sample.unique().numel() > 5 for sample in samples)


class TurnedAsking(Asking):
    def __getitem__(self, i):
        return self.transform(torch.full((5, 3), i).t()), self.step.last


def test_control_of_such_a_picture_it_is_found_who_asks_a_step(cut):
    def make():
        return TurnedAsking(torch.nn.Sequential(Step(1), Telling()))

    dataset = cut(make(), steps=1)
    agrees(dataset, make(), "gives other samples if a part of its transform runs later")
    assert dataset.stats().filled == 0


def stored(dataset, start, *indices):
    """Lets another process load these samples, and waits for it."""
    process = multiprocessing.get_context(start).Process(target=load, args=(dataset, indices))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def load(dataset, indices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in indices:
            dataset[index]


def test_what_one_process_finds_holds_for_all_that_have_the_dataset(cut):
    """They do not go on to read what others have stored."""
    dataset = cut(asking(1), steps=1)
    dataset[0], dataset[1]  # nothing is drawn, so that nothing differs
    assert dataset.stats().filled == 2
    dataset.dataset.step.largest = 1000
    stored(dataset, "fork", 0)
    assert dataset.stats().filled == 2, "that process had looked already"
    dataset.dataset.aside.to_check = 1
    stored(dataset, "fork", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        random.seed(6)
        seen = shown(dataset[0])
        random.seed(6)
        assert seen == shown(dataset.dataset.dataset[0])
    assert dataset.stats().hits == 1, "by the process that had looked"


def test_who_joins_a_cache_that_was_cut_wrongly_finds_it(cut):
    """Other random steps, by which it shows: of a dataset that asks them."""
    options = {"steps": 1, "name": "until-random-asks", "keep": True, "fingerprint": "1"}
    first = cut(asking(1), **options)
    for i in range(6):
        first[i]
    assert first.stats().filled == 6
    first.close()
    again = cut(asking(1000), **options)
    try:
        agrees(again, asking(1000), "gives other samples if a part of its transform runs later")
    finally:
        again.delete()


def test_a_named_cache_that_cannot_be_cut_any_more_ends_no_epoch(cut):
    options = {"steps": 1, "name": "until-random-now", "keep": True, "fingerprint": "1"}
    first = cut(Pictures(torch.nn.Sequential(Step(1), Noise())), **options)
    for i in range(6):
        first[i]
    assert first.stats().filled == 6
    first.close()
    again = cut(Pictures(torch.nn.Sequential(Step(1), Noise()), "changed"), **options)
    plain = Pictures(torch.nn.Sequential(Step(1), Noise()), "changed")
    try:
        with pytest.warns(RuntimeWarning, match="cannot be cut there now"):
            again.verify()
        agrees(again, plain, "looks at what its transform gave")
    finally:
        again.delete()


# Batches


@pytest.mark.parametrize("how", ["not for each", "drawing itself", "seeding"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_both_kinds_draw_in_their_order(cut, how, workers):
    dataset = cut(Calling(steps(), how), steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in range(3):
            batches = []
            for source in (Calling(steps(), how), dataset):
                torch.manual_seed(epoch)
                random.seed(epoch)
                loader = DataLoader(source, 4, shuffle=True, num_workers=workers)
                batches.append([shown(batch) for batch in loader])
                batches.append(random_states())
            assert batches[:2] == batches[2:]
    assert dataset.stats().filled == SOME.get(how, 0)


def test_lists_and_slices_of_both_kinds_draw_in_their_order(cut):
    dataset, plain = (make(Calling(steps(), "drawing itself")) for make in (cut, lambda it: it))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            torch.manual_seed(3)
            expected = [shown(plain[i]) for i in (1, 2, 3, 0)]
            torch.manual_seed(3)
            assert [shown(sample) for sample in dataset[[1, 2, 3, 0]]] == expected


# Errors of the dataset


class Broken(Pictures):
    """Fails before its transform, or after it."""

    def __init__(self, transform, after):
        super().__init__(transform)
        self.after = after

    def __getitem__(self, i):
        if i == 3 and not self.after:
            raise OSError("disk on fire")
        sample = super().__getitem__(i)
        if i == 3:
            raise OSError("disk on fire")
        return sample


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("first", [3, 0])
def test_errors_of_the_dataset_are_its_own(cut, first, after):
    dataset, plain = cut(Broken(steps(), after), steps=2), Broken(steps(), after)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in (first, 3, 1, 3):
            seen = []
            for source in (plain, dataset):
                torch.manual_seed(i)
                try:
                    seen.append(shown(source[i]))
                except OSError as error:
                    seen.append(str(error))
                seen.append(random_states())
            assert seen[:2] == seen[2:]
    assert dataset.stats().unsupported == 0


def test_samples_are_loaded_in_vain_only_a_few_times(cut):
    source = Pictures(steps(), "changed")
    dataset = cut(source, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(10):
            dataset[0]
    # In vain, and once more to see what the first sample is.
    assert len(source.loads) == 10 + until_random._TRIES + 1 + 1


# What cannot be cut at all


class Computed(Pictures):
    transform = property(lambda self: steps(), lambda self, value: None)


def test_a_transform_that_cannot_be_replaced_is_told(cut):
    source = Computed(None)
    before = dict(vars(source))
    with pytest.raises(TypeError, match="transform of Computed is computed") as caught:
        cut(source, steps=2)
    assert "\n" not in str(caught.value) and vars(source) == before


class InBatches(Pictures):
    """Its transform runs in its own batches alone."""

    def __getitem__(self, i):
        return torch.full((2,), i), i

    def __getitems__(self, indices):
        return [(self.transform(self[i][0]), i) for i in indices]


def test_a_dataset_with_batches_of_its_own_is_told(cut):
    with pytest.raises(TypeError, match="InBatches has a __getitems__ of its own") as caught:
        cut(InBatches(steps()))
    assert "\n" not in str(caught.value)


# What a program sets


class FromFile(Pictures):
    path = os.devnull
    file = None
    epoch = 0

    def __getitem__(self, i):
        return self.transform(torch.full((2,), i)), self.file.fileno() > 0, self.epoch

    def open(self):
        self.file = open(self.path, "rb")  # noqa: SIM115


def opens(worker):
    get_worker_info().dataset.open()


def sets(worker):
    dataset = get_worker_info().dataset
    dataset.file = open(dataset.path, "rb")  # noqa: SIM115


@pytest.mark.parametrize("init", [opens, sets])
@pytest.mark.parametrize("shape", ["tuple", "changed"])
def test_what_a_worker_sets_reaches_the_dataset(cut, init, shape):
    class Changed(FromFile):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            return sample if shape == "tuple" else (sample[0] * 2, *sample[1:])

    dataset = cut(Changed(steps()), steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in range(2):
            batches = []
            for source in (Changed(steps()), dataset):
                torch.manual_seed(epoch)
                loader = DataLoader(source, 2, shuffle=True, num_workers=2, worker_init_fn=init)
                batches.append([shown(batch) for batch in loader])
            assert batches[0] == batches[1]
    assert dataset.stats().filled == (6 if shape == "tuple" else 0)


class Epochs(Pictures):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        given = self.transform(torch.full((2,), i + self.epoch))
        return given * 2 if self.shape == "changed" else given


@pytest.mark.parametrize("shape", ["tuple", "changed"])
def test_epochs_reach_the_dataset(cut, shape):
    dataset, plain = cut(Epochs(steps(), shape)), Epochs(steps(), shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in range(3):
            seen = []
            for source in (plain, dataset):
                source.set_epoch(epoch)
                torch.manual_seed(epoch)
                seen.append([shown(source[i]) for i in range(6)])
            assert seen[0] == seen[1]


def test_another_transform_is_that_of_the_program(cut):
    source = Pictures(steps())
    dataset = cut(source, steps=2)
    source.transform = Step(5)
    with pytest.warns(RuntimeWarning, match="has another transform by now"):
        assert dataset[1][0].tolist() == [6, 6]
    assert type(source.transform) is Step
