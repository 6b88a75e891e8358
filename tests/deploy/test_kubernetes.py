"""Manifests follow Kubernetes' own schemas, hang together, and start nodes that read what they are given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from exported import ROOT, TARGET_LABELS

from pulsenetd import config
from pulsenetd.cli import build_parser

KUBERNETES = ROOT / "deploy" / "kubernetes"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((KUBERNETES / "pulsenet.yaml").read_text()))
SETS = [one for one in MANIFESTS if one["kind"] == "StatefulSet"]
MONITOR: dict[str, Any] = yaml.safe_load((KUBERNETES / "podmonitor.yaml").read_text())
TOKEN = "pulse1..."


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def read_container(stateful_set: dict[str, Any]) -> dict[str, Any]:
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    return dict(container)


def list_service_variables(stateful_set: dict[str, Any]) -> dict[str, str]:
    """Return what Kubernetes itself tells a pod of each service that has an address of its own."""
    if not stateful_set["spec"]["template"]["spec"].get("enableServiceLinks", True):
        return {}
    variables = {}
    for one in MANIFESTS:
        if one["kind"] == "Service" and one["spec"].get("clusterIP") != "None":
            prefix = one["metadata"]["name"].upper().replace("-", "_")
            variables |= {f"{prefix}_SERVICE_HOST": "10.0.0.1", f"{prefix}_PORT": "tcp://10.0.0.1:4001"}
    return variables


def read_variables(stateful_set: dict[str, Any], pod: str) -> dict[str, str]:
    """Return what a pod's process finds in its environment."""
    variables = {**list_service_variables(stateful_set), **find("ConfigMap", "pulsenet")["data"]}
    for one in read_container(stateful_set)["env"]:
        if "value" in one:
            variables[one["name"]] = one["value"].replace("$(POD_NAME)", pod)
        elif "secretKeyRef" in one["valueFrom"]:
            variables[one["name"]] = TOKEN
        else:
            assert one["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    return variables


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_manifests_follow_the_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for version in ("1.29", validator.latest_version()):
        validator.validate(manifest, version, strict=True)


def test_a_wrong_manifest_is_found() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    wrong = {**find("StatefulSet", "seed"), "spec": {**find("StatefulSet", "seed")["spec"], "replica": 1}}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, validator.latest_version(), strict=True)


def test_what_is_there_is_what_was_asked_for() -> None:
    assert [one["metadata"]["name"] for one in SETS] == ["seed", "inferencer"]
    assert MONITOR["kind"] == "PodMonitor"
    assert {one["metadata"]["namespace"] for one in (*MANIFESTS, MONITOR)} == {"pulsenet"}


@pytest.mark.parametrize("stateful_set", SETS, ids=lambda one: one["metadata"]["name"])
def test_variables_of_a_pod_are_options_of_its_node(stateful_set: dict[str, Any]) -> None:
    name = stateful_set["metadata"]["name"]
    settings = {
        key: value for key, value in read_variables(stateful_set, f"{name}-0").items() if key.startswith("PULSENET_")
    }
    node = config.resolve({}, {"PULSENET_LISTEN": "/ip4/0.0.0.0/tcp/4001", **settings}, None).config
    assert node.role == name
    assert node.token == TOKEN
    assert node.announce
    assert not re.search(r"\$\(", node.announce[0]), "a variable that is not set before it is used"
    build_parser().parse_args(read_container(stateful_set)["args"])


def test_pods_announce_the_names_that_their_service_gives_them() -> None:
    inferencers = find("StatefulSet", "inferencer")
    (address,) = config.resolve(
        {}, {k: v for k, v in read_variables(inferencers, "inferencer-2").items() if k.startswith("PULSENET_")}, None
    ).config.announce
    service = find("Service", inferencers["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    name, space = service["metadata"]["name"], service["metadata"]["namespace"]
    assert address == f"/dns4/inferencer-2.{name}.{space}.svc.cluster.local/tcp/4001"


@pytest.mark.parametrize("stateful_set", SETS, ids=lambda one: one["metadata"]["name"])
def test_probes_ask_what_a_node_answers(stateful_set: dict[str, Any]) -> None:
    container = read_container(stateful_set)
    paths = {
        probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    # A node without a publisher is not ready and must not be ended for it.
    assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    admin = (ROOT / "daemon" / "pulsenetd" / "admin.py").read_text()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in paths:
        assert f'"{paths[probe]}":' in admin
        assert container[probe]["httpGet"]["port"] in ports
    assert str(ports["metrics"]) == find("ConfigMap", "pulsenet")["data"]["PULSENET_METRICS_PORT"]


@pytest.mark.parametrize("stateful_set", SETS, ids=lambda one: one["metadata"]["name"])
def test_pods_run_as_the_image_does_and_keep_their_data(stateful_set: dict[str, Any]) -> None:
    pod, container = stateful_set["spec"]["template"]["spec"], read_container(stateful_set)
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"USER {pod['securityContext']['runAsUser']}:" in (ROOT / "Dockerfile").read_text()
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"]: claim for claim in stateful_set["spec"]["volumeClaimTemplates"]}
    assert mounts["/data"] in claims
    room = claims[mounts["/data"]]["spec"]["resources"]["requests"]["storage"]
    limit = read_variables(stateful_set, "x")["PULSENET_STORE_LIMIT_BYTES"]
    assert config.parse_size(limit) < config.parse_size(room.removesuffix("i"))
    assert pod["terminationGracePeriodSeconds"] > 10, "a node leaves within 10 s"


def test_selectors_choose_the_pods_they_mean() -> None:
    labels = {one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in SETS}

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, own in labels.items() if selector.items() <= own.items()}

    for one in SETS:
        assert chosen(one["spec"]["selector"]["matchLabels"]) == {one["metadata"]["name"]}
    assert chosen(find("Service", "pulsenet")["spec"]["selector"]) == {"seed", "inferencer"}
    assert chosen(find("Service", "pulsenet-seed")["spec"]["selector"]) == {"seed"}
    assert chosen(find("PodDisruptionBudget", "inferencer")["spec"]["selector"]["matchLabels"]) == {"inferencer"}
    assert chosen(MONITOR["spec"]["selector"]["matchLabels"]) == {"seed", "inferencer"}


def test_the_monitor_scrapes_every_pod_and_gives_the_labels_that_rules_use() -> None:
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    for one in SETS:
        assert endpoint["port"] in {port["name"] for port in read_container(one)["ports"]}
    assert endpoint["path"] == "/metrics"
    assert {rule["targetLabel"] for rule in endpoint["relabelings"]} == TARGET_LABELS
