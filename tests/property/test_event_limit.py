"""The limit of a node's events, for any events at any times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.dra.node_events import HOUR_S, HOURLY_MAX, HourlyLimit

KINDS = st.sampled_from(["GPUUnavailable", "GPUAvailable"])
UUIDS = st.sampled_from(["GPU-a", "GPU-b"])
PAUSES = st.floats(0, HOUR_S / 4) | st.just(0.0) | st.just(HOUR_S)


@given(st.lists(st.tuples(KINDS, UUIDS, PAUSES), max_size=80))
def test_any_hour_has_so_many_of_a_kind_and_gpu_and_none_is_refused_that_has_room(
    asked: list[tuple[str, str, float]],
) -> None:
    limit, now, written = HourlyLimit(), 0.0, list[tuple[str, str, float]]()
    for kind, uuid, pause_s in asked:
        now += pause_s
        within = [each for each in written if each[:2] == (kind, uuid) and now - each[2] < HOUR_S]
        allowed = limit.allows(kind, uuid, now)
        assert allowed is (len(within) < HOURLY_MAX)
        written += [(kind, uuid, now)] if allowed else []
