"""deploy/container/node-config: what a node's ckptd.yaml gets, and what it refuses."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
from kubernetes_api import TOKEN, KubernetesApi, node
from rendered import objects_of
from settings import run_node_config

TEMPLATE = "node_name: '@NODE_NAME@'\n"
ADDRESS = TEMPLATE + "cluster: {advertise_address: '@ADVERTISE_ADDRESS@'}\n"
LABELS = TEMPLATE + "cluster: {labels: '@LABELS@'}\n"
NODE = {"NODE_NAME": "gpu-17"}
ZONE_AND_RACK = {
    "TOPOLOGY_0": "zone=topology.kubernetes.io/zone",
    "TOPOLOGY_1": "rack=example.com/rack",
}
BY_API = NODE | ZONE_AND_RACK | {"TOPOLOGY_SOURCE": "api"}
BY_POD = NODE | ZONE_AND_RACK | {"TOPOLOGY_SOURCE": "podLabels"}


def written(folder: pathlib.Path) -> dict:
    (one,) = objects_of((folder / "ckptd.yaml").read_text())
    return one


@pytest.fixture
def api(tmp_path: pathlib.Path) -> Iterator:
    made: list[KubernetesApi] = []

    def start(nodes: dict, **options: int) -> KubernetesApi:
        account = tmp_path / "account"
        account.mkdir()
        made.append(KubernetesApi(account, nodes, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("name", ["gpu-17.rack-3.example.com", "7", "null", "1e3"])
def test_a_node_name_stays_a_name(tmp_path: pathlib.Path, name: str) -> None:
    assert run_node_config(TEMPLATE, tmp_path, {"NODE_NAME": name}).returncode == 0
    assert written(tmp_path) == {"node_name": name}


@pytest.mark.parametrize(
    "name",
    ["", "a b", "x', state_dir: '/etc", "-x", "x\ny: 1", "$(id)", "a/../b", "A" * 300],
)
def test_a_node_name_that_is_none_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    done = run_node_config(TEMPLATE, tmp_path, {"NODE_NAME": name})
    assert done.returncode == 1 and "NODE_NAME" in done.stderr, done
    assert not (tmp_path / "ckptd.yaml").exists()


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"ADVERTISE": "ip", "POD_IP": "10.0.3.17"}, "10.0.3.17:9465"),
        ({"ADVERTISE": "ip", "POD_IP": "fd00::17"}, "[fd00::17]:9465"),
        ({"ADVERTISE": "podDns", "POD_IP": "10.0.3.17"}, "10-0-3-17.hf.pod.k8s.example:9465"),
        ({"ADVERTISE": "podDns", "POD_IP": "fd00::17"}, "fd00--17.hf.pod.k8s.example:9465"),
        ({"ADVERTISE": "nodeName", "POD_IP": "10.0.3.17"}, "gpu-17:9465"),
        (
            {"ADVERTISE": "nodeName", "POD_IP": "10.0.3.17", "NODE_DOMAIN": "nodes.example"},
            "gpu-17.nodes.example:9465",
        ),
    ],
)
def test_where_the_others_reach_it(
    tmp_path: pathlib.Path, variables: dict[str, str], address: str
) -> None:
    all_of_them = {"PORT": "9465", "POD_NAMESPACE": "hf", "DNS_DOMAIN": "k8s.example"}
    done = run_node_config(ADDRESS, tmp_path, NODE | all_of_them | variables)
    assert done.returncode == 0, done
    assert written(tmp_path)["cluster"]["advertise_address"] == address


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ADVERTISE": "ip", "POD_IP": "10.0.0.1', x: '"}, "POD_IP"),
        ({"ADVERTISE": "ip"}, "POD_IP"),
        ({"ADVERTISE": "magic", "POD_IP": "10.0.0.1"}, "ADVERTISE"),
        ({"ADVERTISE": "ip", "POD_IP": "10.0.0.1", "PORT": "x"}, "PORT"),
        ({"ADVERTISE": "podDns", "POD_IP": "10.0.0.1", "POD_NAMESPACE": "a.b"}, "POD_NAMESPACE"),
    ],
)
def test_an_address_that_is_none_is_refused(
    tmp_path: pathlib.Path, variables: dict[str, str], named: str
) -> None:
    done = run_node_config(ADDRESS, tmp_path, NODE | {"PORT": "9465"} | variables)
    assert done.returncode == 1 and named in done.stderr, done


def test_labels_of_the_node_in_their_order(tmp_path: pathlib.Path, api) -> None:
    labels = node(
        **{"example.com/rack": "r7", "topology.kubernetes.io/zone": "eu-1a", "other": "x"}
    )
    server = api({"gpu-17": labels})
    done = run_node_config(LABELS, tmp_path, BY_API | server.variables())
    assert done.returncode == 0, done
    assert written(tmp_path)["cluster"]["labels"] == [
        {"name": "zone", "value": "eu-1a"},
        {"name": "rack", "value": "r7"},
    ]
    assert server.requests == ["/api/v1/nodes/gpu-17"]


def test_a_label_that_the_node_lacks_is_left_out(tmp_path: pathlib.Path, api) -> None:
    server = api({"gpu-17": node(**{"example.com/rack": "r7"})})
    assert run_node_config(LABELS, tmp_path, BY_API | server.variables()).returncode == 0
    assert written(tmp_path)["cluster"]["labels"] == [{"name": "rack", "value": "r7"}]


def test_an_api_that_is_not_ready_yet_is_asked_again(tmp_path: pathlib.Path, api) -> None:
    server = api({"gpu-17": node(**{"example.com/rack": "r7"})}, failures=3)
    assert run_node_config(LABELS, tmp_path, BY_API | server.variables()).returncode == 0
    assert len(server.requests) == 4


def test_an_api_that_never_is_ends_it_with_the_cause(tmp_path: pathlib.Path, api) -> None:
    server = api({}, failures=1000)
    done = run_node_config(LABELS, tmp_path, BY_API | server.variables())
    assert done.returncode == 1 and "HTTP 503, 30 times" in done.stderr, done
    assert not (tmp_path / "ckptd.yaml").exists()


def test_a_right_that_is_missing_is_said_at_once(tmp_path: pathlib.Path, api) -> None:
    server = api({})
    done = run_node_config(LABELS, tmp_path, BY_API | server.variables())
    assert done.returncode == 1 and "nodes is forbidden" in done.stderr, done
    assert "'get' on nodes" in done.stderr and len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"metadata": {"labels": {"example.com/rack": 'r7"}], "x": [{'}}},
        {"metadata": {"labels": {"example.com/rack": "a b"}}},
        {"metadata": {"labels": {"example.com/rack": "x\n- y"}}},
        {"metadata": {"labels": {"example.com/rack": "y" * 64}}},
        {"metadata": {"labels": ["no", "map"]}},
        b"this is no JSON",
    ],
)
def test_an_answer_that_is_no_node_is_refused(tmp_path: pathlib.Path, api, answer) -> None:
    server = api({"gpu-17": answer})
    done = run_node_config(LABELS, tmp_path, BY_API | server.variables())
    assert done.returncode == 1 and "node-config:" in done.stderr, done
    assert not (tmp_path / "ckptd.yaml").exists()


def test_an_authority_that_is_not_the_clusters_gets_no_token(tmp_path: pathlib.Path, api) -> None:
    server = api({"gpu-17": node()})
    other = tmp_path / "other"
    other.mkdir()
    elsewhere = KubernetesApi(other, {})
    elsewhere.close()
    (server.account / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    done = run_node_config(LABELS, tmp_path, BY_API | server.variables())
    assert done.returncode == 1 and "certificate" in done.stderr, done
    assert server.requests == []


def test_the_token_is_in_no_arguments(tmp_path: pathlib.Path, api) -> None:
    server = api({"gpu-17": node()})
    programs = tmp_path / "programs"
    programs.mkdir()
    real = subprocess.check_output(["sh", "-c", "command -v curl"], text=True).strip()
    arguments = tmp_path / "arguments"
    (programs / "curl").write_text(f'#!/bin/sh\necho "$@" >>{arguments}\nexec {real} "$@"\n')
    (programs / "curl").chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = run_node_config(LABELS, tmp_path, BY_API | server.variables() | path)
    assert done.returncode == 0, done
    assert "/api/v1/nodes/gpu-17" in arguments.read_text()
    assert TOKEN not in arguments.read_text() + done.stdout + done.stderr


def test_labels_of_the_pod(tmp_path: pathlib.Path) -> None:
    values = {"TOPOLOGY_VALUE_0": "eu-1a", "TOPOLOGY_VALUE_1": ""}
    assert run_node_config(LABELS, tmp_path, BY_POD | values).returncode == 0
    assert written(tmp_path)["cluster"]["labels"] == [{"name": "zone", "value": "eu-1a"}]


def test_what_nobody_knows_is_not_left_in_the_file(tmp_path: pathlib.Path) -> None:
    done = run_node_config(TEMPLATE + "state_dir: '@HOME@'\n", tmp_path, NODE)
    assert done.returncode == 1 and "@HOME@" in done.stderr, done
    assert not (tmp_path / "ckptd.yaml").exists()
