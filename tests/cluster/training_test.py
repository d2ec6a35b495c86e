"""The Python package on a node."""

from __future__ import annotations

import pathlib

from .daemon import Daemon
from .network import Network
from .rank import start_training


def test_a_python_program_trains_on_a_node(network: Network) -> None:
    node = network.add_node("a")
    daemon = Daemon(node, {"nvme": None, "remote": None}).start()
    program = pathlib.Path(__file__).parent / "training_rank.py"
    training = start_training(node, [program])
    assert training.wait() == 0, training.log() + daemon.log()
    assert training.log().split("\n")[-2:] == ["saved 4", ""]
    again = start_training(node, [program])
    assert again.wait() == 0, again.log()
    assert again.log().startswith("starts at step 5\n")
