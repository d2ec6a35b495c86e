"""torch's tensors as tensors of an image."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from holdfast import HoldfastError, InvalidArgumentError
from holdfast._torch_types import Place, dense, dtype_from_name, dtype_name, tensors_over

# Those that safetensors' own package reads and writes for torch, and F8_E8M0, which it writes only.
NAMES = [*safetensors.torch._TYPES, "F8_E8M0"]


def test_every_type_of_safetensors_has_a_dtype_and_back() -> None:
    for name in NAMES:
        assert dtype_name(dtype_from_name(name, "x"), "x") == name


@pytest.mark.parametrize(
    "dtype",
    [torch.complex128, torch.complex32, torch.float4_e2m1fn_x2, torch.quint8],
)
def test_other_dtypes_are_refused_with_the_path(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgumentError, match="model.w: .*" + str(dtype)):
        dtype_name(dtype, "model.w")


def test_dense_takes_what_is_contiguous_as_it_lies() -> None:
    tensor = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    assert dense(tensor, "x").data_ptr() == tensor.data_ptr()
    row = tensor[1]
    assert dense(row, "x").data_ptr() == row.data_ptr()
    column = dense(tensor.t(), "x")
    assert column.is_contiguous() and torch.equal(column, tensor.t())


def test_dense_resolves_lazy_views() -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(
        torch.view_as_real(dense(tensor.conj(), "x")),
        torch.view_as_real(torch.conj_physical(tensor)),
    )
    negative = tensor.conj().imag
    assert negative.is_neg()
    assert torch.equal(dense(negative, "x"), -tensor.imag)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quint8"),
        (torch.ones(2).as_subclass(Subclass), "Subclass"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_what_has_no_plain_memory_is_refused_with_the_path(
    tensor: torch.Tensor, words: str
) -> None:
    with pytest.raises(HoldfastError, match=f"model.w: .*{words}"):
        dense(tensor, "model.w")


def test_tensors_over_memory() -> None:
    memory = memoryview(bytes(range(16)))
    tensors = tensors_over(
        memory,
        [8, 0, 2, 7],
        [8, 0, 2, 1],
        [torch.int16, torch.float32, torch.int16, torch.bool],
        [(2, 2), (0, 3), (), (1,)],
    )
    del memory
    assert tensors[0].tolist() == [[0x0908, 0x0B0A], [0x0D0C, 0x0F0E]]
    assert tensors[1].shape == (0, 3) and tensors[1].dtype == torch.float32
    assert tensors[2].shape == () and tensors[2].item() == 0x0302
    assert tensors[3].tolist() == [True]
    assert tensors[0].untyped_storage().nbytes() == 8
    assert tensors_over(memoryview(b""), [], [], [], []) == []
    (empty,) = tensors_over(memoryview(b""), [0], [0], [torch.int8], [(0,)])
    assert empty.shape == (0,)


def test_places() -> None:
    assert Place((4,), (0,), (4,)).whole
    assert not Place((4,), (0,), (2,)).whole
    assert Place((3,), (3,), (0,)).empty
    assert not Place((0,), (0,), (0,)).empty  # an empty tensor is something
