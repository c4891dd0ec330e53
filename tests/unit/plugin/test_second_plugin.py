"""Two nri-gpu on one runtime are told from a forged annotation: by what no pod can write."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.names import GRANT_KEY
from nri_gpu.plugin.second_plugin import connected_clause, connected_daemons
from tests.support import nri_messages as nri
from tests.support.log import Log
from tests.support.plugin import Bench

SECOND = "another nri-gpu serves this runtime"
NOTHING = pb.CreateContainerResponse()
GRANT = pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(annotations={GRANT_KEY: "v1"}))
PROOFS: dict[str, tuple[Mapping[str, pb.CreateContainerResponse], str]] = {
    "this plugin alone": ({"10-nri-gpu": NOTHING, "90-nri-gpu-guard": NOTHING}, ""),
    "its own grant": ({"10-nri-gpu": GRANT}, ""),
    "two of its name": ({"10-nri-gpu": NOTHING, "20-nri-gpu": NOTHING}, "10-nri-gpu and 20-nri-gpu"),
    "a grant of another's": ({"20-x": GRANT}, ""),
    "a grant of one of its name": ({"20-nri-gpu": GRANT}, "NRI plugin 20-nri-gpu granted GPUs to a container"),
}

# By its words an nri-gpu. It connects or has a connection of its parent's, and a child of it has both, too.
FORKS = """
import os, socket, sys  # nri_gpu
connection = socket.socket(socket.AF_UNIX)
if sys.argv[2] == "connects":
    connection.connect(sys.argv[3])
if os.fork():
    print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", PROOFS)
def test_what_proves_a_second_one(name: str, log: Log) -> None:
    replies, proof = PROOFS[name]
    bench, of = Bench(), nri.pod()
    for _ in range(2):
        bench.plugin.validate(nri.validate(of, nri.container(of), replies))
    assert (proof in bench.plugin.second.proof, bool(proof)) == (True, bool(bench.plugin.second.proof))
    assert len(log.said(SECOND)) == bool(proof)  # once


def test_it_is_over_once_the_runtime_asks_one_again() -> None:
    bench, of = Bench(), nri.pod()
    bench.plugin.validate(nri.validate(of, nri.container(of), PROOFS["two of its name"][0]))
    assert bench.plugin.second.proof
    bench.plugin.validate(nri.validate(of, nri.container(of), PROOFS["this plugin alone"][0]))
    assert not bench.plugin.second.proof


def test_the_same_name_and_index_twice_is_a_second_one() -> None:
    bench, of = Bench(), nri.pod()
    request = pb.ValidateContainerAdjustmentRequest(pod=of, container=nri.container(of))
    for _ in range(2):
        request.plugins.add(name="nri-gpu", index="10")
    bench.plugin.validate(request.SerializeToString())
    assert "10-nri-gpu and 10-nri-gpu" in bench.plugin.second.proof


def test_a_forged_annotation_makes_no_error(log: Log) -> None:
    """Not even beside a text that looks like the runtime's list of plugins. The refusal says what else it may be."""
    plugins = "".join(
        pb.ValidateContainerAdjustmentRequest(plugins=[pb.PluginInstance(name="nri-gpu", index=index)])
        .SerializeToString()
        .decode()
        for index in ("10", "20")
    )
    forged = {GRANT_KEY: "v1;mode=shared", "x": plugins}
    bench, of = Bench(), nri.pod(annotations=forged)
    made = nri.container(of, annotations=forged)
    said = bench.refused(of, made)
    assert "remove it from the container, or a second nri-gpu: see `nri-gpu doctor`" in said
    bench.plugin.validate(nri.validate(of, made, {"10-nri-gpu": NOTHING}))
    bench.settle()
    assert bench.plugin.second.proof == ""
    assert [line for line in log.lines if line.level == "ERROR"] == []


@pytest.mark.parametrize("does", ["connects", "inherits"])
def test_a_connection_counts_once_and_our_own_never(tmp_path: Path, does: str) -> None:
    """A child that is no program of its own yet has its parent's words and connections."""
    path = tmp_path / "nri.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as own:
        listener.bind(str(path))
        listener.listen()
        own.connect(str(path))
        ends = [listener.accept()]
        words = [sys.executable, "-c", FORKS, "run", does, str(path)]
        pipe, passed = subprocess.PIPE, [own.fileno()]
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, pass_fds=passed, text=True) as forks:
            assert forks.stdout
            assert forks.stdout.readline() == "ready\n"
            ends += [listener.accept()] if does == "connects" else []
            assert [*connected_daemons(path)] == ([forks.pid] if does == "connects" else [])
    for end, _ in ends:
        end.close()


def test_nothing_is_known_where_proc_is_not_seen(tmp_path: Path) -> None:
    assert [*connected_daemons(tmp_path / "nri.sock", tmp_path / "proc")] == []
    assert connected_clause([]) == ""
