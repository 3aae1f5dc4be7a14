"""The chart, rendered by Helm's own library for several sets of values and checked strictly, without a cluster."""

from __future__ import annotations

import copy
import json
import re
from importlib import metadata
from typing import Any

import manifests
import pytest
import yaml

from trace_serve.server.observe.metrics import Metrics
from trace_serve.server.run import SHUTDOWN_MARGIN_S
from trace_serve.settings import Settings

if not manifests.HELM:
    pytest.skip("helm-python-sdk has no wheel for this machine", allow_module_level=True)

SETS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted((manifests.CHART / "ci").glob("*.yaml"))}
DEFAULTS = yaml.safe_load((manifests.CHART / "values.yaml").read_text("utf-8"))

Object = dict[str, Any]


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Object]]:
    return {name: manifests.render(values) for name, values in SETS.items()}


def only(objects: list[Object], kind: str, suffix: str = "") -> Object:
    (found,) = [
        each for each in objects if each["kind"] == kind and each["metadata"]["name"] == f"mine-trace-serve{suffix}"
    ]
    return found


def changed(name: str, **changes: Any) -> Object:
    """A set of values with some replaced; a double underscore goes one level down."""
    values = copy.deepcopy(SETS[name])
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return values


def container(workload: Object) -> Object:
    return workload["spec"]["template"]["spec"]["containers"][0]


def environment(workload: Object) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(workload)["env"]}


@pytest.mark.parametrize("version", manifests.VERSIONS)
@pytest.mark.parametrize("name", SETS)
def test_every_object_fits_its_schema_strictly(rendered: dict[str, list[Object]], name: str, version: str) -> None:
    for each in rendered[name]:
        assert manifests.faults(each, version) == [], each["kind"]


def test_a_field_that_no_schema_knows_is_found(rendered: dict[str, list[Object]]) -> None:
    for each in (each for objects in rendered.values() for each in objects):
        wrong = copy.deepcopy(each)
        wrong["spec" if "spec" in wrong else "metadata"]["misspelt"] = 1
        assert manifests.faults(wrong, manifests.VERSIONS[-1])
        wrong = copy.deepcopy(each)
        pods = [node for node in manifests.walk(wrong) if "containers" in node]
        if pods:
            pods[-1]["containers"][0]["misspelt"] = "x"
            assert manifests.faults(wrong, manifests.VERSIONS[-1]), each["kind"]


@pytest.mark.parametrize("name", SETS)
def test_helm_lint_has_no_complaint(name: str) -> None:
    assert [message for message in manifests.lint(SETS[name]) if message["severity"] > 1] == []


def test_every_optional_object_is_in_some_set(rendered: dict[str, list[Object]]) -> None:
    kinds = {each["kind"] for objects in rendered.values() for each in objects}
    assert kinds == {
        "Deployment", "HorizontalPodAutoscaler", "LeaderWorkerSet", "NetworkPolicy", "PodDisruptionBudget", "Role",
        "RoleBinding", "ScaledObject", "Service", "ServiceAccount", "ServiceMonitor",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": {"repository": "r"}}, "digest"),
        ({"image__tag": "latest"}, "tag"),
        ({"image__digest": "sha256:short"}, "digest"),
        ({"publicKey": {"configMap": ""}}, "publicKey"),
        ({"publicKey__secret": "both"}, "publicKey"),
        ({"apiKey": {"secret": ""}}, "apiKey"),
        ({"policy__volume": {}}, "volume"),
        ({"policy__volume": {"emptyDir": {}, "hostPath": {"path": "/"}}}, "volume"),
        ({"autoscaling": {"kind": "keda"}}, "prometheusServer"),
        ({"gateway": {"enabled": True}}, "gateway"),
        ({"admin": {"enabled": True}}, "admin"),
        ({"settings": {"port": 1}}, "port"),
        ({"settings": {"MAX_QUEUE": 1}}, "MAX_QUEUE"),
        ({"networkPolicy": {"from": []}}, "from"),
        ({"replica": 3}, "replica"),
        ({"startTimeoutSeconds": 5}, "startTimeoutSeconds"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(manifests.RenderRefusedError, match=reason):
        manifests.render(changed("minimal", **changes))


def test_rollout_mode_needs_neither_verdict_nor_key(rendered: dict[str, list[Object]]) -> None:
    given = environment(only(rendered["rollout"], "Deployment"))
    assert given["TRACE_SERVE_MODE"] == "rollout"
    assert not {"TRACE_SERVE_PUBLIC_KEY", "TRACE_SERVE_API_KEY"} & set(given)


@pytest.mark.parametrize("name", SETS)
def test_the_server_gets_settings_that_exist_and_values_they_take(rendered: dict[str, list[Object]], name: str) -> None:
    given = environment(only(rendered[name], "Deployment"))
    values = {key.removeprefix("TRACE_SERVE_").lower(): value for key, value in given.items()}
    assert set(values) <= set(Settings.model_fields)
    Settings(**{key: "a key of sixteen or more" if isinstance(value, dict) else value for key, value in values.items()})


def test_numbers_reach_the_server_as_they_were_written(rendered: dict[str, list[Object]]) -> None:
    given = environment(only(rendered["gb200"], "Deployment"))
    assert given["TRACE_SERVE_MAX_TOTAL_TOKENS"] == "4194304"
    assert given["TRACE_SERVE_QUEUE_TIMEOUT_S"] == "30.5"


@pytest.mark.parametrize("name", SETS)
def test_no_secret_stands_in_an_object(rendered: dict[str, list[Object]], name: str) -> None:
    for each in rendered[name]:
        for node in manifests.walk(each):
            secret = (
                re.search(r"(KEY|TOKEN|SECRET)$", str(node.get("name", "")))
                and node["name"] != "TRACE_SERVE_PUBLIC_KEY"
            )
            assert not secret or "secretKeyRef" in node["valueFrom"]


@pytest.mark.parametrize("name", SETS)
def test_every_container_is_confined(rendered: dict[str, list[Object]], name: str) -> None:
    pods = [node for each in rendered[name] for node in manifests.walk(each) if "containers" in node]
    assert pods
    for pod in pods:
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in pod["containers"]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_start_has_the_time_it_was_given_and_the_server_gives_up_first(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        workload = only(objects, "Deployment")
        probe = container(workload)["startupProbe"]
        allowed = SETS[name].get("startTimeoutSeconds", DEFAULTS["startTimeoutSeconds"])
        assert allowed <= probe["failureThreshold"] * probe["periodSeconds"] < allowed + probe["periodSeconds"]
        assert float(environment(workload)["TRACE_SERVE_ENGINE_START_TIMEOUT_S"]) < allowed
        assert workload["spec"]["progressDeadlineSeconds"] > allowed


def test_liveness_asks_the_process_and_readiness_the_engine(rendered: dict[str, list[Object]]) -> None:
    server = container(only(rendered["minimal"], "Deployment"))
    paths = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {
        "startupProbe": "/health/ready",
        "livenessProbe": "/health/live",
        "readinessProbe": "/health/ready",
    }


def test_the_grace_period_holds_the_drain_and_the_stop_of_the_engine(rendered: dict[str, list[Object]]) -> None:
    stop_s = Settings.model_fields["engine_stop_timeout_s"].default
    for name, objects in rendered.items():
        workload = only(objects, "Deployment")
        drain_s = float(environment(workload)["TRACE_SERVE_DRAIN_S"])
        sleep_s = container(workload)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace_s = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= sleep_s + drain_s + SHUTDOWN_MARGIN_S + stop_s, name


def test_what_scales_and_what_is_scraped_are_metrics_that_the_server_has(rendered: dict[str, list[Object]]) -> None:
    exported = {family.name for family in Metrics().registry.collect()}
    scaled = only(rendered["gb200"], "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    pods = only(rendered["rollout"], "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    for name in (*re.findall(r"trace_serve_\w+", scaled), pods):
        assert name in exported


def test_replicas_are_left_to_the_autoscaler(rendered: dict[str, list[Object]]) -> None:
    has = {name: "replicas" in only(objects, "Deployment")["spec"] for name, objects in rendered.items()}
    assert has == {"minimal": True, "gb200": False, "rollout": False, "multi-node": True}


@pytest.mark.parametrize(("name", "kind"), [("gb200", "ScaledObject"), ("rollout", "HorizontalPodAutoscaler")])
def test_a_rollout_is_scaled_where_it_has_taken_the_pods_over(name: str, kind: str) -> None:
    target = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout"}
    objects = manifests.render(changed(name, replicas=0, autoscaling__scaleTarget=target))
    assert only(objects, kind)["spec"]["scaleTargetRef"] == {**target, "name": "mine-trace-serve"}
    assert only(objects, "Deployment")["spec"]["replicas"] == 0


def test_the_front_end_may_call_the_engine_that_it_is_given(rendered: dict[str, list[Object]]) -> None:
    objects = rendered["multi-node"]
    url = environment(only(objects, "Deployment"))["TRACE_SERVE_ENGINE_URLS"]
    engine = only(objects, "Service", "-multi-node-leader")
    (port,) = engine["spec"]["ports"]
    assert url == f"http://{engine['metadata']['name']}:{port['port']}"
    rule = only(objects, "NetworkPolicy")["spec"]["egress"][0]
    wanted = rule["to"][0]["podSelector"]["matchLabels"].items()
    leader = only(objects, "LeaderWorkerSet", "-multi-node")["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    assert wanted <= leader["metadata"]["labels"].items()


@pytest.mark.parametrize("name", SETS)
def test_every_selector_finds_the_pods_it_is_meant_for(rendered: dict[str, list[Object]], name: str) -> None:
    objects = rendered[name]
    pods = {}
    for each in objects:
        for node in manifests.walk(each):
            if "containers" in node.get("spec", {}):
                labels = node["metadata"]["labels"]
                pods.setdefault(labels["app.kubernetes.io/component"], []).append(labels)
    for each in objects:
        selector = each.get("spec", {}).get("selector") or each.get("spec", {}).get("podSelector")
        if selector is None or each["kind"] == "ServiceMonitor":
            continue
        wanted = selector.get("matchLabels", selector).items()
        component = dict(wanted)["app.kubernetes.io/component"]
        assert [labels for labels in pods[component] if wanted <= labels.items()], each["kind"]
        assert not [
            labels
            for other, found in pods.items()
            if other != component
            for labels in found
            if wanted <= labels.items()
        ]


def test_a_server_is_reached_by_those_named_and_calls_nobody(rendered: dict[str, list[Object]]) -> None:
    policy = only(rendered["gb200"], "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": "http"}], [{"port": "admin"}]]
    assert all(rule["from"] for rule in policy["ingress"])


def test_the_admin_api_is_off_unless_asked_for_and_on_a_service_of_its_own(rendered: dict[str, list[Object]]) -> None:
    assert [port["name"] for port in container(only(rendered["minimal"], "Deployment"))["ports"]] == ["http"]
    assert [port["name"] for port in only(rendered["gb200"], "Service")["spec"]["ports"]] == ["http"]
    assert [port["name"] for port in only(rendered["gb200"], "Service", "-admin")["spec"]["ports"]] == ["admin"]
    assert not {"TRACE_SERVE_ADMIN_PORT"} & set(environment(only(rendered["minimal"], "Deployment")))


def test_the_gateway_finds_the_servers_and_asks_them_what_they_answer(rendered: dict[str, list[Object]]) -> None:
    objects = rendered["gb200"]
    arguments = container(only(objects, "Deployment", "-gateway"))["args"]
    at = arguments.index("--selector")
    labels = dict(word.split("=", 1) for word in arguments[at + 1 :] if not word.startswith("--"))
    server = only(objects, "Deployment")
    assert labels == server["spec"]["selector"]["matchLabels"]
    ports = {port["containerPort"] for port in container(server)["ports"]}
    assert int(next(word for word in arguments if "discovery-port" in word).split("=")[1]) in ports


def test_a_group_of_machines_is_one_engine_over_all_their_cards(rendered: dict[str, list[Object]]) -> None:
    group = only(rendered["multi-node"], "LeaderWorkerSet", "-multi-node")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    commands = []
    for role in ("leaderTemplate", "workerTemplate"):
        engine = group[role]["spec"]["containers"][0]
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == 4
        commands.append(engine["args"])
    assert commands[0] == commands[1]
    assert {"--tp-size=8", "--nnodes=2", "--node-rank=$(LWS_WORKER_INDEX)"} <= set(commands[0])


def test_a_full_name_leaves_room_for_the_suffixes() -> None:
    objects = manifests.render(changed("gb200", fullnameOverride="x" * 80))
    assert max(len(each["metadata"]["name"]) for each in objects) <= 63


def test_the_values_file_has_every_value_of_the_schema() -> None:
    schema = json.loads((manifests.CHART / "values.schema.json").read_text("utf-8"))

    def compare(given: Object, described: Object, path: str) -> None:
        assert set(given) == set(described) - {"global"}, path
        for name, below in described.items():
            if "properties" in below:
                compare(given[name], below["properties"], f"{path}.{name}")

    compare(DEFAULTS, schema["properties"], "values")


def test_the_chart_has_the_version_of_the_distribution() -> None:
    version = metadata.version("trace-serve")
    chart = yaml.safe_load((manifests.CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["appVersion"], chart["version"]) == (version, version)
