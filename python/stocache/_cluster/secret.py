"""The secret with which a job writes values that count: from the environment, or from a file."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

VARIABLE = "STOCACHE_SECRET"
FILE_VARIABLE = "STOCACHE_SECRET_FILE"


def secret() -> bytes:
    """Of STOCACHE_SECRET; or of the file that STOCACHE_SECRET_FILE names; or of a file in the
    user's home, which is made at the first time: nodes that share the home share the secret."""
    words = os.environ.get(VARIABLE)
    if words:
        return os.fsencode(words)
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return _read(Path(named))
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = Path(config, "stocache", "secret")
    if not path.exists():
        _make(path)
    return _read(path)


def _read(path: Path) -> bytes:
    remedy = f"chmod 600 it, or give the secret in {VARIABLE}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"the secret {path} cannot be read ({error.strerror}); {remedy}") from None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
            raise ValueError(
                f"the secret {path} is not for this user alone (user {found.st_uid}, mode "
                f"{mode:o}); {remedy}"
            )
        words = file.read(4096).strip()
    if not words:
        raise ValueError(f"the secret {path} is empty; write some random words there")
    return words


def _make(path: Path) -> None:
    """Whole at once: another node may be making it, too, and the first one counts."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.unlink(made)
