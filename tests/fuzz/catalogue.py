"""All targets by name, and the module that has each: known without importing any, so that one can be instrumented."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from tests.fuzz.target import Target


class Entrance(Struct, frozen=True):
    """module: of tests.fuzz, which has the target. what: comes in there."""

    module: str
    what: str


ENTRANCES: Final[Mapping[str, Entrance]] = {
    "wire": Entrance("fuzz_wire", "bytes of ttrpc and of NRI's mux"),
    "nri-plugin": Entrance("fuzz_nri", "an NRI session, as the daemon serves it"),
    "nri-guard": Entrance("fuzz_nri", "an NRI session, as the guard serves it"),
    "request": Entrance("fuzz_request", "a pod's annotation"),
    "requirements": Entrance("fuzz_requirements", "an image's NVIDIA_REQUIRE variables"),
    "signed": Entrance("fuzz_signed", "signed grants, kubelet tokens, claim markers"),
    "claim": Entrance("fuzz_claim", "ResourceClaims of the API server"),
    "peers": Entrance("fuzz_peers", "answers of children, daemon, API server, kubelet; audit log; files in /etc"),
    "state": Entrance("fuzz_state", "files of the state folder"),
    "policy": Entrance("fuzz_documents", "the policy"),
    "topology": Entrance("fuzz_documents", "topology files"),
    "manifest": Entrance("fuzz_documents", "pod manifests of `nri-gpu explain`"),
    "kernel": Entrance("fuzz_kernel", "/proc, /sys, device cgroups, eBPF programs, container bundles"),
    "node": Entrance(
        "fuzz_node", "others' configuration, the driver's files and processes, as `doctor` and `prepare` read"
    ),
    "listeners": Entrance("fuzz_listeners", "requests of HTTP for metrics, questions on the daemon's two sockets"),
    "grpc": Entrance("fuzz_grpc", "gRPC: PodResources, the kubelet's claims, why CRI does not stop a container"),
    "note": Entrance("fuzz_note", "ELF files and NVIDIA's note in them"),
}
NAMES: Final = tuple(ENTRANCES)


def load(name: str) -> Target:
    """Import its module, and with it what it tests."""
    target: Target = importlib.import_module(f"tests.fuzz.{ENTRANCES[name].module}").TARGETS[name]
    return target
