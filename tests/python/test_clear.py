"""clear() while others read and fill: nobody sees a torn sample, or one of another index."""

from __future__ import annotations

import mmap
import multiprocessing
import random
import sys

import pytest

torch = pytest.importorskip("torch")
import stocache  # noqa: E402

FORK = multiprocessing.get_context("fork")
SAMPLES = 64
WORDS = 4_000
VERSIONS = 1_000


class Changing:
    """Gives another sample each time, of which every word says whose it is and which."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        word = index * VERSIONS + random.randrange(VERSIONS)
        return torch.full((WORDS,), word), index, word


def is_right(words, index, word):
    first = int(words[0])
    return first == word and first // VERSIONS == index and bool((words == first).all())


def read_samples(dataset, seed, count, wrongs):
    rng = random.Random(seed)
    for _ in range(count):
        index = rng.randrange(SAMPLES)
        words, label, word = dataset[index]
        if label != index or not is_right(words, index, word):
            print(f"sample {index} is {label}: {words}, {word}", file=sys.stderr, flush=True)
            wrongs.value += 1


def read_batches(dataset, seed, count, wrongs, workers):
    torch.manual_seed(seed)
    loader = stocache.DataLoader(dataset, 16, shuffle=True, num_workers=workers)
    done = 0
    while done < count:
        for words, labels, word in loader:
            for row in range(len(labels)):
                if not is_right(words[row], int(labels[row]), int(word[row])):
                    print(f"row of {labels[row]}: {words[row]}", file=sys.stderr, flush=True)
                    wrongs.value += 1
            done += len(labels)


def clear_and_fill(dataset, seed, ended):
    rng = random.Random(seed)
    while not ended.is_set():
        dataset.clear()
        # In another order each time, so that a sample's memory becomes another's.
        for index in rng.sample(range(SAMPLES), rng.randrange(SAMPLES)):
            dataset[index]


@pytest.fixture
def clearing():
    """clearing(dataset, seed): another process clears and fills until the test ends."""
    ended = FORK.Event()
    started = []

    def run(dataset, seed):
        started.append(FORK.Process(target=clear_and_fill, args=(dataset, seed, ended)))
        started[-1].start()

    yield run
    ended.set()
    for process in started:
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.parametrize("policy", ["freeze", "lru"])
@pytest.mark.parametrize("how", ["samples", "batches", "batches of workers", "verify"])
@pytest.mark.parts(4)
def test_samples_are_whole_while_another_process_clears(
    cached, clearing, in_child, seed, scale, policy, how
):
    dataset = cached(Changing(), "16MiB", policy=policy, fingerprint="x")
    wrongs = FORK.Value("i", 0)
    clearing(dataset, seed)
    count = scale(3_000, 100_000)

    def read():
        if how == "samples":
            read_samples(dataset, seed, count, wrongs)
        elif how == "verify":
            for _ in range(count // 10):
                index = random.randrange(SAMPLES)
                # A torn copy would be of another length or schema: no exception, and an answer.
                differs = dataset._stocache.records.differs(index, Changing()[index], False)
                assert differs in {None, True, False}
                dataset._stocache.records.contains(index)
        else:
            read_batches(dataset, seed, count, wrongs, 2 if "workers" in how else 0)

    in_child(read, timeout=600)
    assert wrongs.value == 0
    stats = dataset.stats()
    assert stats.fills > SAMPLES, "nothing was ever filled again: the test tests nothing"
    assert stats.filled <= SAMPLES


def test_without_a_check_after_the_copy_other_samples_would_be_seen(
    cached, clearing, seed, wait_until
):
    """The control: who reads the memory of a sample and does not ask again sees another sample."""
    dataset = cached(Changing(), "16MiB", fingerprint="x", backing="shm")
    words = dataset[5][0]
    with open(dataset.path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    at = memory.find(words.numpy().tobytes())
    assert at > 0
    clearing(dataset, seed)

    def is_wrong():
        copied = torch.frombuffer(bytearray(memory[at : at + 8 * WORDS]), dtype=torch.int64)
        return not is_right(copied, 5, int(copied[0]))

    wait_until(is_wrong, "another sample lies where sample 5 was")
    memory.close()
