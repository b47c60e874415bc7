"""What is not ours is refused, what is ours is private, and what was edited is found."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import stocache
import torch
from kernel import root_only
from samples import complaint, limit_gib, whole, words_cache

HEADER_BYTES = 256  # the part of a segment that never changes and carries its own checksum


# P11: attach refuses what is not ours


@pytest.fixture
def kept(unique_name):
    """A kept cache that nobody uses, with eight samples: its name, its file and how to open it."""
    name = unique_name()
    with words_cache(8, 64, name=name, keep=True, backing="shm") as cache:
        cache.set_many(range(8), torch.stack([whole(idx, 64) for idx in range(8)]))
        path = Path(cache.path)

    class Kept:
        def __init__(self):
            self.name, self.path, self.good = name, path, path.read_bytes()

        def reset(self, contents=None):
            self.remove()
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            os.write(descriptor, self.good if contents is None else contents)
            os.fchmod(descriptor, 0o600)
            os.close(descriptor)

        def remove(self):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)

        def open(self, **options):
            return words_cache(8, 64, name=name, keep=True, backing="shm", **options)

        def served(self) -> bool:
            """Whether the file is accepted: an error, or a new and empty cache, is a refusal."""
            try:
                with self.open() as cache:
                    return any(cache.get_slot(idx) is not None for idx in range(8))
            except (RuntimeError, ValueError):
                return False

        def refused(self) -> str:
            with pytest.raises(RuntimeError) as caught:
                self.open().close()
            message = str(caught.value)
            assert "\n" not in message and str(path) in message
            return message

    made = Kept()
    yield made
    made.remove()


def test_the_kept_file_of_these_tests_is_accepted_as_it_is(kept):
    # the control: what the tests below damage opens, and holds its samples, when it is whole
    for _ in range(2):
        with kept.open() as cache:
            assert all(complaint(idx, cache.get_slot(idx)) is None for idx in range(8))
        assert kept.served()
        kept.reset()


@root_only
def test_a_file_of_another_user_is_refused(kept):
    os.chown(kept.path, 65534, 65534)
    message = kept.refused()
    assert "65534" in message and re.search("owner|uid|user", message)
    os.chown(kept.path, 0, 0)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o666, 0o602, 0o700, 0o4600])
def test_a_file_that_others_may_reach_is_refused(kept, mode):
    os.chmod(kept.path, mode)
    assert "mode" in kept.refused()


def test_what_is_no_regular_file_is_refused(kept):
    kept.remove()
    os.mkfifo(kept.path, 0o600)
    message = kept.refused()
    assert "regular" in message and "symbolic" not in message
    kept.remove()
    kept.path.mkdir(0o600)
    assert "regular" in kept.refused()


def test_a_symbolic_link_is_refused_and_not_followed(kept, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(kept.good)
    target.chmod(0o600)
    kept.remove()
    kept.path.symlink_to(target)
    assert "symbolic" in kept.refused() or "symlink" in kept.refused()
    assert target.read_bytes() == kept.good
    kept.remove()
    kept.path.symlink_to(tmp_path / "nowhere")
    kept.refused()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("size", [0, 1, 8, 255, 256, 4096, -1, 1, "+1"])
def test_a_file_of_another_size_is_refused(kept, size):
    length = len(kept.good)
    wanted = length + 1 if size == "+1" else size % length
    os.truncate(kept.path, wanted)
    assert "size" in kept.refused()


def test_another_magic_number_is_refused(kept):
    kept.reset(b"S" + kept.good[1:])
    assert "magic" in kept.refused()
    kept.reset(bytes(len(kept.good)))
    assert "magic" in kept.refused()


@pytest.mark.parametrize("version", [0, 1, 255, 2**32 - 1])
def test_another_format_version_is_refused(kept, version):
    kept.reset(kept.good[:8] + version.to_bytes(4, "little") + kept.good[12:])
    message = kept.refused()
    assert "version" in message and str(version) in message


def test_another_geometry_is_a_value_error_that_keeps_the_file(kept):
    with pytest.raises(ValueError, match="64"):
        words_cache(8, 32, name=kept.name, keep=True, backing="shm")
    with kept.open() as cache:
        assert all(complaint(idx, cache.get_slot(idx)) is None for idx in range(8))


def test_the_reasons_to_refuse_are_told_apart(kept, tmp_path):
    reasons = set()

    def collect():
        reasons.add(kept.refused().replace(str(kept.path), ""))

    os.chmod(kept.path, 0o644)
    collect()
    kept.reset(kept.good[:-1])
    collect()
    kept.reset(b"S" + kept.good[1:])
    collect()
    kept.reset(kept.good[:8] + b"\x77" + kept.good[9:])
    collect()
    kept.reset(kept.good[:33] + b"\x77" + kept.good[34:])
    collect()
    kept.remove()
    os.mkfifo(kept.path, 0o600)
    collect()
    kept.remove()
    kept.path.symlink_to(tmp_path)
    collect()
    assert len(reasons) == 7, reasons


def test_no_damaged_header_is_accepted(kept, in_child, scale, seed):
    rng = random.Random(seed)

    def attempt():
        accepted = []
        for _ in range(scale(1500, 100_000)):
            damaged = bytearray(kept.good)
            for _ in range(rng.choice([1, 1, 2, 8])):
                damaged[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
            if bytes(damaged) == kept.good:
                continue
            kept.reset(bytes(damaged))
            if kept.served():
                accepted.append(damaged[:HEADER_BYTES].hex())
        return accepted

    assert in_child(attempt, timeout=1200) == []


def test_every_single_bit_of_the_header_counts(kept, in_child):
    def attempt():
        accepted = []
        for bit in range(8 * HEADER_BYTES):
            damaged = bytearray(kept.good)
            damaged[bit // 8] ^= 1 << bit % 8
            kept.reset(bytes(damaged))
            if kept.served():
                accepted.append(bit)
        return accepted

    assert in_child(attempt) == []


def test_a_foreign_file_of_that_name_is_left_alone(kept):
    kept.reset(b"somebody's notes" * 100)
    kept.refused()
    stocache.sweep()
    assert kept.path.read_bytes() == b"somebody's notes" * 100


@root_only
def test_another_user_gets_caches_of_its_own(make_cache, unique_name, run_script):
    if not shutil.which("setpriv"):
        pytest.skip("setpriv is absent: a second user is not covered")
    name = unique_name()
    cache = make_cache(limit_gib(8, 64), 8, (64,), torch.int64, name=name, backing="shm")
    cache.set_slot(0, whole(0, 64))
    script = """
        import os, sys, torch, stocache
        from samples import limit_gib, whole
        try:
            open(sys.argv[2], "rb")
            sys.exit("the file can be read by another user")
        except PermissionError:
            pass
        with stocache.SharedCache(
            limit_gib(8, 64), 8, (64,), torch.int64, name=sys.argv[1], backing="shm"
        ) as cache:
            assert cache.get_slot(0) is None, "the same name, another user, one cache"
            cache.set_slot(0, whole(0, 64))
            assert cache.path != sys.argv[2]
        with stocache.SharedCache(
            limit_gib(8, 64), 8, (64,), torch.int64, name=sys.argv[1], backing="memfd"
        ) as cache:
            assert cache.get_slot(0) is None
        assert not any(sys.argv[1] in name for name in stocache.sweep())
    """
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    probe = subprocess.run(
        [*nobody, sys.executable, "-c", "import stocache"], capture_output=True, cwd="/", text=True
    )
    if probe.returncode != 0:
        pytest.skip("another user cannot import this installation: a second user is not covered")
    for folder in (run_script.tmp_path, *run_script.tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    source = Path(__file__).parent / "samples.py"
    shutil.copy(source, run_script.tmp_path)
    run_script(script, name, cache.path, prefix=nobody)
    assert os.path.exists(cache.path) and complaint(0, cache.get_slot(0)) is None


# P12: private by default


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_files_are_private_under_any_umask(in_child, umask):
    def make():
        os.umask(umask)
        with words_cache(8, 8, backing="shm") as cache:
            cache.set_slot(0, whole(0, 8))
            modes = [stat.S_IMODE(os.stat(cache.path).st_mode)]
        with words_cache(8, 8, backing="memfd") as cache:
            cache.set_slot(0, whole(0, 8))
            fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            mine = [fd for fd in fds if os.path.lexists(fd) and cache.name in os.readlink(fd)]
            modes += [stat.S_IMODE(os.stat(fd).st_mode) for fd in mine]
        return modes

    modes = in_child(make)
    assert len(modes) > 1 and set(modes) == {0o600}, modes


# P21: an edited slot


@pytest.mark.parametrize("backing", ["shm", "memfd"])
def test_verify_always_finds_an_edited_slot(make_cache, backing):
    cache = make_cache(limit_gib(8, 64), 8, (64,), torch.int64, verify="always", backing=backing)
    for idx in range(4):
        cache.set_slot(idx, whole(idx, 64))
    assert all(complaint(idx, cache.get_slot(idx)) is None for idx in range(4))
    cache.get_slot(1).add_(1)  # what a careless transform does
    cache.get_slot(2)[63] ^= 1
    assert cache.get_slot(1) is None, "a damaged slot is a miss"
    batch, found = cache.get_many(range(4))
    assert found.tolist() == [True, False, False, True] and not batch[1:3].any()
    assert cache.stats().damaged == 2
    cache.set_slot(1, whole(1, 64))  # and is filled again, without an overwrite
    assert complaint(1, cache.get_slot(1)) is None
    assert cache.stats().damaged == 2


def test_verify_never_does_not_find_it(make_cache):
    # the control, and what is documented: a view is the memory itself
    cache = make_cache(limit_gib(8, 64), 8, (64,), torch.int64)
    cache.set_slot(1, whole(1, 64))
    cache.get_slot(1).add_(1)
    assert complaint(1, cache.get_slot(1)) is not None
    assert cache.stats().damaged == 0


def test_verify_always_works_with_every_way_to_write(make_cache, in_child):
    cache = make_cache(limit_gib(8, 64), 8, (64,), torch.int64, verify="always")
    cache.set_slot(0, whole(0, 64))
    cache[1] = whole(1, 64)
    cache.set_many([2, 3], torch.stack([whole(2, 64), whole(3, 64)]))
    cache.set_slot(0, whole(0, 64, version=1), allow_overwrite=True)
    in_child(lambda: cache.set_slot(4, whole(4, 64)))
    assert all(complaint(idx, cache.get_slot(idx)) is None for idx in range(5))
    assert cache.get_many(range(5))[1].tolist() == [True] * 5
    assert cache.stats().damaged == 0
    cache.clear()
    assert cache.get_many(range(5))[1].tolist() == [False] * 5


def test_verify_always_turns_any_flipped_bit_of_the_file_into_a_miss(unique_name, scale, seed):
    rng = random.Random(seed)
    name = unique_name()

    def reopen():
        return words_cache(8, 64, name=name, keep=True, backing="shm", verify="always")

    with reopen() as cache:
        for idx in range(6):
            cache.set_slot(idx, whole(idx, 64))
        path = Path(cache.path)
    good = path.read_bytes()
    try:
        misses = 0
        for _ in range(scale(300, 10_000)):
            damaged = bytearray(good)
            # half of the flips in the samples, half in the states and checksums before them
            data = len(good) - 8 * 64 * 8
            states = int.from_bytes(good[192:200], "little")
            low, high = (data, len(good)) if rng.random() < 0.5 else (states, data)
            damaged[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with reopen() as cache:
                for idx in range(8):
                    got = cache.get_slot(idx)
                    misses += got is None
                    assert got is None or complaint(idx, got) is None
        assert misses > 2 * scale(300, 10_000)
    finally:
        path.unlink()


def test_a_kept_cache_that_lost_its_keep_flag_is_refused_not_swept(make_cache, unique_name):
    name = unique_name()
    cache = make_cache(name=name, backing="shm", keep=True)
    path = cache.path
    cache.close()
    with open(path, "r+b") as file:
        file.seek(12)
        flags = file.read(1)[0]
        file.seek(12)
        file.write(bytes([flags ^ 1]))
    try:
        assert os.path.basename(path) not in stocache.sweep()
        with pytest.raises(RuntimeError, match="damaged"):
            make_cache(name=name, backing="shm", keep=True)
    finally:
        os.unlink(path)
