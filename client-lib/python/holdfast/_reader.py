"""`holdfast.open`: a checkpoint to look at, for evaluation and export."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from holdfast import _core, _daemon, _jobs, _json, _objects, _subclasses
from holdfast._arrays import numpy_dtype
from holdfast._errors import (
    CorruptError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    NothingToRestoreError,
)
from holdfast._merged import OfAll
from holdfast._state import TENSOR_CODEC, TREE, join
from holdfast._tree import Owners
from holdfast._whole_state import OnceRead, together

_NAMES_SHOWN = 5
_log = logging.getLogger("holdfast")


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one rank saved of a tensor: where it is, and where in the whole it belongs."""

    rank: int
    index: int  # in that rank's list
    info: _core.TensorInfo
    digest: int  # of its bytes

    @property
    def place(self) -> tuple[Any, ...]:
        return self.info.offset, self.info.local_shape, self.info.flat

    @property
    def whole(self) -> bool:
        return self.info.offset is None and self.info.flat is None


class Checkpoint:
    """One step of a job, read-only. Made by `holdfast.open`.

        with holdfast.open("llama-70b", step=1200) as saved:
            for name in saved:
                print(name, saved.dtype(name), saved.shape(name))
            weight = saved.tensor("model.layers.0.weight")      # torch, whole, verified
            array = saved.numpy("model.layers.0.weight")        # NumPy
            extra = saved.value("extra")                        # what was saved under that key

    Tensors are read when they are asked for, from the nearest tier that has them; what ranks have split is put together.
    """

    def __init__(self, job: str, views: list[_core.View], socket: str, timeout: float) -> None:
        self.job = job
        self._socket = socket
        self._timeout = timeout
        self._views = views
        self._without: dict[int, list[str]] = {}  # by rank: tiers whose copy is damaged
        self._pieces: dict[str, list[Piece]] = {}
        for rank, view in enumerate(views):
            for index, (info, digest) in enumerate(zip(view.tensors, view.digests, strict=True)):
                self._pieces.setdefault(info.name, []).append(Piece(rank, index, info, digest))
        for name, other in self._tied():
            if other in self._pieces:
                self._pieces.setdefault(name, self._pieces[other])

    @property
    def step(self) -> int:
        return self._open()[0].step

    @property
    def attempt(self) -> int:
        return self._open()[0].attempt

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self._open()[0].world_size

    @property
    def tiers(self) -> list[str]:
        """Where each rank's shard is read from."""
        return [view.tier for view in self._open()]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._pieces))

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor, whatever part of it a rank saved."""
        return self._of(name)[0].info.shape

    def dtype(self, name: str) -> str:
        """As safetensors calls it: "BF16"."""
        return self._of(name)[0].info.dtype

    def tensor(self, name: str, device: Any = None, *, rank: int | None = None) -> Any:
        """The whole tensor, for torch. Raises holdfast.CorruptError if a byte contradicts its digest.

        Raises holdfast.InvalidArgumentError where ranks saved different values of it.

        `rank`: as that rank saved it, where ranks have tensors of their own under one name.
        """
        import torch

        from holdfast import _torch_types

        first = self._of(name, rank)[0].info
        dtype = _torch_types.dtype_from_name(first.dtype, name)
        whole = torch.empty(first.shape, dtype=dtype, device="cpu")

        def part(shape: tuple[int, ...]) -> tuple[Any, int]:
            made = torch.empty(shape, dtype=dtype, device="cpu")
            return made, made.data_ptr()

        has = torch.zeros(first.shape, dtype=torch.bool, device="cpu")
        self._assemble(name, rank, whole, whole.data_ptr(), torch.uint8, part, has)
        return whole if device is None else whole.to(device)

    def numpy(self, name: str, *, rank: int | None = None) -> Any:
        """The whole tensor, for NumPy."""
        import numpy

        first = self._of(name, rank)[0].info
        whole = numpy.empty(first.shape, dtype=numpy_dtype(first.dtype, name))

        def part(shape: tuple[int, ...]) -> tuple[Any, int]:
            made = numpy.empty(shape, dtype=whole.dtype)
            return made, made.__array_interface__["data"][0]

        has = numpy.zeros(first.shape, dtype=bool)
        address = whole.__array_interface__["data"][0]
        self._assemble(name, rank, whole, address, numpy.uint8, part, has)
        return whole

    def value(self, path: str = "", rank: int = 0, *, allow_pickle: bool = False) -> Any:
        """What that rank's Checkpointer saved under a path of its state, with tensors read ("extra", "extra.loader").

        Modules and optimizers come as dictionaries of their state.
        """
        return self._value_of(path, rank, self, allow_pickle)

    def _value_of(
        self, path: str, rank: int, tensors: Checkpoint | OnceRead, allow_pickle: bool
    ) -> Any:
        objects = {name: (data, codec) for name, data, codec in self._shard(rank).objects}
        if TREE not in objects:
            if path in objects:
                data, codec = objects[path]
                return _objects.from_object(path, data, codec, allow_pickle=allow_pickle)
            raise NotFoundError(
                f"{path!r}: this step was not saved by holdfast.Checkpointer, and has no object of that name; "
                f"it has {', '.join(map(repr, objects)) or 'none'}"
            )
        node = _json.decode(objects[TREE][0])
        return _Values(tensors, rank, objects, allow_pickle).at(node, path)

    def state(self, *, allow_pickle: bool = False) -> Any:
        """All that the ranks' Checkpointers saved, as one nested dictionary in host memory. Tensors are whole; of what ranks have
        each of their own the lowest rank's, and a warning names those tensors.

            model.load_state_dict(holdfast.open("llama-70b").state()["model"])
        """
        own: list[str] = []

        def lowest(name: str) -> int:
            pieces = self._of(name)
            if pieces[0].whole and _differing(pieces) is not None:
                own.append(name)
            return pieces[0].rank

        whole = OnceRead(
            lambda name: self.tensor(name, rank=lowest(name)),
            lambda name: self.numpy(name, rank=lowest(name)),
            self.keys(),
        )
        states = (self._value_of("", rank, whole, allow_pickle) for rank in range(self.world_size))
        state = functools.reduce(together, states)
        if own:
            _log.warning(
                "job %s: state of step %d: ranks saved different values of %s%s: the lowest rank's are taken",
                self.job,
                self.step,
                ", ".join(map(repr, own[:_NAMES_SHOWN])),
                f" and {len(own) - _NAMES_SHOWN} more tensors" if len(own) > _NAMES_SHOWN else "",
            )
        return state

    def verify(self) -> None:
        """Reads everything and compares it with its digests. Raises holdfast.CorruptError, naming the tensor."""
        for view in self._open():
            view.verify()

    def close(self) -> None:
        """Lets the checkpoint go: it may be removed afterwards. What was read stays."""
        self._views = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._views:
            return f"<holdfast.Checkpoint of '{self.job}', closed>"
        return (
            f"<holdfast.Checkpoint of '{self.job}': step {self.step} of attempt {self.attempt}, {self.world_size} ranks, "
            f"{len(self)} tensors>"
        )

    # ---- how ----

    def _open(self) -> list[_core.View]:
        if not self._views:
            raise InvalidArgumentError(f"the checkpoint of '{self.job}' was closed")
        return self._views

    def _read(self, piece: Piece, address: int, nbytes: int) -> None:
        """That piece, from the nearest copy whose bytes are what was saved."""
        while True:
            view = self._shard(piece.rank)
            try:
                view.read(piece.index, address, nbytes)
                return
            except CorruptError as damaged:
                without = self._without.setdefault(piece.rank, [])
                if view.tier in without:
                    raise
                without.append(view.tier)
                try:
                    self._views[piece.rank] = _core.attach(
                        self.job,
                        rank=piece.rank,
                        step=self.step,
                        attempt=self.attempt,
                        socket=self._socket,
                        timeout=self._timeout,
                        without=without,
                    )
                except HoldfastError:
                    raise damaged from None

    def _shard(self, rank: int) -> _core.View:
        views = self._open()
        if not 0 <= rank < len(views):
            raise NotFoundError(f"rank {rank}: {len(views)} ranks saved this step")
        return views[rank]

    def _of(self, name: str, rank: int | None = None) -> list[Piece]:
        """The pieces that make up the tensor: a whole one is enough, that rank's if one is named."""
        self._open()
        pieces = self._pieces.get(name)
        if pieces is None:
            close = [other for other in self._pieces if name in other][:5]
            raise NotFoundError(
                f"no tensor {name!r} in step {self.step}"
                + (f"; perhaps {', '.join(map(repr, close))}" if close else "")
            )
        first = pieces[0]
        if rank is not None:
            own = [piece for piece in pieces if piece.rank == rank]
            if not own:
                raise NotFoundError(f"rank {rank} saved no tensor {name!r} in step {self.step}")
            if own[0].whole:
                return own[:1]
            first = own[0]
        for piece in pieces:
            if (piece.info.dtype, piece.info.shape) != (first.info.dtype, first.info.shape):
                raise InvalidArgumentError(
                    f"{name}: ranks disagree: rank {first.rank} saved {first.info.dtype} {list(first.info.shape)}, rank "
                    f"{piece.rank} {piece.info.dtype} {list(piece.info.shape)}: name one of them (rank=…)"
                )
        return pieces

    def _tied(self) -> Iterator[tuple[str, str]]:
        """Names under which a module had a tensor that is saved under another."""
        for view in self._views:
            for name, data, codec in view.objects:
                if name == TREE and codec is None:
                    yield from _tied_in(_json.decode(data), "")

    def _assemble(
        self, name: str, rank: int | None, whole: Any, address: int, u8: Any, part: Any, has: Any
    ) -> None:
        """Reads every piece into the whole, and notes in `has` what came. Replicas are read once; what several ranks have of it
        is the same, or it is an error.
        """
        pieces = self._of(name, rank)
        differing = _differing(pieces)
        if differing is not None:
            one, other = differing
            raise _disagree(
                name,
                f"rank {one.rank} and rank {other.rank}",
                "name one of them (rank=…)" if one.whole else "read an older step",
            )
        for piece in {each.place: each for each in pieces}.values():
            info = piece.info
            box: Any = ...
            target, region = whole, has
            if info.flat is not None:
                box = slice(info.flat[0], sum(info.flat))
                target, region = whole.reshape(-1), has.reshape(-1)
            elif info.offset is not None:
                assert info.local_shape is not None
                box = tuple(
                    slice(o, o + n) for o, n in zip(info.offset, info.local_shape, strict=True)
                )
            twice = region[box]
            if not twice.any() and info.offset is None:  # one run of memory
                first = info.flat[0] if info.flat is not None else 0
                nbytes = target[box].nbytes
                self._read(piece, address + first * whole.itemsize, nbytes)
            else:
                made, where = part(tuple(twice.shape))
                self._read(piece, where, made.nbytes)
                if twice.any() and (_bits(target[box], u8)[twice] != _bits(made, u8)[twice]).any():
                    raise _disagree(
                        name, f"rank {piece.rank} and a lower rank", "read an older step"
                    )
                target[box] = made
            region[box] = True
        if not has.all():
            raise NotFoundError(
                f"{name}: what the ranks saved of it does not make up the whole tensor: "
                f"{int(has.sum())} of its elements"
            )


def _differing(pieces: list[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces with the same elements that have other bytes."""
    first: dict[tuple[Any, ...], Piece] = {}
    for piece in pieces:
        other = first.setdefault(piece.place, piece)
        if other.digest != piece.digest:
            return other, piece
    return None


def _disagree(name: str, ranks: str, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name}: ranks disagree: {ranks} saved different values of the same elements: {fix}"
    )


def _bits(array: Any, u8: Any) -> Any:
    """Of each element its bytes."""
    return array.reshape(-1).view(u8).reshape(*array.shape, array.itemsize)


def _tied_in(node: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for key, each in node.get("module", {}).items():
        if set(each) == {"tensor"}:
            yield f"{path}.{key}", each["tensor"]
    children = node.get("dict") or enumerate(node.get("list") or node.get("tuple") or [])
    for key, each in children:
        yield from _tied_in(each, join(path, key))


class OldRanks:
    """What each of the ranks that saved a step had: their objects are known, their shards are opened for tensors alone.

    old = OldRanks(of_all, attach)
    old.values("extra.rng", allow_pickle=False)  # of each rank, in their order; None: it had nothing there
    """

    def __init__(self, of_all: OfAll, attach: Callable[[], Checkpoint]) -> None:
        self._of_all = of_all
        self._attach = attach
        self._checkpoint: Checkpoint | None = None
        self._objects: list[dict[str, tuple[bytes, str | None]]] = [
            {} for _ in range(of_all.saved_by)
        ]
        for name, data, codec, ranks in of_all.contents:
            for rank in ranks:
                self._objects[rank][name] = data, codec

    def values(self, path: str, *, allow_pickle: bool) -> list[Any]:
        found = []
        for rank, objects in enumerate(self._objects):
            value = None
            if TREE in objects:
                with contextlib.suppress(NotFoundError):
                    node = _json.decode(objects[TREE][0])
                    value = _Values(self, rank, objects, allow_pickle).at(node, path)
            found.append(value)
        return found

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()

    # What _Values asks of a checkpoint.

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards())

    def tensor(self, name: str, *, rank: int) -> Any:
        return self._shards().tensor(name, rank=rank)

    def numpy(self, name: str, *, rank: int) -> Any:
        return self._shards().numpy(name, rank=rank)

    def _shards(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = self._attach()
        return self._checkpoint


class _Values:
    """Nodes of the tree (holdfast/_state.py) as plain values."""

    def __init__(
        self,
        checkpoint: Checkpoint | OldRanks | OnceRead,
        rank: int,
        objects: dict[str, tuple[bytes, str | None]],
        allow_pickle: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._rank = rank
        self._objects = objects
        self._allow_pickle = allow_pickle
        self._owners: Owners | None = None

    def at(self, node: dict[str, Any], path: str) -> Any:
        """The value of the node at a path from here."""
        self._owners = Owners(node)
        done = ""
        while path:
            children = self._children(node, done)
            # The longest: keys may have dots themselves.
            fits = [key for key in children if path == key or path.startswith(f"{key}.")]
            key = max(fits, key=len, default=None)
            if key is None:
                raise NotFoundError(
                    f"{join(done, path)!r} was not saved; under {done or 'the top'!r} there is "
                    f"{', '.join(map(repr, children)) or 'nothing'}"
                )
            node = children[key]
            done = join(done, key)
            path = path[len(key) + 1 :]
        return self._value(node, done)

    def _children(self, node: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
        if "dict" in node:
            return {str(key): each for key, each in node["dict"]}
        if "list" in node or "tuple" in node:
            nodes = node["list"] if "list" in node else node["tuple"]
            return {str(i): each for i, each in enumerate(nodes)}
        if "stateful" in node:
            return self._children(node["stateful"], path)
        if "optimizer" in node:  # what it is set to; its states are tensors with names of their own
            groups = [{"dict": group["fields"]} for group in node["optimizer"]["groups"]]
            return {"groups": {"list": groups}}
        if "module" in node:
            names = [
                name
                for name in self._checkpoint
                if self._owners is not None and self._owners.are(name, path)
            ]
            other: dict[str, dict[str, Any]] = node["module"]
            return {name[len(path) + 1 :]: {"tensor": name} for name in names} | other
        value = node.get("value")
        if isinstance(value, dict):
            return {str(key): {"value": each} for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return {str(i): {"value": each} for i, each in enumerate(value)}
        return {}

    def _value(self, node: dict[str, Any], path: str) -> Any:
        if "value" in node:
            return node["value"]
        if "tensor" in node:
            return self._checkpoint.tensor(node["tensor"], rank=self._rank)
        if "array" in node:
            return self._checkpoint.numpy(node["array"], rank=self._rank)
        if "subclass" in node:
            return self._subclass(node["subclass"], path)
        if "object" in node:
            return self._object(node["object"], path)
        if "absent" in node:
            return None
        if "dict" in node:
            return {key: self._value(each, join(path, key)) for key, each in node["dict"]}
        if "list" in node:
            return [self._value(each, join(path, i)) for i, each in enumerate(node["list"])]
        if "tuple" in node:
            return tuple(self._value(each, join(path, i)) for i, each in enumerate(node["tuple"]))
        if "stateful" in node:
            return self._value(node["stateful"], path)
        if "module" in node:
            return {
                key: self._value(each, join(path, key))
                for key, each in self._children(node, path).items()
            }
        if "optimizer" in node:
            return self._optimizer(node["optimizer"], path)
        raise CorruptError(
            f"{path}: the tree of this state has a node that is none: {next(iter(node), None)!r}"
        )

    def _object(self, name: str, path: str) -> Any:
        if name not in self._objects:
            raise CorruptError(f"{path}: the object {name!r} is named and was not saved")
        data, codec = self._objects[name]
        if codec != TENSOR_CODEC:
            return _objects.from_object(path, data, codec, allow_pickle=self._allow_pickle)
        return _subclasses.unpickled(data, path, "cpu", allow_pickle=self._allow_pickle)

    def _subclass(self, content: dict[str, Any], path: str) -> Any:
        tensors = {
            attribute: self._value(each, join(path, attribute))
            for attribute, each in content["tensors"]
        }
        return _subclasses.put_together(content, tensors, tuple(content["shape"]), path)

    def _optimizer(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        groups = [
            {"params": group["params"]}
            | {key: self._value(each, f"{path}.groups.{i}.{key}") for key, each in group["fields"]}
            for i, group in enumerate(node["groups"])
        ]
        state = {
            name: {
                key: self._value(
                    node["rest"].get(name, {}).get(key, {"tensor": f"{path}.state.{name}.{key}"}),
                    f"{path}.state.{name}.{key}",
                )
                for key in kind["keys"]
            }
            for kind in node["states"]
            for name in kind["params"]
        }
        return {"state": state, "param_groups": groups}


def open(  # noqa: A001 - holdfast.open("job") is what it is called
    job: str,
    *,
    step: int | None = None,
    attempt: int = 0,
    socket: str | None = None,
    timeout: float = 30.0,
) -> Checkpoint:
    """A committed step to look at; the newest on the job's line of descent unless `step` says another.

        with holdfast.open("llama-70b") as saved:
            print(saved.step, saved.tiers, saved.keys()[:3])

    Takes no part in the job: it may be called beside a run, or when none is there. Raises NotFoundError where there is no such
    step, NothingToRestoreError where the job has none or is not known, UnavailableError where no daemon answers.
    """
    job = _jobs.job_name("open", job)
    timeout = _jobs.seconds("open", "timeout", timeout)
    step = None if step is None else _jobs.unsigned("open", "step", step)
    attempt = _jobs.unsigned("open", "attempt", attempt)
    if attempt and step is None:
        raise InvalidArgumentError(f"open: attempt {attempt} of which step? Name it: step=…")
    path = _daemon.ensure_daemon(socket, start=False)
    first = _core.attach(job, rank=0, step=step, attempt=attempt, socket=path, timeout=timeout)
    views = [first]
    for rank in range(1, first.world_size):
        views.append(
            _core.attach(
                job, rank=rank, step=first.step, attempt=first.attempt, socket=path, timeout=timeout
            )
        )
    return Checkpoint(job, views, path, timeout)


def checkpoints(
    job: str, *, socket: str | None = None, timeout: float = 30.0
) -> list[_core.CheckpointInfo]:
    """The steps of a job that can be read, newest first; none where nothing was saved under that name.

    for found in holdfast.checkpoints("llama-70b"):
        print(found.step, found.attempt, found.tiers, "on the line" if found.on_line else "discarded branch")
    """
    try:
        return _core.list_checkpoints(
            _jobs.job_name("checkpoints", job),
            socket=_daemon.ensure_daemon(socket, start=False),
            timeout=_jobs.seconds("checkpoints", "timeout", timeout),
        )
    except NothingToRestoreError:  # nobody has joined it yet
        return []
