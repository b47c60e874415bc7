"""The store by which the ranks of torch.distributed have found each other."""

from __future__ import annotations

from typing import Any

import torch


def common_store(prefix: str) -> Any:
    """A part of it for one purpose: what one rank sets there, the others see; None where there is
    no group of ranks."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    c10d: Any = distributed.distributed_c10d
    return c10d.PrefixStore(prefix, c10d._get_default_store())
