"""Whatever anybody writes into markers: nothing is granted by it, and the answer is a sentence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.dra.markers import markers_of, read_marker
from nri_gpu.nri.convert import read_markers
from tests.support.builders import container, prepared_claim
from tests.support.claim_nodes import ClaimNode, allocated
from tests.support.plugin import KEY

CLAIM = prepared_claim(0, 1)
((NAME, VALUE), (SECOND, _)) = markers_of(CLAIM, KEY)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
names = st.one_of(st.just(NAME), st.just(SECOND), words.map(lambda word: "NRI_GPU_CLAIM_" + word.replace("=", "")))


@st.composite
def values(draw: st.DrawFn) -> str:
    """Any text, or a true value with something put in the place of some of it."""
    start, end = sorted((draw(st.integers(0, len(VALUE))), draw(st.integers(0, len(VALUE)))))
    return draw(st.one_of(words, words.map(lambda word: VALUE[:start] + word + VALUE[end:])))


@given(st.dictionaries(names, values(), min_size=1, max_size=3))
def test_only_what_was_signed_is_read(written: dict[str, str]) -> None:
    for name, value in written.items():
        assert (read_marker(name, value, KEY) is not None) is ((name, value) == (NAME, VALUE))
    assert read_markers(f"{name}={value}" for name, value in written.items()).keys() <= written.keys()
    node = ClaimNode()
    node.prepared(allocated(0, 1))
    found = node.create(container(markers=written))
    if written == {NAME: VALUE}:
        assert found == (CLAIM.devices[0].uuid,)
    else:
        assert isinstance(found, str)
        assert len(found) < 800
        assert not node.plugin.ledger.entries
