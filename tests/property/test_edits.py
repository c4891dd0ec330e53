"""Law: merge is associative with an empty unit, and no path or key can stand in a reply twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.edits import NO_EDITS, DeviceNode, Edits, Mount, Rlimit
from nri_gpu.nri.convert import reply_to_pb

# Few names, so that they meet.
names = st.sampled_from("abc")
values = st.text(max_size=3)
edits = st.builds(
    lambda devices, mounts, env, annotations, rlimits, cpus, mems: Edits.of(
        devices=tuple(devices),
        mounts=tuple(mounts),
        env=env,
        annotations=annotations,
        rlimits=tuple(rlimits),
        cpuset_cpus=cpus,
        cpuset_mems=mems,
    ),
    st.lists(st.builds(DeviceNode, names.map("/dev/{}".format), st.integers(0, 4095), st.integers(0, 255)), max_size=4),
    st.lists(st.builds(Mount, names.map("/{}".format), names), max_size=4),
    st.dictionaries(names, values, max_size=3),
    st.dictionaries(names, values, max_size=3),
    st.lists(st.builds(Rlimit, names, st.integers(0, 9), st.integers(0, 9)), max_size=3),
    st.sampled_from(["", "0-3", "4"]),
    st.sampled_from(["", "0", "0,1"]),
)


@given(edits, edits, edits)
def test_merging_is_associative(one: Edits, two: Edits, three: Edits) -> None:
    assert one.merge(two).merge(three) == one.merge(two.merge(three))


@given(edits)
def test_no_edits_are_the_unit(one: Edits) -> None:
    assert NO_EDITS.merge(one) == one == one.merge(NO_EDITS)


@given(edits, edits)
def test_merging_changes_neither_and_loses_no_key(one: Edits, two: Edits) -> None:
    keyed = (dict(one.devices), dict(one.mounts), dict(one.env), dict(one.annotations), dict(one.rlimits))
    before = Edits(*keyed, one.cpuset_cpus, one.cpuset_mems)
    merged = one.merge(two)
    assert one == before
    assert set(merged.env) == {*one.env, *two.env}
    assert set(merged.devices) == {*one.devices, *two.devices}
    assert (merged.cpuset_cpus, merged.cpuset_mems) == (
        two.cpuset_cpus or one.cpuset_cpus,
        two.cpuset_mems or one.cpuset_mems,
    )
    assert all(merged.mounts[key] == mount for key, mount in two.mounts.items())


@given(st.lists(edits, max_size=4))
def test_no_path_or_key_stands_in_a_reply_twice(parts: list[Edits]) -> None:
    whole = NO_EDITS
    for part in parts:
        whole = whole.merge(part)
    adjust = pb.CreateContainerResponse.FromString(reply_to_pb(whole)).adjust
    for keys in (
        [device.path for device in adjust.linux.devices],
        [mount.destination for mount in adjust.mounts],
        [pair.key for pair in adjust.env],
    ):
        assert len(keys) == len(set(keys))
