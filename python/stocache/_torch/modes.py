"""The modes of torch that belong to a thread: what a function gives depends on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

_AUTOCAST = ("cpu", "cuda", "xpu", "mps")


class Modes(NamedTuple):
    inference: bool
    gradients: bool
    autocast: tuple[tuple[str, torch.dtype], ...]  # where it is on
    functions: int
    """How many objects of the program (a default device, say) see each call of torch."""

    @classmethod
    def now(cls) -> Modes:
        """Those of this thread."""
        on = filter(torch.is_autocast_enabled, _AUTOCAST)
        return cls(
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            tuple((device, torch.get_autocast_dtype(device)) for device in on),
            torch._C._len_torch_function_stack(),
        )

    @property
    def can_be_entered(self) -> bool:
        """By another thread."""
        return self.functions == 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield
