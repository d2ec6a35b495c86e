"""How frameworks lay tensors out over ranks that split them themselves, without DTensors: as `Part`s and `Range`s of a state.

    from holdfast import layouts

    # Megatron: tensor parallelism; each pipeline stage has some of the layers, under their global names.
    split = layouts.tensor_parallel(
        tp_rank, tp_size,
        column=["*.linear_qkv.*", "*.embedding.weight"],   # rows of the weight, and the bias
        gated=["*.linear_fc1.*"],                          # the same of two matrices, one behind the other (SwiGLU)
        row=["*.linear_proj.weight", "*.linear_fc2.weight"],
    )
    model_parts = layouts.parts(model, split, name=lambda name: with_global_layer_number(name, pp_rank))

    # The distributed optimizer: all parameters of a stage laid end to end, cut into as many ranges as it has ranks.
    master = layouts.flat_shards({name: shape, ...}, buffer, dp_rank, dp_size)

    state = {"model": model_parts, "master": master, "optim": optim}
    ckpt.save(step, state); ckpt.restore(state)             # on any other mesh, too

What is in no rule is the same in all ranks that have it. Several names for one splitting are nothing special: a rule is a function
of a name and a tensor, and you may write your own.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast._errors import InvalidArgumentError
from holdfast._part import Part
from holdfast._range import Range
from holdfast._state import is_tensor

__all__ = ["Split", "flat_shards", "parts", "tensor_parallel"]


@dataclasses.dataclass(frozen=True)
class Split:
    """A tensor is the `rank`-th of `ranks` equal parts of a larger one, along dimension `dim`. `blocks`: of so many larger ones,
    that lie one behind the other (the two matrices of a gated unit, or q, k and v): each is a tensor of its own then, "w.0", "w.1".
    """

    dim: int
    rank: int
    ranks: int
    blocks: int = 1


# What becomes of a tensor; None: all ranks that have it have all of it.
Rule = Callable[[str, Any], Split | None]


def parts(module: Any, rule: Rule, *, name: Callable[[str], str] = str) -> dict[str, Any]:
    """All that a module's state_dict has, as entries of a state: `Part`s of larger tensors, and of themselves where nothing is
    split, so that an optimizer's state has their names. (What no Part can be of, as DTensors and extra state, is as it is.)

    `name`: what a tensor is called in the whole model, of its name here (with numbers of layers or experts that are global).
    The rule is asked with that one.
    """
    found: dict[str, Any] = {}
    for own, tensor in module.state_dict(keep_vars=True).items():
        of_all = name(own)
        split = rule(of_all, tensor)
        made = {of_all: _whole(tensor)} if split is None else _split(of_all, tensor, split)
        for key, part in made.items():
            if key in found:
                raise InvalidArgumentError(f"layouts.parts: two tensors are called {key!r}")
            found[key] = part
    return found


def merged(parts: Sequence[Any]) -> Any:
    """The modules that one rank of a pipeline has, as one entry of a state: with interleaved schedules a rank has several.

        ckpt.save(step, {"model": holdfast.merged(model_parts), "optim": holdfast.merged(optimizers)})

    Tensors are called as in their modules, "model.layers.7.weight", so their places in the list do not matter:
    another schedule or number of stages finds them. Put the optimizer of their parameters into the state beside it. Several
    optimizers, one of each module, are merged likewise: into one whose groups have the parameters of all. So they have equally
    many groups, with the same values.
    """
    from holdfast._optimizers import is_optimizer
    from holdfast._stages import Merged, MergedOptimizer

    parts = list(parts)
    return MergedOptimizer(parts) if parts and all(map(is_optimizer, parts)) else Merged(parts)


def _whole(tensor: Any) -> Any:
    plain = is_tensor(tensor) and type(tensor.data) is sys.modules["torch"].Tensor
    return Part(tensor, tensor.shape, [0] * tensor.ndim) if plain else tensor


def _split(name: str, tensor: Any, split: Split) -> dict[str, Part]:
    if not 0 <= split.rank < split.ranks:
        raise InvalidArgumentError(f"{name}: part {split.rank} of {split.ranks}: there is none")
    if not -tensor.ndim <= split.dim < tensor.ndim:
        raise InvalidArgumentError(
            f"{name}: split along dimension {split.dim}, and its shape is {list(tensor.shape)}"
        )
    dim = split.dim % tensor.ndim
    if split.blocks < 1 or tensor.shape[dim] % split.blocks:
        raise InvalidArgumentError(
            f"{name}: dimension {dim} of {list(tensor.shape)} is not {split.blocks} equal blocks"
        )
    each = tensor.shape[dim] // split.blocks
    shape = [*tensor.shape[:dim], each * split.ranks, *tensor.shape[dim + 1 :]]
    offset = [0] * tensor.ndim
    offset[dim] = each * split.rank
    if split.blocks == 1:
        return {name: Part(tensor, shape, offset)}
    blocks = tensor.detach().split(each, dim)
    return {f"{name}.{i}": Part(block, shape, offset) for i, block in enumerate(blocks)}


def tensor_parallel(
    rank: int,
    ranks: int,
    *,
    column: Sequence[str] = (),
    row: Sequence[str] = (),
    gated: Sequence[str] = (),
) -> Rule:
    """A rule for Megatron's tensor parallelism, by patterns of names (fnmatch). `column`: layers whose outputs are split, so the
    first dimension of weights and biases is (embeddings that split the vocabulary, too). `row`: whose inputs are: the last
    dimension of weights. `gated`: column parallel ones of two matrices, one behind the other. The first that fits counts: gated,
    column, row."""
    _check_rank("tensor_parallel", rank, ranks)
    for key, patterns in (("column", column), ("row", row), ("gated", gated)):
        if isinstance(patterns, str):
            raise InvalidArgumentError(
                f"layouts.tensor_parallel: {key} is a list of patterns, not a text: [{patterns!r}]"
            )

    def rule(name: str, tensor: Any) -> Split | None:
        def fits(patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

        if fits(gated):
            return Split(0, rank, ranks, blocks=2)
        if fits(column):
            return Split(0, rank, ranks)
        if fits(row) and tensor.ndim > 1:  # (the bias is added once, by all alike)
            return Split(-1, rank, ranks)
        return None

    return rule


def _check_rank(function: str, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise InvalidArgumentError(
            f"layouts.{function}: there is no rank {rank} of {ranks}: those of this split are meant, "
            "not of the whole job"
        )


def flat_shards(
    shapes: Mapping[str, Sequence[int]], buffer: Any, rank: int, ranks: int
) -> dict[str, Range]:
    """Of parameters that are laid end to end, in this order, and cut into equal ranges (the last ones end early, or are empty,
    where it does not come out even): what lies in this rank's `buffer`, as views of it.

        master = torch.zeros(layouts_length)                      # ceil(all elements / ranks), or less
        state["master"] = layouts.flat_shards(shapes, master, rank, ranks)
    """
    _check_rank("flat_shards", rank, ranks)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    share = -(-sum(sizes.values()) // ranks)
    begin, end = rank * share, min((rank + 1) * share, sum(sizes.values()))
    if buffer.ndim != 1 or buffer.numel() < end - begin:
        raise InvalidArgumentError(
            f"layouts.flat_shards: rank {rank} of {ranks} has {max(end - begin, 0)} elements, and the buffer's shape is {list(buffer.shape)}"
        )
    found: dict[str, Range] = {}
    first = 0
    for name, size in sizes.items():
        low, high = max(first, begin), min(first + size, end)
        if low < high:
            view = buffer.detach()[low - begin : high - begin]
            found[name] = Range(view, shapes[name], low - first)
        first += size
    return found
