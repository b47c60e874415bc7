"""Loading samples in other processes than this one.

A dataset may open its files at its first sample, so that each worker of a DataLoader has its own.
If a sample were loaded in the process that starts the workers, they would inherit the open files,
and with them one offset for all: reads of one would begin where another's ended. So whatever is
loaded for the cache's own sake is loaded in a process that takes all it opened along when it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import stat
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def in_workers(
    dataset: Dataset[Any],
    indices: Iterable[int],
    num_workers: int = 0,
    context: Any = None,
    worker_init_fn: Callable[[int], Any] | None = None,
) -> DataLoader[Any]:
    """The items of ``dataset``, made by workers: by one where none are asked for."""
    if num_workers == 0 and context is None:
        context = "fork"  # nothing has to be pickled, and no program is run again
    if multiprocessing.current_process().daemon:
        num_workers, context = 0, None  # a worker already, and may not have its own
    else:
        num_workers = max(1, num_workers)
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=indices,
        num_workers=num_workers,
        multiprocessing_context=context,
        worker_init_fn=partial(_begin, worker_init_fn),
        generator=torch.Generator(),  # the seed of the workers is not taken from the program's
    )


def apart(function: Callable[[], Any]) -> Any:
    """``function()``, called in a process of its own."""
    loader = in_workers(_Call(function), [0])
    # Other numbers than workers before it drew: what is random is to be seen.
    loader.generator.seed()
    return next(iter(loader))


class _Call(Dataset[Any]):
    """A dataset whose only item is what a function returns."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.function()


def _begin(worker_init_fn: Callable[[int], Any] | None, worker: int) -> None:
    _have_own_offsets()
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _have_own_offsets() -> None:
    """Opens the files again that a forked process has inherited open for reading.

    The offset of an open file is common to parent and child. A parent that reads through a buffer
    believes to know it, and would go on where the child has stopped.
    """
    for fd in map(int, os.listdir("/proc/self/fd")):
        # Gone by now, or not to be opened again: then it stays as it is.
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            # Only such: others may hold locks, which are tied to how the file was opened.
            if flags & os.O_ACCMODE != os.O_RDONLY or not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            again = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
            try:
                os.lseek(again, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(again, fd, os.get_inheritable(fd))
            finally:
                os.close(again)
