"""holdfast.Checkpointer and tensors that are more, or less, than their elements in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from daemons import Daemon
from holdfast import _core

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|Sparse CSR|prototype)")


@pytest.fixture
def ckpt(daemon: Daemon):
    one = holdfast.Checkpointer("job", rank=0, world_size=1)
    yield one
    one.close()


def two(first: float, second: float) -> TwoTensor:
    return TwoTensor(torch.full((3, 4), float(first)), torch.full((3, 4), float(second)))


def halves(tensor: Any) -> tuple[list[float], list[float]]:
    return tensor.a.flatten().tolist(), tensor.b.flatten().tolist()


class Opaque(TwoTensor):
    """One that does not say what it is made of."""

    __tensor_flatten__ = None


def opaque(first: float, second: float) -> Opaque:
    return Opaque(torch.full((3, 4), float(first)), torch.full((3, 4), float(second)))


def test_a_subclass_that_hides_its_tensors_is_saved_as_torch_saves_it(daemon: Daemon) -> None:
    """And so were all, once."""
    with holdfast.Checkpointer("job", allow_pickle=True) as ckpt:
        value = opaque(3, 4)
        handle = ckpt.save(0, {"value": value})
        with torch.no_grad():  # a copy of its own: it may change at once
            value.b.fill_(-1)
        handle.wait("sealed", 60)
        targets = opaque(0, 0), two(0, 0)
        for target in targets:
            ckpt.restore({"value": target})
            assert halves(target) == halves(two(3, 4))
        codecs = {name: codec for name, _, codec in _core.attach("job").objects}
        assert codecs == {"holdfast.state": None, "value": "torch.save.1"}


@pytest.mark.parametrize("make", [two, opaque])
def test_a_subclass_is_not_cast_or_spread(daemon: Daemon, make: Callable[..., Any]) -> None:
    with holdfast.Checkpointer("job", allow_pickle=True) as ckpt:
        ckpt.save(0, {"value": make(1.5, 2)})
        for target in (torch.zeros(3, 4, dtype=torch.int8), torch.zeros(4), torch.zeros(2, 3, 4)):
            with pytest.raises(
                holdfast.InvalidArgumentError, match="^value: was saved as an? (TwoTensor|Opaque)"
            ):
                ckpt.restore({"value": target})
            assert not target.any()


def test_a_subclass_is_not_unpickled_unasked(daemon: Daemon) -> None:
    with holdfast.Checkpointer("job") as ckpt:
        with pytest.raises(
            holdfast.RefusedError, match=r"^value: .*Opaque would have to be pickled"
        ):
            ckpt.save(0, {"value": opaque(1, 2)})
        with torch.serialization.safe_globals([Opaque]):
            ckpt.save(0, {"value": opaque(1, 2)}, wait="sealed", timeout=60)
        with pytest.raises(holdfast.RefusedError, match=r"^value: .*without unpickling"):
            ckpt.restore({"value": opaque(0, 0)})


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(2).to_sparse(), "a torch.sparse_coo tensor has no plain memory"),
        (lambda: torch.eye(2).to_sparse_csr(), "a torch.sparse_csr tensor has no plain memory"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "a nested tensor has no plain memory",
        ),
        (quantized, "quint8"),
        (fake, "torch.save cannot write a .*FakeTensor"),
        (torch.nn.UninitializedParameter, "has no shape yet"),
    ],
    ids=["sparse", "csr", "nested", "quantized", "fake", "lazy"],
)
def test_what_has_no_plain_memory_is_named(
    ckpt: holdfast.Checkpointer, make: Callable[[], torch.Tensor], words: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make()
    for state in ({"a": {"b": tensor}}, {"a": [tensor, torch.ones(1)]}):
        path = r"a\.b" if isinstance(state["a"], dict) else r"a\.0"
        with pytest.raises(holdfast.InvalidArgumentError, match=f"^{path}: .*{words}"):
            ckpt.save(0, state)
    # In the middle of a run it costs that save alone.
    ckpt.save(1, {"w": torch.ones(1)}, wait="sealed", timeout=60)
    assert isinstance(ckpt.save(2, {"w": tensor}).error, holdfast.InvalidArgumentError)
    ckpt.save(3, {"w": torch.ones(1)}, wait="sealed", timeout=60)


def test_an_optimizer_whose_state_is_sparse_is_named(ckpt: holdfast.Checkpointer) -> None:
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.Adagrad(model.parameters())
    ckpt.restore({"model": model, "optim": optim})
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    optim.state[model.weight]["sum"] = optim.state[model.weight]["sum"].to_sparse()
    with pytest.raises(
        holdfast.InvalidArgumentError, match="^optim.state.model.weight.sum: a torch.sparse"
    ):
        ckpt.save(0, {"model": model, "optim": optim})
