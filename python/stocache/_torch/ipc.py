"""How batches of ours cross from a worker to the main process: by a ticket, without a copy."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

from stocache import _C

_registered = False


def is_worker() -> bool:
    """Whether this process is a DataLoader's worker. From then on it sends batches by ticket: the
    reducer of tensors is its own. In no other process does stocache touch it."""
    global _registered
    if get_worker_info() is None:
        return False
    if not _registered:
        ForkingPickler.register(torch.Tensor, _reduce)
        _registered = True
    return True


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A batch of ours by its ticket, or inside the message if it is small; others as torch does."""
    ticket = _C.batch_ticket(tensor) if type(tensor) is torch.Tensor else None
    if ticket is None:
        return tuple(reduce_tensor(tensor))  # type: ignore[no-untyped-call]
    return (_C.batch_copy if len(ticket) == 3 else _C.batch_tensor, ticket)
