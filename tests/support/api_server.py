"""A Kubernetes API server as a DRA driver sees it: HTTPS with an authority of its own, and the objects in memory.

It does what the reference and Kubernetes 1.36 do: resource versions that never repeat, conflicts, field selectors, a
watch with bookmarks that forgets the past, dry runs, quantities in canonical form, the time of a taint, limits of a
slice, and fields of missing feature gates dropped without a word unless the object had them already.
Source: kubernetes/kubernetes pkg/registry/resource/resourceslice/strategy.go, pkg/apis/resource/validation.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, unquote, urlsplit

from nri_gpu.dra.api_access import Access
from tests.support import packages

GATES: Final = frozenset({"DRADeviceTaints", "DRAConsumableCapacity", "DRAPartitionableDevices"})
GROUP: Final = "resource.k8s.io"
Json = dict[str, Any]
_QUANTITY: Final = re.compile(r"(\d+)(|[KMGTPE]i|[kMGTPE])")
_SEMVER: Final = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_POLL_S: Final = 0.05


@dataclass(frozen=True)
class Certificates:
    """PEM files: of an authority, and of a server on this machine that it signed."""

    authority: Path
    certificate: Path
    key: Path


@functools.cache
def certificates(name: str = "kubernetes", *, strict: bool = True) -> Certificates:
    """Made once in a process, by openssl. Another name: another authority. strict: as RFC 5280 has them."""
    holder = tempfile.TemporaryDirectory(prefix="nri-gpu-test-")
    _HOLDERS.append(holder)
    folder = Path(holder.name)
    options = shlex.split("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 9")
    new = [*packages.command("openssl"), *options]

    def run(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    signs = ("-addext", "keyUsage=critical,keyCertSign,cRLSign" if strict else "authorityKeyIdentifier=none")
    run(*new, "-subj", f"/CN={name}-ca", "-keyout", "ca.key", "-out", "ca.crt", *signs)
    names = "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost"
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", names, "-addext", "basicConstraints=critical,CA:FALSE")
    run(*new, "-subj", f"/CN={name}", "-keyout", "server.key", "-out", "server.crt", *signed)
    return Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")


_HOLDERS: Final[list[tempfile.TemporaryDirectory[str]]] = []


@dataclass
class Canned:
    """What the next requests get instead. body: bytes as they are; drip_s: between two of them. times: -1: always."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    verb: str = ""
    path: str = ""
    times: int = 1
    drip_s: float = 0.0

    def answers(self, verb: str, path: str) -> bool:
        return self.times != 0 and self.verb in ("", verb) and self.path in path


class StandInApiServer:
    """gates: those that are on. served: versions of resource.k8s.io. token: the one that is accepted; empty: any.

    delay_s: before each answer. bookmark_s: between bookmarks of a watch; bookmarks: sent so far. requests: verb and
    path of each, in order. client_authority: whose certificates clients need.
    """

    def __init__(self, *, signed_by: Certificates | None = None, client_authority: Path | None = None) -> None:
        self.gates: frozenset[str] = GATES
        self.served: tuple[str, ...] = ("v1", "v1beta2", "v1beta1")
        self.token = ""
        self.delay_s = 0.0
        self.bookmark_s = 0.1
        self.bookmarks = 0
        self.canned: list[Canned] = []
        self.requests: list[tuple[str, str]] = []
        self.claims: dict[tuple[str, str], Json] = {}
        self.nodes: dict[str, Json] = {}
        self.slices: dict[str, Json] = {}
        self.written_events: dict[str, Json] = {}  # of the namespace default, by their names
        self.changed = threading.Condition()
        self.version = 1000
        self.oldest = 0  # version from which a watch can begin
        self.history: list[tuple[int, str, Json]] = []
        self.generation = 0  # of the server's process
        self.connected = 0  # connections so far
        self.watches: set[socket.socket] = set()
        self.certificates = signed_by or certificates()
        self._connections: set[socket.socket] = set()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificates.certificate, self.certificates.key)
        if client_authority:
            context.load_verify_locations(client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
        self._server = _Server(self, context)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.drop_connections()

    def access(self, token: bytes | Path = b"") -> Access:
        """The way to it."""
        return Access(host="127.0.0.1", port=self.port, authority=self.certificates.authority, token=token)

    def add_node(self, name: str) -> str:
        """Returns its UID."""
        self.nodes[name] = {"metadata": {"name": name, "uid": str(uuid.uuid4())}}
        return str(self.nodes[name]["metadata"]["uid"])

    def add_claim(self, namespace: str, name: str, **parts: object) -> str:
        """parts: `spec`, `status` and what else the claim has. Returns its UID."""
        uid = str(uuid.uuid4())
        metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": "7"}
        self.claims[namespace, name] = {"metadata": metadata, "spec": {}, "status": {}, **parts}
        return uid

    def delete_slices(self, node: str) -> None:
        """As the kubelet does at its start."""
        with self.changed:
            for name in [n for n, each in self.slices.items() if each["spec"].get("nodeName") == node]:
                self._record("DELETED", self.slices.pop(name))

    def change_slice(self, name: str, change: Json) -> None:
        """Somebody else edits its spec."""
        with self.changed:
            self.slices[name] = deepcopy(self.slices[name])
            self.slices[name]["spec"].update(change)
            self._record("MODIFIED", self.slices[name])

    def forget_history(self) -> None:
        """Watches from before now are answered 410, and those that are open end."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.history.clear()
        self.break_watches()

    def break_watches(self) -> None:
        for each in tuple(self.watches):
            _shut(each)

    def end_watches(self) -> None:
        """As a server does that stops in good order."""
        with self.changed:
            self.generation += 1

    def drop_connections(self) -> None:
        for each in tuple(self._connections):
            _shut(each)

    def count(self, verb: str, path: str = "") -> int:
        """Requests of that verb whose path has this part; dry runs only where the part says so."""
        dry = "dryRun" in path
        return sum(v == verb and path in p and ("dryRun" in p) == dry for v, p in self.requests)

    @property
    def writes(self) -> int:
        return sum(self.count(verb) for verb in ("POST", "PUT", "DELETE"))

    def devices(self) -> dict[str, Json]:
        """All published devices, name -> device, in the order of slices' names."""
        with self.changed:
            return {d["name"]: d for name in sorted(self.slices) for d in self.slices[name]["spec"].get("devices", ())}

    def _record(self, kind: str, found: Json) -> None:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, deepcopy(found)))
        self.changed.notify_all()

    def store(self, given: Json, name: str | None, *, dry_run: bool) -> tuple[int, Json]:
        """Create (no name) or replace a slice. Returns status and answer."""
        with self.changed:
            found = deepcopy(given)
            metadata = found.setdefault("metadata", {})
            if name is None and not metadata.get("name"):
                metadata["name"] = metadata.get("generateName", "") + uuid.uuid4().hex[:5]
            old = self.slices.get(metadata["name"])
            if name is None and old:
                return _status(409, "AlreadyExists", f'resourceslices "{metadata["name"]}" already exists')
            if name is not None and (old is None or name != metadata["name"]):
                return _status(404, "NotFound", f'resourceslices "{name}" not found')
            if old and metadata.get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
                return _status(409, "Conflict", "the object has been modified; please apply your changes to it")
            self._drop_disabled(found["spec"], old["spec"] if old else {})
            _complete(found["spec"])
            if fault := _fault(found["spec"], old["spec"] if old else None):
                return _status(422, "Invalid", f'ResourceSlice "{metadata["name"]}" is invalid: {fault}')
            metadata["uid"] = old["metadata"]["uid"] if old else str(uuid.uuid4())
            if old and old["spec"] == found["spec"]:
                return 200, old
            if not dry_run:
                self.slices[metadata["name"]] = found
                self._record("MODIFIED" if old else "ADDED", found)
            return 200 if old else 201, deepcopy(found)

    def delete(self, name: str, options: Json) -> tuple[int, Json]:
        with self.changed:
            found = self.slices.get(name)
            if found is None:
                return _status(404, "NotFound", f'resourceslices "{name}" not found')
            if options.get("preconditions", {}).get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
                return _status(409, "Conflict", "the UID in the precondition is not the object's")
            self._record("DELETED", self.slices.pop(name))
            return 200, found

    def _drop_disabled(self, spec: Json, old: Json) -> None:
        devices, before = spec.get("devices") or [], old.get("devices", ())
        for gate, key in (
            ("DRADeviceTaints", "taints"),
            ("DRAConsumableCapacity", "allowMultipleAllocations"),
            ("DRAPartitionableDevices", "consumesCounters"),
        ):
            used = any(key in device for device in before)
            if gate in self.gates or used or (gate == "DRAPartitionableDevices" and "sharedCounters" in old):
                continue
            for device in devices:
                device.pop(key, None)
                if gate == "DRAConsumableCapacity":
                    for capacity in device.get("capacity", {}).values():
                        capacity.pop("requestPolicy", None)
            if gate == "DRAPartitionableDevices":
                spec.pop("sharedCounters", None)

    def events(self, since: int, selected: dict[str, str], until_s: float) -> Iterator[Json]:
        """Those of a watch, and bookmarks between them."""
        bookmark_at, generation = time.monotonic() + self.bookmark_s, self.generation
        while (now := time.monotonic()) < until_s and generation == self.generation:
            with self.changed:
                if since < self.oldest:
                    status = _status(410, "Expired", f"too old resource version: {since} ({self.oldest})")[1]
                    yield {"type": "ERROR", "object": status}
                    return
                fresh = [each for each in self.history if each[0] > since]
                if not fresh and now < bookmark_at:
                    self.changed.wait(min(_POLL_S, bookmark_at - now))
                    continue
                since = self.version
            yield from ({"type": kind, "object": each} for _, kind, each in fresh if _selects(selected, each))
            if not fresh:
                bookmark_at = now + self.bookmark_s
                self.bookmarks += 1
                metadata = {"resourceVersion": str(since)}
                yield {"type": "BOOKMARK", "object": {"kind": "ResourceSlice", "metadata": metadata, "spec": {}}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, of: StandInApiServer, context: ssl.SSLContext) -> None:
        self.of = of
        self.context = context
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's
        """The handshake, in the connection's own thread."""
        try:
            request.settimeout(10)
            wrapped = self.context.wrap_socket(request, server_side=True)
        except OSError:  # the client does not trust us
            self.shutdown_request(request)
            return
        wrapped.settimeout(None)
        self.of._connections.add(wrapped)
        self.of.connected += 1
        try:
            super().process_request_thread(wrapped, client_address)
        finally:
            self.of._connections.discard(wrapped)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's
        """A client that is gone is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        api, body = self.server.of, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        api.requests.append((self.command, self.path))
        if api.delay_s:
            time.sleep(api.delay_s)
        if canned := next((each for each in api.canned if each.answers(self.command, self.path)), None):
            canned.times -= 1
            self._send(canned.status, canned.body, canned.headers, canned.drip_s)
            return
        if api.token and self.headers.get("Authorization") != f"Bearer {api.token}":
            self._json(*_status(401, "Unauthorized", "Unauthorized"))
            return
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match url.path.strip("/").split("/"):
            case ["version"]:
                self._json(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2"})
            case ["apis", "resource.k8s.io"] if api.served:
                versions = [{"groupVersion": f"{GROUP}/{each}", "version": each} for each in api.served]
                self._json(200, {"kind": "APIGroup", "name": GROUP, "versions": versions})
            case ["api", "v1", "nodes", name] if name in api.nodes:
                self._json(200, api.nodes[name])
            case ["apis", "resource.k8s.io", version, *rest] if version in api.served:
                self._resource(rest, query, json.loads(body) if body else {})
            case ["apis", "events.k8s.io", "v1", "namespaces", "default", "events", *rest]:
                self._event(rest, json.loads(body))
            case _:
                self._json(*_status(404, "NotFound", "the server could not find the requested resource"))

    def _event(self, path: list[str], given: Json) -> None:
        """Create one, or merge a patch into it; which fields it must have, a real API server tells."""
        events = self.server.of.written_events
        match self.command, [unquote(each) for each in path]:
            case "POST", [] if given["metadata"]["name"] in events:
                self._json(*_status(409, "AlreadyExists", f'events "{given["metadata"]["name"]}" already exists'))
            case "POST", []:
                events[given["metadata"]["name"]] = given
                self._json(201, given)
            case "PATCH", [name] if name in events:
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                events[name] |= given
                self._json(200, events[name])
            case _:
                self._json(*_status(404, "NotFound", f"events {path} not found"))

    def _resource(self, path: list[str], query: dict[str, str], body: Json) -> None:
        api = self.server.of
        match self.command, path:
            case "GET", ["namespaces", namespace, "resourceclaims", name] if (namespace, name) in api.claims:
                self._json(200, api.claims[namespace, name])
            case "GET", ["resourceslices"] if query.get("watch"):
                self._watch(query)
            case "GET", ["resourceslices"]:
                with api.changed:
                    items = [each for each in api.slices.values() if _selects(_selector(query), each)]
                    metadata = {"resourceVersion": str(api.version)}
                    listed = deepcopy({"kind": "ResourceSliceList", "metadata": metadata, "items": items})
                self._json(200, listed)
            case "GET", ["resourceslices", name] if name in api.slices:
                self._json(200, api.slices[name])
            case "POST", ["resourceslices"]:
                self._json(*api.store(body, None, dry_run="dryRun" in query))
            case "PUT", ["resourceslices", name]:
                self._json(*api.store(body, name, dry_run="dryRun" in query))
            case "DELETE", ["resourceslices", name]:
                self._json(*api.delete(name, body))
            case _:
                code, status = _status(404, "NotFound", f'{path[-2:]} "{path[-1:]}" not found')
                self._json(code, {**status, "details": {"name": unquote("".join(path[-1:]))}})

    def _watch(self, query: dict[str, str]) -> None:
        api = self.server.of
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        api.watches.add(self.connection)
        until = time.monotonic() + float(query.get("timeoutSeconds", "60"))
        try:
            for event in api.events(int(query.get("resourceVersion", "0")), _selector(query), until):
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")
        finally:
            api.watches.discard(self.connection)

    def _json(self, status: int, found: Json) -> None:
        self._send(status, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], drip_s: float = 0.0) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        for part in [body[i : i + 1] for i in range(len(body))] if drip_s else [body]:
            self.wfile.write(part)
            time.sleep(drip_s)


def _shut(connection: socket.socket) -> None:
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return


def _status(code: int, reason: str, message: str) -> tuple[int, Json]:
    return code, {"kind": "Status", "status": "Failure", "message": message, "reason": reason, "code": code}


def _selector(query: dict[str, str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part)


def _selects(selected: dict[str, str], found: Json) -> bool:
    return all(found["spec"].get(key.removeprefix("spec."), "") == value for key, value in selected.items())


def _complete(spec: Json) -> None:
    """What the API server adds, leaves out, and spells in its own way."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for key in [key for key, value in spec.items() if value in ([], {}, None)]:
        del spec[key]
    for device in spec.get("devices", ()):
        for taint in device.get("taints", ()):
            taint["timeAdded"] = taint.get("timeAdded") or now
        for capacity in device.get("capacity", {}).values():
            capacity["value"] = canonical(capacity["value"])
            if policy := capacity.get("requestPolicy"):
                policy["default"] = canonical(policy["default"])
                policy["validRange"] = {key: canonical(each) for key, each in policy["validRange"].items()}
    counted = [each for device in spec.get("devices", ()) for each in device.get("consumesCounters", ())]
    for each in (*spec.get("sharedCounters", ()), *counted):
        each["counters"] = {name: {"value": canonical(of["value"])} for name, of in each["counters"].items()}


def canonical(quantity: str) -> str:
    """As Kubernetes spells it: the largest unit of its base that leaves a whole number."""
    match = _QUANTITY.fullmatch(quantity)
    assert match, quantity
    number, unit = int(match[1]), match[2]
    units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"] if unit.endswith("i") else ["", "k", "M", "G", "T", "P", "E"]
    base, at = (1024 if unit.endswith("i") else 1000), units.index(unit)
    while number and number % base == 0 and at + 1 < len(units):
        number, at = number // base, at + 1
    return f"{number}{units[at]}"


def _fault(spec: Json, old: Json | None) -> str:
    """What of a slice breaks the rules; empty for nothing."""
    devices = spec.get("devices", [])
    most = 64 if any(each.get("taints") or each.get("consumesCounters") for each in devices) else 128
    if old and any(spec.get(key) != old.get(key) for key in ("driver", "nodeName")):
        return "spec: Invalid value: field is immutable"
    if "devices" in spec and "sharedCounters" in spec:
        return "spec: Invalid value: only one of `sharedCounters` or `devices` is allowed"
    if len(devices) > most:
        return f"spec.devices: Too many: {len(devices)}: must have at most {most} items"
    if len({each["name"] for each in devices}) < len(devices):
        return "spec.devices: Duplicate value"
    if len(spec.get("sharedCounters", ())) > 8:
        return "spec.sharedCounters: Too many"
    if spec["pool"]["resourceSliceCount"] <= 0:
        return "spec.pool.resourceSliceCount: Invalid value: must be greater than zero"
    for each in devices:
        if len(each.get("attributes", {})) + len(each.get("capacity", {})) > 32:
            return "spec.devices: Invalid value: the total number of attributes and capacities must not exceed 32"
        if any(
            "version" in value and not _SEMVER.fullmatch(value["version"])
            for value in each.get("attributes", {}).values()
        ):
            return "spec.devices.attributes: must be a string compatible with semver.org spec 2.0.0"
        policies = any("requestPolicy" in capacity for capacity in each.get("capacity", {}).values())
        if policies and not each.get("allowMultipleAllocations"):
            return "spec.devices.capacity.requestPolicy: Forbidden: allowMultipleAllocations must be true"
    return ""
