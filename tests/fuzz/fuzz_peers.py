"""Whatever a process that we talk to says: a value of ours, or the error of that peer; nothing else comes out.

nvml, event, stray: our children, which a driver's library or a race may have broken. question, answer: of `nri-gpu
dra` and the daemon. config: a claim's opaque parameters. slices, refusal, watch: the API server. allocate, preferred:
the kubelet. replay: a line of the audit log. kubeconfig;
containerd, cdi: files in /etc that others write.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Final, cast

import msgspec
import urllib3
from msgspec import to_builtins

from nri_gpu.cdi.spec_file import overlaps
from nri_gpu.cli.replay_command import compare
from nri_gpu.doctor.runtime_settings import containerd_settings, crio_settings
from nri_gpu.domain.errors import InventoryError, RequestError
from nri_gpu.domain.value import encode
from nri_gpu.dra.api_access import Access, AccessError, by_kubeconfig
from nri_gpu.dra.api_server import ApiServer, ApiServerError, SliceEvent
from nri_gpu.dra.claim_config import ConfigError, parse_config
from nri_gpu.dra.questions import Answer, Question
from nri_gpu.health.event_child import MalformedLineError, UnplacedEvent, WaitingFailed, parse_line
from nri_gpu.inventory.nvml_report import read_report
from nri_gpu.kubelet.advertised import AllocationError
from nri_gpu.records.audit_records import NodeRecord, PolicyRecord, decision_record
from nri_gpu.request.annotation import parse_claim
from nri_gpu.stray.uses import Extent, Use
from tests.fuzz.target import Target, chosen, named, scratch, words
from tests.property.test_report import WHOLE
from tests.support import builders as make
from tests.support.kubelet_nodes import GPU, PluginNode
from tests.support.resource_claims import CONFIG
from tests.unit.decision.deciding import injected

FOLDER: Final = scratch()
ACCESS: Final = Access(host="api", port=6443)
LOOP: Final = asyncio.new_event_loop()


def nvml(data: bytes) -> bool:
    try:
        found = read_report(json.loads(data), 1.0)
    except (ValueError, RecursionError):  # of json, which the reader of the line catches
        return False
    except InventoryError as error:
        assert str(error)
        return False
    return bool(found.inventory.gpus)


def event(data: bytes) -> bool:
    try:
        said = parse_line(data)
    except MalformedLineError:
        return False
    assert not isinstance(said, UnplacedEvent | WaitingFailed) or said.why.isprintable()
    return True


def _decoded(kind: object) -> Callable[[bytes], bool]:
    """What its reader decodes, with the exceptions that it catches."""

    def check(data: bytes) -> bool:
        try:
            msgspec.json.decode(data, type=kind)
        except (ValueError, RecursionError):
            return False
        return True

    return check


def config(data: bytes) -> bool:
    try:
        text = parse_config(data)
    except ConfigError as error:
        assert error.faults
        assert all(each.isprintable() for each in error.faults)
        return False
    try:
        assert not text or parse_claim("key", text, given=True)
    except RequestError as error:
        raise AssertionError(text) from error
    return True


class Answering(ApiServer):
    """An API server that answers everything with one body."""

    def __init__(self, body: bytes, status: int) -> None:
        super().__init__(ACCESS, bytes_max=10_000)
        self._answers, self._code = body, status
        self._version = "v1"

    def _connections(self) -> urllib3.HTTPSConnectionPool:
        def urlopen(*_: object, **__: object) -> urllib3.HTTPResponse:
            headers = {"Retry-After": self._answers[:8].decode("latin-1")}
            body = io.BytesIO(self._answers)
            return urllib3.HTTPResponse(body, headers, self._code, preload_content=False)

        return cast("urllib3.HTTPSConnectionPool", SimpleNamespace(urlopen=urlopen))


def _understood(question: Coroutine[Any, Any, object]) -> bool:
    try:
        LOOP.run_until_complete(question)
    except ApiServerError as error:
        assert str(error).isprintable()
        return False
    return True


def _slices(status: int) -> Callable[[bytes], bool]:
    return lambda data: _understood(Answering(data, status).slices("node", "gpu.nri.io"))


def watch(data: bytes) -> bool:
    found: list[SliceEvent] = []
    return _understood(Answering(data, 200).watch("node", "gpu.nri.io", "1", found.append))


def kubeconfig(data: bytes) -> bool:
    file = FOLDER / "kubeconfig"
    file.write_bytes(data)
    try:
        return bool(by_kubeconfig(file).url)
    except AccessError as error:
        assert str(error)
        return False


def allocate(data: bytes) -> bool:
    """IDs with blanks between, containers with line breaks."""
    node = PluginNode()
    requests = [line.split(" ") for line in data.decode(errors="replace").splitlines()]
    try:
        answers = node.devices.allocate(GPU, requests)
    except AllocationError as error:
        assert len(str(error)) < 2000
        assert not node.plugin.ledger.reservations
        return False
    assert len(answers) == len(requests)
    assert sum(map(len, requests)) == len(node.plugin.ledger.reservations)
    return True


def preferred(data: bytes) -> bool:
    """The size, what is available, what must be taken; blanks between IDs."""
    size, available, must, *_ = (*data.decode(errors="replace").split("\n"), "", "", "")
    ids, wanted = available.split(" "), must.split(" ")
    count = int(size) if size.lstrip("-").isascii() and size.lstrip("-").isdecimal() and len(size) < 11 else 0
    chosen_ids = PluginNode().devices.preferred(GPU, ids, wanted, count)
    assert len(set(chosen_ids)) == len(chosen_ids)
    assert set(wanted) <= set(chosen_ids) <= {*ids, *wanted}
    return len(chosen_ids) == count


def replay(data: bytes) -> bool:
    lines = [*RECORDS, data.decode(errors="replace")]
    return all(not isinstance(each, str) for each in compare(("log:1", line) for line in lines))


def containerd(data: bytes) -> bool:
    (FOLDER / "config.toml").write_bytes(data)
    found = containerd_settings(FOLDER, "/config.toml", (2, 1, 4))
    crio_settings(FOLDER, "/config.toml")
    return not found.faults


def cdi(data: bytes) -> bool:
    folder = FOLDER / "cdi"
    folder.mkdir(exist_ok=True)
    (folder / "other.json").write_bytes(data)
    return bool(list(overlaps(folder / "ours.json", {"0"}, [folder])))


def _records() -> list[str]:
    node, container = make.node(), make.container("device=0", of="one")
    decision = decision_record(container, injected(container), 1_800_000_000.0, 10.0)
    return [json.dumps(to_builtins(each)) for each in (NodeRecord(node=encode(node)), PolicyRecord("", ""), decision)]


RECORDS: Final = _records()
READERS: Final[dict[str, Callable[[bytes], object]]] = {
    "nvml": nvml,
    "event": event,
    "stray": _decoded(Use | Extent),
    "question": _decoded(Question),
    "answer": _decoded(Answer),
    "config": config,
    **{name: _slices(status) for name, status in (("slices", 200), ("refusal", 403), ("missing", 404))},
    "watch": watch,
    "kubeconfig": kubeconfig,
    "allocate": allocate,
    "preferred": preferred,
    "replay": replay,
    "containerd": containerd,
    "cdi": cdi,
}
_SLICES: Final = {
    "metadata": {"resourceVersion": "7"},
    "items": [
        {
            "metadata": {"name": "n"},
            "spec": {
                "driver": "gpu.nri.io",
                "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
                "nodeName": "n",
                "devices": [],
            },
        }
    ],
}
_EVENT: Final = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}
_KUBECONFIG: Final = {
    "current-context": "c",
    "clusters": [{"name": "c", "cluster": {"server": "https://api:6443", "certificate-authority-data": "YQ=="}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
}
PEERS: Final = Target(
    chosen(READERS),
    good=[
        *named("nvml", json.dumps(WHOLE)),
        *named("event", '{"type": "call", "call": "nvmlInit"}', '{"type": "watching", "gpus": [], "failed": {}}'),
        *named("stray", '{"type": "extent", "processes": 1, "closed": 0, "whole": true}'),
        *named("config", json.dumps({**CONFIG, "mode": "shared"})),
        *named("slices", json.dumps(_SLICES)),
        *named("watch", json.dumps(_EVENT) + "\n"),
        *named("kubeconfig", json.dumps(_KUBECONFIG)),
        *named("allocate", make.uuid(0), f"{make.uuid(1)} {make.uuid(2)}\n{make.uuid(3)}"),
        *named("preferred", f"2\n{make.uuid(0)} {make.uuid(1)} {make.uuid(2)}\n{make.uuid(1)}"),
        *named("replay", RECORDS[-1]),
        *named("containerd", "version = 3\nimports = []\n[plugins.'io.containerd.nri.v1.nri']\ndisable = false\n"),
        *named(
            "cdi",
            '{"kind": "nvidia.com/gpu", "devices": [{"name": "0"}]}',
            "kind: nvidia.com/gpu\ndevices: [name: 0]\n",
        ),
    ],
    bad=[
        *(
            each
            for name in READERS
            if name not in ("containerd", "replay", "watch")
            for each in named(name, b"\xff\0", "{}", "[" * 5)
        ),
        *(
            each
            for name in (
                "refusal",
                "missing",
                "cdi",
                "slices",
                "watch",
                "config",
                "kubeconfig",
                "event",
                "question",
            )
            for each in named(name, "[" * 2500 + "\n", '{"a":' * 1500 + "\n", b'{"message": "\xff"}\n')
        ),
        *named("replay", "[" * 2500, '{"kind": "ledger"}', '{"kind": "changed", "entries": {"c": {}}}'),
        *named("containerd", "x", "x = " + "[" * 1500, "[plugins]\n'io.containerd.nri.v1.nri' = 1"),
    ],
    pieces=(
        *READERS,
        *words('"type": "items": "metadata": "spec": "devices": "object": "ERROR" "ADDED" "code": "kind":'),
        *words('"message": "details": "gpus": "uuid": "pci_bus_id": "mig": MIG- null true -1 1e999 NaN'),
        *words('"ledger" "changed" "decision" "entries": "plugins" ../ https://[::1'),
        *('"\\ud800"', '"\\u0000"', "9" * 4400, "[" * 2500, '{"a":' * 1500, "\xff", "\\"),
        *(make.uuid(0), make.uuid(1), "imports = ['*']", "!!bool x"),
    ),
    bytes_max=6000,
)
TARGETS: Final = {"peers": PEERS}
