"""The Helm chart: Kubernetes takes what Helm renders, the programs what it passes, and it asks for no more."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from nri_gpu.cli.main import main, parse
from nri_gpu.daemon.app import DRAIN_S
from nri_gpu.domain.errors import Exit
from nri_gpu.domain.mps import DEFAULT_MPS_DIR
from nri_gpu.dra.api_access import SERVICE_ACCOUNT
from nri_gpu.dra.node_events import CONTROLLER, NAMESPACE
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.policy.document import options_in
from nri_gpu.policy.kubelet_settings import Registration
from nri_gpu.policy.metrics_settings import metrics_faults
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import PolicyText, build_policy
from nri_gpu.request.annotation import select_annotation
from nri_gpu.system.succession import TAKES_OVER_S
from tests.support import builders as make
from tests.support.chart import (
    CLAIMS,
    ELSEWHERE,
    VARIANTS,
    container,
    daemon_sets,
    found,
    host_paths,
    mount,
    one,
    pod,
)
from tests.support.daemon import FOUR_GPUS
from tests.support.helm import CHART, RefusedError, Release, documents, of_helm_test, parsed, render, values
from tests.support.prometheus import ALERTS
from tests.unit.policy.samples import SETTINGS
from tools.chart_values import leaves, old_names
from tools.manifests import FOLDER, SETS

ROOT = CHART.parents[2]
PAGE = "".join((ROOT / "docs" / f"{each}.md").read_text() for each in ("kubernetes-install", "distributions", "rights"))
CHANGE_OVER = (ROOT / "docs" / "migrate.md").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# The oldest that Chart.yaml admits and the newest whose schemas there are.
VERSIONS = ("1.25", kubernetes_validate.latest_version())
ADMISSION = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
NEWER = {*ADMISSION, "DeviceClass"}  # than the oldest
RIGHTS = {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "DeviceClass"}  # for the DRA driver
TWO_POOLS = """
[kubelet]
pool = "a"
[dra]
pool = "b"
[[pool]]
name = "a"
device = ["0"]
[[pool]]
name = "b"
device = ["1"]
"""
OPERATORS = {"ServiceMonitor"}  # whose schemas are not Kubernetes' own


def inside(component: str, variant: str) -> set[str]:
    return {each["mountPath"] for each in container(component, variant)["volumeMounts"]}


def arguments(component: str, variant: str = "defaults") -> Namespace:
    """What our command line reads of the container's arguments."""
    return parse(*container(component, variant)["args"])


def policy_in(among: list[dict[str, Any]], release: str = "other") -> Policy:
    """As the daemon takes it up: the ConfigMap's, with what its arguments put over it."""
    (only,) = one(among, "DaemonSet", release)["spec"]["template"]["spec"]["containers"]
    text = one(among, "ConfigMap", f"{release}-policy")["data"]["policy.toml"]
    return build_policy(PolicyText("values.yaml", text), options_in(vars(parse(*only["args"]))))


# --- what Kubernetes and Helm take -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_takes_it(variant: str, version: str) -> None:
    for document in found(variant):
        own = NAMESPACE if document["kind"] in ("Role", "RoleBinding") else "elsewhere"  # where a Node's events are
        assert document["metadata"].get("namespace", own) == own
        if document["kind"] not in OPERATORS | (NEWER if version == VERSIONS[0] else set()):
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", SETS)
def test_a_file_to_apply_brings_the_namespace_of_all_in_it(name: str) -> None:
    namespace, *others = parsed((FOLDER / name).read_text())
    kubernetes_validate.validate(namespace, VERSIONS[0], strict=True)
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    there = {each["metadata"].get("namespace") for each in others}
    assert there - {NAMESPACE, None} == {namespace["metadata"]["name"]}


def tables(schema: Mapping[str, Any], *at: str) -> Iterator[tuple[str, ...]]:
    """Paths of all tables that have no other keys than the schema names."""
    if "properties" in schema:
        if schema.get("additionalProperties") is False:
            yield at
        for key, below in schema["properties"].items():
            yield from tables(SCHEMA["definitions"][below["$ref"][14:]] if "$ref" in below else below, *at, key)


def test_a_misspelt_key_is_refused_at_every_level() -> None:
    for path in tables(SCHEMA):
        given: dict[str, Any] = {"mispelt": {}}
        for key in reversed(path):
            given = {key: given}
        with pytest.raises(RefusedError, match="additional properties 'mispelt' not allowed"):
            render(**given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"image": {"repository": "Upper Case"}},
        *({"paths": {"nri": path}} for path in ("run/nri", "/run/../etc", "/run/.", "/", "/run/nri/", "/run/nri: x")),
        {"admission": {"resourcePrefix": "gpu"}},
        {"metrics": {"address": "localhost"}},
        {"maxSurge": "0%"},
        {"resources": {"limits": {"memory": "much"}}},
        {"dra": {"driver": "gpu.nri.io'"}},
        {"dra": {"extendedResource": "gpu"}},
        *({table: {"resources": {"requests": {"nvidia.com/gpu": 1}}}} for table in ("dra", "guard")),
        {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        {"podAnnotations": {"gpu.nri.io": "1"}},
        {"podAnnotations": {"tolerate-missing.gpu.nri.io": "false"}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(RefusedError, match="values don't meet the specifications of the schema"):
        render(**wrong)


def test_every_value_is_used_and_every_value_that_is_used_is_there() -> None:
    there = {re.sub(r"resources\.\w+$", "resources", path) for path, _ in leaves(values(), SCHEMA)}
    # A part of a value that Kubernetes has a shape for stands for it.
    used = {next((each for each in there if path.startswith(f"{each}.")), path) for path in used_values()}
    handed_on = {path for path in used if any(each.startswith(f"{path}.") for each in there)}
    assert used - handed_on - {path for path, _ in old_names(SCHEMA)} == there


def used_values() -> set[str]:
    """Paths in the templates: of values, and of what is taken from a table that has a name or is handed to a helper."""
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    helpers = dict(re.findall(r'define "([^"]+)" -?}}(.*?)(?={{-? define |\Z)', text, re.DOTALL))
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", text))
    for name, table in re.findall(r'include "([^"]+)" \(list \.Values(\.[A-Za-z.]+)? "', text):
        taken = re.findall(r"\(index \. 0\)\.(?!Values)([A-Za-z.]+)", helpers[name])
        used |= {f"{table}.{key}".lstrip(".") for key in taken}
    for name, table in re.findall(r"(\$\w+) := \.Values\.([A-Za-z.]+)", text):
        used |= {f"{table}.{key}" for key in re.findall(rf"{re.escape(name)}\.([A-Za-z.]+)", text)}
    return used


def test_no_template_differs_from_time_to_time_or_looks_into_a_cluster() -> None:
    """So Argo CD and Flux, which render without one, see a difference where there is one."""
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    actions = " ".join(re.findall(r"{{(?!-? */\*)(.*?)}}", text, re.DOTALL))
    words = set(re.findall(r"(?<![.$\w])[A-Za-z]\w*", re.sub(r'"(\\.|[^"\\])*"', "", actions)))
    assert {"include", "fail", "hasKey"} <= words
    changing = (
        r"lookup|now|ago|env|expandenv|shuffle|uuidv4|bcrypt|htpasswd|derivePassword|getHostByName|rand\w+|gen\w+"
    )
    assert not [word for word in words if re.fullmatch(changing, word)]


# --- the policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["defaults", "claims", "annotations"])
def test_by_default_one_way_gives_every_gpu(variant: str) -> None:
    policy = policy_in(found(variant))
    inventory = make.inventory((make.gpu(0), make.mig_gpu(1)))
    members = policy.pool.members(inventory)
    assert not any(pool.namespaces for pool in policy.pool.pools)
    if variant == "annotations":
        assert not members
        assert policy.namespaces.allow == Policy.default().namespaces.allow
    else:
        way = policy.kubelet.pool if variant == "defaults" else policy.dra.pool
        assert {members[unit.uuid].name for unit in inventory.units} == {way}
    assert (policy.kubelet.enabled, policy.dra.enabled) == (variant == "defaults", variant == "claims")
    assert arguments("daemon", variant).gpus is None  # nothing is simulated


@pytest.mark.parametrize(("kubelet", "registration"), [(True, "watcher"), (False, "register")])
def test_the_values_decide_what_is_served_whatever_the_policy_says(kubelet: bool, registration: str) -> None:
    no, yes = str(not kubelet).lower(), str(kubelet).lower()
    said = f"[kubelet]\nenabled = {no}\nregistration = 'register'\n[dra]\nenabled = {yes}\n"
    given: dict[str, Any] = {
        "kubelet": {"enabled": kubelet, "registration": registration},
        "dra": {"enabled": not kubelet},
    }
    policy = policy_in(documents(ELSEWHERE, policy=said, **given))
    assert (policy.kubelet.enabled, policy.dra.enabled) == (kubelet, not kubelet)
    assert policy.kubelet.registration is Registration(registration)


def test_one_value_names_the_driver_everywhere() -> None:
    made = documents(**CLAIMS | {"dra": {"enabled": True, "driver": "gpu.example.com"}})
    classes = {each["metadata"]["name"]: str(each["spec"]) for each in made if each["kind"] == "DeviceClass"}
    assert set(classes) == {"gpu.example.com", "mig.gpu.example.com"}
    assert all(each.count("gpu.example.com") == 2 for each in classes.values())
    assert policy_in(made, "nri-gpu").dra.driver == "gpu.example.com"
    driver = one(made, "ValidatingAdmissionPolicy", "nri-gpu.nri-gpu-dra")["spec"]
    assert '== "gpu.example.com"' in driver["validations"][2]["expression"]


@pytest.mark.parametrize("policy", ["  [namespaces]\n  allow = ['*']\n", "\n\n # ours\n[namespaces]", "[namespaces]"])
def test_a_policy_comes_through_as_it_is_written(policy: str) -> None:
    data = one(documents(policy=policy, simulation=policy), "ConfigMap", "nri-gpu-policy")["data"]
    assert data == dict.fromkeys(("policy.toml", "topology.toml"), policy.rstrip("\n") + "\n")


def test_a_job_without_rights_checks_a_policy_of_ones_own_first(tmp_path: Path) -> None:
    made = documents(ELSEWHERE, policy="[kubelet]\nnonsense = 1\n")
    config, job = one(made, "ConfigMap", "other.check-policy"), one(made, "Job", "other-check-policy")
    hooks = "pre-install,pre-upgrade"
    assert {each["metadata"]["annotations"]["helm.sh/hook"] for each in (config, job)} == {hooks}
    (only,) = job["spec"]["template"]["spec"]["containers"]
    assert only["securityContext"].items() >= {"runAsNonRoot": True, "allowPrivilegeEscalation": False}.items()
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert job["spec"]["template"]["spec"]["volumes"] == [
        {"name": "policy", "configMap": {"name": config["metadata"]["name"]}}
    ]
    (tmp_path / "policy.toml").write_text(config["data"]["policy.toml"])
    verb, file, *_ = only["args"]
    assert main([verb, str(tmp_path / Path(file).name)]) == Exit.CONFIGURATION
    without = documents(policy="a", checkPolicy=False), documents()
    assert "Job" not in {each["kind"] for made in without for each in made}


@pytest.mark.parametrize("beside", ["a-check", "a-test"])
def test_no_hook_has_the_name_of_what_another_release_of_the_namespace_has(beside: str) -> None:
    """Helm deletes what has a hook's name before it makes the hook, whosever it is."""

    def names(release: Release) -> set[tuple[str, str]]:
        made = documents(release, policy="[limits]\n", metrics={"enabled": True, "serviceMonitor": {"enabled": True}})
        return {(each["kind"], each["metadata"]["name"]) for each in [*made, *of_helm_test(release).values()]}

    assert not names(Release("a", "gpus")) & names(Release(beside, "gpus"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_that_job_takes_the_options_of_the_release(variant: str) -> None:
    made = documents(ELSEWHERE, **{**VARIANTS[variant], "policy": "[limits]\n"})
    (only,) = one(made, "Job", "other-check-policy")["spec"]["template"]["spec"]["containers"]
    assert options_in(vars(parse(*only["args"]))) == options_in(vars(arguments("daemon", variant)))


def test_that_job_refuses_what_every_node_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, code in (("[limits]\n[dra]\nenabled = true\n", Exit.CONFIGURATION), (TWO_POOLS, Exit.OK)):
        made = documents(ELSEWHERE, policy=text, dra={"enabled": True})
        (only,) = one(made, "Job", "other-check-policy")["spec"]["template"]["spec"]["containers"]
        (tmp_path / "policy.toml").write_text(text)
        verb, file, *options = only["args"]
        assert main([verb, str(tmp_path / Path(file).name), *options]) == code
        assert ("command line: --kubelet: dra.enabled" in capsys.readouterr().out) is bool(code)


def test_two_ways_to_every_gpu_are_refused_with_a_sentence() -> None:
    with pytest.raises(RefusedError, match=r"kubelet\.enabled=false, or give each a pool"):
        render(dra={"enabled": True})


def test_a_cluster_without_gpus_has_those_of_a_file(tmp_path: Path) -> None:
    made = documents(simulation=FOUR_GPUS.read_text(), affinity={"nodeAffinity": None})
    spec = one(made, "DaemonSet", "nri-gpu")["spec"]["template"]["spec"]
    args = parse(*spec["containers"][0]["args"])
    assert args.gpus == "/etc/nri-gpu/topology.toml"
    assert Path(args.socket).name == "nri.sock"  # else it would join no runtime
    (tmp_path / "topology.toml").write_text(one(made, "ConfigMap", "nri-gpu-policy")["data"]["topology.toml"])
    assert load_topology(tmp_path / "topology.toml", boot_clock=lambda: 1.0) == load_topology(
        FOUR_GPUS, boot_clock=lambda: 1.0
    )
    assert "affinity" not in spec


# --- what is started -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_programs_take_their_arguments_and_look_where_folders_are(variant: str) -> None:
    for component in daemon_sets(variant).keys() - {"dra"}:
        # A file alone is never swapped by the kubelet.
        folder = mount(component, variant, name="policy")
        assert "subPath" not in folder
        # By name: then it is a fault that it is missing, also for a daemon that remembers no policy.
        assert arguments(component, variant).policy == f"{folder['mountPath']}/policy.toml"
    args, settings = arguments("daemon", variant), policy_in(found(variant)).kubelet
    assert args.kubelet is settings.enabled
    # Else a container would be given paths that are only ours.
    assert args.driver_root == mount("daemon", variant, name="driver-root")["mountPath"]
    assert args.driver_host_root in host_paths("daemon", variant)
    there = inside("daemon", variant)
    assert (settings.dir in there) == (settings.cdi_dir in there) == settings.enabled
    assert (settings.registry_dir in there) == (settings.registration is Registration.WATCHER)


def test_the_dra_driver_takes_its_arguments_and_looks_where_folders_are() -> None:
    args = arguments("dra", "claims")
    assert (args.module, args.state_dir, args.kubeconfig) == ("nri_gpu.cli.dra_command", "/run/nri-gpu", None)
    assert args.node_name == "$(NODE_NAME)"  # the kubelet puts it in
    assert mount("dra", "claims", name="token")["mountPath"] == str(SERVICE_ACCOUNT)
    for variant, root in (("claims", "/var/lib/kubelet"), ("claims elsewhere", "/data/kubelet")):
        policy = policy_in(found(variant))
        assert policy.dra.dir == f"{root}/plugins"  # the kubelet dials the socket by its own path
        assert {policy.dra.dir, policy.kubelet.registry_dir, policy.kubelet.cdi_dir} <= inside("dra", variant)


@pytest.mark.parametrize("component", ["daemon", "guard", "dra"])
def test_each_knows_its_node(component: str) -> None:
    (name,) = (each for each in container(component, "claims")["env"] if each["name"] == "NODE_NAME")
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_the_next_is_there_before_the_last_goes() -> None:
    """One daemon has the state folder, one driver process the driver's: the second waits, and counts as ready."""
    for component, each in daemon_sets("claims").items():
        assert each["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        assert "ports" not in container(component, "claims")  # of the host's, the second would wait for it
        # Helm 3 does not wait for these, and an upgrade before they are over never ends: a probe holds the pod back.
        assert "minReadySeconds" not in each["spec"]
    for component, probe in (("daemon", "readinessProbe"), ("dra", "startupProbe")):
        assert container(component, "claims")[probe]["initialDelaySeconds"] == 10
    assert arguments("daemon").stand_by
    assert pod("daemon")["terminationGracePeriodSeconds"] > DRAIN_S + TAKES_OVER_S


@pytest.mark.parametrize(("component", "ready"), [("daemon", True), ("guard", True), ("dra", False)])
def test_its_probes_read_the_file_of_its_own_process(component: str, ready: bool) -> None:
    """What they tell, test_probes.py has."""
    folder, chosen = arguments(component, "claims").run_dir, container(component, "claims")
    own = mount(component, "claims", mountPath=folder)["name"]
    (volume,) = (each for each in pod(component, "claims")["volumes"] if each["name"] == own)
    assert volume["emptyDir"]["medium"] == "Memory"
    probes = {name: each["exec"]["command"][3:] for name, each in chosen.items() if name.endswith("Probe")}
    alive = [f"{folder}/alive", "30"]
    other = {"readinessProbe": [*alive, "ready"]} if ready else {"startupProbe": alive}
    assert probes == {"livenessProbe": alive} | other


def test_metrics_are_served_and_found_as_the_values_say() -> None:
    for variant, address in (("metrics", "0.0.0.0:9464"), ("scraped by the operator", "0.0.0.0:9999")):
        settings = policy_in(found(variant)).metrics
        assert settings.listen == address
        assert not list(metrics_faults(settings))
    assert "metrics.listen" not in options_in(vars(arguments("daemon")))
    annotated = daemon_sets("metrics")["daemon"]["spec"]["template"]["metadata"]["annotations"]
    assert (annotated["prometheus.io/scrape"], annotated["prometheus.io/port"]) == ("true", "9464")
    kinds = {each["kind"]: each for each in found("scraped by the operator")}
    service, monitor = kinds["Service"], kinds["ServiceMonitor"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [endpoint], [port] = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert (endpoint["port"], endpoint["honorLabels"], port["port"]) == (port["name"], True, 9999)
    job = re.search(r'job=~"\.\*(.*)\.\*"', ALERTS.read_text())
    assert job
    assert job[1] == service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    sets = daemon_sets("scraped by the operator").items()
    labels = {name: each["spec"]["template"]["metadata"]["labels"].items() for name, each in sets}
    assert [name for name, each in labels.items() if service["spec"]["selector"].items() <= each] == ["daemon"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_what_mps_clients_write_is_mounted_once_and_bounded(tmp_path: Path) -> None:
    *program, place, options = pod("daemon", "mps")["initContainers"][0]["command"]
    assert place == DEFAULT_MPS_DIR
    base = tmp_path / "mps" / "clients"
    twice = 2 * shlex.join([*program, str(base), options]).join(["", "\n"])
    imports = "from pathlib import Path\nfrom nri_gpu.mps.mps_folders import mount_fault"
    look = f"{imports}\nprint(mount_fault(Path({str(base)!r})))"
    script = f"set -e\n{twice}{shlex.join([sys.executable, '-c', look])}\ngrep {base} /proc/self/mounts"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=True)
    fault, mounted = done.stdout.splitlines()
    assert fault == ""
    kind, rights = mounted.split()[2:4]
    assert kind == "tmpfs"
    assert {"nosuid", "nodev", "noexec", "mode=700", "nr_inodes=262144", f"size={8 << 20}k"} <= set(rights.split(","))


# --- two releases, for a change-over node by node --------------------------------------------------------------------


def change_over() -> dict[str, Mapping[str, Any]]:
    """The values files of the documentation's migration, by their names."""
    shown = re.findall(r"```yaml\n# ([a-z]+)\.yaml: (.*?)```", CHANGE_OVER, flags=re.DOTALL)
    return {name: yaml.safe_load(f"# {text}") for name, text in shown}


def test_two_releases_share_no_name_and_no_pod_and_no_node() -> None:
    given = change_over()
    releases = [documents(Release(name), **given[name]) for name in ("beside", "kubelet")]
    assert all(policy_in(each, name) for each, name in zip(releases, ("beside", "kubelet"), strict=True))
    names = [{(each["kind"], each["metadata"]["name"]) for each in release} for release in releases]
    assert not names[0] & names[1]
    sets = [(index, each["spec"]) for index in (0, 1) for each in releases[index] if each["kind"] == "DaemonSet"]
    for index, each in sets:
        chosen = each["selector"]["matchLabels"].items()
        assert [other for _, other in sets if chosen <= other["template"]["metadata"]["labels"].items()] == [each]
        spec = each["template"]["spec"]
        (config,) = (volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume)
        assert {("ServiceAccount", spec["serviceAccountName"]), ("ConfigMap", config)} <= names[index]
        assert spec["nodeSelector"].items() >= given[("beside", "kubelet")[index]]["nodeSelector"].items()
    (key,) = {key for each in given.values() for key in each["nodeSelector"]}  # a label has one value
    assert {each["nodeSelector"][key] for each in given.values()} == {"nvidia", "nri-gpu"}


def test_one_name_in_two_namespaces_is_two_releases() -> None:
    names = [
        {(each["kind"], each["metadata"]["name"]) for each in documents(Release("a", namespace), **given)}
        for namespace, given in (("b", CLAIMS), ("c", {**CLAIMS, "dra": {"enabled": True, "deviceClasses": False}}))
    ]
    assert {kind for kind, _ in names[0] & names[1]} == {"ServiceAccount", "ConfigMap", "DaemonSet"}  # of a namespace


# --- what the documentation says to set ------------------------------------------------------------------------------


def test_every_value_that_the_pages_name_is_one_and_renders() -> None:
    said = re.findall(r"`([a-z][A-Za-z]*(?:\.[A-Za-z]+)+): ([^`]+)`", PAGE)
    assert {path for path, _ in said} >= {"kubelet.enabled", "paths.driverRoot", "guard.criDir"}
    for path, value in said:
        table, key = path.split(".")
        given: dict[str, Any] = {table: {key: yaml.safe_load(value)}}
        assert render(**given)
    for name in re.findall(r"`((?:kubelet|paths|guard|labels|admission)\.(?!yaml|conf)[a-zA-Z_]+)`", PAGE):
        section, key = name.split(".")
        assert key in values()[section] or name in SETTINGS, name


def test_every_policy_that_the_pages_show_holds() -> None:
    shown = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    settings = re.findall(r"`\[([a-z]+)\] ([^`]+)`", PAGE)
    shown += [f"[{section}]\n{setting}" for section, setting in settings if "=" in setting]
    assert len(shown) >= 5
    assert all(build_policy(PolicyText("page", text)) for text in shown)


def test_every_path_of_the_cluster_that_the_pages_name_is_the_charts() -> None:
    paths = {path for variant in VARIANTS for path in host_paths("daemon", variant)}
    for said in ("/var/run/nri", "/run/nri-gpu", "/var/lib/nri-gpu/drivers", "/var/lib/kubelet"):
        assert said in PAGE
        assert any(path == said or path.startswith(f"{said}/") for path in paths)
    assert all(f"`{name}`" in PAGE for name in SETS)


# --- rights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_nobody_but_the_dra_driver_has_rights_at_the_api_server(variant: str) -> None:
    kinds = {each["kind"] for each in found(variant)}
    served = "dra" in daemon_sets(variant)
    assert kinds <= {"ServiceAccount", "ConfigMap", "DaemonSet", "Service", "Job", *OPERATORS, *ADMISSION} | (
        RIGHTS if served else set()
    )
    for component in daemon_sets(variant):
        assert pod(component, variant)["automountServiceAccountToken"] is False
        tokens = [each["name"] for each in pod(component, variant)["volumes"] if "projected" in each]
        assert tokens == (["token"] if component == "dra" else [])
    accounts = {name: pod(name, variant)["serviceAccountName"] for name in daemon_sets(variant)}
    assert {name for name, account in accounts.items() if account != "other"} == ({"dra"} if served else set())


def test_the_dra_drivers_rights_are_its_own_and_bound_to_its_pod() -> None:
    """Which ones they are, tests/unit/deploy/test_dra_docs.py has; that they keep to its node, a real API server."""
    account = {"kind": "ServiceAccount", "name": "other-dra", "namespace": "elsewhere"}
    for kind, namespace in (("ClusterRole", None), ("Role", NAMESPACE)):
        role, binding = (one(found("claims"), each, "elsewhere.other-dra") for each in (kind, f"{kind}Binding"))
        assert {each["metadata"].get("namespace") for each in (role, binding)} == {namespace}
        assert binding["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": kind,
            "name": "elsewhere.other-dra",
        }
        assert binding["subjects"] == [account]
    assert pod("dra", "claims")["serviceAccountName"] == account["name"]
    (token,) = (each["projected"] for each in pod("dra", "claims")["volumes"] if each["name"] == "token")
    assert token["sources"][0] == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    policy = one(found("claims"), "ValidatingAdmissionPolicy", "elsewhere.other-dra")["spec"]
    (whose,) = policy["matchConditions"]
    assert whose["expression"] == "request.userInfo.username == 'system:serviceaccount:elsewhere:other-dra'"
    assert policy["failurePolicy"] == "Fail"
    assert f"reportingController.orValue('') == '{CONTROLLER}'" in policy["validations"][-1]["expression"]


KUBELET = "/var/lib/kubelet"
ALWAYS = {"/var/run/nri": "ro", "/run/nri-gpu": "rw", "/var/lib/nri-gpu/drivers": "rw", "/": "ro", "/dev": "rw"}
ALWAYS |= {"/var/lib/nri-gpu": "rw"}
ALWAYS |= {"/proc": "ro", "/sys/fs/cgroup": "ro"}
SERVING = ALWAYS | {"/var/run/cdi": "rw", f"{KUBELET}/device-plugins": "rw"}
HOST_PATHS = dict.fromkeys(VARIANTS, SERVING | {f"{KUBELET}/pod-resources": "ro"}) | {
    "annotations": ALWAYS,
    "claims": ALWAYS | {f"{KUBELET}/pod-resources": "ro"},
    "claims elsewhere": ALWAYS | {"/data/kubelet/pod-resources": "ro"},
    "beside": ALWAYS | {f"{KUBELET}/pod-resources": "ro"},
    "stray": ALWAYS | {f"{KUBELET}/pod-resources": "ro"},
    "health": SERVING | {f"{KUBELET}/pod-resources": "ro", "/run/containerd": "ro"},
    "all of it": SERVING
    | {
        "/data/kubelet/plugins_registry": "rw",
        "/data/kubelet/pod-resources": "ro",
        "/etc/kubernetes/node-feature-discovery/features.d": "rw",
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_paths_are_those_that_are_needed(variant: str) -> None:
    wanted = {"daemon": HOST_PATHS[variant]}
    if variant != "least of it":
        cri = {"/run/containerd": "ro"} if variant == "all of it" else {}
        wanted["guard"] = {"/var/run/nri": "ro", "/run/nri-gpu": "ro"} | cri
    if variant.startswith("claims"):
        kubelet = "/data/kubelet" if variant == "claims elsewhere" else KUBELET
        sockets = {f"{kubelet}/plugins": "rw", f"{kubelet}/plugins_registry": "rw"}
        wanted["dra"] = {"/run/nri-gpu": "ro", "/var/run/cdi": "rw"} | sockets
    assert {component: host_paths(component, variant) for component in daemon_sets(variant)} == wanted


@pytest.mark.parametrize("variant", VARIANTS)
def test_of_the_hosts_namespaces_and_rights_what_is_needed(variant: str) -> None:
    for component in daemon_sets(variant):
        spec, (chosen,) = pod(component, variant), pod(component, variant)["containers"]
        shared = {"hostNetwork"} if component != "dra" else set()
        init = variant == "mps" and component == "daemon"
        if component == "daemon" and variant in {"mps", "stray"}:
            shared |= {"hostPID"}
        assert {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"} & spec.keys() == shared
        assert ("initContainers" in spec) == init
        rights: dict[str, Any] = {"runAsUser": 0, "readOnlyRootFilesystem": True}
        if component == "daemon":
            rights |= {"privileged": True}
            # The kubelet's file for last words is in /dev by default: the runtime would make it in the host's.
            assert not chosen["terminationMessagePath"].startswith("/dev")
        else:
            profile = {"type": "RuntimeDefault"}
            rights |= {"capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False, "seccompProfile": profile}
        assert chosen["securityContext"] == rights
        if init:
            (made,) = spec["initContainers"][0]["volumeMounts"]
            assert made == {"name": "state", "mountPath": "/run/nri-gpu", "mountPropagation": "Bidirectional"}
            assert mount(component, variant, name="state") == made | {"mountPropagation": "HostToContainer"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_own_pods_ask_for_no_gpu_and_are_created_where_plugins_are_required(variant: str) -> None:
    drop_in = tomllib.loads((ROOT / "config" / "containerd" / "required-plugins.toml").read_text())
    required = drop_in["plugins"]["io.containerd.nri.v1.nri"]["default_validator"]
    policy = policy_in(found(variant))
    assert required["enable"] is True
    assert required["required_plugins"] == [policy.plugin.name, policy.guard.name]
    for component, each in daemon_sets(variant).items():
        wanted = container(component, variant)["resources"]
        assert {name for amounts in wanted.values() for name in amounts} <= {"cpu", "memory"}, component
        annotations = each["spec"]["template"]["metadata"].get("annotations", {})
        assert select_annotation(annotations, {}, component) is None
        if component != "dra":  # which provides no plugin of the runtime
            assert annotations[required["tolerate_missing_plugins_annotation"]] == "true"
