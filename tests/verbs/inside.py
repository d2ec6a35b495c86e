"""What runs in the guest (../guests): two daemons, each with an RDMA device of its own, over one link, and what is done to them.

    inside.py BIN NAME…     # the steps NAME…, in this order; what came of each goes to /run/share/answer

Both nodes are in one network namespace, as their devices are: soft-RoCE of this kernel receives in the first namespace only. So
that packets of one to the other leave by its own interface and arrive at the other's, addresses of this machine are looked up
last (`make_network`). In memory and on disk the nodes have nothing in common. Python's standard library only.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import resource
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

BIN = pathlib.Path(sys.argv[1])
SHARE = pathlib.Path("/run/share")
PORT = 9465
STATE_BYTES = 64 << 20
SOME_USER = 4242
DSCP = 26
CUT_S = 25
MEASURE_TRIES = 3
# Of everything: the machine is emulated, and what emulates it may have other work.
DEADLINE_S = 300
# Far less than a slot, and enough for queues.
LITTLE_MEMLOCK_BYTES = 256 << 10

# Opcodes of RoCE's base transport header. Responses: first, middle, last, only.
READ_REQUEST = 0x0C
READ_RESPONSES = (0x0D, 0x0E, 0x0F, 0x10)

# Not those that know tcp's ways: its names, its sockets, that a file that is cut short cannot be read.
PULL_TESTS = {
    "pull_test": "-*ConnectionsAreLimitedAndKept",
    "pull_faults_test": "-*.ConnectionThatDiedWhileItWaited:*.StoppedSource*:*.SourceIsCutShortInTheMiddle:"
    "*.SourceInThisProcessIsCutShort:*.SourceIsCutShortAndGrows*",
    "fabric_test": "*.TrafficClass*:*.RegistrationOutlives*:*.WhoWasNotTold*",
}

T = TypeVar("T")


def say(text: str) -> None:
    print(f"[{time.monotonic():6.1f}] {text}", flush=True)


def run(*words: str | os.PathLike[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(what: str, told: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    end = time.monotonic() + deadline_s
    while not (answer := told()):
        assert time.monotonic() < end, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(0.1)
    return answer


def make_network() -> None:
    """ve1 has 10.99.0.1 and rxe1, ve2 has 10.99.0.2 and rxe2: two ends of one cable."""
    batch = ["link add ve1 mtu 9000 type veth peer name ve2 mtu 9000"]
    for here, there in ((1, 2), (2, 1)):
        ours, theirs, link, table = f"10.99.0.{here}", f"10.99.0.{there}", f"ve{here}", 100 + here
        batch += [
            f"address add {ours}/24 dev {link}",
            f"link set {link} up",
            f"route add {theirs} dev {link} src {ours} table {table}",
            # What comes in for us is ours, …
            f"rule add pref 5 iif {link} to {ours} lookup local",
            f"rule add pref 6 from {ours} to {ours} lookup local",
            # … and what is for the other one goes over the cable, though it is an address of this machine, too.
            f"rule add pref 7 from {ours} to {theirs} lookup {table}",
            f"rule add pref 8 iif lo to {theirs} lookup {table}",
        ]
    batch += ["rule add pref 100 lookup local", "rule del pref 0"]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(batch), text=True, check=True)
    for link in ("ve1", "ve2"):
        settings = pathlib.Path(f"/proc/sys/net/ipv4/conf/{link}")
        (settings / "accept_local").write_text("1")
        (settings / "rp_filter").write_text("0")
    pathlib.Path("/proc/sys/net/ipv4/conf/all/rp_filter").write_text("0")
    # RDMA wants a network that drops nothing, as the cable of RoCE is to be. When this one does, the soft-RoCE of Linux 6.1 may say
    # of a read that failed that it is done (a warning of rxe_completer tells), and the pull finds bytes that were never read.
    pathlib.Path("/proc/sys/net/core/netdev_max_backlog").write_text("1000000")
    for number in (1, 2):
        run("rdma", "link", "add", f"rxe{number}", "type", "rxe", "netdev", f"ve{number}")


class Node:
    """A daemon, what it keeps, and a job's ranks beside it."""

    def __init__(self, number: int) -> None:
        self.name = f"n{number}"
        self.address = f"10.99.0.{number}"
        self.link = f"ve{number}"
        self.device = f"rxe{number}"
        self.directory = pathlib.Path(f"/run/nodes/{self.name}")
        self.memory = pathlib.Path(f"/dev/shm/{self.name}")
        self.log_path = SHARE / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, fabric: dict[str, Any], *, uid: int = 0, memlock_bytes: int | None = None
    ) -> None:
        """Returns when it is ready. `fabric`: that section of its settings, laid over its own device by verbs."""
        for directory in (self.directory, self.directory / "state", self.memory):
            directory.mkdir(parents=True, exist_ok=True)
            shutil.chown(directory, uid, uid)
        settings = {
            "node_name": self.name,
            "state_dir": str(self.directory / "state"),
            "socket": {"path": str(self.directory / "ckptd.sock")},
            "admin": {
                "path": str(self.directory / "admin.sock"),
                "request_timeout_ms": DEADLINE_S * 1000,
            },
            "memory": {"dir": str(self.memory), "bytes_max": 10 * STATE_BYTES},
            "metrics": {"address": "off"},
            "cluster": {
                "listen_address": f"{self.address}:{PORT}",
                "advertise_address": f"{self.address}:{PORT}",
                "plaintext": True,
                # n2 first: it hosts the job, and n1 is the one that is lost.
                "members": [
                    {"name": f"n{number}", "address": f"10.99.0.{number}:{PORT}"}
                    for number in (2, 1)
                ],
            },
            "fabric": {"provider": "verbs", "devices": [self.device], **fabric},
        }
        config = self.directory / "ckptd.yaml"
        config.write_text(json.dumps(settings))  # JSON is YAML

        def become() -> None:
            if memlock_bytes is not None:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
            if uid != 0:  # which leaves CAP_IPC_LOCK behind
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)

        ready_path = self.directory / "ready.sock"
        ready_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(ready_path))
            ready_path.chmod(0o666)
            with open(self.log_path, "ab") as log:
                self.process = subprocess.Popen(
                    [BIN / "ckptd", f"--config={config}"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(ready_path)},
                    cwd="/",
                    preexec_fn=become,
                )
            readable, _, _ = select.select([ready], [], [], DEADLINE_S)
        assert readable, f"{self.name} did not become ready"
        say(f"{self.name} is ready")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def lose(self) -> None:
        """As by a power cut: its memory is gone with it."""
        self.kill()
        shutil.rmtree(self.memory)

    def forget(self) -> None:
        self.lose()
        shutil.rmtree(self.directory)

    def tell(self, *words: str) -> dict[str, Any]:
        """What `ckptctl … --json` says of it; raises when it fails."""
        return json.loads(
            run(
                *(BIN / "ckptctl", *words, "--json", f"--timeout={DEADLINE_S}s"),
                f"--socket={self.directory}/admin.sock",
            )
        )

    def log(self) -> str:
        return self.log_path.read_text()

    def packets(self) -> int:
        """That its RDMA device has sent and received so far."""
        counters = pathlib.Path(f"/sys/class/infiniband/{self.device}/ports/1/hw_counters")
        return sum(int((counters / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))


N1, N2 = Node(1), Node(2)


class Rank:
    """tests/integration/rank_program.cc, the only one of its job: it checks every bit that it restores."""

    def __init__(self, node: Node, job: str, *, uid: int = 0) -> None:
        words = [f"{node.directory}/ckptd.sock", job, "0", "1", str(STATE_BYTES), ""]
        with open(SHARE / "rank.log", "ab") as log:
            self.process = subprocess.Popen(
                [BIN / "holdfast_test_rank", *words, "replicas=1"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                user=uid,
                group=uid,
                extra_groups=[],
            )

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        say(f"rank: {command}")
        self.process.stdin.write(command + "\n")
        readable, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert readable, f"no answer to '{command}'"
        said = self.process.stdout.readline().strip()
        say(f"rank: {said}")
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Sniffer:
    """RoCE packets that arrive at a node's interface within the block, by (BTH opcode, DSCP); some are missed when there are many."""

    ETH_P_IP = 0x0800
    ROCE_PORT = 4791
    # 20 bytes of IP, 8 of UDP.
    OPCODE_AT = 28

    def __init__(self, node: Node) -> None:
        self.seen: collections.Counter[tuple[int, int]] = collections.Counter()
        self._socket = socket.socket(
            socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(self.ETH_P_IP)
        )
        self._socket.bind((node.link, self.ETH_P_IP))
        self._socket.settimeout(0.2)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Sniffer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._socket.close()

    def read_responses(self) -> dict[int, int]:
        """How many answers to one-sided reads, by DSCP."""
        by_dscp: collections.Counter[int] = collections.Counter()
        for (opcode, dscp), count in self.seen.items():
            if opcode in READ_RESPONSES:
                by_dscp[dscp] += count
        return dict(by_dscp)

    def _look(self) -> None:
        while not self._ends.is_set():
            try:
                packet = self._socket.recv(64)
            except TimeoutError:
                continue
            if len(packet) > self.OPCODE_AT and packet[9] == socket.IPPROTO_UDP:
                (port,) = struct.unpack_from(">H", packet, 22)
                if port == self.ROCE_PORT:
                    self.seen[packet[self.OPCODE_AT], packet[1] >> 2] += 1


def start_both(**fabric: Any) -> None:
    """Anew, with nothing kept."""
    for node in (N1, N2):
        node.kill()
    for node in (N1, N2):
        if node.directory.exists():
            node.forget()
    for node in (N2, N1):
        node.start(fabric)
    wait_until("they see each other", they_see_each_other)


def they_see_each_other() -> bool:
    return all(len(node.tell("nodes").get("nodes", [])) == 2 for node in (N1, N2))


def saved_in_peer(rank: Rank, step: int) -> None:
    assert rank.ask(f"save {step}") == "ok sealed"
    assert rank.ask(f"tier peer {DEADLINE_S * 1000}") == "ok peer"


def protection(job: str) -> dict[str, Any]:
    return N2.tell("status", job)["jobs"][0]


def copies(job: str, step: int) -> list[tuple[int, str, str]]:
    said = N2.tell("where", job, "--step", str(step)).get("copies", [])
    return sorted((c["rank"], c["tier"], c["node"]) for c in said if c["state"] == "good")


def measure(node: Node, other: Node) -> dict[str, Any]:
    """`ckptctl fabric OTHER`. It is given up after 30 s, which an emulated machine beside other work may need."""
    for left in reversed(range(MEASURE_TRIES)):
        try:
            return node.tell("fabric", other.name)
        except AssertionError as error:
            if left == 0:
                raise
            say(f"once more: {error}")
    raise AssertionError


# The steps. Each returns what verbs_test.py and people want to know.


def shown() -> dict[str, Any]:
    """What the daemons say of their devices, and what libfabric's own program does."""
    start_both()
    told = {
        node.device: run("fi_info", "-p", "verbs", "-d", node.device, "-t", "FI_EP_MSG", "-v")
        for node in (N1, N2)
    }
    return {
        "shown": {node.name: node.tell("fabric") for node in (N1, N2)},
        "fi_info": {
            device: {
                "registration": sorted(
                    set(re.findall(r"FI_MR_(\w+)", re.findall(r"mr_mode: \[(.*)\]", text)[0]))
                ),
                "message_bytes_max": int(re.findall(r"max_msg_size: (\d+)", text)[0]),
            }
            for device, text in told.items()
        },
        "people": run(BIN / "ckptctl", "fabric", f"--socket={N1.directory}/admin.sock"),
    }


def measured() -> dict[str, Any]:
    with Sniffer(N1) as sniffer:
        said = measure(N1, N2)
    return {"measured": said, "read_responses": sniffer.read_responses()}


def restored() -> dict[str, Any]:
    """A step goes to the other node's memory and comes back from there, when its own node has lost it."""
    rank = Rank(N1, "job")
    facts: dict[str, Any] = {"state_bytes": STATE_BYTES}
    try:
        facts["open"] = rank.ask("open")
        facts["nothing"] = rank.ask("restore")
        packets = N2.packets()
        began = time.monotonic()
        saved_in_peer(rank, 1)
        facts["replicated_s"] = time.monotonic() - began
        facts["packets_replicated"] = N2.packets() - packets
        facts["status"] = protection("job")
        facts["copies"] = copies("job", 1)
    finally:
        rank.end()
    N1.lose()
    N1.start({})
    rank = Rank(N1, "job")
    try:
        facts["opened_again"] = rank.ask("open")
        packets = N2.packets()
        with Sniffer(N1) as sniffer:
            began = time.monotonic()
            facts["restored"] = rank.ask("restore")
            facts["restored_s"] = time.monotonic() - began
        facts["packets_restored"] = N2.packets() - packets
        facts["read_responses"] = sniffer.read_responses()
    finally:
        rank.end()
    facts["logs"] = {node.name: node.log() for node in (N1, N2)}
    return facts


def dscp() -> dict[str, Any]:
    """Asked for, by daemons that were not told what carries the bytes, either."""
    start_both(provider="auto", dscp=DSCP)
    facts: dict[str, Any] = {
        "shown": {node.name: node.tell("fabric") for node in (N1, N2)},
        "log": N1.log(),
        "before": measured_packets(),
    }
    # As `cma_roce_tos` does it: for connections that say nothing, made from now on.
    run("mount", "-t", "configfs", "configfs", "/sys/kernel/config")
    for node in (N1, N2):
        device = pathlib.Path(f"/sys/kernel/config/rdma_cm/{node.device}")
        device.mkdir()
        (device / "ports/1/default_roce_tos").write_text(str(DSCP << 2))
    start_both()
    facts["with_default_roce_tos"] = measured_packets()
    for node in (N1, N2):
        device = pathlib.Path(f"/sys/kernel/config/rdma_cm/{node.device}")
        (device / "ports/1/default_roce_tos").write_text("0")
    return facts


def measured_packets() -> dict[str, dict[int, int]]:
    """Of one-sided reads by n1: how many of which DSCP."""
    with Sniffer(N1) as responses, Sniffer(N2) as requests:
        assert measure(N1, N2)["provider"] == "verbs"
    asked: collections.Counter[int] = collections.Counter()
    for (opcode, dscp), count in requests.seen.items():
        if opcode == READ_REQUEST:
            asked[dscp] += count
    return {"responses": responses.read_responses(), "requests": dict(asked)}


def cut() -> dict[str, Any]:
    """The cable is pulled in the middle of a read, for longer than RDMA tries again by itself, and plugged in again."""
    start_both()
    rank = Rank(N1, "cut")
    facts: dict[str, Any] = {}
    try:
        assert rank.ask("open").startswith("ok"), "open"
        facts["nothing"] = rank.ask("restore")
        packets = N2.packets()
        assert rank.ask("save 1") == "ok sealed"
        wait_until("bytes are on their way", lambda: N2.packets() > packets + 1000)
        run("ip", "link", "set", N1.link, "down")
        say("cut")
        time.sleep(CUT_S)
        facts["packets_when_cut"] = N2.packets() - packets
        run("ip", "link", "set", N1.link, "up")
        # (An interface that goes down forgets its routes.)
        run("ip", "route", "add", N2.address, "dev", N1.link, "src", N1.address, "table", "101")
        say("healed")
        facts["peer"] = rank.ask(f"tier peer {DEADLINE_S * 1000}")
        facts["copies"] = copies("cut", 1)
        facts["measured"] = measure(N1, N2)
    finally:
        rank.end()
    facts["logs"] = {node.name: node.log() for node in (N1, N2)}
    return facts


def memlock() -> dict[str, Any]:
    """n1 may lock next to nothing: what others want to read of it, and what it reads of others, go over the daemons' connections."""
    for node in (N1, N2):
        node.forget()
    N2.start({})
    how: dict[str, Any] = {"uid": SOME_USER, "memlock_bytes": LITTLE_MEMLOCK_BYTES}
    N1.start({}, **how)
    wait_until("they see each other", they_see_each_other)
    facts: dict[str, Any] = {"shown_before": N1.tell("fabric")}
    rank = Rank(N1, "little", uid=SOME_USER)
    try:
        assert rank.ask("open").startswith("ok"), "open"
        facts["nothing"] = rank.ask("restore")
        packets = N2.packets()
        saved_in_peer(rank, 1)
        facts["packets_replicated"] = N2.packets() - packets
        facts["copies"] = copies("little", 1)
    finally:
        rank.end()
    facts["shown"] = N1.tell("fabric")
    facts["measured"] = measure(N2, N1)
    N1.lose()
    N1.start({}, **how)
    rank = Rank(N1, "little", uid=SOME_USER)
    try:
        assert rank.ask("open").startswith("ok"), "open"
        packets = N2.packets()
        facts["restored"] = rank.ask("restore")
        facts["packets_restored"] = N2.packets() - packets
    finally:
        rank.end()
    facts["log"] = N1.log()
    return facts


def all_devices() -> dict[str, Any]:
    """None named: of verbs all are used, side by side."""
    start_both(devices=[])
    facts: dict[str, Any] = {"shown": N1.tell("fabric")}
    before = {node.device: node.packets() for node in (N1, N2)}
    facts["measured"] = measure(N1, N2)
    facts["packets"] = {node.device: node.packets() - before[node.device] for node in (N1, N2)}
    return facts


def pulls() -> dict[str, Any]:
    """Those of tiers/peer's own tests that hold for every provider, over these devices."""
    for node in (N1, N2):
        node.kill()
    env = {"HOLDFAST_TEST_FABRIC": f"verbs {N1.address} {N2.address}"}
    facts = {}
    for name, tests in PULL_TESTS.items():
        with open(SHARE / f"{name}.log", "wb") as log:
            done = subprocess.run(
                [BIN.parent / "tests" / name, f"--gtest_filter={tests}"],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=4 * DEADLINE_S,
            )
        text = (SHARE / f"{name}.log").read_text(errors="replace")
        facts[name] = {
            "code": done.returncode,
            "passed": re.findall(r"\[       OK \] \w+\.(\w+)", text),
            "failed": re.findall(r"\[  FAILED  \] \w+\.(\w+)", text),
        }
    return facts


STEPS = {
    step.__name__: step
    for step in (shown, measured, restored, dscp, memlock, all_devices, cut, pulls)
}


def main() -> None:
    answer: dict[str, Any] = {}
    make_network()
    for name in sys.argv[2:]:
        say(f"--- {name}")
        began = time.monotonic()
        try:
            answer[name] = STEPS[name]()
        except Exception:  # told to the host, with all that came before
            answer[name] = {"failed": traceback.format_exc()}
            say(answer[name]["failed"])
        answer[name]["took_s"] = round(time.monotonic() - began, 1)
    for node in (N1, N2):
        node.kill()
    (SHARE / "answer.new").write_text(json.dumps(answer, indent=1))
    (SHARE / "answer.new").rename(SHARE / "answer")


if __name__ == "__main__":
    main()
