"""Loads the native libraries, and says why if they do not load."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_OLDEST = (2, 9)  # torch
_NEEDED = f"stocache needs torch {_OLDEST[0]}.{_OLDEST[1]} or newer"


def prefix() -> Path:
    """The folder of what was built for the torch that is installed; raises ImportError in one
    sentence if there is none."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"{_NEEDED}: run pip install torch") from None
    folders = {folder.name.removeprefix("torch"): folder for folder in _HERE.glob("torch*.*")}
    if not folders:
        raise ImportError(
            f"stocache in {_HERE} has no native libraries: it is a source folder, not an installed "
            "package; run pip install --no-build-isolation . in the project"
        )
    found = torch.__version__.split("+")[0]
    numbers = re.match(r"(\d+)\.(\d+)", found)  # of a nightly build more follows
    minor = numbers[0] if numbers else found
    if minor in folders:
        return folders[minor]
    names = sorted(folders, key=lambda name: [int(part) for part in name.split(".")])
    remedy = f'run pip install "torch=={names[-1]}.*"'
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise ImportError(f"{_NEEDED} but torch {found} is installed; {remedy}")
    built_for = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    raise ImportError(
        f"this stocache was built for torch {built_for} but torch {found} is installed; "
        f"{remedy}, or build stocache for torch {minor}"
    )


def load() -> None:
    """Loads libstocache, which registers torch.ops.stocache; raises ImportError in one sentence."""
    native = prefix()
    if sys.platform != "linux":
        raise ImportError(f"stocache runs on Linux, this is {sys.platform}")
    import torch

    try:
        torch.ops.load_library(str(native / "lib" / "libstocache.so"))  # type: ignore[no-untyped-call]
        sys.modules["stocache"].__path__.insert(0, str(native))
        import stocache._C  # noqa: F401
    except (ImportError, OSError) as error:
        raise ImportError(
            f"the native libraries of stocache in {native} do not load ({error}); reinstall "
            f"stocache with this Python ({sys.version.split()[0]}) and torch {torch.__version__}"
        ) from error
