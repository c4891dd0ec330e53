"""Laws that tests/fuzz has for any text, of sentences of the grammar; and any mapping of annotations is read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nri_gpu.domain.edits import FORMER_EXTRAS, Extra
from nri_gpu.domain.errors import RequestError
from nri_gpu.request.annotation import select_annotation
from tests.fuzz.fuzz_request import KEY, check

hexes = st.text("0123456789abcdefABCDEF", min_size=4, max_size=8)
devices = st.one_of(
    st.integers(0, 99).map(str),
    hexes.map("GPU-{}".format),
    hexes.map("MIG-{}".format),
    st.builds("{}:{}".format, st.integers(0, 247), st.integers(0, 99)),
    st.builds("0000:{:02x}:{:02X}.{}".format, st.integers(0, 255), st.integers(0, 31), st.integers(0, 7)),
)
profiles = st.builds(
    "{}{}g.{}gb{}{}".format,
    st.sampled_from(["", "", "1c."]),
    st.integers(1, 7),
    st.integers(1, 96),
    st.sampled_from(["", "", "+me", "+gfx", "-me"]),
    st.sampled_from(["", ":1", " : 2", ":128", ":0"]),
)
extras = st.one_of(
    st.sampled_from([*FORMER_EXTRAS, *(extra.value for extra in Extra)]),
    st.builds("imex{}{}".format, st.sampled_from([":", " : ", ""]), st.integers(-1, 2**20 + 1)),
)
operators = st.sampled_from([">=", "<=", ">", "<", "="])
wanted = st.one_of(
    st.just("all"),
    st.integers(1, 128).map(str),
    st.integers(1, 128).map("count = {}".format),
    st.lists(profiles, min_size=1, max_size=4).map(lambda each: "mig = " + " , ".join(each)),
    st.lists(devices, min_size=1, max_size=8).map(lambda ids: "device=" + " , ".join(ids)),
)
others = st.lists(
    st.one_of(
        st.sampled_from(
            ["mode=shared", " mode = exclusive", "mode=mps", "capabilities=utility", "capabilities=utility,compute"]
        ),
        st.builds("memory{}{}{}".format, operators, st.integers(0, 10**6), st.sampled_from(["", "K", "Mi", "Gi", "T"])),
        st.lists(extras, min_size=1, max_size=4).map(lambda each: "extras = " + " , ".join(each)),
        st.sampled_from(["sharing=memory:10Gi", "sharing = threads : 50", "sharing=memory:3Ki,threads:100"]),
        st.builds("arch{}{}.{}".format, operators, st.integers(0, 99), st.integers(0, 99)),
        st.text("abcXYZ019*?[]! -", min_size=1, max_size=20).filter(str.strip).map("model={}".format),
    ),
    max_size=4,
    unique_by=lambda clause: clause.split("=")[0].split(">")[0].split("<")[0].strip(),
)
sentences = st.builds(lambda first, rest: ";".join([first, *rest]), wanted, others)


@given(sentences)
def test_sentences_of_the_grammar(value: str) -> None:
    check(value)


keys = st.one_of(
    st.sampled_from([KEY, "gpu.nri.io/pod", "gpu.nri.io/container.a", "gpu.nri.io/container.", "gpu.nri.io/grant"]),
    st.text(max_size=20).map("gpu.nri.io/{}".format),
    st.text(max_size=20),
)
mappings = st.dictionaries(keys, st.text(max_size=5), max_size=5)


@given(mappings, mappings, st.sampled_from(["a", "b", ""]))
def test_any_annotations(pod: dict[str, str], container: dict[str, str], name: str) -> None:
    try:
        chosen = select_annotation(pod, container, name)
    except RequestError as error:
        assert str(error).isascii()
        assert len(str(error)) < 500
    else:
        assert chosen is None or pod[chosen[0]] == chosen[1]
