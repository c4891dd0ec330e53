"""The names that the chart gives: those of the release before, or the user's own, which lead to what they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.dra.node_events import NAMESPACE
from tests.support.chart import CLAIMS, one
from tests.support.helm import CHART, IMAGE, RefusedError, Release, documents, parsed
from tests.support.released import BEFORE_CORDONS, PROJECT, unpacked

Object = dict[str, Any]
NAME, INSTANCE, COMPONENT = (f"app.kubernetes.io/{each}" for each in ("name", "instance", "component"))
POLICY = '[namespaces]\nallow = ["*"]\n'
MONITORED: dict[str, Any] = {"metrics": {"enabled": True, "serviceMonitor": {"enabled": True}}}
SERVED: dict[str, Any] = {"kubelet": {"enabled": False}, "dra": {"enabled": True, "deviceClasses": False}}
SERVED |= {**MONITORED, "policy": POLICY}
OBSERVED: dict[str, Any] = {"mode": "observe", **MONITORED}


def place(made: Object) -> tuple[str, str, str]:
    """Return the kind, the namespace or "", and the name: no cluster has two objects of one place."""
    return made["kind"], made["metadata"].get("namespace", ""), made["metadata"]["name"]


def selectors(made: list[Object]) -> dict[tuple[str, str, str], Any]:
    """Return by which labels each object selects others."""
    chosen = {place(each): each.get("spec", {}).get("selector", {}) for each in made}
    return {where: each.get("matchLabels", each) for where, each in chosen.items() if each}


def templates(made: list[Object]) -> dict[tuple[str, str, str], Any]:
    """Return the labels of the pods that each object makes."""
    bodies = {place(each): each["spec"]["template"] for each in made if each["kind"] in ("DaemonSet", "Job")}
    return {where: each["metadata"]["labels"] for where, each in bodies.items()}


def references(made: list[Object]) -> dict[tuple[str, str, str], Any]:
    """Return whom each binding gives which role."""
    return {place(each): (each["roleRef"], each["subjects"]) for each in made if each["kind"].endswith("RoleBinding")}


def without_tests(made: list[Object]) -> list[Object]:
    """Return what an installation makes; the rest is there while `helm test` runs."""
    return [each for each in made if each["metadata"].get("annotations", {}).get("helm.sh/hook") != "test"]


def lasting(made: list[Object]) -> set[tuple[str, str, str]]:
    """Return the places of what stays after an installation: hooks go."""
    return {place(each) for each in made if "helm.sh/hook" not in each["metadata"].get("annotations", {})}


# --- after an upgrade ------------------------------------------------------------------------------------------------

# Values that the release before takes, and what today's call differently.
UPGRADED: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "claims": (CLAIMS, {}),
    "a policy of one's own": ({"policy": POLICY, "podLabels": {"team": "gpu"}}, {}),
    "metrics": (
        {"metrics": {"enabled": True, "scrape": "serviceMonitor"}},
        {"metrics": {"enabled": True, "serviceMonitor": {"enabled": True}}},
    ),
    "least of it": ({"guard": {"enabled": False}, "admission": {"enabled": False}}, {}),
}


def rendered_before(release: Release, given: dict[str, Any]) -> list[Object]:
    """Return what the chart of the release before makes of these values."""
    helm_python = pytest.importorskip("helm_python")
    chart = helm_python.Chart.load(unpacked(BEFORE_CORDONS) / CHART.relative_to(PROJECT))
    texts = chart.render({**given, "image": {"repository": IMAGE}}, name=release.name, namespace=release.namespace)
    return [each for name, text in texts.items() if name.endswith(".yaml") for each in parsed(text) if each]


@pytest.mark.parametrize("case", UPGRADED)
def test_an_upgrade_changes_no_name_and_no_selector(case: str) -> None:
    release, (given, today) = Release("team-a", "gpus"), UPGRADED[case]
    before, after = rendered_before(release, given), without_tests(documents(release, **{**given, **today}))
    # The driver's right to write events of its node.
    newer = {(kind, NAMESPACE, "gpus.team-a-dra") for kind in ("Role", "RoleBinding") if given is CLAIMS}
    assert lasting(after) == lasting(before) | newer
    assert selectors(before) == selectors(after)
    assert templates(before) == templates(after)
    assert references(before).items() <= references(after).items()


# --- names of the user's own -----------------------------------------------------------------------------------------


class Installed(Struct, frozen=True):
    """A release, and the values of this file's concern."""

    name: str
    namespace: str
    fullname: str = ""
    elsewhere: str = ""  # namespaceOverride
    called: str = ""  # nameOverride
    labelled: bool = False
    observes: bool = False

    def where(self) -> tuple[str, str]:
        """Return the namespace of all objects, and what their names begin with."""
        return self.elsewhere or self.namespace, self.fullname or self.name


@cache
def made_by(installed: Installed) -> list[Object]:
    given = OBSERVED if installed.observes else SERVED
    given = given | {"fullnameOverride": installed.fullname, "namespaceOverride": installed.elsewhere}
    given |= {"nameOverride": installed.called, "commonLabels": {"team": "gpu"} if installed.labelled else {}}
    return documents(Release(installed.name, installed.namespace), **given)


# The second word of each pair is the first of the other kind, or what another release's name makes of it.
PLACES = [
    Installed(name, namespace, fullname, elsewhere, observes=observes)
    for name, namespace, fullname, elsewhere, observes in product(
        ("one", "one-dra"), ("here", "there"), ("", "one", "one-guard"), ("", "there"), (False, True)
    )
]


@pytest.mark.parametrize("installed", PLACES, ids=str)
def test_a_name_and_labels_of_ones_own_reach_no_pod_and_nothing_that_selects(installed: Installed) -> None:
    plain, own = made_by(installed), made_by(replace(installed, called="accelerators", labelled=True))
    assert [place(each) for each in plain] == [place(each) for each in own]
    assert (selectors(plain), templates(plain)) == (selectors(own), templates(own))
    assert {labels[NAME] for labels in templates(own).values()} == {"nri-gpu"}
    for each in own:
        labels = each["metadata"]["labels"]
        assert labels["team"] == "gpu"
        assert labels["helm.sh/chart"].startswith("nri-gpu-")
        assert labels[NAME] == ("nri-gpu" if each["kind"] == "Service" else "accelerators")
        assert labels[INSTANCE] == installed.where()[1]


@pytest.mark.parametrize("installed", PLACES, ids=str)
def test_prometheus_finds_the_pods_and_calls_the_job_by_our_name(installed: Installed) -> None:
    made = made_by(replace(installed, called="accelerators", labelled=True))
    service, monitor = (next(each for each in made if each["kind"] == kind) for kind in ("Service", "ServiceMonitor"))
    assert selectors(made)[place(monitor)].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "nri-gpu"
    scraped = selectors(made)[place(service)].items()
    found = [labels[COMPONENT] for labels in templates(made).values() if scraped <= labels.items()]
    assert found == ["observe" if installed.observes else "daemon"]


def test_two_releases_select_none_of_each_others_pods_and_share_no_name() -> None:
    tried = 0
    for first, second in combinations(PLACES, 2):
        both = made_by(first), made_by(second)
        shared = {place(each) for each in both[0]} & {place(each) for each in both[1]}
        if first.where() == second.where():
            assert shared  # so that Helm refuses the second
            continue
        # What lies in no namespace, or in another one than the release, has the names of no other release.
        assert {namespace for _, namespace, _ in shared} <= {first.where()[0]}
        if not shared:
            tried += 1
            for ours, theirs in (both, both[::-1]):
                assert not list(selected(ours, theirs))
    assert tried > 100
    for installed in PLACES:
        sets = [where for where in templates(made_by(installed)) if where[0] == "DaemonSet"]
        found = [
            (each, pods) for each, pods in selected(made_by(installed), made_by(installed)) if each[0] == "DaemonSet"
        ]
        assert found == [(each, each) for each in sets]


def selected(by: list[Object], among: list[Object]) -> Iterator[tuple[tuple[str, str, str], tuple[str, str, str]]]:
    """Pair each object that selects pods with each whose pods it would select."""
    for (chooser, chosen), (owner, labels) in product(selectors(by).items(), templates(among).items()):
        if chooser[1] == owner[1] and chooser[0] != "ServiceMonitor" and chosen.items() <= labels.items():
            yield chooser, owner


# --- what names lead to ----------------------------------------------------------------------------------------------

ACCOUNTS: Mapping[str, dict[str, Any]] = {
    "defaults": {},
    "names": {"serviceAccount": {"name": "plain"}, "dra": {"serviceAccount": {"name": "claims.driver"}}},
    "others' accounts": {
        "serviceAccount": {"create": False, "name": "plain"},
        "dra": {"serviceAccount": {"create": False, "name": "claims-driver"}},
    },
    "none but one": {"serviceAccount": {"create": False}, "dra": {"serviceAccount": {"create": False}}},
    "no roles": {"rbac": {"create": False}},
    "all of it": {
        "rbac": {"create": False},
        "namespaceOverride": "held",
        "fullnameOverride": "gpus",
        "dra": {"serviceAccount": {"name": "driver"}},
    },
    "elsewhere": {"namespaceOverride": "held", "fullnameOverride": "gpus"},
}


def accounts(case: str) -> tuple[dict[str, Any], list[Object]]:
    given = ACCOUNTS[case]
    given = given | SERVED | {"dra": {**SERVED["dra"], **given.get("dra", {})}}
    return given, documents(Release("one", "here"), **given)


@pytest.mark.parametrize("case", ACCOUNTS)
def test_each_reference_leads_to_what_it_names(case: str) -> None:
    given, made = accounts(case)
    there = {place(each) for each in made}
    own = given.get("namespaceOverride", "here")
    assert {namespace for _, namespace, _ in there} == {own, ""} | ({NAMESPACE} if "rbac" not in given else set())
    assert not [each for each in there if each[1] == NAMESPACE and each[0] not in ("Role", "RoleBinding")]
    for each in made:
        kind, namespace, _ = place(each)
        spec = each.get("spec", {})
        for volume in spec["template"]["spec"]["volumes"] if kind in ("DaemonSet", "Job") else ():
            if "configMap" in volume:
                assert ("ConfigMap", namespace, volume["configMap"]["name"]) in there
        if kind.endswith("RoleBinding"):
            assert (each["roleRef"]["kind"], namespace, each["roleRef"]["name"]) in there
        if kind == "ValidatingAdmissionPolicyBinding":
            assert ("ValidatingAdmissionPolicy", "", spec["policyName"]) in there


@pytest.mark.parametrize("case", ACCOUNTS)
def test_rights_and_the_policy_that_confines_them_are_of_the_account_of_the_drivers_pods(case: str) -> None:
    given, made = accounts(case)
    users = {
        each["metadata"]["labels"][COMPONENT]: (each["metadata"]["namespace"], pod["serviceAccountName"])
        for each in made
        if each["kind"] == "DaemonSet"
        for pod in (each["spec"]["template"]["spec"],)
    }
    namespace, account = users.pop("dra")
    (policy,) = (
        each for each in made if place(each)[0] == "ValidatingAdmissionPolicy" and place(each)[2].endswith("-dra")
    )
    (whose,) = policy["spec"]["matchConditions"]
    assert whose["expression"] == f"request.userInfo.username == 'system:serviceaccount:{namespace}:{account}'"
    (bound,) = (each for each in made if each.get("spec", {}).get("policyName") == policy["metadata"]["name"])
    assert bound["spec"]["validationActions"] == ["Deny"]
    subjects = [(each["kind"], subject) for each in made for subject in each.get("subjects", ())]
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    rights = ["ClusterRoleBinding", "RoleBinding"] if "rbac" not in given else []
    assert subjects == [(each, subject) for each in rights]
    assert [each["kind"] for each in made if each["kind"] in ("ClusterRole", "Role")] == ["ClusterRole", "Role"][
        : len(rights)
    ]
    # The others have one that has no rights, whoever makes it.
    (others,) = set(users.values())
    assert others != (namespace, account)
    made_here = {place(each)[1:] for each in without_tests(made) if each["kind"] == "ServiceAccount"}
    creates = (given.get("serviceAccount", {}), given["dra"].get("serviceAccount", {}))
    wanted = zip((others, (namespace, account)), creates, strict=True)
    assert made_here == {each for each, table in wanted if table.get("create", True)}


def test_annotations_reach_the_account_that_they_are_of() -> None:
    given = {
        "serviceAccount": {"annotations": {"a": "1"}},
        "dra": {**SERVED["dra"], "serviceAccount": {"annotations": {"b": "2"}}},
    }
    made = documents(**{**SERVED, **given})
    for name, noted in (("nri-gpu", {"a": "1"}), ("nri-gpu-dra", {"b": "2"})):
        account = one(made, "ServiceAccount", name)
        assert account["metadata"]["annotations"] == noted
        assert account["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"namespaceOverride": "default"}, "give it a namespace of its own"),
        ({"fullnameOverride": "a.b"}, "'/fullnameOverride': 'a.b' does not match"),
        ({"fullnameOverride": "a" * 54}, "'/fullnameOverride': maxLength: got 54, want 53"),
        ({"fullnameOverride": "a" * 51, "policy": POLICY}, "set fullnameOverride to a shorter name"),
        ({"serviceAccount": {"name": "a..b"}}, "'/serviceAccount/name': 'a..b' does not match"),
        ({"serviceAccount": {"name": "one"}, "dra": {"serviceAccount": {"name": "one"}}}, "both accounts would be one"),
        ({"serviceAccount": {"name": "nri-gpu-dra"}}, "both accounts would be nri-gpu-dra"),
        ({"dra": {"serviceAccount": {"name": "nri-gpu"}}}, "both accounts would be nri-gpu"),
        ({"fullnameOverride": "x", "serviceAccount": {"name": "x-dra"}}, "both accounts would be x-dra"),
        (
            {"fullnameOverride": "x", "dra": {"serviceAccount": {"create": False, "name": "x"}}},
            "both accounts would be x,",
        ),
        ({"dra": {"serviceAccount": {"name": "default"}}}, "give the DRA driver an account of its own"),
        ({"serviceAccount": {"name": "default"}}, r"set serviceAccount\.create=false"),
        ({"commonLabels": {NAME: "x"}}, "commonLabels: the label app.kubernetes.io/name is the chart's own"),
        ({"commonLabels": {"helm.sh/chart": "x"}}, "commonLabels: the label helm.sh/chart is the chart's own"),
        ({"podLabels": {COMPONENT: "x"}}, "podLabels: the label app.kubernetes.io/component is the chart's own"),
        (
            {"metrics": {"enabled": True}, "podAnnotations": {"prometheus.io/port": "1"}},
            "podAnnotations: the chart sets prometheus.io/port itself, to 9464",
        ),
        (
            {"tolerateMissingKeys": ["tolerate.example.com"], "podAnnotations": {"tolerate.example.com": "no"}},
            "podAnnotations: the chart sets tolerate.example.com itself, to true",
        ),
    ],
    ids=str,
)
def test_names_that_would_meet_are_refused_with_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError, match=sentence):
        documents(**{**CLAIMS, **given, "dra": {"enabled": True, **given.get("dra", {})}})
