"""Batches whose images a fused pipeline makes: the same whoever makes them, in the trainer and in
workers, from memory, from disk and of what was just loaded."""

from __future__ import annotations

import hashlib
import time

import pytest
import stocache
import torch
from PIL import Image
from servers import Server
from sources import INDEX, Fixed
from stocache._cluster import spawn
from stocache._dataset.augmenting import Fusing
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset

v2 = pytest.importorskip("torchvision.transforms.v2")
tv_tensors = pytest.importorskip("torchvision.tv_tensors")

LENGTH = 26
SIDE = 20
SEED = 11
EPOCHS = 2


def pixels(i, height=SIDE, width=SIDE):
    generator = torch.Generator().manual_seed(i)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def photograph(i, varying=True):
    """A PIL image; of one in three it is said which way up it is, of others in which colours."""
    height, width = (SIDE + i % 5, SIDE + i % 3) if varying else (SIDE, SIDE)
    image = Image.fromarray(pixels(i, height, width).permute(1, 2, 0).numpy())
    if i % 3 == 0:
        image.info["icc_profile"] = b"p" * i
    if i % 3 == 1:
        exif = Image.Exif()
        exif[0x0112] = 6
        image.info["exif"] = exif.tobytes()
    return image


def samples(kind="tensor"):
    of = {
        "tensor": pixels,
        "image": lambda i: tv_tensors.Image(pixels(i)),
        "PIL": photograph,
        "array": lambda i: pixels(i).permute(1, 2, 0).contiguous().numpy(),
        "varying": lambda i: pixels(i, SIDE + i % 5, SIDE + i % 3),
    }[kind]
    return Fixed([{"image": of(i), "label": i, "name": f"{i}"} for i in range(LENGTH)])


def transform(*more):
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(8, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.25] * 3),
            *more,
        ]
    )


def expected(pipeline, source, epoch, seed=SEED):
    """Every image of an epoch, made by itself."""
    return {i: pipeline.apply(source[i], seed, epoch, i)["image"] for i in range(LENGTH)}


def seen(loader):
    """Every image of an epoch, by its label."""
    found = {}
    for batch in loader:
        for row, label in enumerate(batch["label"].tolist()):
            assert label not in found and batch["name"][row] == str(label)
            found[label] = batch["image"][row].clone()
    return found


def differ(one, other):
    """The labels of images that are not the same."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [label for label, image in one.items() if not torch.equal(image, other[label])]


def make(cached, share, pipeline, kind="tensor", **options):
    """A cache of which this share is in memory; the rest does not fit."""
    source = samples(kind)
    room = {"all": "8MiB", "some": INDEX + LENGTH // 2 * 1350, "none": INDEX + 64}[share]
    dataset = cached(source, room, transform=pipeline, fingerprint="x", **options)
    if share != "none":
        for i in range(LENGTH):
            dataset._stocache.get(i, False)
        filled = dataset.stats().filled
        assert filled == LENGTH if share == "all" else LENGTH // 4 < filled < LENGTH
    return source, dataset


@pytest.fixture
def natively(monkeypatch):
    """No sample is made by itself, in this process and in those that it forks."""

    def refuse(*_):
        raise AssertionError("a sample was made by itself")

    monkeypatch.setattr(Fusing, "sample", refuse)


# --- the same images, whoever makes them ---------------------------------------------------------


@pytest.mark.parametrize("share", ["all", "some", "none"])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_images_are_those_of_their_seed_epoch_and_index(cached, share, workers):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, share, pipeline)
    torch.manual_seed(SEED)
    loader = stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers)
    for epoch in range(EPOCHS):
        assert differ(seen(loader), expected(pipeline, source, epoch)) == []


def test_a_transform_that_draws_is_not_the_same_with_other_workers(cached):
    """The control: what is compared above differs where random numbers come one after the other."""
    found = []
    for workers in (0, 2):
        _, dataset = make(cached, "all", transform())
        torch.manual_seed(SEED)
        found.append(seen(stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers)))
    assert len(differ(*found)) > LENGTH // 2


@pytest.mark.parametrize("share", ["all", "some", "none"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_make_what_one_rank_would(cached, share, workers):
    pipeline = stocache.fuse(transform())
    for ranks in (1, 2):
        source, dataset = make(cached, share, pipeline)
        torch.manual_seed(SEED)
        found = {}
        for rank in range(ranks):
            sampler = DistributedSampler(dataset, ranks, rank)
            loader = stocache.DataLoader(dataset, 5, sampler=sampler, num_workers=workers)
            for epoch in (3, 4):
                sampler.set_epoch(epoch)
                found |= {(epoch, label): image for label, image in seen(loader).items()}
        for epoch in (3, 4):
            every = {label: image for (of, label), image in found.items() if of == epoch}
            assert differ(every, expected(pipeline, source, epoch)) == []


def digest(found):
    """Of all images of an epoch, whatever their order was."""
    every = hashlib.sha256()
    for label in sorted(found):
        every.update(found[label].contiguous().view(torch.uint8).numpy().tobytes())
    return every.hexdigest()


def test_another_process_makes_the_same(run_script):
    """A program that is started again: nothing of what it draws comes from where it runs."""
    program = """
        import sys, stocache, torch
        import test_fused_batches as this

        if __name__ == "__main__":
            workers, room = int(sys.argv[1]), sys.argv[2]
            source, pipeline = this.samples(), stocache.fuse(this.transform())
            with stocache.CachedDataset(
                source, room, transform=pipeline, fingerprint="x", verbose=False
            ) as dataset:
                torch.manual_seed(this.SEED)
                loader = stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers)
                print(*(this.digest(this.seen(loader)) for _ in range(this.EPOCHS)))
    """
    source, pipeline = samples(), stocache.fuse(transform())
    wanted = [digest(expected(pipeline, source, epoch)) for epoch in range(EPOCHS)]
    assert wanted[0] != wanted[1]
    for workers, room in ((0, "8MiB"), (2, "8MiB"), (1, INDEX + 64)):
        assert run_script(program, workers, room, fresh=True).stdout.split() == wanted


STEADY = {
    "bytes": [v2.CenterCrop(12), v2.RandomHorizontalFlip(1.0)],
    "numbers": [
        v2.CenterCrop((14, 10)),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]),
    ],
}


@pytest.mark.parametrize("kind", ["tensor", "image", "PIL", "array", "varying"])
@pytest.mark.parametrize("steps", STEADY)
@pytest.mark.parametrize("workers", [0, 2])
def test_steps_without_chance_are_an_epoch_of_torchvisions(cached, kind, steps, workers):
    """As by torch's DataLoader over the dataset without a cache, with torchvision's steps."""
    chain = v2.Compose([v2.ToImage(), *STEADY[steps], v2.ToPureTensor()])

    class Plain(torch.utils.data.Dataset):
        source = samples(kind)

        def __len__(self):
            return LENGTH

        def __getitem__(self, i):
            return chain(self.source[i])

    _, dataset = make(cached, "some", stocache.fuse(chain), kind)

    def epochs(loader):
        for epoch in range(EPOCHS):
            torch.manual_seed(epoch)  # torchvision draws whether to do what it always does
            yield from loader

    loaders = [
        DataLoader(Plain(), 5, shuffle=True, num_workers=workers),
        stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers),
    ]
    for theirs, ours in zip(*map(list, map(epochs, loaders)), strict=True):
        assert (ours["label"].tolist(), ours["name"]) == (theirs["label"].tolist(), theirs["name"])
        assert type(ours["image"]) is type(theirs["image"])
        far = 0 if steps == "bytes" else 1e-6
        torch.testing.assert_close(ours["image"], theirs["image"], rtol=0, atol=far)


def test_a_program_that_forks_between_batches_has_them_in_both_processes(cached, in_child):
    """Those that were begun are large enough to be made by threads, which a child does not have."""
    source = Fixed([{"image": pixels(i, 200, 200), "label": i, "name": f"{i}"} for i in range(26)])
    steps = [v2.RandomCrop(190), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    pipeline = stocache.fuse(v2.Compose(steps))
    dataset = cached(source, "8MiB", transform=pipeline, fingerprint="x")
    dataset.warm(progress=False)
    torch.manual_seed(SEED)
    wanted = expected(pipeline, source, 0)
    iterator = iter(stocache.DataLoader(dataset, 5))
    found = seen([next(iterator)])

    def rest():
        return digest(found | seen(iterator))

    assert in_child(rest) == in_child(rest) == digest(wanted)
    assert rest() == digest(wanted)


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("STOCACHE_SECRET", "words of the tests")
    monkeypatch.setenv("STOCACHE_CLUSTER_TIMEOUT", "5")  # whatever else this machine does
    monkeypatch.setattr(spawn.tempfile, "tempdir", str(tmp_path))
    server = Server()
    yield server
    server.stop()


@pytest.mark.parametrize("kind", ["tensor", "PIL"])
@pytest.mark.parametrize("memory", [1, "8MiB"])
def test_rows_from_servers_are_made_as_those_in_memory(cached, server, kind, memory, natively):
    pipeline = stocache.fuse(transform())
    source = samples(kind)
    same = {"fingerprint": "x", "dataset_name": "x", "probe": 0, "cluster": server.url}
    first = cached(source, "8MiB", **same)
    first.warm(progress=False)
    assert first.flush()
    torch.manual_seed(SEED)
    pipeline.set_epoch(0)
    wanted = expected_natively(pipeline, source)
    for workers in (0, 2):
        gone = Fixed([None] * LENGTH)  # who loads one finds no image
        dataset = cached(gone, memory, transform=pipeline, **same)
        batch = dataset.batches[[7, 0, 25, 3]]
        assert differ(seen([batch]), {label: wanted[label] for label in (7, 0, 25, 3)}) == []
        found = seen(stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers))
        assert differ(found, wanted) == []
        assert dataset.stats().cluster.hits > 0
        dataset.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_of_a_node_has_the_numbers_of_the_whole_dataset(tmp_path, workers):
    pipeline = stocache.fuse(transform())
    source = samples()
    torch.manual_seed(SEED)
    for ranks in (1, 2):
        found = {}
        for rank in range(ranks):
            shard = stocache.LazyShardDataset(
                source, disk_size=None, memory_size="8MiB", rank=rank, num_replicas=ranks,
                transform=pipeline, verbose=False,
            )  # fmt: skip
            shard.set_epoch(4)
            with shard:
                found |= seen(stocache.DataLoader(shard, 5, num_workers=workers))
                found |= seen_alone(shard)
        assert differ(found, expected(pipeline, source, 4)) == []


def seen_alone(shard):
    """The same by samples, of which a pipeline is told the epoch."""
    shard.transform.set_epoch(4)
    try:
        return {sample["label"]: sample["image"] for sample in (shard[0], shard[1])}
    finally:
        shard.transform._epoch[0] = -1


@pytest.mark.parametrize("kind", ["tensor", "image", "PIL", "array", "varying"])
@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_every_kind_are_gathered(cached, kind, workers, natively):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "all", pipeline, kind)
    torch.manual_seed(SEED)
    loader = stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers)
    found = seen(loader)
    for i in range(LENGTH):
        image, numbers = source[i]["image"], (SEED, 0, i)
        made = pipeline.apply(image, *numbers)
        assert torch.equal(found[i], made.as_subclass(torch.Tensor)), i


@pytest.mark.parametrize("kind", ["tensor", "PIL"])
def test_what_workers_load_is_made_by_the_trainer(cached, kind, natively):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "none", pipeline, kind)
    torch.manual_seed(SEED)
    found = seen(stocache.DataLoader(dataset, 5, num_workers=2))
    for i in range(LENGTH):
        made = pipeline.apply(source[i]["image"], SEED, 0, i)
        assert torch.equal(found[i], made.as_subclass(torch.Tensor)), i


def test_batches_and_single_samples_are_the_same(cached):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "some", pipeline)
    torch.manual_seed(SEED)
    pipeline.set_epoch(7)
    want = expected(pipeline, source, 7)
    indices = [3, 1, 25, 14]
    batch = dataset.batches[indices]
    assert all(torch.equal(batch["image"][k], want[i]) for k, i in enumerate(indices))
    for found in (dataset.__getitems__(indices), dataset[indices], [dataset[i] for i in indices]):
        assert all(torch.equal(found[k]["image"], want[i]) for k, i in enumerate(indices))
    assert torch.equal(dataset[-1]["image"], want[LENGTH - 1])
    for workers in (0, 2):
        for collate in (stocache.collate, None):
            loader = DataLoader(dataset, 5, num_workers=workers, collate_fn=collate)
            assert differ(seen(loader), want) == []


def test_a_subset_and_a_concatenation_have_the_numbers_of_what_is_under_them(cached, natively):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "all", pipeline)
    torch.manual_seed(SEED)
    pipeline.set_epoch(0)
    want = expected_natively(pipeline, source)
    chosen = Subset(dataset, list(range(5, 15)))
    found = seen(stocache.DataLoader(chosen, 4, num_workers=2))
    assert differ(found, {label: want[label] for label in range(5, 15)}) == []
    joined = ConcatDataset([chosen, Subset(dataset, list(range(15, 20)))])
    found = seen(stocache.DataLoader(joined, 4))
    assert differ(found, {label: want[label] for label in range(5, 20)}) == []


@pytest.mark.parametrize("share", ["all", "some", "none"])
@pytest.mark.parametrize("workers", [0, 2])
def test_indices_from_the_end_have_the_numbers_of_their_samples(cached, share, workers):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, share, pipeline)
    torch.manual_seed(SEED)
    pipeline.set_epoch(0)
    want = {i: expected(pipeline, source, 0)[i] for i in (3, LENGTH - 3, LENGTH - 1)}
    chosen = Subset(dataset, [-3, 3, -1])
    joined = ConcatDataset([chosen, Subset(dataset, [5, -2])])
    for kind in (stocache.DataLoader, DataLoader):
        for subset in (chosen, Subset(joined, [0, 1, 2]), Subset(joined, [0, 1, -3])):
            for collate in (stocache.collate, None):
                loader = kind(subset, 2, num_workers=workers, collate_fn=collate)
                assert differ(seen(loader), want) == []


@pytest.mark.parametrize("index", [LENGTH - 3, -3, "a key", (1, 2)])
def test_a_sample_that_comes_again_begins_another_pass(cached, index):
    class Keys(Fixed):
        def __getitem__(self, index):
            return super().__getitem__(index if isinstance(index, int) else 5)

    one = samples()
    dataset = cached(Keys([one[i] for i in range(LENGTH)]), transform=stocache.fuse(transform()))
    singly = [dataset[index]["image"] for _ in range(4)]
    together = [dataset.__getitems__([index])[0]["image"] for _ in range(4)]
    assert len({image.numpy().tobytes() for image in singly + together}) == 8
    # Another sample does not begin one.
    after, again = dataset[7]["image"], dataset._stocache.passes._number
    assert again == 7 and not torch.equal(after, dataset[7]["image"])


@pytest.mark.parametrize("workers", [0, 2])
def test_each_of_several_pipelines_has_its_own_seed(cached, workers):
    pipelines = [stocache.fuse(transform(), seed=seed) for seed in (3, 4, None)]
    parts = [make(cached, "all", pipeline) for pipeline in pipelines]
    torch.manual_seed(SEED)
    joined = ConcatDataset([Subset(dataset, range(5)) for _, dataset in parts])
    for epoch, loader in enumerate([stocache.DataLoader(joined, 5, num_workers=workers)] * 2):
        for batch, (source, _), seed in zip(loader, parts, (3, 4, SEED), strict=True):
            want = expected(pipelines[0], source, epoch, seed)
            assert all(torch.equal(batch["image"][i], want[i]) for i in range(5))


def expected_natively(pipeline, source):
    return {
        i: pipeline.apply(source[i]["image"], SEED, 0, i).as_subclass(torch.Tensor)
        for i in range(LENGTH)
    }


def test_rows_from_disk_are_made_as_those_in_memory(cached, tmp_path, natively):
    pipeline = stocache.fuse(transform())
    source = samples()
    dataset = cached(
        source, INDEX + 64, disk="16MiB", disk_path=tmp_path, transform=pipeline, fingerprint="x"
    )
    dataset.warm(progress=False)
    assert dataset.flush() and dataset.stats().disk.filled == LENGTH
    torch.manual_seed(SEED)
    pipeline.set_epoch(0)
    for workers in (0, 2):
        found = seen(stocache.DataLoader(dataset, 5, num_workers=workers))
        assert differ(found, expected_natively(pipeline, source)) == []


def test_rows_of_a_cache_that_recycles_its_memory_are_the_same(cached):
    pipeline = stocache.fuse(transform())
    source = samples()
    dataset = cached(source, INDEX + 20_000, transform=pipeline, fingerprint="x", policy="lru")
    torch.manual_seed(SEED)
    loader = stocache.DataLoader(dataset, 5, shuffle=True, num_workers=2)
    for epoch in range(3):
        assert differ(seen(loader), expected(pipeline, source, epoch)) == []


# --- seeds and epochs ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers, persistent", [(0, False), (2, False), (2, True)])
def test_epochs_differ_and_runs_do_not(cached, workers, persistent):
    runs = []
    for _ in range(2):
        _, dataset = make(cached, "some", stocache.fuse(transform()))
        torch.manual_seed(SEED)
        loader = stocache.DataLoader(
            dataset, 5, shuffle=True, num_workers=workers, persistent_workers=persistent
        )
        runs.append([seen(loader) for _ in range(3)])
    for one, other in zip(*runs, strict=True):
        assert differ(one, other) == []
    one, two, three = runs[0]
    assert all(len(differ(*pair)) > LENGTH // 2 for pair in ((one, two), (two, three)))


@pytest.mark.parametrize("workers, persistent", [(0, False), (2, False), (2, True)])
def test_a_stock_loader_makes_no_sample_twice_in_the_same_way(cached, workers, persistent):
    _, dataset = make(cached, "some", stocache.fuse(transform()))
    loader = DataLoader(
        dataset, 5, shuffle=True, num_workers=workers, persistent_workers=persistent
    )
    epochs = [seen(loader) for _ in range(3)]
    for pair in ((0, 1), (1, 2), (0, 2)):
        assert len(differ(*(epochs[k] for k in pair))) > LENGTH // 2


@pytest.mark.parametrize("workers, persistent", [(0, False), (2, False), (2, True)])
def test_set_epoch_says_which_it_is(cached, workers, persistent):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "some", pipeline)
    torch.manual_seed(SEED)
    for kind in (stocache.DataLoader, DataLoader):
        loader = kind(dataset, 5, num_workers=workers, persistent_workers=persistent)
        for epoch in (5, 2, 9):
            pipeline.set_epoch(epoch)
            assert differ(seen(loader), expected(pipeline, source, epoch)) == []


def numbers_of(pipeline, source, found):
    """Of the epochs of which these could be, and those that nobody says after each."""
    numbers = [said + (since << 32) for said in range(6) for since in range(3)]
    return [n for n in numbers if differ(found, expected(pipeline, source, n)) == []]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_was_said_has_its_number_however_often_it_is_said(cached, workers):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "all", pipeline)
    torch.manual_seed(SEED)
    loader = stocache.DataLoader(dataset, 5, num_workers=workers)
    next(iter(loader))  # a look at a batch
    found = []
    for epoch in (0, 0, 1, 1, 2, 0):
        pipeline.set_epoch(epoch)
        found += numbers_of(pipeline, source, seen(loader))
        assert torch.equal(dataset[3]["image"], expected(pipeline, source, epoch)[3])
    assert found == [0, 0, 1, 1, 2, 0]
    # Without another word, those that follow have numbers that nobody says.
    assert numbers_of(pipeline, source, seen(loader)) == [1 << 32]
    state = loader.state_dict()
    assert numbers_of(pipeline, source, seen(loader)) == [2 << 32]
    pipeline.set_epoch(1)
    assert numbers_of(pipeline, source, seen(loader)) == [1]
    other = stocache.DataLoader(dataset, 5, num_workers=workers)
    pipeline.set_epoch(0)
    other.load_state_dict(state)
    assert numbers_of(pipeline, source, seen(other)) == [2 << 32]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_before_a_sampler_is_told_its_epoch_makes_no_two_of_them_alike(cached, workers):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "all", pipeline)
    torch.manual_seed(SEED)
    for new in (False, True):
        sampler = DistributedSampler(dataset, 1, 0)

        def loader(sampler=sampler):
            return stocache.DataLoader(dataset, 5, sampler=sampler, num_workers=workers)

        one = loader()
        next(iter(one))
        found = []
        for epoch in (0, 1, 2, 1):
            sampler.set_epoch(epoch)
            found += numbers_of(pipeline, source, seen(loader() if new else one))
        assert found == [1 << 32, 1, 2, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_made_anew_goes_on_with_the_next_epoch(cached, workers):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "all", pipeline)

    def loader(dataset=dataset):
        return stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers)

    torch.manual_seed(SEED)
    assert [numbers_of(pipeline, source, seen(loader())) for _ in range(2)] == [[0], [1]]
    third = loader()
    begun = seen([next(iter(third))])
    state = third.state_dict()
    assert numbers_of(pipeline, source, seen(loader())) == [3]
    # In another process, whose datasets were counted nowhere.
    _, again = make(cached, "all", pipeline)
    goes_on = loader(again)
    goes_on.load_state_dict(state)
    assert numbers_of(pipeline, source, begun | seen(goes_on)) == [2]
    assert [numbers_of(pipeline, source, seen(loader(again))) for _ in range(2)] == [[3], [4]]


def test_a_seed_of_its_own_goes_before_that_of_torch(cached):
    pipeline = stocache.fuse(transform(), seed=3)
    pipeline.set_epoch(0)
    source, dataset = make(cached, "all", pipeline)
    for workers in (0, 1):
        torch.manual_seed(workers)
        found = seen(stocache.DataLoader(dataset, 5, num_workers=workers))
        assert differ(found, expected(pipeline, source, 0, seed=3)) == []


def test_torchs_own_random_numbers_stay_what_they_are(cached):
    """The order and what a program draws meanwhile are those of a loader without a transform."""
    found = []
    for pipeline in (None, stocache.fuse(transform())):
        for workers in (0, 2):
            _, dataset = make(cached, "some", pipeline)
            torch.manual_seed(SEED)
            loader = stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers)
            order = [batch["label"].tolist() for _ in range(2) for batch in loader]
            found.append((order, torch.rand(3).tolist()))
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_goes_on_has_its_own_numbers(cached, workers):
    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "some", pipeline)

    def loader():
        return stocache.DataLoader(dataset, 5, shuffle=True, num_workers=workers)

    torch.manual_seed(SEED)
    first = loader()
    seen(first)
    iterator = iter(first)
    begun = seen([next(iterator), next(iterator)])
    state = first.state_dict()
    del iterator
    torch.manual_seed(99)
    second = loader()
    second.load_state_dict(state)
    rest = seen(second)
    assert len(begun) == 10 and not begun.keys() & rest.keys()
    assert differ(begun | rest, expected(pipeline, source, 1)) == []
    assert differ(seen(second), expected(pipeline, source, 2)) == []
    # Between epochs.
    third = loader()
    third.load_state_dict(second.state_dict())
    assert differ(seen(third), expected(pipeline, source, 3)) == []


# --- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_types_and_layouts_are_as_asked_for(cached, workers, dtype, natively):
    pipeline = stocache.fuse(transform(), dtype=dtype, memory_format=torch.channels_last)
    source, dataset = make(cached, "some", pipeline)
    torch.manual_seed(SEED)
    for batch in stocache.DataLoader(dataset, 5, num_workers=workers):
        images = batch["image"]
        assert images.dtype == (dtype or torch.float32) and images.shape[1:] == (3, 8, 8)
        assert images.is_contiguous(memory_format=torch.channels_last)
        for image, label in zip(images, batch["label"].tolist(), strict=True):
            made = pipeline.apply(source[label]["image"], SEED, 0, label)
            assert torch.equal(image, made.as_subclass(torch.Tensor))


def test_bytes_come_out_for_who_normalises_elsewhere(cached, natively):
    pipeline = stocache.fuse(v2.Compose([v2.RandomCrop(8), v2.RandomHorizontalFlip()]))
    source, dataset = make(cached, "all", pipeline)
    torch.manual_seed(SEED)
    found = seen(stocache.DataLoader(dataset, 5, num_workers=1))
    assert {image.dtype for image in found.values()} == {torch.uint8}
    assert differ(found, expected_natively(pipeline, source)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_of_batches_comes_after(cached, workers):
    def doubled(batch):
        batch["image"] = batch["image"] * 2
        return batch

    pipeline = stocache.fuse(transform())
    source, dataset = make(cached, "some", pipeline)
    torch.manual_seed(SEED)
    loader = stocache.DataLoader(dataset, 5, num_workers=workers, batch_transform=doubled)
    want = {label: image * 2 for label, image in expected(pipeline, source, 0).items()}
    assert differ(seen(loader), want) == []


def test_images_and_masks_of_a_sample_go_together(cached):
    def sample(i):
        image = pixels(i)
        return {
            "image": tv_tensors.Image(image), "label": i, "name": f"{i}",
            "mask": tv_tensors.Mask(image[:1]),
        }  # fmt: skip

    steps = v2.Compose([v2.RandomCrop(8), v2.RandomHorizontalFlip()])
    dataset = cached(
        Fixed([sample(i) for i in range(LENGTH)]), transform=stocache.fuse(steps), fingerprint="x"
    )
    for _ in range(2):
        for batch in stocache.DataLoader(dataset, 5, num_workers=2):
            assert torch.equal(batch["image"][:, :1], batch["mask"])


def test_a_batch_that_is_sent_by_a_worker_keeps_its_layout(cached):
    """Where the trainer does not gather: a worker_init_fn may change anything."""
    pipeline = stocache.fuse(transform(), memory_format=torch.channels_last)
    source, dataset = make(cached, "all", pipeline)
    torch.manual_seed(SEED)
    loader = stocache.DataLoader(dataset, 5, num_workers=2, worker_init_fn=nothing)
    for batch in loader:
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    for batch in loader:
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True):
            made = pipeline.apply(source[label]["image"], SEED, 1, label)
            assert torch.equal(image, made.as_subclass(torch.Tensor))


def nothing(_):
    pass


# --- bad images ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", ["all", "none"])
def test_an_error_names_the_sample_and_nothing_of_its_batch_comes(cached, workers, share):
    small = {"image": pixels(0, 5, 5), "label": 13, "name": "13"}
    source = Fixed([small if i == 13 else samples()[i] for i in range(LENGTH)])
    dataset = cached(
        source, "8MiB" if share == "all" else INDEX + 64,
        transform=stocache.fuse(v2.RandomCrop(8)), fingerprint="x",
    )  # fmt: skip
    if share == "all":
        [dataset._stocache.get(i, False) for i in range(LENGTH)]
    loader = stocache.DataLoader(dataset, 5, num_workers=workers)
    iterator, labels = iter(loader), []
    for number in range(6):
        if number == 2:
            with pytest.raises(ValueError, match=r"sample 13: .*RandomCrop"):
                next(iterator)
            continue
        labels += next(iterator)["label"].tolist()
    assert next(iterator, None) is None  # workers end
    assert labels == [i for i in range(LENGTH) if not 10 <= i < 15]


def test_images_that_become_of_several_sizes_are_the_error_of_torch(cached):
    pipeline = stocache.fuse(v2.RandomHorizontalFlip())
    _, dataset = make(cached, "all", pipeline, "varying")
    with pytest.raises(RuntimeError, match="equal size"):
        seen(stocache.DataLoader(dataset, 5))


def test_a_sample_without_an_image_is_an_error_with_its_index(cached):
    dataset = cached(Fixed([(i, "text") for i in range(8)]), transform=stocache.fuse(transform()))
    with pytest.raises(TypeError, match=r"sample 0: .*no image"):
        next(iter(stocache.DataLoader(dataset, 4)))


# --- transforms that are functions ---------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_people_are_told_what_a_slow_transform_takes(capfd, workers):
    """Its time is that of a transform, whatever that of the machine: the source takes none."""
    source = Fixed([(pixels(i), i) for i in range(LENGTH)])
    with stocache.CachedDataset(source, "8MiB", transform=slow) as dataset:
        [dataset._stocache.get(i, False) for i in range(LENGTH)]
        for _ in range(2):
            for _ in stocache.DataLoader(dataset, 5, num_workers=workers):
                pass
        stats = dataset.stats()
    assert stats.transforms == 2 * LENGTH and stats.transform_seconds >= stats.transforms * 0.004
    assert "s in transform" in str(stats)
    lines = [line for line in capfd.readouterr().out.splitlines() if "stocache.fuse" in line]
    assert len(lines) == 1 and "The transform (slow) took" in lines[0]


def slow(sample):
    time.sleep(0.005)
    return sample


def test_nobody_is_told_of_a_transform_that_takes_less_than_loading(capfd):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return slow((pixels(i), i))

    with stocache.CachedDataset(Slow(), "8MiB", transform=lambda sample: sample) as dataset:
        [dataset[i] for _ in range(2) for i in range(8)]
    assert "stocache.fuse" not in capfd.readouterr().out


def test_a_fused_transform_is_not_counted_as_a_function(cached):
    _, dataset = make(cached, "all", stocache.fuse(transform()))
    seen(stocache.DataLoader(dataset, 5))
    assert dataset.stats().transforms == 0
