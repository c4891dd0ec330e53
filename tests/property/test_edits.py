"""Law: merge is associative with an empty unit, and the later part wins."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.domain.edits import NO_EDITS, Edits
from tests.property import strategies

edits = strategies.edits(st.sampled_from("abc"))  # few names, so that they meet


@given(edits, edits, edits)
def test_merging_is_associative(one: Edits, two: Edits, three: Edits) -> None:
    assert one.merge(two).merge(three) == one.merge(two.merge(three))


@given(edits)
def test_no_edits_are_the_unit(one: Edits) -> None:
    assert NO_EDITS.merge(one) == one == one.merge(NO_EDITS)


@given(edits, edits)
def test_merging_changes_neither_and_loses_no_key(one: Edits, two: Edits) -> None:
    before = copy.deepcopy(one)
    merged = one.merge(two)
    assert one == before
    assert set(merged.env) == {*one.env, *two.env}
    assert set(merged.devices) == {*one.devices, *two.devices}
    assert (merged.cpuset_cpus, merged.cpuset_mems) == (
        two.cpuset_cpus or one.cpuset_cpus,
        two.cpuset_mems or one.cpuset_mems,
    )
    assert all(merged.mounts[key] == mount for key, mount in two.mounts.items())
