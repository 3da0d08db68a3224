"""Sums that do not depend on how many tokens a call holds, so that chunked prefill and decode can be compared to the bit.

A matrix product, a reduction or a transcendental function in fp32 gives a row another last bit when the call holds more
rows; in front of a rounding to E4M3 or E2M1 such a bit now and then moves a value by a whole step, which spreads. Within
`steady_sums` these functions run in float64 and are rounded once, and the softmax takes all slots at once. What differs
then between two ways to feed the same tokens is a fault of the state, the masks or the selection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from evrun.coordinator.models.deepseek_v41 import sparse_attention

_WIDENED = {"matmul", "__matmul__", "bmm", "sum", "mean", "softmax", "exp", "sigmoid", "softplus", "silu"}


class _Steady(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if name.removesuffix("_") not in _WIDENED and name not in _WIDENED:
            return func(*args, **kwargs)
        out = args[0] if in_place else kwargs.pop("out", None)
        if in_place:
            func = getattr(torch.Tensor, name.removesuffix("_"))
        result = func(*(_wide(a) for a in args), **kwargs)
        if result.dtype == torch.float64:
            result = result.float()
        return result if out is None else out.copy_(result)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


@contextmanager
def steady_sums() -> Iterator[None]:
    with mock.patch.object(sparse_attention, "SOFTMAX_BLOCK", 1 << 30), _Steady():
        yield
