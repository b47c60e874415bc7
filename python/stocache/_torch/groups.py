"""The store that the ranks of torch.distributed have in common, by which it is reached."""

from __future__ import annotations

import torch


def common_store(prefix: str) -> torch.distributed.Store | None:
    """A part of it for one purpose; None where there is none, or none that counts."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    store = distributed.distributed_c10d._get_default_store()
    return distributed.PrefixStore(prefix, store)
