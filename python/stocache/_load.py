"""Loads the native libraries, and says why if they do not load."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def load() -> None:
    """Loads libstocache, which registers torch.ops.stocache; raises ImportError in one sentence."""
    here = Path(__file__).parent
    try:
        from stocache._built_for import TORCH
    except ImportError:
        raise ImportError(
            f"stocache in {here} has no native libraries: it is a source folder, not an installed "
            "package; run pip install --no-build-isolation . in the project"
        ) from None
    found = torch.__version__.split("+")[0]
    if found != TORCH:
        raise ImportError(
            f"this stocache was built for torch {TORCH} but torch {found} is installed; "
            f"run pip install torch=={TORCH}"
        )
    if sys.platform != "linux":
        raise ImportError(f"stocache runs on Linux, this is {sys.platform}")
    try:
        torch.ops.load_library(str(here / "lib" / "libstocache.so"))  # type: ignore[no-untyped-call]
        import stocache._C  # noqa: F401
    except (ImportError, OSError) as error:
        raise ImportError(
            f"the native libraries of stocache in {here} do not load ({error}); reinstall stocache "
            f"with this Python ({sys.version.split()[0]}) and torch {found}"
        ) from error
