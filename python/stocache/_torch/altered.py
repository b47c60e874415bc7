"""Objects that do more than their class says."""

from __future__ import annotations

from typing import Any

import torch


def is_altered(value: Any) -> bool:
    """Whether a module has hooks, or an object a function in the place of a method of its class."""
    own, kind = getattr(value, "__dict__", {}), type(value)
    if isinstance(value, torch.nn.Module) and any(
        hooks for name, hooks in own.items() if name.endswith("_hooks")
    ):
        return True
    return any(callable(each) and callable(getattr(kind, name, None)) for name, each in own.items())
