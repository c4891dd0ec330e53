"""NVIDIA_DRIVER_CAPABILITIES: which parts of the driver come by it, and what the grant says of the others."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.domain.allocation import Allocated, AllocatedDevice, ClaimUid
from nri_gpu.domain.container import Container
from nri_gpu.domain.decision import REFUSAL_MAX, Code
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES, Capabilities, Capability, DrmNode
from nri_gpu.domain.node import Majors, Node
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import (
    CapabilityRules,
    ClaimDefaults,
    Complete,
    DriverCapabilities,
    EnvironmentSettings,
    ForeignSettings,
    Policy,
)
from nri_gpu.policy.rules import Rule, RuleList
from tests.support import builders as make
from tests.support.loading import tree_of
from tests.unit.decision.deciding import NODE, POLICY, injected, refused

VARIABLE = "NVIDIA_DRIVER_CAPABILITIES"
ASK = Policy(environment=EnvironmentSettings(driver_capabilities=DriverCapabilities.ASK))
EVERY = "compute,utility,video,graphics,display,ngx,compat32"


def asking(value: str | None, claim: str | None = "1", **fields: Any) -> Container:  # noqa: ANN401 - of a Container
    return make.container(claim, env={} if value is None else {VARIABLE: value}, **fields)


def given(container: Container, policy: Policy = ASK, node: Node = NODE) -> str:
    """The parts of the driver that the container gets."""
    tree = tree_of(injected(container, node, policy=policy).edits).rpartition("/")[2].split("+")
    return ",".join(each for each in Capability if each in tree)


def allowing(*words: Capability) -> Policy:
    return replace(ASK, capabilities=CapabilityRules(allowed=frozenset(words)))


def ruled(**fields: Any) -> Policy:  # noqa: ANN401 - any field of a Rule
    return replace(ASK, rule=RuleList((Rule(allow=True, namespace=Globs(("ml",)), **fields),)))


def lacking(*words: Capability, **fields: Any) -> Node:  # noqa: ANN401 - any field of an Inventory
    """A node whose driver lacks a library for each, and 32-bit libraries where these are named."""
    trees = {
        some: tree for some, tree in make.trees().items() if Capability.COMPAT32 not in words or not some & {*words}
    }
    return make.node(staged=make.driver(lacks={each: f"lib{each}.so" for each in words}, trees=trees), **fields)


C, U, V, G, D, N, C32 = Capability
UTILITY = replace(ASK, defaults=ClaimDefaults(capabilities=frozenset({U})))
SERVER = make.node(staged=make.driver(trees={s: t for s, t in make.trees().items() if s <= DEFAULT_CAPABILITIES}))
# The variable, policy and node; the parts that come, and words of what the grant says of those that do not.
ROWS: dict[str, tuple[str | None, Policy, Node, str, str]] = {
    "not set": (None, ASK, NODE, "compute,utility", ""),
    "empty": ("", ASK, NODE, "compute,utility", ""),
    "no word that is known": ("none,x", ASK, NODE, "compute,utility", ""),
    "all": ("all", ASK, NODE, EVERY, ""),
    "less than the default": ("utility", ASK, NODE, "utility", ""),
    "other parts": ("graphics,ngx", ASK, NODE, "graphics,ngx", ""),
    "unknown words beside": ("video, frob,utility", ASK, NODE, "compute,utility,video", ""),
    "what brings another": ("display", ASK, NODE, "graphics,display", ""),
    "more than the default": ("all", UTILITY, NODE, EVERY, ""),
    "ignored": (
        "all",
        POLICY,
        NODE,
        "compute,utility",
        "names video, graphics, display, ngx, compat32: environment.driver",
    ),
    "ignored, and no more than the default": ("compute,utility", POLICY, NODE, "compute,utility", ""),
    "a rule says": (
        "all",
        ruled(default_capabilities=frozenset({U})),
        NODE,
        "utility",
        "rule[0].default_capabilities in",
    ),
    "a rule allows": (
        "all",
        ruled(capabilities=frozenset({C, U, V})),
        NODE,
        "compute,utility,video",
        "names graphics, display, ngx, compat32: capabilities graphics may not be asked for: rule[0].capabilities in",
    ),
    "policy allows": ("all", allowing(C, U, N), NODE, "compute,utility,ngx", "capabilities.allowed in"),
    "what is brought is not allowed": (
        "display,video,graphics,utility",
        allowing(U, V, G, D),
        NODE,
        "utility,graphics,display",
        "names video: capabilities compute may not be asked for (compute is brought along by another)",
    ),
    "nothing of it is allowed": ("graphics,x", allowing(C, U), NODE, "compute,utility", "names graphics: capabilities"),
    "nothing but utility is allowed": ("video,utility", allowing(U), NODE, "", ""),
    "no library for some": (
        "all",
        ASK,
        lacking(G, N, C32),
        "compute,utility,video",
        "names graphics, display, ngx, compat32: the driver on this node has no libgraphics.so for graphics",
    ),
    "no library for what brings nothing": (
        "video,ngx,utility",
        ASK,
        lacking(V),
        "utility,ngx",
        "libvideo.so for video",
    ),
    "no library for one, and utility left": ("video,utility", ASK, lacking(V), "compute,utility", "names video: the"),
    "no libcuda": ("all", ASK, lacking(C), "utility,graphics,display,ngx,compat32", "names compute, video: the driver"),
    "no libcuda, and none needed": ("graphics,utility", ASK, lacking(C), "utility,graphics", ""),
    "files of the default alone": ("all", ASK, SERVER, "compute,utility", "has no files for video"),
    "no module to draw": (
        "all",
        ASK,
        make.node(majors=Majors(nvidia=195, nvidia_uvm=511, modeset=False)),
        "compute,utility,video,ngx,compat32",
        "names graphics, display: kernel module nvidia-modeset is not loaded on this node",
    ),
    "no module to compute": (
        "all",
        UTILITY,
        make.node(majors=Majors(nvidia=195)),
        "utility,graphics,display,ngx,compat32",
        "names compute, video: kernel module nvidia-uvm",
    ),
}


@pytest.mark.parametrize(("value", "policy", "node", "parts", "words"), ROWS.values(), ids=ROWS)
def test_the_parts_that_come(value: str | None, policy: Policy, node: Node, parts: str, words: str) -> None:
    if not parts:  # as without the variable
        assert refused(asking(value), node, policy=policy) == refused(asking(None), node, policy=policy)
        return
    assert given(asking(value), policy, node) == parts
    said = injected(asking(value), node, policy=policy).left_out
    assert words in said
    assert bool(said) is bool(words)
    assert said.startswith(f'{VARIABLE}="{value}" also names ') or not said


@pytest.mark.parametrize("without", Capability)
def test_whatever_a_node_lacks_is_left_out_of_all(without: Capability) -> None:
    """Also what brings it along."""
    left = [each for each in Capability if without not in (each, *({C} if each is V else {G} if each is D else ()))]
    node = lacking(without)
    assert given(asking("all"), ASK, node) == ",".join(left)
    assert f"lib{without}.so" in injected(asking("all"), node, policy=ASK).left_out or without is C32


def test_where_the_node_lacks_what_the_default_has_the_variable_saves_nothing() -> None:
    """A CUDA image says `compute,utility`: it must not start with utility alone."""
    for value in (None, "", "compute", "compute,utility", "video,utility,compat32"):
        assert refused(asking(value), lacking(C), policy=ASK).code is Code.NODE_NOT_READY


def test_a_package_may_bring_libcuda_to_who_is_given_compute_by_default_alone() -> None:
    node = replace(lacking(C), compat=(make.package(),))
    assert given(asking("all"), UTILITY, node) == "utility,graphics,display,ngx,compat32"
    wanting = make.container("1", env={VARIABLE: "all", "CUDA_VERSION": "14.0.1"})
    served = replace(node, inventory=replace(node.inventory, cuda_version="13.0", driver_version="580.95.05"))
    compat = replace(ASK, compat=replace(ASK.compat, dir="/packages"))
    tesla = replace(served, inventory=replace(served.inventory, gpus=(make.gpu(brand="tesla"),)))
    assert given(wanting, compat, tesla) == EVERY


VOLUMES = {
    "/dev/dri": ("compute,utility,video,ngx,compat32", "/dev/dri/card0 or above it"),
    "/dev/dri/renderD128": ("compute,utility,video,ngx,compat32", "/dev/dri/renderD128"),
    "/dev/nvidia-modeset": ("compute,utility,video,ngx,compat32", "/dev/nvidia-modeset"),
    "/dev/shm": (EVERY, ""),
}


@pytest.mark.parametrize(("place", "row"), VOLUMES.items())
def test_a_volume_where_its_nodes_go_costs_the_part_and_not_the_grant(place: str, row: tuple[str, str]) -> None:
    """Pods that encode video mount /dev/dri for other vendors' GPUs."""
    drm = (DrmNode(name="card0", major=226, minor=0), DrmNode(name="renderD128", major=226, minor=128))
    node = make.node([make.gpu(drm=drm)])
    container = asking("all", mounts=frozenset({place}))
    assert given(container, ASK, node) == row[0]
    assert row[1] in injected(container, node, policy=ASK).left_out
    for part in ("graphics", "display"):
        assert (refused if row[1] else injected)(asking(None, f"1;capabilities={part}", mounts=container.mounts), node)


UUID = make.uuid(2)
OF_KUBELET = Allocated((AllocatedDevice("nvidia.com/gpu", UUID),))
CLAIMED = Allocated((AllocatedDevice("gpu", UUID),), claims=(ClaimUid("c"),))
SAID = {
    "an annotation": asking("all", "1;capabilities=utility"),
    "beside the kubelet": asking("all", "all;capabilities=utility", kubelet=OF_KUBELET),
    "a claim's configuration": asking("all", None, kubelet=replace(CLAIMED, request="capabilities=utility")),
    "monitoring": asking("all", None, kubelet=replace(CLAIMED, admin=True)),
}


@pytest.mark.parametrize("policy", [ASK, POLICY], ids=["ask", "ignore"])
@pytest.mark.parametrize("container", SAID.values(), ids=SAID)
def test_what_the_request_says_itself_comes(container: Container, policy: Policy) -> None:
    assert given(container, policy) == "utility"
    said = injected(container, policy=policy).left_out
    assert "names compute, video, graphics, display, ngx, compat32: " in said
    assert said.endswith(("says capabilities=", "only monitors"))


GRANTED = {
    "by annotation": asking("video"),
    "by the kubelet": asking("video", None, kubelet=OF_KUBELET),
    "by the kubelet, with an annotation": asking("video", "1", kubelet=OF_KUBELET),
    "by a claim": asking("video", None, kubelet=CLAIMED),
}


@pytest.mark.parametrize("container", GRANTED.values(), ids=GRANTED)
def test_it_is_read_wherever_gpus_are_given(container: Container) -> None:
    assert given(container) == "compute,video"
    assert "names video: " in injected(container).left_out


def test_it_is_read_where_another_components_gpus_are_completed() -> None:
    held = (make.held_node(make.gpu(2)),)
    for complete, claim in ((Complete.ALL, None), (Complete.ASKED, "1")):
        policy = replace(ASK, foreign=ForeignSettings(complete=complete))
        container = asking("graphics", claim, devices=held)
        decision = injected(container, policy=policy)
        assert decision.completes == (make.uuid(2),)
        assert given(container, policy) == "graphics"
        ignoring = replace(policy, environment=EnvironmentSettings())
        assert (given(container, ignoring), "names graphics" in injected(container, policy=ignoring).left_out) == (
            "compute,utility",
            True,
        )


def test_it_is_read_where_the_environment_may_ask() -> None:
    policy = replace(ASK, environment=replace(ASK.environment, may_ask=Globs(("ml",))))
    assert given(make.container(env={VARIABLE: "ngx", "NVIDIA_VISIBLE_DEVICES": "0"}), policy) == "ngx"


@pytest.mark.parametrize("policy", [ASK, POLICY], ids=["ask", "ignore"])
def test_it_is_no_request_and_means_nothing_without_one(policy: Policy) -> None:
    assert injected(asking("all", "none"), policy=policy) == injected(asking(None, "none"), policy=policy)


HOSTILE = ("all," + "\n\x1b[31m" * 40, "compute,all," + "GPU-" * 60, "video,\u202e\U0001f600,'\"\\")


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_what_is_said_of_it_is_short_and_fit_for_a_log(value: str) -> None:
    policy = replace(POLICY, source="/etc/" + "x" * 4000)
    said = injected(make.container("1", env={VARIABLE: value, "SECRET": "hunter2"}), policy=policy).left_out
    assert said.isascii()
    assert said.isprintable()
    assert len(said) < REFUSAL_MAX
    assert "hunter2" not in said


def test_every_closed_set_that_is_left_is_one_that_can_be_granted() -> None:
    """One word after the other is tried with those before it, so what is left is asked for as any request is."""
    sets: set[Capabilities] = set()
    for word in Capability:
        sets |= {some | {word} for some in sets} | {frozenset({word})}
    for some in sets:
        assert injected(asking(",".join(some)), lacking(V, N), policy=ASK)
