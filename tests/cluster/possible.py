"""Whether this machine allows what a `Network` is made of; exits with 77 and says what is missing, or with 1 if a package is.

python3 -m cluster.possible && echo yes
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import sys
import tempfile

from . import clock
from . import system_calls as sc
from .node import run_in_network

SKIPPED = 77
# What the programs say when the machine does not want to; all else is a fault of ours, and no reason to skip.
_REFUSALS = re.compile(
    "not permitted|not supported|Permission denied|Unknown device type|No such file"
)
_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "ss": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "etcd": "etcd-server",
}


def missing_packages() -> list[str]:
    missing = {package for name, package in _PROGRAMS.items() if shutil.which(name) is None}
    try:
        clock.library()
    except FileNotFoundError:
        missing.add("libfaketime")
    return sorted(missing)


def obstacle() -> str | None:
    """What the machine forbids, or None. Tries each thing by itself, with none of the code under test's own steps."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with sc.in_network(None):
            network = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    except OSError as error:
        return f"no network namespaces: {error}"
    try:
        run_in_network(network, ["ip", "link", "add", "name", "switch", "type", "bridge"], "")
        run_in_network(
            network, ["ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "two"], ""
        )
        tbf = ["rate", "1mbit", "burst", "16kb", "latency", "100ms"]
        run_in_network(network, ["tc", "qdisc", "add", "dev", "one", "root", "tbf", *tbf], "")
        run_in_network(
            network,
            ["nft", "-f", "-"],
            "table bridge f {\nchain c {\ntype filter hook forward priority 0;\n"
            "ether type ip numgen random mod 10 < 3 drop\n}\n}\n"
            "table ip n {\nchain c {\ntype nat hook output priority -100;\n"
            "tcp dport 1 redirect to :2\n}\n}\n",
        )
    except OSError as error:
        if not _REFUSALS.search(str(error)):
            raise
        return f"the kernel lacks something that network faults need: {error}"
    finally:
        os.close(network)
    return _mount_obstacle()


def _mount_obstacle() -> str | None:
    place = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("HOLDFAST_CLUSTER_DIR")))
    child = os.fork()
    if child == 0:
        try:
            users = sc.new_user_namespace(1_000_000)
            sc.unshare(sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWUTS | sc.CLONE_NEWIPC)
            sc.mount("", "/", None, sc.MS_REC | sc.MS_PRIVATE)
            (place / "from").mkdir()
            (place / "to").mkdir()
            sc.bind(f"{place}/from", f"{place}/to", user_namespace=users)
        except OSError as error:
            (place / "why").write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    why = place / "why"
    try:
        if why.exists():
            return (
                f"no mounts with owners of their own in {place.parent} (try HOLDFAST_CLUSTER_DIR on "
                f"ext4 or XFS): {why.read_text()}"
            )
        return None
    finally:
        shutil.rmtree(place)


def main() -> int:
    missing = missing_packages()
    if missing:
        print(
            f"tests/cluster: run scripts/setup test: {' '.join(missing)} missing", file=sys.stderr
        )
        return 1
    why = obstacle()
    if why is not None:
        print(f"tests/cluster: skipped, as this machine does not allow it: {why}", file=sys.stderr)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
