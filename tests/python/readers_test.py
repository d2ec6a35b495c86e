"""Checkpoints are plain safetensors files: what ckptd wrote is read by programs that know nothing of Holdfast.

    python readers_test.py BIN_DIRECTORY

Real processes save a step of a job whose tensors are split between two ranks; the `safetensors` package and
torch.distributed.checkpoint then read the files of the NVMe and of the remote tier.
"""

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

import numpy
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

DEADLINE_S = 120
BIN = ""

# Name: type, number of its values, shape; as save_sharded.cc has them.
TENSORS = {
    "model.rows": (torch.float32, 1, (10, 6)),
    "model.columns": (torch.bfloat16, 2, (4, 9)),
    "optimizer.moment": (torch.float64, 3, (700, 300)),
    "ids": (torch.int64, 4, (6, 2)),
    "embedding": (torch.int32, 5, (3, 2, 4)),
    "head": (torch.uint8, 6, (17,)),
}
# Of rank 0 and 1: where the box begins and what shape it has.
BOXES = {
    "model.rows": [((0, 0), (5, 6)), ((5, 0), (5, 6))],
    "model.columns": [((0, 0), (4, 4)), ((0, 4), (4, 5))],
    "optimizer.moment": [((0, 0), (300, 300)), ((300, 0), (400, 300))],
    "ids": [((0, 0), (3, 2)), ((3, 0), (3, 2))],
}


def expected(name):
    dtype, seed, shape = TENSORS[name]
    values = (seed * 31 + torch.arange(int(numpy.prod(shape)), dtype=torch.int64)) % 251
    return values.reshape(shape).to(dtype)


def part_of(name, rank):
    offset, shape = BOXES[name][rank]
    return expected(name)[tuple(slice(o, o + n) for o, n in zip(offset, shape))]


class Parts(DefaultLoadPlanner):
    """Loads boxes of the tensors: what a rank of another layout would want."""

    def __init__(self, offsets):
        super().__init__()
        self.offsets = offsets

    def create_local_plan(self):
        items = []
        for name, tensor in self.state_dict.items():
            chunk = ChunkStorageMetadata(torch.Size(self.offsets[name]), tensor.size())
            items += create_read_items_for_chunk_list(
                name, self.metadata.state_dict_metadata[name], [chunk]
            )
        return LoadPlan(items)

    def lookup_tensor(self, index):
        return self.state_dict[index.fqn]


class Node:
    """ckptd with a drive and a remote directory, and a job of two ranks that has saved a step into both."""

    def __init__(self):
        self.memory = tempfile.mkdtemp(prefix="holdfast-python-", dir="/dev/shm")
        self.work = tempfile.mkdtemp(prefix="holdfast-python-", dir=BIN)
        self.nvme, self.remote = os.path.join(self.work, "nvme"), os.path.join(self.work, "remote")
        os.mkdir(self.nvme)
        os.mkdir(self.remote)
        self.runtime = tempfile.mkdtemp(prefix="holdfast-python-")  # socket paths are short
        self.socket = os.path.join(self.runtime, "ckptd.sock")
        config = os.path.join(self.work, "ckptd.yaml")
        with open(config, "w", encoding="utf-8") as file:
            file.write(
                f"state_dir: {self.work}/state\nsocket: {{path: {self.socket}}}\nadmin: {{path: {self.runtime}/admin.sock}}\n"
                f"metrics: {{address: 'off'}}\nmemory: {{dir: {self.memory}, bytes_max: 256MiB}}\n"
                f"nvme: {{dirs: [{self.nvme}]}}\nremote: {{dir: {self.remote}}}\n"
                "policy: {nvme: {every_steps: 1}, remote: {every_steps: 1, every_ms: 0}}\n"
            )
        ready_path = os.path.join(self.runtime, "notify.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(ready_path)
            with open(os.path.join(self.work, "ckptd.log"), "wb") as log:
                self.daemon = subprocess.Popen(
                    [os.path.join(BIN, "ckptd"), "--config", config],
                    env={**os.environ, "NOTIFY_SOCKET": ready_path},
                    stderr=log,
                )
            end = os.pidfd_open(self.daemon.pid)
            readable, _, _ = select.select([ready, end], [], [], DEADLINE_S)
            os.close(end)
        if ready not in readable:
            raise RuntimeError("ckptd did not become ready: " + self.log())

    def log(self):
        with open(os.path.join(self.work, "ckptd.log"), encoding="utf-8") as file:
            return file.read()

    def save(self, job="job", world_size=2):
        ranks = [
            subprocess.Popen(
                [
                    os.path.join(BIN, "holdfast_test_save_sharded"),
                    self.socket,
                    job,
                    str(rank),
                    "1",
                    str(world_size),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            _, errors = rank.communicate(timeout=DEADLINE_S)
            if rank.returncode != 0:
                raise RuntimeError(f"{errors}\n{self.log()}")

    def close(self):
        self.daemon.terminate()
        self.daemon.wait(timeout=DEADLINE_S)
        for directory in [self.memory, self.work, self.runtime]:
            shutil.rmtree(directory, ignore_errors=True)


class Readers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.node = Node()
        cls.addClassCleanup(cls.node.close)
        cls.node.save()
        cls.step = os.path.join(cls.node.remote, "job", "1-a1")

    def check_image(self, path, rank):
        with safe_open(path, framework="pt") as image:
            names = set(image.keys())
            for name in BOXES:
                self.assertIn(name, names)
                got = image.get_tensor(name)
                self.assertEqual(got.dtype, TENSORS[name][0], name)
                self.assertTrue(torch.equal(got, part_of(name, rank)), name)
            alone = ["embedding", "head"][rank]
            self.assertTrue(torch.equal(image.get_tensor(alone), expected(alone)))
            progress = [name for name in names if name.endswith(":progress")]
            self.assertEqual(len(progress), 1, names)
            self.assertEqual(bytes(image.get_tensor(progress[0]).tolist()), b'{"step": 1}')

    def test_safetensors_opens_images_of_both_tiers(self):
        for rank in range(2):
            self.check_image(
                os.path.join(self.step, f"shard-{rank:05d}-of-00002.safetensors"), rank
            )
            self.check_image(
                os.path.join(self.node.nvme, "job", "1-a1", f"{rank}.safetensors"), rank
            )

    def test_safetensors_opens_them_as_numpy_arrays(self):
        with safe_open(
            os.path.join(self.step, "shard-00001-of-00002.safetensors"), framework="np"
        ) as image:
            numpy.testing.assert_array_equal(
                image.get_tensor("optimizer.moment"), part_of("optimizer.moment", 1).numpy()
            )

    def test_torch_loads_whole_tensors_from_the_step_directory(self):
        state = {
            name: torch.zeros(shape, dtype=dtype) for name, (dtype, _, shape) in TENSORS.items()
        }
        dcp.load(state, storage_reader=HuggingFaceStorageReader(self.step), no_dist=True)
        for name in TENSORS:
            self.assertTrue(torch.equal(state[name], expected(name)), name)

    def test_torch_loads_what_replicas_share(self):
        """Six replicas of each part: every tensor lies in one file, one of them has no tensor at all."""
        self.node.save("replicas", 12)
        step = os.path.join(self.node.remote, "replicas", "1-a1")
        files = sorted(name for name in os.listdir(step) if name.endswith(".safetensors"))
        self.assertEqual(len(files), 12)
        keys = []
        for name in files:
            with safe_open(os.path.join(step, name), framework="pt") as image:
                keys.append(list(image.keys()))
        tensors = [key for each in keys for key in each if not key.endswith(":progress")]
        self.assertEqual(len(tensors), 2 * len(BOXES) + 2, keys)
        self.assertIn([], keys)
        state = {
            name: torch.zeros(shape, dtype=dtype) for name, (dtype, _, shape) in TENSORS.items()
        }
        dcp.load(state, storage_reader=HuggingFaceStorageReader(step), no_dist=True)
        for name in TENSORS:
            self.assertTrue(torch.equal(state[name], expected(name)), name)

    def test_torch_loads_another_split_of_the_tensors(self):
        # Three ranks instead of two, and the columns of what was split by rows.
        for rank in range(3):
            offsets = {
                "model.rows": (0, rank * 2),
                "optimizer.moment": (rank * 233, 10),
                "model.columns": (rank, 3),
                "ids": (rank * 2, 0),
            }
            shapes = {
                "model.rows": (10, 2),
                "optimizer.moment": (233, 280),
                "model.columns": (2, 6),
                "ids": (2, 2),
            }
            state = {name: torch.zeros(shapes[name], dtype=TENSORS[name][0]) for name in offsets}
            dcp.load(
                state,
                storage_reader=HuggingFaceStorageReader(self.step),
                planner=Parts(offsets),
                no_dist=True,
            )
            for name, offset in offsets.items():
                wanted = expected(name)[
                    tuple(slice(o, o + n) for o, n in zip(offset, shapes[name]))
                ]
                self.assertTrue(torch.equal(state[name], wanted), (name, rank))

    def test_a_flipped_byte_would_be_seen(self):
        """The comparison itself can fail."""
        with tempfile.TemporaryDirectory() as other:
            copy = os.path.join(other, "shard-00000-of-00002.safetensors")
            shutil.copy(os.path.join(self.step, "shard-00000-of-00002.safetensors"), copy)
            with open(copy, "r+b") as file:
                file.seek(4096 + 7)  # in the first tensor: the largest elements come first
                byte = file.read(1)[0]
                file.seek(4096 + 7)
                file.write(bytes([byte ^ 1]))
            with self.assertRaises(AssertionError):
                self.check_image(copy, 0)


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)
