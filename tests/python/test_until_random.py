"""A dataset whose transform is random from some step on: what comes before is cached."""

from __future__ import annotations

import dataclasses
import random
import warnings

import numpy as np
import pytest
import stocache
import torch
from augmented import Joint, Noise, Pictures, Step, agrees, shown, steps
from stocache._dataset import splitting, until_random
from torch.utils.data import DataLoader, Dataset, Subset

SHAPES = ["tuple", "alone", "dict", "named", "two views", "same twice", "beside"]


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
    assert dataset.dataset.aside.steps is None


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


class InPlace(torch.nn.Module):
    """Augments the very tensor that it is given."""

    def forward(self, picture):
        return picture.add_(torch.randint(1, 1000, ()))


@pytest.mark.parametrize("shape", ["two views", "beside", "tuple"])
@pytest.mark.parametrize("first", [[], [torch.nn.Identity()]])
def test_what_is_augmented_in_place_is_one_thing_wherever_it_stands(cut, shape, first):
    transform = torch.nn.Sequential(*first, InPlace())
    dataset = cut(Pictures(transform, shape), steps=len(first))
    agrees(dataset, Pictures(transform, shape))
    assert dataset.stats().loads == 6


def test_control_two_things_would_be_others(cut, monkeypatch):
    monkeypatch.setattr(until_random._Shares, "taken_out", lambda self, value: (value, ()))
    dataset = cut(Pictures(InPlace(), "two views"), probe=0)
    with pytest.raises(AssertionError):
        agrees(dataset, Pictures(InPlace(), "two views"))


class Frozen(torch.nn.Module):
    """Does one thing in training and another in evaluation."""

    def forward(self, picture):
        return picture + (1 if self.training else 1000)


@pytest.mark.parametrize("training", [True, False])
def test_modes_of_steps_are_the_users(cut, training):
    def make():
        first, last = Frozen().train(not training), Frozen().train(training)
        transform = torch.nn.Sequential(first, torch.nn.Sequential(last, Noise()), Frozen())
        transform.training = training
        return transform

    source = Pictures(make())
    modes = [each.training for each in source.transform.modules()]
    dataset = cut(source, steps=1)
    assert [each.training for each in source.transform.modules()] == modes
    agrees(dataset, Pictures(make()))


def test_a_sequential_with_hooks_is_not_cut_inside(cut, capsys):
    transform = torch.nn.Sequential(torch.nn.Identity(), Noise())
    transform.register_forward_hook(lambda module, arguments, result: result + 1)
    cut(Pictures(transform), verbose=True)
    assert "cached before all steps of Pictures.transform" in capsys.readouterr().out


# A transform that remembers


class Lazy(torch.nn.Module):
    """Makes its random numbers when it is first called."""

    generator = None

    def forward(self, picture):
        if self.generator is None:
            self.generator = np.random.default_rng(7)
        return picture + int(self.generator.integers(1000))


class Slots:
    __slots__ = ("generator",)

    def __init__(self):
        self.generator = random.Random(3)

    def __call__(self, picture):
        return picture + self.generator.randrange(1000)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls = 0
        self.of = []

    def forward(self, picture):
        self.calls += 1
        self.seen += 1
        self.of.append(self.calls)
        return picture + 100 * self.calls + 10_000 * self.seen + 1_000_000 * len(self.of)


def enclosed():
    generator = torch.Generator().manual_seed(4)
    return lambda picture: picture + torch.randint(1000, (), generator=generator)


@pytest.mark.parametrize("make", [Lazy, Slots, Counting, enclosed])
@pytest.mark.parametrize("shape", ["tuple", "two views", "changed"])
def test_a_transform_that_remembers_is_called_as_often_as_without_the_cache(cut, make, shape):
    warning = "looks at what its transform gave (mul)" if shape == "changed" else None
    agrees(cut(Pictures(make(), shape)), Pictures(make(), shape), warning)


@pytest.mark.parametrize("make", [Lazy, Slots, Counting])
def test_control_a_look_that_puts_nothing_back_is_seen(cut, make, monkeypatch):
    monkeypatch.setattr(until_random.Snapshot, "put_back", lambda self: None)
    with pytest.raises(AssertionError):
        agrees(cut(Pictures(make())), Pictures(make()))


# What a transform gives


class Sometimes(torch.nn.Module):
    """Fails, gives nothing, or one part more, for some random numbers."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, picture):
        draw = random.randrange(4)
        if draw or self.how == "never":
            return picture + draw
        if self.how == "fails":
            raise ValueError("no box is left")
        return None


class GoesOn(Pictures):
    """Gives another sample where its transform does not."""

    def __getitem__(self, i):
        for _ in range(50):
            try:
                sample = super().__getitem__(i)
            except ValueError:
                sample = None, i
            if sample[0] is not None:
                return sample
            i = (i + 1) % 6
        raise RuntimeError("no sample is left")


@pytest.mark.parametrize("how", ["never", "fails", "gives nothing"])
def test_a_dataset_that_goes_on_where_its_transform_fails(cut, how):
    dataset = cut(GoesOn(Sometimes(how)))
    agrees(dataset, GoesOn(Sometimes(how)))
    assert dataset.stats().filled == 6


@pytest.mark.parametrize("how", ["fails", "gives nothing"])
def test_so_it_does_at_the_first_sample(cut, how):
    dataset = cut(GoesOn(Sometimes(how)))
    random.seed(next(seed for seed in range(99) if not random.Random(seed).randrange(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset[2]
    agrees(dataset, GoesOn(Sometimes(how)))
    assert dataset.stats().filled == 6


def test_no_error_is_made_only_to_see_what_comes_of_it(cut):
    source = GoesOn(Sometimes("never"))
    agrees(cut(source), GoesOn(Sometimes("never")))
    assert len(source.loads) == 6 + 1, "the first was made both ways"


def test_control_an_error_that_the_dataset_would_catch_ends_an_epoch(cut, monkeypatch):
    monkeypatch.setattr(until_random, "_is_caught", lambda frame: False)
    with pytest.raises(ValueError, match="no box is left"):
        agrees(cut(GoesOn(Sometimes("fails"))), GoesOn(Sometimes("fails")))


def test_where_the_transform_gives_nothing_the_dataset_is_asked(cut):
    """Of that alone it can ask without our seeing it."""

    class Asks(Pictures):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            return self[(i + 1) % 6] if sample[0] is None else sample

    dataset = cut(Asks(Sometimes("gives nothing")))
    random.seed(0)
    with pytest.warns(RuntimeWarning, match="takes the None of its transform") as caught:
        for _ in range(40):
            assert dataset[2][0] is not None
    assert len(caught) == 1
    agrees(dataset, Asks(Sometimes("gives nothing")))


def test_an_error_that_the_dataset_lets_pass_comes_to_the_program(cut):
    dataset, plain = cut(Pictures(Sometimes("fails"))), Pictures(Sometimes("fails"))
    for seed in range(20):
        seen = []
        for source in (plain, dataset):
            random.seed(seed)
            try:
                seen.append(shown(source[2]))
            except ValueError as error:
                seen.append(str(error))
            seen.append(random.getstate())
        assert seen[:2] == seen[2:]


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


@pytest.mark.parametrize("how", ["one", "both", "all of it", "a part"])
def test_a_transform_that_is_called_by_names(cut, how):
    dataset = cut(ByName(Augment(), how))
    agrees(dataset, ByName(Augment(), how))
    assert dataset.stats().loads == 6


class Both:
    def __call__(self, image, *, mask):
        return image + random.randrange(9), mask


class ByPlaceAndName(Pictures):
    def __getitem__(self, i):
        return self.transform(torch.full((2,), i), mask=i)


def test_positional_and_keyword_arguments(cut):
    dataset = cut(ByPlaceAndName(Both()))
    agrees(dataset, ByPlaceAndName(Both()))
    assert dataset.stats().loads == 6


def test_a_number_that_stands_at_two_places(cut):
    dataset = cut(Pictures(torch.nn.Sequential(Step(1)), "number"), steps=0)
    agrees(dataset, Pictures(Step(1), "number"))
    assert dataset.stats().loads == 6


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


def hooked(step):
    step.register_forward_hook(lambda module, args, given: given + random.randrange(1000))


def hooked_before(step):
    step.register_forward_pre_hook(lambda module, args: (args[0] + random.randrange(1000),))


def patched(step):
    forward = step.forward
    step.forward = lambda image: forward(image) + random.randrange(1000)


ALTERED = [hooked, hooked_before, patched]


def resizing(alter):
    pytest.importorskip(
        "torchvision", reason="torchvision is not installed: its steps are not covered"
    )
    from torchvision.transforms import v2

    step = v2.Pad(1)
    if alter is not None:
        alter(step)
    return torch.nn.Sequential(step, Noise())


class Images(Pictures):
    def __getitem__(self, i):
        self.loads.append(i)
        return self.transform(torch.full((1, 2, 2), i)), i


@pytest.mark.parametrize("alter", ALTERED)
def test_a_step_with_hooks_or_functions_of_its_own_counts_as_random(cut, alter):
    agrees(cut(Images(resizing(alter))), Images(resizing(alter)))


def test_control_who_does_not_look_for_hooks_caches_what_is_random(cut, monkeypatch):
    monkeypatch.setattr(splitting, "is_altered", lambda step: False)
    with pytest.raises(AssertionError):
        agrees(cut(Images(resizing(hooked))), Images(resizing(hooked)))


@pytest.mark.parametrize("alter", ALTERED)
def test_a_step_with_hooks_or_functions_of_its_own_is_not_fused(alter):
    with pytest.raises(TypeError, match="Pad has hooks, or functions in the place of its"):
        stocache.fuse(resizing(alter)[:1])
    assert stocache.fuse(resizing(None)[:1]) is not None


def another(source):
    source.transform = torch.nn.Sequential(Step(7))


def one_more(source):
    source.transform.append(Step(1000))


def one_in_the_place_of_another(source):
    source.transform[3] = Step(1000)


@pytest.mark.parametrize("change", [another, one_more, one_in_the_place_of_another])
def test_another_transform_is_used_from_then_on(cut, change):
    sources = Pictures(steps()), Pictures(steps())
    dataset = cut(sources[0])
    agrees(dataset, sources[1])
    for source in sources:
        change(source)
    with pytest.warns(RuntimeWarning, match="has another transform than when it was") as told:
        for epoch in range(2):
            seen = []
            for source in (sources[1], dataset):
                random.seed(epoch)
                torch.manual_seed(epoch)
                seen.append([shown(source[i]) for i in range(6)])
            assert seen[0] == seen[1]
    assert len(told) == 1
