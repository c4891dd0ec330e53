"""Law: a container gets a compatibility package only where it wants more CUDA than the driver has, and then enough.

And never one that is not newer than the driver, is not made for it, or on a GPU whose brand policy does not list.
"""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from nri_gpu.decision.cuda_choice import choose, wanted, with_compat
from nri_gpu.domain.node import CompatPackage
from nri_gpu.policy.model import CompatSettings, Policy, RequirementSettings
from nri_gpu.request.image_requirements import GpuFacts, RequirementFacts, unmet, version_of

cudas = st.tuples(st.integers(11, 13), st.integers(0, 3))
versions = st.builds("{}.{:02}".format, st.sampled_from([535, 550, 570, 580]), st.integers(0, 3))
packages = st.builds(
    lambda cuda, version, drivers: CompatPackage(
        cuda=cuda, version=version, drivers=drivers, generation="g", path=f"/{cuda}{version}"
    ),
    cudas,
    versions,
    st.one_of(st.none(), st.frozensets(st.sampled_from([535, 550, 570, 580]))),
)
brands = st.sampled_from(["tesla", "nvidia", "geforce", ""])
facts = st.builds(
    RequirementFacts,
    st.one_of(versions, versions, st.just("")),
    st.one_of(cudas.map("{0[0]}.{0[1]}".format), cudas.map("{0[0]}.{0[1]}".format), st.just("")),
    st.lists(st.builds(GpuFacts, st.just((9, 0)), brands), max_size=2).map(tuple),
)
policies = st.builds(
    Policy,
    compat=st.builds(
        CompatSettings,
        brands=st.sampled_from([("tesla",), ("nvidia",), ("tesla", "nvidia")]),
        across_minor=st.booleans(),
    ),
    requirements=st.builds(RequirementSettings, check=st.booleans(), may_disable=st.booleans()),
)
required = st.builds(
    "cuda{}{}{}".format,
    st.sampled_from([">=", ">=", ">=", "=", "<", ">"]),
    cudas.map("{0[0]}.{0[1]}".format),
    st.sampled_from(["", "", ",driver>=550", ",cuda<13", " brand=tesla,driver<551", "bad"]),
)
env = st.fixed_dictionaries(
    {},
    optional={
        "CUDA_VERSION": st.one_of(cudas.map("{0[0]}.{0[1]}.1".format), st.text(max_size=5)),
        "NVIDIA_REQUIRE_CUDA": required,
        "NVIDIA_DISABLE_REQUIRE": st.sampled_from(["1", "0"]),
    },
)


@settings(max_examples=150)
@given(env, facts, st.lists(packages, max_size=4), policies)
def test_only_upwards_and_only_where_it_runs(
    env: dict[str, str], facts: RequirementFacts, packages: list[CompatPackage], policy: Policy
) -> None:
    choice = choose(env, facts, packages, policy)
    assert choice.why.isascii()
    event(f"chosen {choice.package is not None}")
    if choice.package is None:
        return
    want, have, package = wanted(env), version_of(facts.cuda_version), choice.package
    assert want is not None
    assert have
    assert want > (*have, 0)[:2]
    assert package.cuda >= want
    assert policy.compat.across_minor or want[0] > have[0]
    driver, own = version_of(facts.driver_version), version_of(package.version)
    assert driver
    assert own
    assert own > driver
    assert driver[0] in package.drivers if package.drivers is not None else own[0] > driver[0]
    assert facts.gpus
    assert all(gpu.brand in policy.compat.brands for gpu in facts.gpus)
    assert not policy.requirements.check or not unmet(
        env, with_compat(facts, package), may_disable=policy.requirements.may_disable
    )
    assert not [each for each in packages if each.cuda < package.cuda and choose(env, facts, [each], policy).package]
