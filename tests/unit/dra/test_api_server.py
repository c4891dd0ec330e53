"""The client of the API server, over real TLS."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.dra.api_access import Access, AccessError, by_kubeconfig, in_cluster
from nri_gpu.dra.api_server import (
    ApiServer,
    ApiServerError,
    ApiTimes,
    ConflictError,
    GoneError,
    NotFoundError,
    RefusedError,
    SliceEvent,
    UnauthorizedError,
    UnavailableError,
)
from nri_gpu.dra.slices import ResourceSlice, SliceMetadata, SlicePool, SliceSpec
from tests.support.api_server import Canned, StandInApiServer, certificates
from tests.support.kubeconfig import kubeconfig
from tests.support.waiting import aside, wait_for

NODE, DRIVER = "node1", "gpu.nri.io"
SLICES = "/resourceslices"
QUICK = ApiTimes(connect=3, read=2, answer=4)


@pytest.fixture
def server() -> Iterator[StandInApiServer]:
    with StandInApiServer() as running:
        yield running


@pytest.fixture
def api(server: StandInApiServer) -> Iterator[ApiServer]:
    yield from client(server)


def client(server: StandInApiServer, **options: object) -> Iterator[ApiServer]:
    made = ApiServer(server.access(), times=QUICK)
    yield made
    made.close()


def a_slice(name: str = "00-slice", node: str = NODE) -> ResourceSlice:
    return ResourceSlice(SliceMetadata(name), SliceSpec(driver=DRIVER, pool=SlicePool(node, 1, 1), node_name=node))


async def test_connections_are_kept(api: ApiServer, server: StandInApiServer) -> None:
    made = await api.create(a_slice())
    for _ in range(5):
        await api.slices(NODE, DRIVER)
        with pytest.raises(RefusedError, match="has no node none: set --node-name"):
            await api.node_uid("none")
    await api.delete(made)
    assert server.connected == 1


async def test_names_cannot_leave_their_place_in_a_path(api: ApiServer, server: StandInApiServer) -> None:
    server.canned = [Canned(200, b"[" * 100_000, path="deep")]
    with pytest.raises(UnavailableError):
        await api.claim("ml", "deep")
    with pytest.raises(NotFoundError):
        await api.claim("../../x", "y?watch=1")
    assert server.requests[-1][1].endswith("/namespaces/..%2F..%2Fx/resourceclaims/y%3Fwatch%3D1")


@pytest.mark.parametrize(
    "body",
    [
        b"404 page not found\n",
        b'{"kind": "Status", "code": 404, "message": "no such path"}',
        b'{"code": 404, "details": {"name": "train"}}',
        b'{"kind": "Status", "code": 404, "reason": "Unknown", "details": {"name": "train"}}',
        b'{"kind": "Error", "code": 404, "reason": "NotFound", "details": {"name": "train"}}',
    ],
)
async def test_a_claim_is_gone_only_if_that_is_what_the_server_says(
    api: ApiServer, server: StandInApiServer, body: bytes
) -> None:
    """What a proxy says, or a server that does not serve this version any more, releases no claim of the node."""
    await api.discover()
    server.add_claim("ml", "train")
    server.canned = [Canned(404, body, path="resourceclaims")]
    with pytest.raises(UnavailableError, match="answered 404"):
        await api.claim("ml", "train")
    server.served = ("v1beta2",)
    assert await api.claim("ml", "train")
    server.claims.clear()
    with pytest.raises(NotFoundError, match="not found"):
        await api.claim("ml", "train")


@pytest.mark.parametrize(
    ("served", "used"), [(("v1", "v1beta2"), "v1"), (("v1beta2", "v1beta1"), "v1beta2"), (("v2", "v1"), "v1")]
)
async def test_the_newest_served_version_is_used(
    api: ApiServer, server: StandInApiServer, served: tuple[str, ...], used: str
) -> None:
    server.served = served
    assert await api.discover() == used
    made = await api.create(a_slice())
    assert made.api_version == f"resource.k8s.io/{used}"


@pytest.mark.parametrize("served", [(), ("v1beta1",)])
async def test_a_server_without_dra_is_told_by_its_version(
    api: ApiServer, server: StandInApiServer, served: tuple[str, ...]
) -> None:
    server.served = served
    with pytest.raises(RefusedError, match=r"does not serve resource.k8s.io/v1: .* needs Kubernetes 1.34"):
        await api.slices(NODE, DRIVER)


async def test_somebody_elses_write_is_a_conflict(api: ApiServer, server: StandInApiServer) -> None:
    made = await api.create(a_slice())
    with pytest.raises(ConflictError, match="already exists"):
        await api.create(a_slice())
    server.change_slice("00-slice", {"pool": {"name": NODE, "generation": 9, "resourceSliceCount": 1}})
    with pytest.raises(ConflictError):
        await api.update(made)
    with pytest.raises(ConflictError):
        await api.delete(replace(made, metadata=replace(made.metadata, uid="another")))
    await api.delete(made)
    with pytest.raises(NotFoundError):
        await api.delete(made)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RefusedError),
        (403, RefusedError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, GoneError),
        (422, RefusedError),
        (429, UnavailableError),
        (302, UnavailableError),
        (500, UnavailableError),
        (503, UnavailableError),
    ],
)
async def test_a_refusal_names_the_server_and_its_message(
    api: ApiServer, server: StandInApiServer, status: int, kind: type[ApiServerError]
) -> None:
    await api.discover()
    message = {"kind": "Status", "message": "not today\n\x1b[31m" + "x" * 10_000}
    server.canned = [Canned(status, json.dumps(message).encode(), {"Retry-After": "7", "Location": "/elsewhere"})]
    with pytest.raises(kind) as raised:
        await api.slices(NODE, DRIVER)
    sentence = str(raised.value)
    assert sentence.startswith(f"the API server at {api.url} answered {status}: not today\\n\\x1b[31mxxx")
    assert len(sentence) < 600
    if isinstance(raised.value, UnavailableError):
        assert raised.value.retry_after_s == 7


HTML = b"<html><body>502 Bad Gateway</body></html>"


@pytest.mark.parametrize(
    "canned",
    [
        Canned(200, HTML),
        Canned(502, HTML),
        Canned(200, b'{"metadata": {"resourceVersion": 5}}'),
        Canned(200, b'{"items": [{"spec": 1}], "metadata": {}}'),
        Canned(200, b"[" * 100_000),
        Canned(200, b"\xff\xfe"),
        Canned(200, b'{"metadata": {"resourceVersion": "\xff"}}'),
        Canned(200, b""),
        Canned(200, b"{}", {"Content-Length": "50", "Connection": "close"}),
        Canned(200, b"x" * 300_000),
        Canned(500, b"x" * 300_000),
        Canned(200, b"x" * 300, drip_s=0.05),
        Canned(429, b"", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
        Canned(200, b"\x1f\x8b\x08\x00" + b"\x00" * 100, {"Content-Encoding": "gzip"}),
    ],
    ids=lambda canned: f"{canned.status}-{canned.body[:12]!r}",
)
async def test_answers_that_are_none(server: StandInApiServer, canned: Canned) -> None:
    api = ApiServer(server.access(), times=QUICK, bytes_max=200_000)
    await api.discover()
    server.canned = [replace_path(canned, SLICES)]
    with pytest.raises(UnavailableError, match=r"^the API server at https://127.0.0.1:\d+ "):
        await api.slices(NODE, DRIVER)
    assert (await api.slices(NODE, DRIVER)).items == ()  # the next question goes well
    api.close()


def replace_path(canned: Canned, path: str) -> Canned:
    return Canned(canned.status, canned.body, canned.headers, path=path, drip_s=canned.drip_s)


async def test_a_server_that_is_slow_or_absent(server: StandInApiServer) -> None:
    api = ApiServer(server.access(), times=replace(QUICK, read=0.3))
    server.delay_s = 1.0
    with pytest.raises(UnavailableError, match=r"cannot be reached: .*[Rr]ead timed out"):
        await api.discover()
    api.close()
    absent = ApiServer(replace(server.access(), port=1), times=QUICK)
    with pytest.raises(UnavailableError, match=r"https://127.0.0.1:1 cannot be reached: .*refused"):
        await absent.discover()


async def test_a_certificate_of_another_authority_is_not_trusted(server: StandInApiServer) -> None:
    for access in (
        replace(server.access(), authority=certificates("another").authority),
        replace(server.access(), authority=b""),
        replace(server.access(), server_name="kubernetes.default.svc"),
    ):
        with pytest.raises(UnavailableError, match="its certificate must be of the authority"):
            await ApiServer(access, times=QUICK).discover()
    assert server.requests == []
    named = ApiServer(replace(server.access(), server_name="localhost"), times=QUICK)
    await named.discover()
    named.close()


@pytest.mark.parametrize("strict", [True, False])
async def test_an_authority_need_not_be_strict_with_rfc_5280(monkeypatch: pytest.MonkeyPatch, *, strict: bool) -> None:
    default = ssl.create_default_context

    def as_from_3_13_on(**given: str | None) -> ssl.SSLContext:
        context = default(**given)  # type: ignore[arg-type] # as it is called
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_from_3_13_on)
    with StandInApiServer(signed_by=certificates("cluster", strict=strict)) as server:
        api = ApiServer(server.access(), times=QUICK)
        assert await api.discover() == "v1"
        api.close()
        with pytest.raises(UnavailableError, match="its certificate must be of the authority"):
            await ApiServer(replace(server.access(), server_name="elsewhere"), times=QUICK).discover()


async def test_an_authority_that_changed_on_disk_is_read_again(server: StandInApiServer, tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_bytes(certificates("another").authority.read_bytes())
    api = ApiServer(replace(server.access(), authority=authority), times=QUICK)
    with pytest.raises(UnavailableError):
        await api.discover()
    authority.unlink()
    authority.write_bytes(server.certificates.authority.read_bytes())
    assert await api.discover() == "v1"
    api.close()


async def test_a_token_that_rotates_is_read_again(server: StandInApiServer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    server.token = "first"
    api = ApiServer(server.access(file), times=QUICK)
    await api.discover()
    server.token = "second"
    with pytest.raises(UnauthorizedError, match="answered 401: Unauthorized"):
        await api.discover()
    file.write_text("second\n")
    await api.discover()
    for content in (b"a\nb: c", b"\xff" * 9):
        file.write_bytes(content)
        with pytest.raises(ApiServerError):
            await api.discover()
    file.unlink()
    with pytest.raises(UnavailableError, match="token: no such file"):
        await api.discover()
    api.close()


async def test_a_watch_tells_each_change_of_this_nodes_slices(api: ApiServer, server: StandInApiServer) -> None:
    events: list[SliceEvent] = []
    since = (await api.slices(NODE, DRIVER)).metadata.resource_version
    watching = asyncio.create_task(api.watch(NODE, DRIVER, since, events.append))
    await api.create(a_slice("00-other", "node2"))
    made = await api.create(a_slice())
    await api.delete(made)
    await aside(wait_for, "events", lambda: len({each.kind for each in events}) == 3, 5)
    told = [each for each in events if each.kind != "BOOKMARK"]
    assert [(each.kind, each.slice and each.slice.metadata.name) for each in told] == [
        ("ADDED", "00-slice"),
        ("DELETED", "00-slice"),
    ]
    assert events[-1].resource_version == str(server.version)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await threads_end()


async def threads_end() -> None:
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 5)


async def test_a_watch_that_is_lost_expired_or_garbage(server: StandInApiServer) -> None:
    api = ApiServer(server.access(), times=replace(QUICK, silent=0.3, watch=1.8), bytes_max=100_000)
    since = (await api.slices(NODE, DRIVER)).metadata.resource_version
    await api.watch(NODE, DRIVER, since, lambda _: None)  # the server ends it in time
    events: list[SliceEvent] = []
    watching = asyncio.create_task(api.watch(NODE, DRIVER, since, events.append))
    await aside(wait_for, "a bookmark", lambda: bool(events), 5)
    server.drop_connections()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await watching
    server.bookmark_s = 5
    with pytest.raises(UnavailableError, match="timed out"):  # nothing comes on it
        await api.watch(NODE, DRIVER, since, lambda _: None)
    server.forget_history()
    with pytest.raises(GoneError, match="ended the watch: too old resource version"):
        await api.watch(NODE, DRIVER, since, lambda _: None)
    for body in (
        HTML + b"\n",
        b'{"type": "ADDED", "object": {}}\n',
        b'{"type": "ERROR", "object": []}\n',
        b"x" * 200_000,
    ):
        server.canned = [Canned(200, body, path="watch=1")]
        with pytest.raises(UnavailableError):
            await api.watch(NODE, DRIVER, since, lambda _: None)
    server.canned = [Canned(403, b"{}", path="watch=1")]
    with pytest.raises(RefusedError):
        await api.watch(NODE, DRIVER, since, lambda _: None)
    api.close()
    await threads_end()


def test_a_pod_has_its_way_from_its_service_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    four = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    access = in_cluster(four, tmp_path)
    assert (access.url, access.token, access.authority) == (
        "https://10.0.0.1:443",
        tmp_path / "token",
        tmp_path / "ca.crt",
    )
    assert in_cluster({**four, "KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path).url == "https://[fd00::1]:443"
    for environment in ({}, {**four, "KUBERNETES_SERVICE_PORT": "https"}, {"KUBERNETES_SERVICE_PORT": "443"}):
        with pytest.raises(AccessError, match="this is no pod with a service account"):
            in_cluster(environment, tmp_path)
    with pytest.raises(AccessError):
        in_cluster(four, tmp_path / "nothing")


async def test_a_kubeconfig_with_a_client_certificate(tmp_path: Path) -> None:
    ours = certificates("client")
    with StandInApiServer(client_authority=ours.authority) as server:
        encoded = {
            name: base64.b64encode(path.read_bytes()).decode()
            for name, path in (("ca", server.certificates.authority), ("crt", ours.certificate), ("key", ours.key))
        }
        data = kubeconfig(
            {"server": f"https://localhost:{server.port}/", "certificate-authority-data": encoded["ca"]},
            {"client-certificate-data": encoded["crt"], "client-key-data": encoded["key"]},
        )
        (tmp_path / "ca.crt").write_bytes(server.certificates.authority.read_bytes())
        files = kubeconfig(
            {"server": f"https://127.0.0.1:{server.port}", "certificate-authority": "ca.crt"},
            {"client-certificate": str(ours.certificate), "client-key": str(ours.key)},
        )
        for config in (data, files):
            (tmp_path / "config").write_text(json.dumps(config))
            api = ApiServer(by_kubeconfig(tmp_path / "config"), times=QUICK)
            assert await api.discover() == "v1"
            api.close()
        with pytest.raises(UnavailableError):
            await ApiServer(server.access(), times=QUICK).discover()


def test_a_kubeconfig_in_yaml_with_a_token_and_a_path(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "current-context: here\nkind: Config\ncontexts:\n- {name: here, context: {cluster: c, user: u}}\n"
        "clusters:\n- name: c\n  cluster: {server: 'https://[fd00::1]/k8s/clusters/c-1/', tls-server-name: kube}\n"
        "users:\n- name: u\n  user: {tokenFile: token}\n"
    )
    access = by_kubeconfig(tmp_path / "config")
    assert (access.url, access.server_name) == ("https://[fd00::1]:443/k8s/clusters/c-1", "kube")
    assert access.token == tmp_path / "token"


SERVER: dict[str, object] = {"server": "https://h"}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (kubeconfig(SERVER, {"exec": {"command": "aws"}}), "signs in by exec"),
        (kubeconfig(SERVER, {"username": "a", "password": "b"}), "password"),
        (kubeconfig({**SERVER, "insecure-skip-tls-verify": True}, {}), "insecure-skip-tls-verify"),
        (kubeconfig({"server": "http://h"}, {}), "is no https:// URL"),
        (kubeconfig({"server": "https://h:99999999"}, {}), "no kubeconfig"),
        (kubeconfig({**SERVER, "certificate-authority-data": "?"}, {}), "no kubeconfig"),
        ({**kubeconfig(SERVER, {}), "current-context": "there"}, "no context there"),
        ({**kubeconfig(SERVER, {}), "users": []}, "no user u"),
        ({"clusters": 1}, "no kubeconfig"),
        ([], "no kubeconfig"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, config: object, why: str) -> None:
    (tmp_path / "config").write_text(json.dumps(config))
    with pytest.raises(AccessError, match=why):
        by_kubeconfig(tmp_path / "config")


def test_files_that_are_no_kubeconfig_and_no_certificate(tmp_path: Path) -> None:
    for content in (b"a: [", b"\x00\xff", b"", b"x" * (2 << 20)):
        (tmp_path / "config").write_bytes(content)
        with pytest.raises(AccessError, match="config"):
            by_kubeconfig(tmp_path / "config")
    with pytest.raises(AccessError, match="no such file"):
        by_kubeconfig(tmp_path / "none")
    for fault in (b"no PEM", b"\xff"):
        with pytest.raises(AccessError, match="the certificates for https://h:1 cannot be used"):
            Access(host="h", port=1, authority=fault).tls()
