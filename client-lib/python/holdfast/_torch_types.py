"""Between torch's tensors and the tensors of an image: types, places, memory."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from holdfast._errors import InvalidArgumentError, RefusedError
from holdfast._part import Part

# safetensors' names; what has none cannot be in an image.
_NAMES: dict[torch.dtype, str] = {
    getattr(torch, torch_name): name
    for torch_name, name in (
        ("bool", "BOOL"),
        ("uint8", "U8"),
        ("int8", "I8"),
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
        ("float8_e8m0fnu", "F8_E8M0"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
        ("uint16", "U16"),
        ("int16", "I16"),
        ("float16", "F16"),
        ("bfloat16", "BF16"),
        ("uint32", "U32"),
        ("int32", "I32"),
        ("float32", "F32"),
        ("uint64", "U64"),
        ("int64", "I64"),
        ("float64", "F64"),
        ("complex64", "C64"),
    )
    if hasattr(torch, torch_name)
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """safetensors' name of a torch dtype.

    >>> dtype_name(torch.bfloat16, "model.w")
    'BF16'
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise InvalidArgumentError(
            f"{path}: tensors of {dtype} have no place in a safetensors file: save a view of it as "
            "integers "
            "(tensor.view(torch.uint8), or view_as_real of complex numbers)"
        )
    return name


def dtype_from_name(name: str, path: str) -> torch.dtype:
    """The torch dtype of safetensors' name for it."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise InvalidArgumentError(f"{path}: torch {torch.__version__} has no dtype for {name}")
    return dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a local tensor lies in the global one."""

    shape: tuple[int, ...]  # of the global tensor
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return self.local_shape == self.shape

    @property
    def empty(self) -> bool:
        """Nothing of a tensor that has elements: uneven sharding leaves some ranks without."""
        return 0 in self.local_shape and 0 not in self.shape


def part_place(part: Part, path: str) -> Place:
    part.check(path)
    return Place(part.shape, part.offset, tuple(part.local.shape))


def is_dtensor(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and hasattr(value, "device_mesh")
        and hasattr(value, "_local_tensor")
    )


def dtensor_place(tensor: Any, path: str) -> Place | None:
    """Where this rank's part of a DTensor lies; None: its mesh has no place for this rank.

    Uneven sharding, several mesh dimensions that split one tensor dimension (FSDP2 over tensor
    parallelism) and replicas are torch's own arithmetic. A Partial tensor's values are still to be
    summed up: nobody can save them as they are.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if tensor.device_mesh.get_coordinate() is None:
        return None
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise InvalidArgumentError(
                f"{path}: a DTensor with placement {placement} holds parts of sums: redistribute "
                "it to Shard or Replicate before saving"
            )
        if _is_scattered(tensor, mesh_dim):
            raise InvalidArgumentError(
                f"{path}: a DTensor with placements {tensor.placements} on a mesh of "
                f"{tuple(tensor.device_mesh.shape)}: this rank's part is not one box of the whole: "
                "redistribute it to Shard or Replicate before saving and restoring"
            )
    local_shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(tensor._local_tensor.shape) != tuple(local_shape):
        raise InvalidArgumentError(
            f"{path}: this rank's part has shape {tuple(tensor._local_tensor.shape)}, where "
            f"placements {tensor.placements} "
            f"of shape {tuple(tensor.shape)} give it {tuple(local_shape)}"
        )
    return Place(tuple(tensor.shape), tuple(offset), tuple(local_shape))


def _is_scattered(tensor: Any, mesh_dim: int) -> bool:
    """Whether a mesh dimension gives a rank several runs of the whole. A `_StridedShard` says how
    many parts a dimension was split into before; mesh dimensions to its right make one of them out
    of those runs, if they are what split it.
    """
    placement = tensor.placements[mesh_dim]
    factor = getattr(placement, "split_factor", 1)
    split_further = 1
    for later in range(mesh_dim + 1, len(tensor.placements)):
        if getattr(tensor.placements[later], "dim", None) == getattr(placement, "dim", None):
            split_further *= tensor.device_mesh.size(later)
    return bool(factor != 1 and factor != split_further)


def dense(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The same values in one contiguous run of memory: the tensor's own where that is so, else a
    copy.

    Keep what this returns alive for as long as its address is used.
    """
    if (
        type(tensor) in _PLAIN
        and tensor.dtype in _NAMES
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        return tensor
    dtype_name(tensor.dtype, path)
    if tensor.layout != torch.strided or tensor.is_nested:
        raise without_plain_memory(tensor, path)
    if tensor.is_quantized:
        raise InvalidArgumentError(
            f"{path}: a quantized tensor: save its int_repr() and its scales"
        )
    if tensor.device.type == "meta":
        raise InvalidArgumentError(
            f"{path}: a tensor on the meta device has no values: materialise it (to_empty, then "
            "initialise) before saving"
        )
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        raise RefusedError(
            f"{path}: a {type(tensor).__module__}.{type(tensor).__qualname__} is a tensor subclass "
            "and has no plain memory of its own that DCP could plan: save the plain tensors that it "
            "is made of (tensor.as_subclass(torch.Tensor), if it is one by another name), or save "
            "it with holdfast.Checkpointer"
        )
    plain = plain.resolve_conj().resolve_neg()
    if plain.device.type not in ("cpu", "cuda"):
        plain = plain.cpu()
    return plain.contiguous()


def without_plain_memory(tensor: torch.Tensor, path: str) -> InvalidArgumentError:
    kind = "nested" if tensor.is_nested else str(tensor.layout)
    return InvalidArgumentError(
        f"{path}: a {kind} tensor has no plain memory: save its parts (indices and values, "
        "unbind()), or a dense tensor of it"
    )


def device_ordinal(tensor: torch.Tensor, path: str) -> int:
    """As TensorList has it: -1 for this process's memory."""
    if tensor.device.type != "cuda":
        return -1
    if torch.version.hip is not None:  # torch calls AMD's devices "cuda", too
        raise InvalidArgumentError(
            f"{path}: is on an AMD GPU (this torch is of ROCm), and Holdfast copies from and to "
            "NVIDIA GPUs alone: give it a copy in host memory (tensor.cpu())"
        )
    return tensor.device.index


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def address_of(memory: memoryview) -> int:
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(
        ctypes.py_object(memory), ctypes.byref(buffer), ctypes.c_int(0)
    )
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def tensors_over(
    memory: memoryview,
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
) -> list[torch.Tensor]:
    """Tensors that are parts of this memory, and keep it. They look writable, as every tensor does;
    where the memory is not, writing to it ends the process. (torch.frombuffer of a read-only
    memoryview would do, with a warning for each.)
    """
    owner = (ctypes.c_char * memory.nbytes).from_address(address_of(memory))
    owner.memory = memory  # type: ignore[attr-defined]
    return [
        torch.frombuffer(owner, dtype=dtype, count=size // dtype.itemsize, offset=offset).view(
            shape
        )
        if size
        else torch.empty(shape, dtype=dtype, device="cpu")
        for offset, size, dtype, shape in zip(offsets, sizes, dtypes, shapes, strict=True)
    ]
