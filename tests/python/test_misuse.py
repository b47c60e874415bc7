"""Odd programs: tensors without memory, closed descriptors, lists that change while they are read.

What they get is an exception or a miss; never a crash, and never harm to other processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def u8(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.fixture
def cache(make_cache):
    cache = make_cache(0.001, 8, (4,))
    cache.set_slot(0, u8(1, 2, 3, 4))
    return cache


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


@pytest.mark.parametrize("without_memory", [freed, fake])
def test_a_value_without_memory_is_refused_and_freezes_nothing(cache, without_memory):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        cache.set_slot(1, without_memory(u8(1, 1, 1, 1)))
    assert "\n" not in str(caught.value)
    assert not cache.stats().frozen
    cache.set_slot(1, u8(5, 6, 7, 8))
    assert cache.get_slot(1).tolist() == [5, 6, 7, 8]


def test_a_buffer_or_indices_without_memory_are_refused(cache):
    with pytest.raises(ValueError, match="no memory"):
        cache.get_many([0], out=freed(torch.zeros(1, 4, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="no memory"):
        cache.get_many(freed(torch.tensor([0])))
    with pytest.raises(ValueError, match="no memory"):
        cache.set_many([1], freed(torch.zeros(1, 4, dtype=torch.uint8)))


def test_a_buffer_that_reads_as_its_conjugate_is_refused(make_cache):
    cache = make_cache(0.001, 4, (2,), torch.complex64)
    cache.set_slot(0, torch.tensor([1 + 2j, 3 - 4j]))
    with pytest.raises(ValueError, match="conjugated"):
        cache.get_many([0], out=torch.zeros(1, 2, dtype=torch.complex64).conj())


def test_a_list_that_changes_while_it_is_read_does_no_harm(cache):
    indices: list[object] = []

    class Vandal:
        def __index__(self) -> int:
            indices.clear()
            return 0

    indices.extend([Vandal(), *range(8)] * 100)
    batch, found = cache.get_many(indices)
    assert len(batch) == len(found) == 900 and indices == []


def test_a_descriptor_that_the_program_closed_is_never_written_to(run_script, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    # As a daemon does: close everything, then open files of its own under the same numbers.
    answer = run_script(
        """
        import os, sys, torch, stocache
        cache = stocache.SharedCache(0.001, 8, (4096,), verbose=False)
        cache.set_slot(0, torch.ones(4096, dtype=torch.uint8))
        view = cache.get_slot(0)
        os.closerange(3, 256)
        files = [os.open(sys.argv[1], os.O_RDWR) for _ in range(200)]
        try:
            cache.set_slot(1, torch.ones(4096, dtype=torch.uint8))
        except RuntimeError as error:
            print(error)
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        del cache
        assert int(view.sum()) == 4096
        for file in files:
            os.fstat(file)  # still open
        """,
        victim,
    )
    assert "closed a descriptor" in answer.stdout
    assert victim.read_bytes() == b"precious"
    # The name cannot be removed without the descriptor; the next creation sweeps it.
    import stocache

    stocache.sweep()


def test_a_miss_of_a_batch_in_a_child_makes_a_later_set_no_error(cache):
    told, tell = os.pipe()
    answered, answer = os.pipe()
    child = os.fork()
    if child == 0:
        _, found = cache.get_many([1])
        os.write(answer, b"m")
        os.read(told, 1)
        try:
            cache.set_slot(1, u8(2, 2, 2, 2))
            os._exit(int(found[0]))
        except BaseException:
            os._exit(9)
    os.read(answered, 1)
    cache.set_slot(1, u8(1, 1, 1, 1))
    os.write(tell, b"g")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cache.get_slot(1).tolist() == [1, 1, 1, 1]
    for fd in (told, tell, answered, answer):
        os.close(fd)


def test_asking_to_keep_a_cache_that_others_do_not_keep_is_an_error(make_cache, unique_name):
    name = unique_name()
    make_cache(name=name, backing="shm")
    with pytest.raises(ValueError, match="keep"):
        make_cache(name=name, backing="shm", keep=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: memory of another user is not covered")
def test_root_does_not_join_what_another_user_offers(make_cache, unique_name, tmp_path):
    """A memfd of another uid under our name, with our header, must not be taken for ours."""
    name = unique_name()
    ours = make_cache(name=name, backing="memfd")
    ours.set_slot(0, u8(1, 2, 3, 4))
    fd = ours._arguments()[-1]
    copy = tmp_path / "copy"
    with open(f"/proc/self/fd/{fd}", "rb") as source:
        copy.write_bytes(source.read())
    copy.chmod(0o644)
    tmp_path.chmod(0o755)
    offer = (
        "import os,sys\n"
        f"fd = os.memfd_create('stocache-0-{ours_format(ours)}-{name}')\n"
        "os.write(fd, sys.stdin.buffer.read())\n"
        "os.fchmod(fd, 0o600)\n"
        "print('ready', flush=True)\n"
        "import signal; signal.pause()\n"
    )
    stranger = subprocess.Popen(
        ["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-S", "-c", offer],
        stdin=copy.open("rb"),
        stdout=subprocess.PIPE,
    )
    try:
        if stranger.stdout.readline() != b"ready\n":
            pytest.skip("no second user can run Python here: its memory is not covered")
        ours.close()
        again = make_cache(name=name, backing="memfd")
        assert again.get_slot(0) is None, "root read another user's memory"
    finally:
        stranger.kill()
        stranger.wait()
        stranger.stdout.close()
        stranger.stdin = None


def ours_format(cache) -> int:
    """The format number in a file name of this version; a memfd shows it in /proc."""
    link = os.readlink(f"/proc/self/fd/{cache._arguments()[-1]}")
    return int(link.split("stocache-0-")[1].split("-")[0])
