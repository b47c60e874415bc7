"""What the fault tests ask of the kernel: namespaces, own mounts, the state of a process."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: own mounts and second users are not covered"
)

CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_RDONLY, MS_REC, MS_PRIVATE = 1, 0x4000, 1 << 18
LIBC = ctypes.CDLL(None, use_errno=True)


def system(call: str, *args) -> None:
    if getattr(LIBC, call)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def mount_shm(options: str, flags: int = 0) -> None:
    """Puts a new tmpfs over /dev/shm, for this process and its children only."""
    system("unshare", CLONE_NEWNS)
    system("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    system("mount", b"tmpfs", b"/dev/shm", b"tmpfs", flags, options.encode())


def hog_the_mount() -> str:
    """Fills /dev/shm to its last page, as another program would."""
    file = os.open("/dev/shm/hog", os.O_CREAT | os.O_WRONLY)
    for size in (1 << 20, 4096):
        try:
            while True:
                os.write(file, bytes(size))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    os.close(file)
    return "/dev/shm/hog"


def process_state(pid: int) -> str:
    """R, S, D, T (stopped) or Z, as /proc says."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
