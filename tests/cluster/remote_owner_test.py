"""One remote directory, one cluster: what belongs to another is neither read nor written, until a person says that the other is gone."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from .cluster_of_daemons import PORT, SHORT_LEASE_S, SHORT_REQUEST_TIMEOUT_MS, wait_until
from .daemon import Daemon
from .etcd import Etcd
from .network import Network
from .node import Node
from .rank import Rank

EVERY_STEP = "remote.every_steps=1"


def _daemon(node: Node, cluster: str, etcd: Etcd) -> Daemon:
    section: Mapping[str, Any] = {
        "name": cluster,
        "advertise_address": f"{node.address}:{PORT}",
        "plaintext": True,
        "etcd": {
            "endpoints": etcd.endpoints,
            "lease_ttl_ms": SHORT_LEASE_S * 1000,
            "request_timeout_ms": SHORT_REQUEST_TIMEOUT_MS,
        },
    }
    return Daemon(node, {"cluster": section}).start()


def _listing(directory: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b""
        for path in sorted(directory.rglob("*"))
    }


def _move(here: pathlib.Path, there: pathlib.Path) -> None:
    for path in list(here.iterdir()):
        path.rename(there / path.name)


def _remote(daemon: Daemon) -> str:
    """What keeps the remote tier from being used; "" if nothing does."""
    said = json.loads(daemon.ctl("status", "--json"))
    (tier,) = [one for one in said["daemon"]["tiers"] if one["tier"] == "remote"]
    return "" if tier["healthy"] else str(tier["state"])


def _saved(node: Node, step: int) -> None:
    rank = Rank(node, "job", policy=EVERY_STEP)
    assert rank.ask("open").startswith("ok attempt=")
    rank.ask("restore")
    assert rank.ask(f"save {step}") == "ok sealed"
    assert rank.ask("tier remote") == "ok remote"
    rank.kill()


def test_two_clusters_that_were_given_one_remote_directory(network: Network) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    etcds = [Etcd(network, name=f"etcd-{name}").start() for name in ("prod", "test")]
    prod = _daemon(a, "prod", etcds[0])
    _saved(a, 5)
    before = _listing(network.remote)
    assert "job/5-a1/MANIFEST" in before
    # The other has a job of the same name, and is given the same directory by mistake.
    test = _daemon(b, "test", etcds[1])
    refusal = wait_until("it is refused", lambda: _remote(test))
    prods, tests = (
        etcd.get(f"/holdfast/{name}/cluster") for etcd, name in zip(etcds, ("prod", "test"))
    )
    assert f"'/remote' belongs to cluster 'prod' (id {prods}, written by node 'a'" in refusal
    assert f"cluster 'test' (id {tests})" in refusal
    assert f"ckptctl adopt-remote {prods}" in refusal
    rank = Rank(b, "job", policy=EVERY_STEP)
    said = rank.ask("open")
    assert said.startswith("error"), f"a new run does not begin while a tier is unread: {said}"
    assert "belongs to cluster 'prod'" in said, f"and hears why: {said}"
    rank.kill()
    test.ctl("gc")
    assert _listing(network.remote) == before, "nothing was written, and nothing removed"
    # The first goes on with its own.
    rank = Rank(a, "job", policy=EVERY_STEP)
    assert rank.ask("open") == "ok attempt=2"
    assert rank.ask("restore").startswith("ok attempt=1 step=5")
    rank.kill()
    # It is gone for good.
    prod.kill()
    for wrong in (["adopt-remote", str(prods)], ["adopt-remote", "0" * 32, "--yes"]):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            test.ctl(*wrong)
        assert "nothing was changed" in str(refused.value.output) + str(refused.value.stderr)
    said_then = test.ctl("adopt-remote", str(prods), "--yes")
    assert re.search(r"copies found there: [1-9]", said_then), said_then
    assert _remote(test) == ""
    rank = Rank(b, "job", policy=EVERY_STEP)
    assert rank.ask("open").startswith("ok attempt=")
    assert "step=5 source=remote" in rank.ask("restore")
    assert rank.ask("save 6") == "ok sealed"
    assert rank.ask("tier remote") == "ok remote"
    # And if it was not gone, it is the one that is refused now.
    prod.start()
    assert f"ckptctl adopt-remote {tests}" in wait_until("it is refused", lambda: _remote(prod))


def test_an_empty_directory_in_place_of_the_remote_one_is_unread(network: Network) -> None:
    etcd = Etcd(network).start()
    a = network.add_node("a")
    daemon = _daemon(a, "test", etcd)
    _saved(a, 5)
    noted = wait_until("it is noted", lambda: etcd.get("/holdfast/test/remote"))
    daemon.kill()
    # Its mount is missing at the next start, and nothing but etcd remembers what was there.
    a.erase("state")
    a.erase("nvme")
    a.reboot()
    kept = network.directory / "kept"
    kept.mkdir()
    _move(network.remote, kept)
    daemon = _daemon(a, "test", etcd)
    wait_until("it is unread", lambda: f"ckptctl adopt-remote {noted}" in _remote(daemon))
    rank = Rank(a, "job", policy=EVERY_STEP)
    said = rank.ask("open")
    said = rank.ask("restore") if said.startswith("ok") else said
    assert "NOTHING_TO_RESTORE" not in said and said.startswith("error"), said
    rank.kill()
    assert not list(network.remote.iterdir()), "and stays as it is"
    # It is mounted again.
    _move(kept, network.remote)
    again = Rank(a, "job", policy=EVERY_STEP)
    assert again.ask("open").startswith("ok attempt=")
    wait_until("it is read", lambda: "step=5 source=remote" in again.ask("restore"))


def test_without_etcd_at_the_start_the_directory_is_not_used(network: Network) -> None:
    etcd = Etcd(network).start()
    a = network.add_node("a")
    etcd.stop()
    daemon = _daemon(a, "test", etcd)
    assert "until etcd has said which cluster this is" in wait_until(
        "it says so", lambda: _remote(daemon)
    )
    assert not list(network.remote.iterdir())
    etcd.resume()
    wait_until("it is used", lambda: _remote(daemon) == "")
    _saved(a, 1)
