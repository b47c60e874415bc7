"""What the fault tests ask of the kernel: namespaces, own mounts, the state of a process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: own mounts and second users are not covered"
)

CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 0x20, 0x4000, 1 << 18
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


def mount_at(folder, options: str, kind: str = "tmpfs") -> None:
    """Puts a new tmpfs, or another kind, over `folder`, for this process and its children only."""
    system("unshare", CLONE_NEWNS)
    system("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    system("mount", b"none", os.fsencode(folder), kind.encode(), 0, options.encode())


def mount_ext4(folder, image, mebibytes: int) -> None:
    """Puts a new ext4 in a file over `folder`, for this process and its children only."""
    with open(image, "wb") as file:
        file.truncate(mebibytes << 20)
    system("unshare", CLONE_NEWNS)
    system("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"{command[0]}: {done.stderr.strip()}")


def mount_overlay(folder, parts) -> None:
    """Puts an overlay over `folder`, whose layers are on a tmpfs at `parts`; likewise."""
    mount_at(parts, "size=64m")
    layers = [os.path.join(parts, name) for name in ("lower", "upper", "work")]
    for layer in layers:
        os.mkdir(layer)
    options = "lowerdir={},upperdir={},workdir={}".format(*layers)
    system("mount", b"overlay", os.fsencode(folder), b"overlay", 0, options.encode())


def remount(folder, read_only: bool) -> None:
    flags = MS_REMOUNT | (MS_RDONLY if read_only else 0)
    system("mount", b"none", os.fsencode(folder), None, flags, None)


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


def become_nobody(folder: Path) -> None:
    """From here on this process is another user, who may pass through `folder` and those above."""
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def process_state(pid: int) -> str:
    """R, S, D, T (stopped) or Z, as /proc says."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def leads_group(words) -> None:
    """From here on this process is the first of a group, and what it says goes to a file, line by
    line. Another file says where it is after 50 s."""
    os.setpgid(0, 0)
    sys.stderr = open(words, "w", buffering=1)  # noqa: SIM115
    stack = open(f"{words}.stack", "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(50, file=stack)


def stack_of(words) -> str:
    """Where it was then."""
    stack = Path(f"{words}.stack")
    return stack.read_text() if stack.exists() else "nobody knows where"


def ends_with_torchs_error(leader, words) -> int:
    """Runs a process that leads a group and whose worker dies; its exit code. It says that a worker
    is gone, and does not hang without a word: about once in 250 kills the dead one held a lock of
    torch's own queue. Another worker then waits for it and outlives its parent: the group ends."""
    leader.start()
    leader.join(60)
    hangs = leader.is_alive()
    leader.kill()
    leader.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    text = Path(words).read_text()
    assert not hangs or text, f"the epoch hangs: {stack_of(words)}"
    code: int = leader.exitcode
    # Who found wrong samples says so by its code, and has no words.
    assert code == 7 or any(word in text for word in ("DataLoader worker", "gone", "Connection"))
    return code
