"""What may be created and started as it stands, and what may not, with the sentence that its owner reads."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.allocation.grant import sign_grant
from nri_gpu.decision.validate import grant_of, validate_adjusted, validate_start
from nri_gpu.domain.container import Added, AddedNode, Adjusted, Container
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import NamespaceRules, Otherwise, Policy
from tests.support import builders as make

KEY: Final = bytes(range(32))
US: Final = "10-nri-gpu"
POLICY: Final = Policy.default()
IGNORING: Final = Policy(namespaces=NamespaceRules(allow=Globs(("web",)), otherwise=Otherwise.IGNORE))
BROKEN: Final = Policy.broken("policy.toml:3: wrong")
ASKING: Final = make.container("2")
QUIET: Final = make.container()
OPTED_OUT: Final = make.container("none")


def signed(*indices: int, to: Container = ASKING, key: bytes = KEY) -> str:
    return sign_grant(make.grant(*indices, to=to), key)


def node(minor: int, owner: str = US, name: str = "", major: int = 195) -> AddedNode:
    return AddedNode(name or f"/dev/nvidia{minor}", owner, major, minor)


def granted(*indices: int, to: Container = ASKING) -> Adjusted:
    """As the injector leaves it."""
    nodes = (
        *(node(7 - index) for index in indices),
        node(255, name="/dev/nvidiactl"),
        node(0, name="/dev/nvidia-uvm", major=511),
    )
    return Adjusted(container=to, grant=Added(signed(*indices, to=to), US), nodes=nodes)


STARTS: dict[str, tuple[Container, str | None, bytes | None, Policy, str]] = {
    "asked for none": (OPTED_OUT, None, None, POLICY, ""),
    "asked and granted": (ASKING, signed(0, 1), KEY, POLICY, ""),
    "asked, granted, and no policy any more": (ASKING, signed(0, 1), KEY, BROKEN, ""),
    "asked": (ASKING, None, KEY, POLICY, "it was not connected, or too late"),
    "asked, with a policy that is broken": (ASKING, None, KEY, BROKEN, "it was not connected, or too late"),
    "not understood": (make.container("tow"), None, KEY, POLICY, "it was not connected, or too late"),
    "may not ask, which is ignored": (ASKING, None, KEY, IGNORING, ""),
    "a signed grant of another key": (ASKING, signed(0, key=bytes(32)), KEY, POLICY, "its mac does not match"),
    "a signed grant and no key": (ASKING, signed(0), None, POLICY, "no key on this node"),
    "another container's": (
        ASKING,
        signed(0, to=make.container("2", name="x")),
        KEY,
        POLICY,
        "does not match",
    ),
    "a signed grant of nobody's, and nothing asked": (QUIET, "v1;mac=x", KEY, POLICY, ""),
}


@pytest.mark.parametrize(("container", "text", "key", "policy", "words"), STARTS.values(), ids=STARTS)
def test_starts(container: Container, text: str | None, key: bytes | None, policy: Policy, words: str) -> None:
    reason = validate_start(container, grant_of(container, text, key), policy)
    assert (reason is not None) is bool(words)
    if reason:
        assert reason.code is Code.NOT_GRANTED
        assert words in reason.sentence
        assert "create it again once `nri-gpu run` serves this node." in reason.sentence


ADDED: dict[str, tuple[Adjusted, Code | None, str]] = {
    "what others add is theirs": (
        Adjusted(
            container=QUIET, nodes=(node(4, "20-other", "/dev/fuse", 10),), cdi_devices=(Added("a.com/b=c", "x"),)
        ),
        None,
        "",
    ),
    "granted": (granted(0, 1), None, ""),
    "granted a MIG device: the node of its GPU": (
        replace(
            granted(0),
            grant=Added(signed(0), US),
            nodes=(node(7), node(12, name="/dev/nvidia-caps/nvidia-cap12", major=509)),
        ),
        None,
        "",
    ),
    "none, and a signed grant of nothing": (
        Adjusted(container=OPTED_OUT, grant=Added(sign_grant(make.grant(mode=None, to=OPTED_OUT), KEY), US)),
        None,
        "",
    ),
    "asked and got nothing": (Adjusted(container=ASKING), Code.NOT_GRANTED, "nri-gpu granted it none"),
    "asked, and another plugin served it": (
        Adjusted(container=ASKING, nodes=(node(0, "20-other"),)),
        Code.NOT_GRANTED,
        "nri-gpu granted it none",
    ),
    "a signed grant that somebody made up": (
        replace(granted(0), grant=Added("v1;mode=exclusive;uuid=GPU-0;gen=;mac=00", "20-other")),
        Code.NOT_GRANTED,
        "its mac does not match",
    ),
    "another plugin adds a GPU": (
        replace(granted(0), nodes=(node(7), node(6, "20-other"))),
        Code.UNGRANTED_NODES,
        "NRI plugin 20-other added /dev/nvidia6 to this container",
    ),
    "under another name": (
        Adjusted(container=QUIET, nodes=(node(0, "20-other", "/dev/harmless"),)),
        Code.UNGRANTED_NODES,
        "added /dev/harmless",
    ),
    "under another number": (
        Adjusted(container=QUIET, nodes=(node(0, "20-other", "/dev/nvidia-uvm", 511),)),
        Code.UNGRANTED_NODES,
        "added /dev/nvidia-uvm",
    ),
    "to one that opted out": (
        replace(granted(to=OPTED_OUT), nodes=(node(0, "20-other"),)),
        Code.UNGRANTED_NODES,
        "its grant is another plugin's",
    ),
    "by a name of CDI of another class of NVIDIA's": (
        Adjusted(container=QUIET, cdi_devices=(Added("k8s.gpu.nvidia.com/claim=x", "20-other"),)),
        Code.UNGRANTED_NODES,
        "added k8s.gpu.nvidia.com/claim=x",
    ),
    "by a rule of the device cgroup": (
        Adjusted(container=QUIET, opened=frozenset({195})),
        Code.UNGRANTED_NODES,
        "a device rule for major 195",
    ),
    "more of our own than the signed grant names": (
        replace(granted(0), nodes=tuple(node(minor) for minor in range(3))),
        Code.UNGRANTED_NODES,
        "the nodes of 3 GPUs were added to this container and its grant names 1",
    ),
    "more of a simulated node's": (
        replace(granted(0), nodes=tuple(node(minor, major=1195) for minor in range(2))),
        Code.UNGRANTED_NODES,
        "the nodes of 2 GPUs",
    ),
    "a runtime that names no owner": (
        replace(granted(0), grant=Added(signed(0), ""), nodes=(node(7, ""),)),
        None,
        "",
    ),
}


@pytest.mark.parametrize(("adjusted", "code", "words"), ADDED.values(), ids=ADDED)
def test_creations(adjusted: Adjusted, code: Code | None, words: str) -> None:
    reason = validate_adjusted(adjusted, KEY, POLICY)
    assert (reason.code if reason else None) is code
    assert words in (reason.sentence if reason else "")


def test_strangers_matter_to_the_guard_alone() -> None:
    theirs = Adjusted(container=QUIET, nodes=(node(0, "20-other"),))
    assert validate_adjusted(theirs, KEY, POLICY)
    assert validate_adjusted(theirs, KEY, POLICY, ungranted=False) is None
    both = replace(granted(0), nodes=(node(7), node(6, "20-other")))
    assert validate_adjusted(both, KEY, POLICY, ungranted=False)


def test_sentences_keep_their_length_whatever_a_plugin_is_called() -> None:
    hostile = AddedNode("/dev/nvidia" + "0" * 5000, "99-" + "\u00e9\n" * 5000, 195, 0)
    reason = validate_adjusted(Adjusted(container=QUIET, nodes=(hostile,)), KEY, POLICY)
    assert isinstance(reason, Reason)
    assert len(str(reason)) < REFUSAL_MAX
    assert str(reason).endswith("or its request from the container.")
    assert "\n" not in str(reason)
