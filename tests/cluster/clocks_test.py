"""Daemons whose wall clocks are wrong."""

from __future__ import annotations

import time

from .daemon import Daemon
from .network import Network
from .rank import Rank

EVERY_STEP = "remote.every_steps=1"


def test_daemons_whose_clocks_are_minutes_apart(network: Network) -> None:
    ahead = network.add_node("ahead", clock_offset_s=600)
    behind = network.add_node("behind", clock_offset_s=-600)
    for node, step in ((ahead, 1), (behind, 2)):
        daemon = Daemon(node).start()
        said = daemon.log().split()[0]
        shown = time.strptime(said[:19], "%Y-%m-%dT%H:%M:%S")
        off = time.mktime(shown) - time.mktime(time.gmtime())
        assert abs(off) > 300 and (off > 0) == (node is ahead), said
        rank = Rank(node, "job", policy=EVERY_STEP)
        answers = [rank.ask(word) for word in ("open", "restore", f"save {step}", "tier remote")]
        assert answers[0] == f"ok attempt={step}" and answers[3] == "ok remote", answers
        assert step == 1 or answers[1].startswith("ok attempt=1 step=1 source=remote")
        node.kill()
