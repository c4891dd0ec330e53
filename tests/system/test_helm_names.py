"""Names of the user's own on OpenShift, by the programs Helm 3 and Helm 4: who may run privileged pods there."""

import pytest

from tests.support.errors import HarnessError
from tests.support.helm import CHART, PROGRAMS, Helm, parsed
from tools.manifests import as_options

OPENSHIFT = ("--api-versions=security.openshift.io/v1", "--kube-version=1.37", *as_options({}))
RELEASE = ("one", CHART, "--namespace=here")
OWN = "--set=namespaceOverride=held,fullnameOverride=gpus,serviceAccount.name=plain"
CLAIMS = "--set=kubelet.enabled=false,dra.enabled=true,dra.serviceAccount.name=driver,dra.serviceAccount.create=false"


@pytest.fixture(params=PROGRAMS)
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(request.param, tmp_path_factory.mktemp("helm"))


def test_the_constraints_are_given_to_the_accounts_that_the_values_name(helm: Helm) -> None:
    made = parsed(helm("template", *RELEASE, *OPENSHIFT, OWN, CLAIMS))
    (binding,) = (each for each in made if each.get("roleRef", {}).get("name") == "system:openshift:scc:privileged")
    assert (binding["metadata"]["name"], binding["metadata"]["namespace"]) == ("gpus-openshift", "held")
    assert [(each["name"], each["namespace"]) for each in binding["subjects"]] == [
        ("plain", "held"),
        ("driver", "held"),
    ]


def test_without_roles_there_is_no_binding_and_tokens_are_confined_all_the_same(helm: Helm) -> None:
    kinds = {
        each["kind"] for each in parsed(helm("template", *RELEASE, *OPENSHIFT, OWN, CLAIMS, "--set=rbac.create=false"))
    }
    assert not {each for each in kinds if "Role" in each}
    assert {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} <= kinds


def test_the_account_of_all_pods_may_not_run_privileged_ones(helm: Helm) -> None:
    without = "--set=serviceAccount.create=false"
    with pytest.raises(HarnessError, match="OpenShift would let the account default"):
        helm("template", *RELEASE, *OPENSHIFT, without)
    assert helm("template", *RELEASE, *OPENSHIFT, without, "--set=rbac.create=false")
