"""Where the elements of a tensor or an array lie, and copies of them: the same of torch's and numpy's."""

from __future__ import annotations

from typing import Any

from holdfast._arrays import is_array
from holdfast._described import torch_module
from holdfast._state import is_tensor, numpy_module


def bytes_of(value: Any) -> Any:
    """The bytes of its elements, in order."""
    if is_tensor(value):
        plain = value.detach().resolve_conj().resolve_neg()
        return plain.contiguous().view(-1).view(torch_module().uint8)
    return numpy_module().ascontiguousarray(value).reshape(-1).view("u1")


def extent_of(value: Any) -> tuple[int, int]:
    """From its first byte to behind its last; others may lie in between. Not of an empty one."""
    if is_tensor(value):
        size = value.element_size()
        steps = [
            (n - 1) * stride * size for n, stride in zip(value.shape, value.stride(), strict=True)
        ]
        begin = value.data_ptr()
    else:
        size = value.itemsize
        steps = [(n - 1) * stride for n, stride in zip(value.shape, value.strides, strict=True)]
        begin = value.__array_interface__["data"][0]
    low = sum(step for step in steps if step < 0)
    return begin + low, begin + size + sum(step for step in steps if step > 0)


OTHER_DEVICE = -2  # where addresses say nothing


def device_of(value: Any) -> int:
    """Whose addresses its address is one of."""
    if is_array(value) or value.device.type == "cpu":
        return -1
    return value.device.index if value.device.type == "cuda" else OTHER_DEVICE


def repeats_itself(value: Any) -> bool:
    """Whether several of its elements are one in memory, as in an expanded tensor."""
    if 0 in value.shape:  # NumPy's strides are all 0 then
        return False
    strides = value.stride() if is_tensor(value) else value.strides
    return any(n > 1 and stride == 0 for n, stride in zip(value.shape, strides, strict=True))


def empty_like(value: Any) -> Any:
    if is_tensor(value):
        return torch_module().empty_like(value.detach())
    return numpy_module().empty_like(value)


def copy_into(target: Any, source: Any) -> None:
    if is_tensor(target):
        with torch_module().no_grad():
            target.detach().copy_(source.detach())
    else:
        target[...] = source


def address_of(value: Any) -> int:
    address: int = value.data_ptr() if is_tensor(value) else value.__array_interface__["data"][0]
    return address
