"""A dataset whose transform is random from some step on: what comes before is cached."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import os
import random
import warnings

import numpy as np
import pytest
import torch
from stocache import CachedDataset, UnsupportedSample
from stocache._dataset import splitting
from torch.utils.data import DataLoader, Dataset, Subset

Pair = collections.namedtuple("Pair", "picture label")


class Step(torch.nn.Module):
    """Adds a number, and counts how often."""

    def __init__(self, amount):
        super().__init__()
        self.amount = amount
        self.calls = 0

    def forward(self, picture):
        self.calls += 1
        return picture + self.amount


class Noise(torch.nn.Module):
    def forward(self, picture):
        return picture + torch.randint(1000, ()) * 1000


class Pictures(Dataset):
    """Calls its transform as people do."""

    classes = ("cat", "dog")

    def __init__(self, transform, shape="tuple"):
        self.transform = transform
        self.shape = shape
        self.loads = []

    def __len__(self):
        return 6

    def __getitem__(self, i):
        self.loads.append(i)
        picture = torch.full((2,), i)
        if self.shape == "two views":
            return self.transform(picture), self.transform(picture), i
        if self.shape == "same twice":
            given = self.transform(picture)
            return given, {"again": given}
        if self.shape == "beside":
            return self.transform(picture), picture
        if self.shape == "number":
            return self.transform(i), i
        if self.shape == "changed":
            return self.transform(picture) * 2
        given = self.transform(picture)
        return {
            "tuple": (given, i),
            "alone": given,
            "dict": {"label": i, "more": [{"picture": given}]},
            "named": Pair(given, i),
        }[self.shape]


class Joint(Dataset):
    """`transforms` of image and target, as torchvision's."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __len__(self):
        return 4

    def __getitem__(self, i):
        image, target = self.transforms(torch.full((2,), i), i)
        return image, target


def steps():
    return torch.nn.Sequential(Step(1), Step(10), Noise(), Step(100))


@pytest.fixture
def cut():
    made = []

    def make(dataset, memory="16MiB", **options):
        options = {"verbose": False, **options}
        made.append(CachedDataset.until_random(dataset, memory, **options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


SHAPES = ["tuple", "alone", "dict", "named", "two views", "same twice", "beside"]


def shown(sample):
    """Values, types and which objects are one."""
    if isinstance(sample, torch.Tensor):
        return sample.tolist()
    if isinstance(sample, dict):
        return {key: shown(value) for key, value in sample.items()}
    if isinstance(sample, np.ndarray):
        return "array", sample.tolist()
    if dataclasses.is_dataclass(sample):
        return type(sample).__name__, shown(vars(sample))
    if isinstance(sample, (tuple, list)):
        return type(sample).__name__, [shown(value) for value in sample]
    return sample


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [0, 2])
def test_samples_and_random_numbers_are_those_of_the_dataset(cut, shape, count):
    plain = Pictures(steps(), shape)
    dataset = cut(Pictures(steps(), shape), steps=count)
    for _ in range(3):
        torch.manual_seed(5)
        expected = [shown(plain[i]) for i in range(6)]
        torch.manual_seed(5)
        assert [shown(dataset[i]) for i in range(6)] == expected
        torch.manual_seed(5)
        assert list(map(shown, dataset.__getitems__(range(6)))) == expected
    assert dataset.stats().loads == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_dataset(cut, workers):
    dataset = cut(Pictures(steps()), steps=2)
    for epoch in range(3):
        batches = []
        for source in (Pictures(steps()), dataset):
            torch.manual_seed(epoch)
            loader = DataLoader(source, 2, shuffle=True, num_workers=workers)
            batches.append([shown(batch) for batch in loader])
        assert batches[0] == batches[1]
    assert dataset.stats().loads == 6


def test_the_dataset_itself_stays_as_it_is(cut):
    transform = steps()
    source = Pictures(transform)
    before = dict(vars(source))
    dataset = cut(source, steps=2, probe=0)
    for _ in range(2):
        dataset[1]
    assert vars(source) == before and source.transform is transform
    assert len(transform) == 4
    assert (transform[0].calls, transform[3].calls) == (1, 2), "its steps are the same objects"
    source.loads.clear()
    assert source[1][0].tolist() != [1, 1] and source.loads == [1]


def test_control_a_transform_that_is_cached_whole_is_random_once(cut):
    with pytest.warns(RuntimeWarning, match="gives another sample"):
        dataset = cut(Pictures(steps()), steps=4)
        assert dataset.transform is None
        assert len({tuple(dataset[1][0].tolist()) for _ in range(8)}) == 1
    dataset = cut(Pictures(steps()), steps=2)
    assert len({tuple(dataset[1][0].tolist()) for _ in range(8)}) > 1


def test_unknown_steps_count_as_random(cut, capsys):
    dataset = cut(Pictures(steps()), verbose=True)
    assert "cached before all steps of Pictures.transform; after the cache: Step" in (
        capsys.readouterr().out
    )
    dataset[1]
    assert dataset.dataset.dataset.transform.steps is None


def test_it_says_where_it_was_cut_once(cut, capsys):
    cut(Pictures(steps()), steps=2, verbose=True)
    line = capsys.readouterr().out
    assert line == (
        "Cached are 2 of 4 steps of Pictures.transform (Step, Step); "
        "after the cache: Noise, Step.\n"
    )


def test_subsets_and_attributes(cut):
    source = Pictures(steps())
    dataset = cut(Subset(Subset(source, [1, 3, 5]), [2, 0]), steps=2)
    assert len(dataset) == 2
    torch.manual_seed(0)
    sample = dataset[0]
    torch.manual_seed(0)
    assert shown(sample) == shown(source[5])
    assert cut(source, steps=2).classes == ("cat", "dog")
    assert source.transform is not None and type(source.transform) is torch.nn.Sequential


def moved(image, target):
    return image + random.randrange(10), target + 1


def test_a_transform_of_image_and_target(cut):
    plain, dataset = Joint(moved), cut(Joint(moved))
    for _ in range(2):
        for source in (plain, dataset):
            random.seed(3)
            assert shown(source[2])[1][1] == 3
        random.seed(3)
        expected = shown(plain[2])
        random.seed(3)
        assert shown(dataset[2]) == expected


def both_of(dataset):
    sample = dataset[3]
    return sample[0].tolist(), sample[1].tolist()


@pytest.mark.parametrize("first", [[], [torch.nn.Identity()]])
def test_what_went_in_stays_as_it_is(cut, first):
    dataset = cut(Pictures(torch.nn.Sequential(*first, Step(1)), "beside"), steps=len(first))
    assert [both_of(dataset) for _ in range(2)] == [([4, 4], [3, 3])] * 2


def test_control_by_identity_alone_it_would_not(cut, monkeypatch):
    monkeypatch.setattr(splitting, "_another", lambda value: value)
    dataset = cut(Pictures(torch.nn.Sequential(Step(1)), "beside"), steps=0, probe=0)
    assert both_of(dataset) == ([4, 4], [4, 4])


# Samples that are not cut: they are those of the dataset all the same


def agrees(dataset, plain, warning=None):
    """Asserts that samples and random numbers are those of the dataset, epoch after epoch; and that
    no more than this is warned about, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            seen = []
            for source in (plain, dataset):
                torch.manual_seed(epoch)
                random.seed(epoch)
                seen.append([shown(source[i]) for i in range(6)])
                seen.append((torch.get_rng_state().tolist(), random.getstate()))
            assert seen[:2] == seen[2:]
    texts = [str(each.message) for each in caught]
    assert len(texts) == (warning is not None), texts
    for text in texts:
        assert "is not cached, and loaded every time: " in text and warning in text
        assert "pass them as CachedDataset(transform=...)" in text and "\n" not in text


class Sometimes(Pictures):
    """Calls its transform for some samples only."""

    def __getitem__(self, i):
        return super().__getitem__(i) if i % 2 else (torch.full((2,), i), i)


def test_a_sample_without_a_call_of_the_transform_is_cached_whole(cut):
    dataset = cut(Sometimes(steps()), steps=2)
    agrees(dataset, Sometimes(steps()))
    assert dataset.stats().loads == dataset.stats().filled == 6
    assert len({tuple(dataset[1][0].tolist()) for _ in range(8)}) > 1, "the others stay random"


class Drawing(Pictures):
    """Is random by itself where it does not call its transform."""

    def __getitem__(self, i):
        return super().__getitem__(i) if i % 2 else torch.rand(2)


def test_one_that_is_random_by_itself_is_not(cut):
    dataset = cut(Drawing(steps()), steps=2)
    agrees(dataset, Drawing(steps()), "draws random numbers itself, or seeds them")
    assert dataset.stats().filled == 3 and dataset.stats().unsupported == 9


class Beside(Pictures):
    """Computes more from what its transform gave."""

    def __getitem__(self, i):
        given = self.transform(torch.full((2,), i))
        return given, int(given.sum())


def test_what_is_computed_from_what_the_transform_gave_is_found(cut):
    dataset = cut(Beside(steps()), steps=2)
    agrees(dataset, Beside(steps()), "gives other samples if a part of its transform runs later")
    assert dataset.stats().filled == 0


def test_control_without_a_look_it_is_not(cut):
    with pytest.raises(AssertionError):
        agrees(cut(Beside(steps()), steps=2, probe=0), Beside(steps()))


class Seeding(Pictures):
    """Makes the same of a sample every time."""

    def __getitem__(self, i):
        torch.manual_seed(100 + i)
        return super().__getitem__(i)


def test_a_dataset_that_seeds_its_transform_passes_by(cut):
    agrees(cut(Seeding(steps()), steps=2), Seeding(steps()), "or seeds them")


class Clock(torch.nn.Module):
    """Random, by a generator that nobody finds."""

    def forward(self, picture):
        return picture + int.from_bytes(os.urandom(4), "little")


def test_what_is_random_in_a_way_of_its_own_is_no_difference(cut):
    dataset = cut(Pictures(torch.nn.Sequential(Step(1), Clock())), steps=1)
    assert len({tuple(dataset[1][0].tolist()) for _ in range(4)}) > 1
    assert dataset.stats().filled == 1 and dataset.stats().unsupported == 0


class Buffered(Pictures):
    """Answers in the same memory each time."""

    memory = None

    def __getitem__(self, i):
        self.memory = torch.empty(2) if self.memory is None else self.memory
        return self.transform(self.memory.fill_(i)), i


def test_a_dataset_that_answers_in_the_same_memory(cut):
    for count in (0, 1):
        transform = torch.nn.Sequential(torch.nn.Identity(), Noise())
        dataset = cut(Buffered(transform), steps=count)
        agrees(dataset, Buffered(transform))
        assert dataset.stats().loads == 6


class Threaded(Pictures):
    """Calls its transform in a thread, which draws in turn."""

    def __getitem__(self, i):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(self.transform, torch.full((2,), i)).result(), i


class Changing(Pictures):
    """Makes something else of what its transform gave."""

    def __init__(self, transform, how):
        super().__init__(transform)
        self.how = how

    def __getitem__(self, i):
        draw = random.random()
        given = self.transform(torch.full((2,), float(i)))
        if self.how == "another":
            return given * draw, i
        if self.how == "edited":
            given += draw
        if self.how == "edited through numpy":
            given.numpy()[0] = draw
        if self.how == "again":
            return self.transform(given), i
        return given, i


CHANGES = {
    "another": "changes what its transform gave, or leaves out a part of it",
    "edited": "edits what its transform gave",
    "edited through numpy": "edits what its transform gave",
    "again": "changes what its transform gave",
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("count", [0, 2])
def test_what_is_changed_after_the_transform_passes_by(cut, how, count):
    dataset = cut(Changing(steps(), how), steps=count)
    agrees(dataset, Changing(steps(), how), CHANGES[how])
    assert dataset.stats().filled == 0 and dataset.stats().unsupported == 18
    strict = cut(Changing(steps(), how), steps=count, strict=True)
    with pytest.raises(UnsupportedSample, match=CHANGES[how]):
        strict[0]


def test_a_transform_that_is_called_by_a_thread_passes_by(cut):
    dataset = cut(Threaded(steps()), steps=2)
    agrees(dataset, Threaded(steps()), "calls its transform from another thread")


def test_samples_are_loaded_twice_only_a_few_times(cut):
    source = Changing(steps(), "another")
    dataset = cut(source, steps=2)
    calls = source.transform[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(10):
            dataset[0]
    assert calls.calls == 10 + 1 + splitting._TRIES, "one more where it was found"


def test_it_passes_by_pickle_too(cut):
    dataset = cut(Changing(steps(), "another"), steps=2, allow_pickle=True)
    agrees(dataset, Changing(steps(), "another"), CHANGES["another"])
    assert dataset.stats().filled == 0


def test_control_an_edit_that_is_not_noticed_is_lost(cut, monkeypatch):
    monkeypatch.setattr(splitting, "_as_bytes", lambda value: None)
    dataset = cut(Changing(steps(), "edited"), steps=0)
    with pytest.raises(AssertionError):
        agrees(dataset, Changing(steps(), "edited"))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_samples_that_pass_by_are_those_of_the_dataset(cut, workers):
    dataset = cut(Changing(steps(), "another"), steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in range(2):
            batches = []
            for source in (Changing(steps(), "another"), dataset):
                torch.manual_seed(epoch)
                random.seed(epoch)
                loader = DataLoader(source, 2, shuffle=True, num_workers=workers)
                batches.append([shown(batch) for batch in loader])
            assert batches[0] == batches[1]


class Of(Pictures):
    """What its transform gives is of another type than what goes in."""

    def __getitem__(self, i):
        return self.transform(np.full(2, float(i))).unsqueeze(0), i


def noisy(array):
    return torch.from_numpy(array) + torch.rand(2)


def test_an_error_that_is_ours_alone_is_none(cut):
    agrees(cut(Of(noisy)), Of(noisy), "cannot go on with the first steps of its transform alone")


class Particular(Pictures):
    """Takes transforms of one type only."""

    def __getitem__(self, i):
        if not isinstance(self.transform, torch.nn.Sequential):
            raise ValueError("transform must be a Sequential")
        return super().__getitem__(i)


def test_a_dataset_that_takes_no_other_transform_passes_by(cut):
    agrees(cut(Particular(steps()), steps=2), Particular(steps()), "must be a Sequential")


class BrokenAtOnce(Pictures):
    def __getitem__(self, i):
        self.loads.append(i)
        if i == 3:
            raise OSError("disk on fire")
        return super().__getitem__(i)


def test_an_error_before_the_transform_is_the_datasets_own(cut):
    dataset = cut(BrokenAtOnce(steps()), steps=2)
    for _ in range(2):
        with pytest.raises(OSError, match="disk on fire"):
            dataset[3]
        assert len(dataset[1]) == 2
    assert dataset.stats().filled == 1 and dataset.stats().unsupported == 0


class Broken(Pictures):
    def __getitem__(self, i):
        sample = super().__getitem__(i)
        raise OSError(f"disk on fire at {len(sample)}")


def test_errors_of_the_dataset_are_its_own(cut):
    dataset = cut(Broken(steps()), steps=2)
    for _ in range(2):
        with pytest.raises(OSError, match="disk on fire at 2"):
            dataset[0]


def test_a_number_that_stands_at_two_places_passes_by(cut):
    dataset = cut(Pictures(torch.nn.Sequential(Step(1)), "number"), steps=0)
    agrees(dataset, Pictures(Step(1), "number"), "at 2 places of the sample")


# How datasets call their transform


class Augment:
    """Takes and gives as albumentations does."""

    def __call__(self, *, image, **more):
        shift = random.randrange(1000)
        return {"image": image + shift, **{key: value - shift for key, value in more.items()}}


class ByName(Pictures):
    def __init__(self, transform, how):
        super().__init__(transform)
        self.how = how

    def __getitem__(self, i):
        picture, mask = np.full(3, i), np.full(2, -i)
        if self.how == "one":
            return self.transform(image=picture)["image"], i
        given = self.transform(image=picture, mask=mask)
        return {
            "both": lambda: (given["image"], given["mask"], picture),
            "all of it": lambda: given,
            "a part": lambda: (given["image"], i),
        }[self.how]()


@pytest.mark.parametrize("how", ["one", "both", "all of it"])
def test_a_transform_that_is_called_by_names(cut, how):
    dataset = cut(ByName(Augment(), how))
    agrees(dataset, ByName(Augment(), how))
    assert dataset.stats().loads == 6


def test_where_a_part_is_left_out_nobody_knows_whether_it_was_used(cut):
    agrees(cut(ByName(Augment(), "a part")), ByName(Augment(), "a part"), "leaves out a part")


class Both:
    def __call__(self, image, *, mask):
        return image + random.randrange(9), mask


class ByPlaceAndName(Pictures):
    def __getitem__(self, i):
        return self.transform(torch.full((2,), i), mask=i)


def test_positional_and_keyword_arguments(cut):
    agrees(cut(ByPlaceAndName(Both())), ByPlaceAndName(Both()), "positional and with keyword")


class TakenApart(Pictures):
    """Of a dict that its transform gives, each part has a place of its own."""

    def __getitem__(self, i):
        given = self.transform({"image": torch.full((2,), i), "label": torch.tensor(-i)})
        return Labelled(given["image"], [given["label"], i])


@dataclasses.dataclass(frozen=True)
class Labelled:
    image: torch.Tensor
    labels: list


class OfDict(torch.nn.Module):
    def forward(self, sample):
        return {key: value + torch.randint(1000, ()) for key, value in sample.items()}


@pytest.mark.parametrize("count", [0, 1])
def test_parts_of_what_the_transform_gave(cut, count):
    transform = torch.nn.Sequential(torch.nn.Identity(), OfDict())
    dataset = cut(TakenApart(transform), steps=count)
    agrees(dataset, TakenApart(transform))
    assert dataset.stats().loads == 6 and type(dataset[0]) is Labelled


# How datasets keep it


class Slotted(Dataset):
    __slots__ = ("__hidden", "transform")

    def __init__(self, transform):
        self.transform = transform
        self.__hidden = 7

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return self.transform(torch.full((2,), i + self.__hidden)), i


class AllSlots:
    __slots__ = ("transform", "unset")
    __len__ = Pictures.__len__

    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, i):
        return self.transform(torch.full((2,), i)), i


class Rows(list):
    transform = None

    def __getitem__(self, i):
        return self.transform(super().__getitem__(i)), i


def rows(transform):
    made = Rows(torch.full((2,), i) for i in range(6))
    made.transform = transform
    return made


@pytest.mark.parametrize("make", [Slotted, AllSlots, rows])
def test_datasets_with_slots_or_items(cut, make):
    dataset = cut(make(steps()), steps=2)
    agrees(dataset, make(steps()))
    assert dataset.stats().loads == 6


class Computed(Pictures):
    transform = property(lambda self: steps(), lambda self, value: None)


def test_a_transform_that_cannot_be_replaced_is_told(cut):
    with pytest.raises(TypeError, match="transform of Computed is computed") as caught:
        cut(Computed(None), steps=2)
    assert "\n" not in str(caught.value)


class Shows(Pictures):
    def preview(self, i):
        return self.transform(torch.full((2,), i))


def test_methods_of_the_dataset_have_the_whole_transform(cut):
    dataset, plain = cut(Shows(steps()), steps=2), Shows(steps())
    torch.manual_seed(1)
    expected = plain.preview(3)
    torch.manual_seed(1)
    assert torch.equal(dataset.preview(3), expected)


@pytest.mark.parametrize(
    ("dataset", "options", "error"),
    [
        ([1, 2], {}, TypeError("without a transform")),
        (Pictures(None), {}, TypeError("without a transform")),
        (Pictures(steps()), {"steps": 5}, ValueError("has 4")),
        (Pictures(steps()), {"steps": True}, ValueError("has 4")),
        (Pictures(steps()), {"transform": print}, TypeError("takes it from the dataset")),
    ],
)
def test_bad_arguments(cut, dataset, options, error):
    with pytest.raises(type(error), match=str(error)) as caught:
        cut(dataset, **options)
    assert "\n" not in str(caught.value)


def test_a_cut_dataset_is_known_again_under_a_name(cut):
    options = {"steps": 2, "name": "until-random", "keep": True, "on_change": "clear"}
    first = cut(Pictures(steps()), **options)
    first[0]
    first.close()
    # Random steps are no part of what is cached.
    other = Pictures(torch.nn.Sequential(Step(1), Step(10), Step(7)))
    again = cut(other, **options)
    assert again.stats().filled == 1
    again.close()
    changed = cut(Pictures(torch.nn.Sequential(Step(2), Step(10), Noise())), **options)
    assert changed.stats().filled == 0
    changed.delete()


def test_a_cut_dataset_can_be_verified(cut):
    dataset = cut(Pictures(steps()), steps=2)
    dataset.warm(progress=False)
    assert dataset.verify() == 6
