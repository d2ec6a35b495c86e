"""What the chart and the overlays come to, as objects.

objects = render("defaults")                    # tests/deploy/values/defaults.yaml, by our renderer, or by helm
daemon_set = only(objects, "DaemonSet")
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parent.parent
CHART = TREE / "deploy/helm/holdfast"
OVERLAYS = TREE / "deploy/kustomize/overlays"
CASES = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
# Ours always, so that a machine without helm misses nothing; helm where there is one, so that the two cannot drift apart.
ENGINES = ["ours"] + (["helm"] if shutil.which("helm") else [])
DEADLINE_S = 120

Object = dict[str, Any]


class Refused(Exception):
    """A chart that does not render; says why."""


class _UniqueKeys(yaml.SafeLoader):
    pass


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    pairs = loader.construct_pairs(node, deep=True)
    keys = [key for key, _ in pairs]
    twice = {key for key in keys if keys.count(key) > 1}
    assert not twice, f"line {node.start_mark.line + 1}: given twice: {twice}"
    return dict(pairs)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def objects_of(text: str) -> list[Object]:
    return [one for one in yaml.load_all(text, Loader=_UniqueKeys) if one is not None]


def read_yaml(path: pathlib.Path) -> Object:
    (one,) = objects_of(path.read_text())
    return one


def values_of(case: str) -> Object:
    return read_yaml(HERE / "values" / f"{case}.yaml")


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Object:
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        result[key] = merged(below, value) if both else value
    return result


def render_text(values: Mapping[str, Any], engine: str = "ours", *, notes: bool = False) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(values), file)
        file.flush()
        if engine == "helm":
            assert not notes, "helm template does not print them"
            command = ["helm", "template", "holdfast", str(CHART), "--namespace=holdfast"]
            command += ["--kube-version=1.31.0", "-f", file.name]
        else:
            command = [os.environ["HOLDFAST_TEST_RENDER"], "-f", file.name]
            command += ["-notes"] if notes else []
            command.append(str(CHART))
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


@functools.cache
def _render(case: str, engine: str) -> str:
    return render_text(values_of(case), engine)


def render(case: str, engine: str = "ours") -> list[Object]:
    return objects_of(_render(case, engine))


@functools.cache
def _kustomize(overlay: str) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", str(OVERLAYS / overlay)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kustomize(overlay: str) -> list[Object]:
    return objects_of(_kustomize(overlay))


def of_kind(objects: list[Object], kind: str, name: str | None = None) -> list[Object]:
    return [
        one
        for one in objects
        if one["kind"] == kind and name in (None, one["metadata"]["name"])
    ]  # fmt: skip


def only(objects: list[Object], kind: str, name: str | None = None) -> Object:
    (one,) = of_kind(objects, kind, name)
    return one


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """The spec of each pod that comes of them, with whose it is."""
    for one in objects:
        if one["kind"] in ("DaemonSet", "StatefulSet", "Deployment", "Job"):
            yield f"{one['kind']} {one['metadata']['name']}", one["spec"]["template"]["spec"]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def container(pod: Object, name: str) -> Object:
    (one,) = [one for one in containers(pod) if one["name"] == name]
    return one


def mount(one: Object, name: str) -> Object:
    (found,) = [each for each in one["volumeMounts"] if each["name"] == name]
    return found


def daemon_pod(objects: list[Object]) -> Object:
    return only(objects, "DaemonSet")["spec"]["template"]["spec"]


def literal_env(one: Object) -> dict[str, str]:
    return {each["name"]: each["value"] for each in one.get("env", []) if "value" in each}
