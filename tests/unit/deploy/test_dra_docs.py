"""docs/dra.md and docs/reference/dra.md: Kubernetes takes their manifests, which name what is published and allowed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from msgspec.structs import replace

from nri_gpu.dra.api_server import ApiTimes
from nri_gpu.dra.claim_config import parse_config
from nri_gpu.dra.node_events import KINDS
from nri_gpu.dra.offered_devices import CORDONED, HELD, NODE_NOT_READY, UNHEALTHY, offer
from nri_gpu.dra.publisher import PublisherTimes
from nri_gpu.dra.questions import NodeView
from nri_gpu.dra.slices import ALL_GATES, AWAY, DEVICES_MAX, Gate, slice_specs
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.policy.model import Policy
from nri_gpu.records.policy_file import PolicyText, build_policy
from nri_gpu.request.annotation import parse_claim
from tests.support import builders as make
from tests.support.daemon import TOPOLOGIES
from tests.support.helm import documents

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("dra.md", "reference/dra.md"))
# Name in the first line -> documents.
SHOWN: dict[str, list[dict[str, Any]]] = {
    name: list(yaml.safe_load_all(text)) for name, text in re.findall(r"```yaml\n# (.*?)\n(.*?)```", PAGE, re.DOTALL)
}
CLAIMS = [(name, each) for name, shown in SHOWN.items() for each in shown if each["kind"] == "ResourceClaimTemplate"]


def test_there_is_one_for_each_wish() -> None:
    wishes = ["one GPU", "two linked GPUs", "memory", "a MIG device", "a share", "configuration", "monitoring"]
    assert list(SHOWN) == wishes


@pytest.mark.parametrize("version", ["1.34", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", SHOWN)
def test_kubernetes_takes_it(name: str, version: str) -> None:
    for document in SHOWN[name]:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_pod_names_its_claim_in_pod_and_container() -> None:
    template, pod = SHOWN["one GPU"]
    (claim,) = pod["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    assert pod["spec"]["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]


@pytest.mark.parametrize(("name", "claim"), CLAIMS, ids=[name for name, _ in CLAIMS])
def test_its_classes_are_the_charts(name: str, claim: dict[str, Any]) -> None:
    found = documents(kubelet={"enabled": False}, dra={"enabled": True})
    classes = {each["metadata"]["name"] for each in found if each["kind"] == "DeviceClass"}
    devices = claim["spec"]["spec"]["devices"]
    assert {each["exactly"]["deviceClassName"] for each in devices["requests"]} <= classes
    requests = {each["name"] for each in devices["requests"]}
    for each in (*devices.get("constraints", ()), *devices.get("config", ())):
        assert set(each["requests"]) == requests, name


def published() -> set[str]:
    """Attributes and capacities of all simulated nodes, as CEL names them."""
    policy, names = Policy.default(), set[str]()
    for file in TOPOLOGIES.glob("*.toml"):
        node = replace(make.node([]), inventory=load_topology(file, boot_clock=lambda: 1.0))
        for device in offer(node, Ledger(), policy, policy.dra)[0]:
            names |= {*device.attributes, *device.capacity}
    return names


def test_every_selector_names_what_is_published() -> None:
    said = re.findall(r"device\.(?:attributes|capacity)\[['\"]gpu\.nri\.io['\"]\]\.(\w+)", PAGE)
    said += re.findall(r"matchAttribute: gpu\.nri\.io/(\w+)", PAGE)
    assert {"memory", "profile", "uuid", "nvlinkDomain", "productName", "cudaComputeCapability"} == set(said)
    assert set(said) <= published()
    rows = re.findall(r"^\| (?:attributes|capacity) \| (.*) \|$", PAGE, re.MULTILINE)
    assert published() <= set(re.findall(r"`([\w./]+)`", " ".join(rows)))


def test_every_taint_and_every_gate_is_one() -> None:
    part = PAGE.partition("## Taints")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)) == {
        UNHEALTHY,
        CORDONED,
        HELD,
        NODE_NOT_READY,
        AWAY.key,
    }
    gates = PAGE.partition("## Versions")[2].partition("\n## ")[0]
    assert all(f"| {gate} |" in gates for gate in Gate)


def test_every_event_is_one() -> None:
    part = PAGE.partition("## Events of the Node")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| (\w+) \|", part, re.MULTILINE) == [
        (reason.value, kind) for reason, (kind, _) in KINDS.items()
    ]


def test_its_figures_are_the_codes() -> None:
    page, times, api = " ".join(PAGE.split()), PublisherTimes(), ApiTimes()
    for said in (
        f"{DEVICES_MAX} devices in a slice",
        f"the daemon has been away for {times.away:g} s",
        f"then up to {times.longest_apart:g} s",
        f"opened again after 5 to {api.watch / 60:g} minutes",
    ):
        assert said in page, said
    assert (times.apart, times.probe_again) == (1, 3600)  # a second; an hour


def test_its_slices_have_the_size_that_it_says() -> None:
    policy, node = Policy.default(), replace(make.node([]), inventory=load_topology(TOPOLOGIES / "hgx-h100.toml"))
    devices, counter_sets = offer(node, Ledger(), policy, policy.dra)
    view = NodeView(
        number=1, driver="gpu.nri.io", dir="", registry_dir="", cdi_dir="", devices=devices, counter_sets=counter_sets
    )
    (spec,) = slice_specs(view, "node", ALL_GATES).values()
    assert len(spec.devices) == 8
    assert 4_000 < len(msgspec.json.encode(spec)) < 6_000


def test_its_configuration_is_read() -> None:
    (claim,) = SHOWN["configuration"]
    (config,) = claim["spec"]["spec"]["devices"]["config"]
    text = parse_config(json.dumps(config["opaque"]["parameters"]).encode())
    assert text == "capabilities=compute,utility,video;extras=rdma"
    assert config["opaque"]["driver"] == Policy.default().dra.driver


def test_what_it_says_of_annotations_is_their_grammar() -> None:
    rows = re.findall(r"^\| (.*) \| (?:.*) \|$", PAGE.partition("| annotation | claim |")[2], re.MULTILINE)
    written = [value for row in rows[:9] for value in re.findall("`([^`]+)`", row) if not value.endswith("=")]
    assert len(written) >= 8
    for value in written:
        parse_claim("gpu.nri.io", value.replace("GPU-8f3a...", "GPU-8f3a1b2c"))


def test_its_policy_holds_and_its_ways_have_pools_of_their_own() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    policy = build_policy(PolicyText("page", text))
    assert policy.dra.enabled
    assert policy.kubelet.enabled
    assert {policy.dra.pool, policy.kubelet.pool} == {pool.name for pool in policy.pool.pools}


def test_its_rights_are_the_charts() -> None:
    found = documents(kubelet={"enabled": False}, dra={"enabled": True})
    rules = [rule for each in found if each["kind"] in ("ClusterRole", "Role") for rule in each["rules"]]
    rows = {(",".join(rule["resources"]), ", ".join(rule["verbs"])) for rule in rules}
    part = PAGE.partition("## Rights")[2].partition("\n## ")[0]
    assert rows == set(re.findall(r"^\| (\w+) \| ((?:\w+, )*(?:get|delete|patch)) \|", part, re.MULTILINE))
