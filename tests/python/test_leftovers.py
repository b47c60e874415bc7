"""Nothing stays behind in /dev/shm, and nothing that lives is taken away."""

from __future__ import annotations

import os
import signal

import pytest
import stocache
import torch
from kernel import CLONE_NEWNS, CLONE_NEWPID, MS_PRIVATE, MS_REC, root_only, system
from samples import complaint, limit_gib, whole, words_cache

# P4: no leftovers

MAKE = """
    import os, sys, time, signal, torch, stocache
    from samples import limit_gib, whole
    cache = stocache.SharedCache(
        limit_gib(64, 64), 64, (64,), torch.int64, backing=sys.argv[1], verbose=False
    )
    for idx in range(64):
        cache.set_slot(idx, whole(idx, 64))
    workers = [os.fork() for _ in range(2)] if "fork" in sys.argv[2] else []
    if 0 in workers:
        cache.get_slot(0)
        time.sleep(1000)
    print(cache.name, cache.path, flush=True)
"""
ENDINGS = {
    "return": "",
    "exit with an error": "sys.exit(3)",
    "exception": "raise ValueError('on purpose')",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "a view is alive": "view = cache.get_slot(3)",
    "a cycle": "cache.me = [cache]; del cache",
    "closed": "cache.close()",
    "a thread is alive": (
        "import threading; "
        "threading.Thread(target=lambda: time.sleep(0.3) or cache.get_slot(0)).start()"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_name_goes_with_a_clean_exit(run_script, ending):
    done = run_script(MAKE + "\n    " + ENDINGS[ending], "shm", "alone", check=False)
    assert done.returncode in (0, 1, 3, -signal.SIGINT, 130), done.stderr
    name, path = done.stdout.split()
    assert name in path and not os.path.exists(path), f"left behind after: {ending}"


WORKERS = """
    import multiprocessing, os, sys, stocache
    from sources import Counted
    from torch.utils.data import DataLoader

    if __name__ == "__main__":
        source = Counted(sys.argv[1], 16, words=64)
        dataset = stocache.CachedDataset(source, "8MiB", backing="shm", verbose=False)
        path = dataset.path
        loader = DataLoader(
            dataset, 4, num_workers=2, persistent_workers=True, multiprocessing_context=sys.argv[2]
        )
        for batch in loader:
            pass
        dataset.close()
        assert os.path.exists(path), "it is the workers' as long as they live"
        for batch in loader:
            pass
        print(path)
"""


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_a_cache_closed_before_its_workers_end_leaves_no_name(run_script, tmp_path, context):
    # workers end with os._exit, so nobody is left to remove the name but who closed it first
    path = run_script(WORKERS, tmp_path / "loads", context).stdout.strip()
    assert "stocache-" in path and not os.path.exists(path)


CLOSED_FIRST = (
    WORKERS.rpartition("for batch in loader")[0]
    + """\
del loader, batch
        for worker in multiprocessing.active_children():
            worker.join(60)
        print(path, os.path.exists(path))
"""
)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_the_last_worker_of_a_closed_cache_removes_its_name(run_script, tmp_path, context):
    path, there = run_script(CLOSED_FIRST, tmp_path / "loads", context).stdout.split()
    assert "stocache-" in path and there == "False", "its memory is taken while the trainer lives"


def test_control_without_a_word_from_its_workers_it_stays(run_script, tmp_path):
    silent = "import stocache.node; stocache.node.Finalize = lambda *_, **__: None\n"
    source = CLOSED_FIRST.replace("from sources", silent + "    from sources")
    path, there = run_script(source, tmp_path / "loads", "fork").stdout.split()
    assert there == "True" and not os.path.exists(path)


def test_a_cache_that_another_program_still_uses_outlives_who_closed_it(
    make_cache, run_script, unique_name
):
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=unique_name(), backing="shm")
    run_script(
        """
        import sys, stocache
        stocache.SharedCache.join(sys.argv[1]).close()
        """,
        cache.name,
    )
    assert os.path.exists(cache.path)


@pytest.mark.parametrize("remover", ["the next cache", "sweep"])
def test_after_a_kill_of_all_at_most_one_object_is_left_until_the_next_start(run_script, remover):
    before = set(os.listdir("/dev/shm"))
    child = run_script.start(MAKE + "\n    time.sleep(1000)", "shm", "fork")
    name, path = child.stdout.readline().split()
    run_script.kill_group(child)
    left = {f for f in set(os.listdir("/dev/shm")) - before if name in f}
    assert len(left) <= 1
    if remover == "sweep":
        assert [n for n in stocache.sweep() if name in n] == list(left)
    else:
        stocache.SharedCache(0.001, 4, (4,), verbose=False).close()
    assert not os.path.exists(path)
    assert stocache.sweep() == [] or not any(name in n for n in stocache.sweep())


def test_after_a_kill_of_all_a_memfd_cache_leaves_nothing(run_script):
    child = run_script.start(MAKE + "\n    time.sleep(1000)", "memfd", "fork")
    name, path = child.stdout.readline().split()
    assert path == "None"
    run_script.kill_group(child)
    assert not [file for file in os.listdir("/dev/shm") if name in file]


def test_a_live_cache_survives_the_sweep_of_others(make_cache, run_script, in_child):
    # P5: never by age, never by pid: only a free lock says that nobody lives
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, backing="shm")
    cache.set_slot(0, whole(0, 4))
    os.utime(cache.path, (0, 0))
    assert not any(cache.name in name for name in stocache.sweep())
    assert not any(cache.name in name for name in in_child(stocache.sweep))
    run_script("import stocache; stocache.sweep(); stocache.SharedCache(0.001, 4, (4,)).close()")
    assert os.path.exists(cache.path) and complaint(0, cache.get_slot(0)) is None


@root_only
def test_a_process_of_another_pid_namespace_joins_and_takes_nothing_away(
    make_cache, unique_name, in_child
):
    # pids mean nothing across namespaces: the inner process is number 1 or 2 of its own world
    name = unique_name()
    cache = make_cache(limit_gib(8, 4), 8, (4,), torch.int64, name=name, backing="shm")
    cache.set_slot(0, whole(0, 4))

    def inside():
        system("unshare", CLONE_NEWPID | CLONE_NEWNS)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                system("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
                system("mount", b"proc", b"/proc", b"proc", 0, None)
                other = words_cache(8, 4, name=name, backing="shm")
                assert complaint(0, other.get_slot(0)) is None
                other.set_slot(1, whole(1, 4))
                cache.set_slot(2, whole(2, 4))
                assert not any(name in n for n in stocache.sweep())
                other.close()
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert in_child(inside) == 0
    assert os.path.exists(cache.path)
    assert all(complaint(idx, cache.get_slot(idx)) is None for idx in range(3))
