"""The extension module: the C++ client, without knowledge of torch.

Tensors come as metadata (`TensorList`, made once per layout) and addresses (a list of integers, new with each call); what
keeps the memory alive is the caller's business. Times are seconds. Every call that waits or copies releases the GIL, and
lets KeyboardInterrupt through within a tenth of a second (a copy out of a slot or file: between pieces of 4 MiB). Failures raise `holdfast.HoldfastError`'s subclasses.

Stages are "snapshot", "sealed", "committed", "nvme", "remote".
"""

from collections.abc import Callable, Mapping, Sequence

__version__: str

def filesystem_type(path: str) -> str:
    """By statfs: "ext4", "nfs", "tmpfs", …; of one that is not known the number, as "0x517b". Raises OSError."""

def is_dying(pid: int) -> bool:
    """Whether that process was killed and hangs in a call that no signal ends."""

# name, bytes, codec; codec None: the bytes are JSON text.
Object = tuple[str, bytes, str | None]
# attempt, step, number of ranks, the contents that objects have among them (name, bytes, codec, ranks), and which tensors each
# of the ranks has, or a part of them.
SavedByAll = tuple[int, int, int, list[tuple[str, bytes, str | None, list[int]]], set[str]]
# device ordinal, CUstream as an integer.
Stream = tuple[int, int]

class TensorList:
    """Tensors of one rank, without their memory, in the order in which addresses are given.

        tensors = TensorList()
        tensors.add("w", "F32", (4096, 1024))
        tensors.add("v", "F32", (4096, 1024), offset=(0, 0), local_shape=(512, 1024))   # rows 0 to 511 of it
        tensors.add("u", "F32", (4096, 1024), flat=(100, 50))                           # elements 100 to 149, flattened

    `device`: -1 for this process's memory, else the CUDA device's ordinal.
    """

    def add(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        offset: Sequence[int] | None = None,
        local_shape: Sequence[int] | None = None,
        flat: tuple[int, int] | None = None,
        device: int = -1,
    ) -> None: ...
    def __len__(self) -> int: ...

class TensorInfo:
    """A tensor as it was saved."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    local_shape: tuple[int, ...] | None
    flat: tuple[int, int] | None
    nbytes: int

class Restored:
    attempt: int
    step: int
    bytes: int
    source: str
    why: str
    waited_s: float
    copied_s: float
    notes: list[str]
    resharded_from: int  # ranks that saved it, if it was put together out of their shards; else 0

class Save:
    """A save under way. When the object goes, the copy has ended, and a save that was held and never sealed is given up."""

    def wait(self, stage: str, timeout: float) -> None:
        """Raises holdfast.DeadlineExceededError when the stage is not reached by then."""

    def wait_first(self, timeout: float) -> None:
        """Returns when the tensors of `copy_first` have been copied, or the save has failed."""

    def done(self, stage: str) -> bool:
        """Whether "snapshot" or "sealed" has been reached or can't be any more; asks nobody."""

    def fence(self, streams: Sequence[Stream], timeout: float) -> None:
        """What these streams do from now on comes after the copy has read the device's tensors."""

    def seal(self, timeout: float) -> None:
        """Of a save with hold=True: seals what was copied. Returns when the daemon has it. Interrupted, or after `timeout`
        seconds, the sealing goes on: wait("sealed", ...) tells what became of it."""

    def discard(self) -> None:
        """Of a save with hold=True: gives it up, unless its sealing has begun. The step is lost for all ranks. Takes no longer
        than a copy under way, and a second in which the daemon may hear of it."""

    def staged(self) -> tuple[memoryview, list[int], list[int]]:
        """Of a save with hold=True, after "snapshot": read-only memory in which the copies of the tensors lie, and of each, in
        the order of the TensorList, where it begins there and how many bytes it has. What lies there is good until seal() or
        discard()."""

    def times(self) -> dict[str, float]:
        """Seconds from the call of save to the stages that are known to be reached; after "sealed", those that a wait was for
        and those before it. A time that the daemon does not know is left out."""
    @property
    def nbytes(self) -> int: ...

class Job:
    def __init__(
        self,
        job: str,
        *,
        rank: int,
        world_size: int,
        launch: str = "",
        socket: str = "",
        copy_threads: int = 0,
        policy: Mapping[str, Mapping[str, int]] = ...,
        open_timeout: float = 60.0,
        call_timeout: float = 30.0,
    ) -> None:
        """policy: {"nvme" | "remote": {"every_steps" | "every_ms" | "keep_last" | "keep_every_steps" | "bytes_max": n}, "peer": {"replicas": n}}"""

    @property
    def attempt(self) -> int: ...
    @property
    def failed_saves(self) -> int: ...
    def preempted(self, step: int) -> bool: ...
    def notice_stop(self, grace: float) -> None: ...
    @property
    def stop_left(self) -> float | None: ...
    def reserve(
        self,
        tensors: TensorList,
        addresses: Sequence[int],
        objects: Sequence[Object],
        timeout: float,
    ) -> tuple[int, int, int]:
        """(slots ready, slots wanted, bytes of a slot)"""

    def save(
        self,
        step: int,
        tensors: TensorList,
        addresses: Sequence[int],
        objects: Sequence[Object],
        *,
        copy_first: Sequence[int] = (),
        hold: bool = False,
        wait_first: bool = True,
        streams: Sequence[Stream] = (),
        wait_for_room: float = 0.0,
    ) -> Save:
        """Begins a save. Tensors with these indices (`copy_first`) are copied before it returns (with wait_first=False: before
        Save.wait_first does, which lets Ctrl-C through and leaves the Save to be waited for); the others must stay alive
        and unchanged until "snapshot". Never raises for the sake of the save itself: the Save says what became of it."""

    def restore(
        self,
        choose: Callable[
            [list[TensorInfo], list[Object], SavedByAll | None], tuple[TensorList, list[int]]
        ],
        *,
        step: int | None = None,
        attempt: int = 0,
        timeout: float = 600.0,
        streams: Sequence[Stream] = (),
        convert: bool = False,
        progress: Callable[[bool, int, int, int, int], object] | None = None,
        label: str = "",
    ) -> Restored:
        """`choose` is given what was saved, and names what is wanted and where to. It may be asked more than once: for another
        step, or another copy; and, when this rank's own shard will not do, for what all ranks saved together, whose tensors are
        shown whole. What it raises ends the session for all ranks, and is raised here.
        `label`: of this run of the job, the same on all ranks. With one, `choose` may raise what has the attribute `of_another_run`:
        the job starts over if it does on all ranks (NothingToRestoreError), or it is UnavailableError, and nothing has changed.
        `progress(loading, step, attempt, bytes, bytes_of)`: called a few times a second; what it raises ends the restore."""

    def enter_network_busy(self) -> None: ...
    def leave_network_busy(self) -> None: ...
    def adopt(
        self, *, step: int | None = None, attempt: int = 0, timeout: float = 600.0
    ) -> Restored:
        """Decides with all ranks which step this attempt goes on from, and loads nothing: that is read with `attach`."""

    def close(self) -> None:
        """Waits for a save under way, unmaps, and tells the daemon. Interrupted: gives up what is not being copied. Twice is
        once."""

class View:
    """One rank's shard of a committed step, where it lies. Stays readable as long as the object lives; of tier "peer", which is read
    on another node, as long as some node has it, or remote."""

    attempt: int
    step: int
    world_size: int
    tier: str
    why: str
    tensors: list[TensorInfo]
    digests: list[int]  # of each tensor's bytes: the same for the same bytes
    objects: list[Object]

    def read(self, tensor: int, address: int, nbytes: int | None = None) -> None:
        """Copies that tensor's bytes to the address (0: nowhere) and verifies them: holdfast.CorruptError. `nbytes`: how many the
        caller has room for; InvalidArgumentError unless that is what the tensor has."""

    def memory(self, tensor: int) -> memoryview:
        """Its bytes where they lie, read-only and not verified. InvalidArgumentError of tier "peer": they lie on another node."""

    def verify(self) -> None:
        """Reads everything, and compares it with its digests."""

class CheckpointInfo:
    """A step that can be read. `tiers`: those that have all of it."""

    attempt: int
    step: int
    world_size: int
    on_line: bool
    tiers: list[str]
    bytes: int
    saved_unix: float

def attach(
    job: str,
    *,
    rank: int = 0,
    step: int | None = None,
    attempt: int = 0,
    socket: str = "",
    timeout: float = 30.0,
    without: Sequence[str] = (),
) -> View:
    """From the nearest tier that has it; `without`: tiers whose copy is not wanted."""

class KeptParts:
    """Parts of tensors of a step. Shards of this node are held as long as the object lives."""

    def read(self, addresses: Sequence[int]) -> None:
        """Copies each part to its address (0: not this time), verified."""

class OpenStep:
    """What a step is made of, whichever rank saved which part."""

    # Tensors by name, then objects: (name, dtype or None of an object, shape, ranks, problem). Ranks of
    # an object: who had this one; of a tensor: none, or the one rank whose own it is.
    items: list[tuple[str, str | None, list[int], list[int], str]]

    def objects(self, items: Sequence[int]) -> list[Object]:
        """Those of the items, in that order."""

    def keep(self, parts: TensorList) -> KeptParts:
        """Plans to read them, and compares what several ranks have of them: InvalidArgumentError."""

def open_step(
    job: str, *, step: int, attempt: int, world_size: int, socket: str = "", timeout: float = 30.0
) -> OpenStep:
    """Attaches to no shard. `timeout`: for this, and for each call of what it returns."""

def list_checkpoints(job: str, *, socket: str = "", timeout: float = 30.0) -> list[CheckpointInfo]:
    """Newest first."""
