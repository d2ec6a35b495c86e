"""torch.distributed.checkpoint into Holdfast: existing loops change one argument.

    import torch.distributed.checkpoint as dcp
    import holdfast.dcp

    dcp.load(state, storage_reader=holdfast.dcp.Reader("llama"))    # the newest step that is whole
    dcp.save(state, storage_writer=holdfast.dcp.Writer("llama", step=100))
    # Copied once, into the daemon's memory, before it returns:
    dcp.async_save(state, storage_writer=holdfast.dcp.Writer("llama", step=101))

Planning, de-duplication and resharding are DCP's own. The steps are Holdfast's like any other:
committed when every rank's shard is sealed, replicated and flushed by the job's policy, and
readable as safetensors files.
"""

from holdfast.dcp import _process_mode
from holdfast.dcp._reader import Reader
from holdfast.dcp._staging import Stager
from holdfast.dcp._writer import Writer

_process_mode.install()

__all__ = ["Reader", "Stager", "Writer"]
