"""The driver process's questions to the Kubernetes API server: plain HTTP by urllib3, each question in a thread.

All that the server sends is untrusted: answers have limits in size and time, and only the fields that we need are
read. The server's certificate is always checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import urllib3
from msgspec import Struct
from msgspec.structs import replace
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, SSLError

from nri_gpu import __version__
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.text import shown
from nri_gpu.dra.api_access import Access, AccessError, content
from nri_gpu.dra.slices import ResourceSlice
from nri_gpu.system.storage import Signature

GROUP: Final = "resource.k8s.io"
VERSIONS: Final = ("v1", "v1beta2")  # the same fields; v1 since Kubernetes 1.34
RETRY_AFTER_MAX_S: Final = 300.0  # for which a server may put us off
MESSAGE_MAX: Final = 400  # characters of what a server says, in a sentence of ours
NOT_UNDERSTOOD: Final = "sent an unexpected response (is it an API server?)"
_READ_BYTES: Final = 1 << 16
T = TypeVar("T")


class ApiServerError(NriGpuError):
    """A question that was not answered as it should be. The error's sentence names the server."""


class NotFoundError(ApiServerError):
    """The lack of an object. name: of the object that the server says is not there; empty: it knows no such path."""

    def __init__(self, sentence: str, name: str = "") -> None:
        super().__init__(sentence)
        self.name = name


class ConflictError(ApiServerError):
    """A write that came second: somebody else wrote the object meanwhile, or made an object of that name."""


class GoneError(ApiServerError):
    """A version so old that the server does not know any more what happened since: list again."""


class UnauthorizedError(ApiServerError):
    """A token or certificate of ours that the server does not accept."""


class RefusedError(ApiServerError):
    """A lasting refusal of the server: we have no right to what we ask, or an object breaks its rules."""


class UnavailableError(ApiServerError):
    """A fault that may pass soon: the server was not reached, is overloaded, or sent what cannot be understood.

    retry_after_s: for how long the server wants not to be asked.
    """

    def __init__(self, sentence: str, retry_after_s: float = 0.0) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


_ERRORS: Final[dict[int, type[ApiServerError]]] = {
    **dict.fromkeys((400, 403, 405, 413, 422), RefusedError),
    401: UnauthorizedError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
}


class ApiTimes(Struct, frozen=True):
    """The times of questions, in seconds."""

    connect: float = 3.0
    read: float = 5.0  # each wait for the server
    answer: float = 10.0  # a whole answer
    watch: float = 480.0  # until the server ends a watch, at most
    silent: float = 180.0  # for how long nothing may come on a watch; bookmarks come each minute


class SliceEvent(Struct, frozen=True):
    """An event of a watch. kind: ADDED, MODIFIED, DELETED, or BOOKMARK, which has no slice."""

    kind: str
    resource_version: str
    slice: ResourceSlice | None


class _Meta(Struct, frozen=True, rename="camel"):
    uid: str = ""
    resource_version: str = ""


class _Object(Struct, frozen=True):
    metadata: _Meta


class SliceList(Struct, frozen=True):
    """The slices that are there, and the version from which to watch."""

    metadata: _Meta
    items: tuple[ResourceSlice, ...]


class _Group(Struct, frozen=True):
    versions: list[dict[str, str]]


class _Details(Struct, frozen=True):
    name: str = ""


class _Status(Struct, frozen=True):
    kind: str = ""
    reason: str = ""
    message: str = ""
    code: int = 0
    details: _Details | None = None


class _Event(Struct, frozen=True):
    type: str
    object: msgspec.Raw


class ApiServer:
    """An API server. bytes_max: of an answer; a slice has 1.5 MiB at most. Methods raise ApiServerError's kinds."""

    def __init__(self, access: Access, *, times: ApiTimes | None = None, bytes_max: int = 16 << 20) -> None:
        self._access = access
        self._times = times or ApiTimes()
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._pool: urllib3.HTTPSConnectionPool | None = None
        self._files: tuple[Signature | None, ...] = ()
        self._version = ""  # of resource.k8s.io

    @property
    def url(self) -> str:
        return self._access.url

    async def discover(self) -> str:
        """Find the version of resource.k8s.io to use from now on. Raises: RefusedError: it serves none of ours."""
        try:
            served = {each.get("version") for each in (await self.ask("GET", f"/apis/{GROUP}", _Group)).versions}
        except NotFoundError:
            served = set()
        self._version = next((version for version in VERSIONS if version in served), "")
        if not self._version:
            raise RefusedError(
                f"the API server at {self.url} does not serve {GROUP}/v1: nri-gpu dra needs Kubernetes 1.34 or later, "
                "or 1.33 with resource.k8s.io/v1beta2 enabled"
            )
        return self._version

    async def node_uid(self, name: str) -> str:
        """Return the UID of a node. Raises: RefusedError: there is none of that name."""
        try:
            return (await self.ask("GET", f"/api/v1/nodes/{quote(name, safe='')}", _Object)).metadata.uid
        except NotFoundError:
            raise RefusedError(
                f"the API server at {self.url} has no node {name}: set --node-name (or NODE_NAME) to "
                "what `kubectl get nodes` shows for this machine"
            ) from None

    async def create_event(self, namespace: str, event: Mapping[str, object]) -> None:
        """Create an Event. Raises: ConflictError: there is one of that name."""
        await self.ask("POST", _events(namespace), msgspec.Raw, event)

    async def patch_event(self, namespace: str, name: str, change: Mapping[str, object]) -> None:
        """Change some fields of an Event. Raises: NotFoundError: the server keeps it no more."""
        await self.ask("PATCH", f"{_events(namespace)}/{quote(name, safe='')}", msgspec.Raw, change)

    async def claim(self, namespace: str, name: str) -> bytes:
        """Return a ResourceClaim as JSON. Raises: NotFoundError; UnavailableError: it may tell soon; or another."""
        place = f"namespaces/{quote(namespace, safe='')}/resourceclaims/{quote(name, safe='')}"
        try:
            return bytes(await self.ask("GET", f"{await self.resource_group()}/{place}", msgspec.Raw))
        except NotFoundError as error:
            if error.name == name:
                raise
            self._version = ""  # a proxy answered, or a server that was replaced serves another version
            raise UnavailableError(str(error)) from None

    async def slices(self, node: str, driver: str) -> SliceList:
        """List the driver's slices of the node."""
        path = f"{await self.resource_group()}/resourceslices?{_selector(node, driver)}"
        return await self.ask("GET", path, SliceList)

    async def create(self, wanted: ResourceSlice, *, dry_run: bool = False) -> ResourceSlice:
        """Create a slice. Return it as the server keeps it. dry_run: create nothing; as the server would keep it."""
        query = "?dryRun=All" if dry_run else ""
        return await self.ask("POST", f"{await self.resource_group()}/resourceslices{query}", ResourceSlice, wanted)

    async def update(self, wanted: ResourceSlice) -> ResourceSlice:
        """Update a slice. Return it as it is kept. Raises: ConflictError: the server has a newer version."""
        path = f"{await self.resource_group()}/resourceslices/{quote(wanted.metadata.name, safe='')}"
        return await self.ask("PUT", path, ResourceSlice, wanted)

    async def delete(self, unwanted: ResourceSlice) -> None:
        """Delete that very slice, not another object of its name."""
        path = f"{await self.resource_group()}/resourceslices/{quote(unwanted.metadata.name, safe='')}"
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": unwanted.metadata.uid}}
        await self.ask("DELETE", path, msgspec.Raw, body)

    async def watch(self, node: str, driver: str, since: str, take: Callable[[SliceEvent], None]) -> bool:
        """Give each change of the driver's slices on the node to `take`, until the server ends the watch.

        It follows in a thread that ends when this is cancelled. Return whether the watch lasted as long as it should: a
        server that ends a watch before is stopping.
        """
        lasting_s = int(self._times.watch * random.uniform(0.6, 1.0))  # or all nodes would ask again at once
        asked = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(lasting_s)}
        query = f"{_selector(node, driver)}&{urlencode({**asked, 'resourceVersion': since})}"
        path = f"{await self.resource_group()}/resourceslices?{query}"
        stream, loop, began = _Stream(self._bytes_max), asyncio.get_running_loop(), time.monotonic()

        def tell(event: SliceEvent) -> None:
            if not stream.closed:
                take(event)

        def follow() -> None:
            try:
                with contextlib.closing(self._open("GET", path, None)) as response:
                    for line in stream.lines(response, self._times.silent):
                        loop.call_soon_threadsafe(tell, self._event(line))
            except (HTTPError, AccessError, OSError, ValueError) as error:
                raise self._unavailable("cannot be reached", error) from None

        try:
            await asyncio.to_thread(follow)
        finally:
            stream.close()
        return time.monotonic() - began > lasting_s - 1

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool:
            pool.close()

    async def resource_group(self) -> str:
        """Return where the paths of resource.k8s.io begin, in the version that the server has."""
        return f"/apis/{GROUP}/{self._version or await self.discover()}"

    async def ask(self, verb: str, path: str, form: type[T], body: object = None) -> T:
        """Return the answer to one question, in that form. path: from the server's root, with its query."""
        if isinstance(body, ResourceSlice):
            body = replace(body, api_version=f"{GROUP}/{self._version}", kind="ResourceSlice")
        sent = None if body is None else msgspec.json.encode(body)
        answer = await asyncio.to_thread(self._answer, verb, path, sent)
        try:
            return msgspec.json.decode(answer, type=form)
        except (ValueError, RecursionError) as error:
            raise self._unavailable(NOT_UNDERSTOOD, error) from None

    def _answer(self, verb: str, path: str, body: bytes | None) -> bytes:
        """Return the body of the answer, in a thread. Raises: ApiServerError."""
        try:
            with contextlib.closing(self._open(verb, path, body)) as response:
                return self._body(response)
        except (HTTPError, AccessError, ValueError) as error:
            raise self._unavailable("cannot be reached", error) from None

    def _open(self, verb: str, path: str, body: bytes | None) -> urllib3.BaseHTTPResponse:
        """Return an answer whose body is still to be read. The token is read each time, as the kubelet renews it."""
        headers = {"Accept": "application/json", "User-Agent": f"nri-gpu/{__version__}"}
        if token := content(self._access.token).decode("latin-1").strip():
            headers["Authorization"] = f"Bearer {token}"
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json" if verb == "PATCH" else "application/json"
        response = self._connections().urlopen(
            verb,
            f"{self._access.prefix}{path}",
            body=body,
            headers=headers,
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
            timeout=urllib3.Timeout(connect=self._times.connect, read=self._times.read),
        )
        if 200 <= response.status < 300:
            return response
        with contextlib.closing(response):
            raise self._refusal(response)

    def _connections(self) -> urllib3.HTTPSConnectionPool:
        """Return the pool; a new pool once a certificate changed on disk."""
        files = self._access.signatures()
        with self._lock:
            if self._pool is None or files != self._files:
                name = self._access.server_name or None
                self._pool = urllib3.HTTPSConnectionPool(
                    self._access.host,
                    self._access.port,
                    maxsize=33,  # as many questions at once, the watch aside
                    ssl_context=self._access.tls(),
                    cert_reqs="CERT_REQUIRED",
                    assert_hostname=name,
                    server_hostname=name,
                )
                self._files = files
            return self._pool

    def _body(self, response: urllib3.BaseHTTPResponse) -> bytes:
        until, parts, size = time.monotonic() + self._times.answer, [], 0
        while part := response.read1(_READ_BYTES, decode_content=False):
            parts.append(part)
            size += len(part)
            if size > self._bytes_max:
                raise UnavailableError(f"the API server at {self.url} sent more than {self._bytes_max} bytes")
            if time.monotonic() > until:
                raise UnavailableError(f"the API server at {self.url} took over {self._times.answer:g} s to answer")
        return b"".join(parts)

    def _refusal(self, response: urllib3.BaseHTTPResponse) -> ApiServerError:
        try:
            status = msgspec.json.decode(self._body(response), type=_Status)
        except (ValueError, RecursionError, HTTPError, UnavailableError):
            status = _Status()
        says = shown(status.message or "no reason", MESSAGE_MAX)
        sentence = f"the API server at {self.url} answered {response.status}: {says}"
        if response.status == 404:
            ours = (status.kind, status.reason) == ("Status", "NotFound")  # not a proxy's
            return NotFoundError(sentence, status.details.name if ours and status.details else "")
        if known := _ERRORS.get(response.status):
            return known(sentence)
        after = response.headers.get("Retry-After", "")
        after_s = float(after) if after.isascii() and after.isdecimal() else 0.0
        return UnavailableError(sentence, min(after_s, RETRY_AFTER_MAX_S))

    def _event(self, line: bytes) -> SliceEvent:
        try:
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=_Status)
                raise _ERRORS.get(status.code, UnavailableError)(
                    f"the API server at {self.url} ended the watch: {shown(status.message, MESSAGE_MAX)}"
                )
            version = msgspec.json.decode(event.object, type=_Object).metadata.resource_version
            found = None if event.type == "BOOKMARK" else msgspec.json.decode(event.object, type=ResourceSlice)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._unavailable(NOT_UNDERSTOOD, error) from None
        return SliceEvent(event.type, version, found)

    def _unavailable(self, what: str, error: Exception) -> UnavailableError:
        hint = "; its certificate must be of the authority given" if isinstance(error, SSLError) else ""
        return UnavailableError(f"the API server at {self.url} {what}: {shown(str(error), MESSAGE_MAX)}{hint}")


class _Stream:
    """An endless answer, which another thread may end. bytes_max: of a line."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._response: urllib3.BaseHTTPResponse | None = None
        self._lock = threading.Lock()
        self.closed = False

    def lines(self, response: urllib3.BaseHTTPResponse, silent_s: float) -> Iterator[bytes]:
        """Yield each line as it comes. Raises: HTTPError; UnavailableError: a line is too long."""
        with self._lock:
            self._response = response
        if isinstance(response.connection, HTTPConnection) and response.connection.sock:
            response.connection.sock.settimeout(silent_s)
        rest = b""
        while not self.closed and (part := response.read1(_READ_BYTES, decode_content=False)):
            *lines, rest = (rest + part).split(b"\n")
            yield from (line for line in lines if line.strip())
            if len(rest) > self._bytes_max:
                raise UnavailableError(f"a watch sent a line of more than {self._bytes_max} bytes")

    def close(self) -> None:
        with self._lock:
            self.closed = True
            if self._response is not None:
                with contextlib.suppress(OSError, RuntimeError, ValueError):  # it ended by itself
                    self._response.shutdown()


def _events(namespace: str) -> str:
    return f"/apis/events.k8s.io/v1/namespaces/{quote(namespace, safe='')}/events"


def _selector(node: str, driver: str) -> str:
    return urlencode({"fieldSelector": f"spec.nodeName={node},spec.driver={driver}"})
