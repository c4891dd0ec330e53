"""Laws of the record: each hold that ends is told once, and what a file has of holds is true wherever it ends."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.ledger.apply import apply
from nri_gpu.ledger.holds import holds_of
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.records.usage_file import UsageReader
from nri_gpu.records.usage_lines import Begun, LogMoment, hold_id
from nri_gpu.records.usage_log import FILE
from nri_gpu.records.usage_sums import Sums
from tests.property import strategies
from tests.property.test_apply import stories
from tests.support.holds import PARTED, Followed
from tests.support.ledgers import RULES
from tests.support.log import Line, log_lines


def granted(ledger: Ledger) -> dict[str, set[str]]:
    """Container -> its GPUs."""
    found = defaultdict[str, set[str]](set)
    for uuid, usage in ledger.usage().items():
        for id_ in usage.grants:
            found[id_].add(uuid)
    return found


steps = st.lists(st.tuples(strategies.ledgers, st.sampled_from([0.0, 0.25, 7.5, 4000.0])), min_size=1, max_size=6)


@given(strategies.ledgers, stories)
def test_each_grant_that_ends_is_logged_once(first: Ledger, story: list) -> None:  # type: ignore[type-arg]
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder, log_lines(lines.append):
        node = Followed(Path(folder))
        node.begin(first)
        for event in story:
            node.commit(apply(node.state.ledger, event, RULES), 1.0)
    chain = [first, *(ledger for _, ledger in node.ledgers)]
    ended = Counter(
        (id_, frozenset(uuids))
        for before, after in pairwise(map(granted, chain))
        for id_, uuids in before.items()
        if id_ not in after
    )
    told = [line.fields for line in lines if line.text == "GPU released" and "container_id" in line.fields]
    assert Counter((each["container_id"], frozenset(each["gpu_uuid"].split(","))) for each in told) == ended
    assert all(each["held_s"] >= 0 for each in told)


@given(strategies.ledgers, steps, st.data())
def test_a_file_that_ends_anywhere_says_nothing_that_was_not(first: Ledger, later: list, data: st.DataObject) -> None:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node = Followed(folder)
        node.begin(first)
        for ledger, after_s in later:
            node.shift_s = data.draw(st.sampled_from([0.0, -86_400.0, 3600.0]))
            node.commit(ledger, after_s)
        node.write()
        reader = UsageReader(folder)
        whole_story = [*reader.events()]
        assert reader.open.keys() == {hold_id(hold) for hold in holds_of(node.state.ledger).values()}
        content = (folder / FILE).read_bytes()
        (folder / FILE).write_bytes(content[: data.draw(st.integers(0, len(content)))])
        cut = [*UsageReader(folder).events()]
        assert cut == whole_story[: len(cut)]


@given(steps)
def test_the_holders_of_a_gpu_never_have_more_time_than_it_has(later: list) -> None:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as name:
        node = Followed(Path(name))
        node.begin(Ledger())
        for ledger, after_s in later:
            node.commit(ledger, after_s)
        node.write()
        reader, of_devices, of_gpus = UsageReader(Path(name)), Sums[str](), Sums[str]()
        for event in reader.events():
            if isinstance(event, Begun):
                of_devices.begun(event.hold, {each.uuid: (1.0, each.uuid) for each in event.devices}, event.began)
                of_gpus.begun(
                    event.hold, {each.uuid: (each.share, each.gpu_uuid) for each in event.devices}, event.began
                )
            else:
                of_devices.ended(event.hold, event.now)
                of_gpus.ended(event.hold, event.now)
        for sums in (of_devices, of_gpus):
            sums.count(node.now())
    held = time_held(node)
    assert {uuid: round(total, 3) for uuid, total in of_devices.totals.items() if total} == held
    # A GPU that is held whole and in parts at once is none that `decide` grants.
    for gpu in PARTED.gpus:
        if gpu.uuid not in held:
            assert of_gpus.totals[gpu.uuid] <= sum(after_s for _, after_s in later) + 1e-6


@given(st.lists(st.one_of(st.just(1.0), st.floats(0, 1, exclude_min=True)), min_size=1, max_size=6))
def test_a_part_that_was_given_is_the_most_a_holder_has(parts: list[float]) -> None:
    sums = Sums[int]()
    for number, part in enumerate(parts):
        sums.begun(str(number), {"GPU": (1.0, number)}, LogMoment(0.0, 0.0), part)
    sums.count(LogMoment(100.0, 100.0))
    assert all(sums.totals[number] <= part * 100 + 1e-6 for number, part in enumerate(parts))
    whole, total = 1.0 in parts, sum(sums.totals.values())
    assert total <= 100 + 1e-6
    assert abs(total - (100 if whole else min(sum(parts), 1.0) * 100)) < 1e-6


def time_held(node: Followed) -> dict[str, float]:
    """For how long each device was held by anybody, by the ledgers: seconds, to the millisecond."""
    held = defaultdict[str, float](float)
    for (began, ledger), (ended, _) in zip(node.ledgers, [*node.ledgers[1:], (node.mono_s, Ledger())], strict=True):
        for uuid in {uuid for hold in holds_of(ledger).values() for uuid in hold.uuids}:
            held[uuid] += ended - began
    return {uuid: round(total, 3) for uuid, total in held.items() if total}
