"""Ranks that save parts of one tensor, and whoever reads it on another node, for peers_test.py.

elsewhere_rank.py save    # RANK of WORLD_SIZE saves its rows as step 4
elsewhere_rank.py read    # looks at it, by holdfast.open and by DCP
elsewhere_rank.py adopt   # a run of another world size goes on from it, by DCP, and saves step 5
"""

import sys

import torch
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.dcp

ROWS, COLUMNS = 12, 500_000  # a part of it is more than one batch
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
JOB = "elsewhere"


def save() -> None:
    with holdfast.Checkpointer(JOB) as ckpt:
        rows = ROWS // ckpt.world_size
        mine = WHOLE.narrow(0, ckpt.rank * rows, rows).clone()
        part = holdfast.Part(mine, shape=(ROWS, COLUMNS), offset=(ckpt.rank * rows, 0))
        ckpt.save(4, {"w": part, "extra": {"epoch": 7}}, wait="committed")
    print("saved", flush=True)


def load(reader: holdfast.dcp.Reader) -> None:
    state = {"w": torch.zeros(ROWS, COLUMNS)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert reader.step == 4
    assert torch.equal(state["w"], WHOLE)


def read() -> None:
    with holdfast.open(JOB) as saved:
        assert torch.equal(saved.tensor("w"), WHOLE)
        assert saved.value("extra", rank=1) == {"epoch": 7}
        saved.verify()
        print("tiers", *saved.tiers, flush=True)
    load(holdfast.dcp.Reader(JOB, adopt=False))
    print("read", flush=True)


def adopt() -> None:
    load(holdfast.dcp.Reader(JOB, adopt=True))
    with holdfast.Checkpointer(JOB) as ckpt:
        ckpt.save(5, {"w": WHOLE}, wait="committed")
    print("went on", flush=True)


{"save": save, "read": read, "adopt": adopt}[sys.argv[1]]()
