"""Access to the API server: with a pod's service account, or by a kubeconfig."""

from __future__ import annotations

import base64
import binascii
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field
from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from nri_gpu.domain.errors import NriGpuError, cause_of
from nri_gpu.domain.text import shown
from nri_gpu.system.storage import Signature, read_bytes, signature

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_FILE_MAX: Final = 1 << 20  # bytes


class AccessError(NriGpuError):
    """The lack of a way to the API server. The error's sentence says which file or variable to mend.

    denied: for want of permission.
    """

    def __init__(self, sentence: str, *, denied: bool = False) -> None:
        super().__init__(sentence)
        self.denied = denied


class Access(Struct, frozen=True, kw_only=True):
    """The place of an API server, and the credentials for it."""

    host: str  # as in a URL, an IPv6 address in brackets
    port: int
    prefix: str = ""  # of each path
    server_name: str = ""  # in its certificate, if it is not the host
    authority: bytes | Path = b""  # PEM, or the file that has it; empty: the system's authorities
    certificate: bytes | Path = b""  # PEM, or the file that has it; empty: we have no certificate
    key: bytes | Path = b""  # of the certificate: PEM, or the file that has it
    token: bytes | Path = b""  # a bearer token, or the file that has it

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}{self.prefix}"

    def signatures(self) -> tuple[Signature | None, ...]:
        """Return signatures of the TLS context's files: they differ once a file does."""
        return tuple(signature(each) for each in (self.authority, self.certificate, self.key) if isinstance(each, Path))

    def tls(self) -> ssl.SSLContext:
        """Make a context that always checks the API server's certificate. Raises: AccessError: a file is no PEM."""
        try:
            authority = content(self.authority).decode("ascii")
            context = ssl.create_default_context(cadata=authority or None)
            # Python sets it from 3.13 on. Authorities of real clusters (Amazon's EKS) have no authority key identifier,
            # which RFC 5280 allows a self-signed authority (4.2.1.1), or no key usage.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if self.certificate:
                _load_pair(context, content(self.certificate), content(self.key))
        except (ssl.SSLError, ValueError) as error:
            raise AccessError(
                f"the certificates for {self.url} cannot be used: {shown(str(error), 200)}; correct them"
            ) from None
        return context


def content(source: bytes | Path) -> bytes:
    """Return bytes, or what a file has. Raises: AccessError: it cannot be read, or is far larger than it could be."""
    if isinstance(source, bytes):
        return source
    try:
        found = read_bytes(source, _FILE_MAX + 1)
    except OSError as error:
        raise AccessError(f"{source}: {cause_of(error)}", denied=isinstance(error, PermissionError)) from None
    if len(found) > _FILE_MAX:
        raise AccessError(f"{source} has more than {_FILE_MAX >> 20} MiB: it is not such a file")
    return found


def in_cluster(environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access of a pod's service account. Raises: AccessError: this is no pod, or has no service account."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not (port.isascii() and port.isdecimal()) or not (folder / "token").exists():
        raise AccessError(
            "this is no pod with a service account (KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT and "
            f"{folder}/token): run it in one, or name a kubeconfig with --kubeconfig"
        )
    host = f"[{host}]" if ":" in host else host
    return Access(host=host, port=int(port), authority=folder / "ca.crt", token=folder / "token")


class _Kebab(Struct, frozen=True, rename="kebab"):
    """A part of a kubeconfig."""


class _Cluster(_Kebab, frozen=True):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""


class _User(_Kebab, frozen=True):
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = field(default="", name="tokenFile")
    exec: object = None
    auth_provider: object = None
    username: str = ""


class _Context(_Kebab, frozen=True):
    cluster: str = ""
    user: str = ""


class _Named(Struct, frozen=True):
    """An entry of a list of clusters, users or contexts."""

    name: str
    cluster: _Cluster = _Cluster()
    user: _User = _User()
    context: _Context = _Context()


class _Kubeconfig(_Kebab, frozen=True):
    current_context: str
    clusters: list[_Named]
    users: list[_Named]
    contexts: list[_Named]


def by_kubeconfig(path: Path) -> Access:
    """Return the access of a kubeconfig's current context. Raises: AccessError: what is wrong with the file."""
    try:
        return _access(_kubeconfig(content(path)), path.parent)
    except (msgspec.DecodeError, binascii.Error, LocationParseError, ValueError) as error:
        raise AccessError(f"{path} is no kubeconfig that can be used: {shown(str(error), 300)}") from None


def _kubeconfig(text: bytes) -> _Kubeconfig:
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return msgspec.json.decode(text, type=_Kubeconfig)
    except msgspec.ValidationError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.DecodeError:
        import yaml  # seldom: a pod has no kubeconfig
    try:
        return msgspec.convert(yaml.safe_load(text), _Kubeconfig)
    except msgspec.ValidationError:
        raise
    except Exception as error:  # PyYAML lets through what its constructors raise: KeyError for `!!bool x`
        raise ValueError(f"it is no YAML: {error}") from None


def _access(config: _Kubeconfig, folder: Path) -> Access:
    """Return the access of the current context. Raises: ValueError: why it cannot be used, as a clause."""
    context = _named(config.contexts, config.current_context, "context").context
    cluster = _named(config.clusters, context.cluster, "cluster").cluster
    user = _named(config.users, context.user, "user").user
    if user.exec or user.auth_provider or user.username:
        raise ValueError(
            f"user {context.user} signs in by exec, auth-provider or password: give it a token or client certificate"
        )
    if cluster.insecure_skip_tls_verify or cluster.proxy_url:
        raise ValueError(f"cluster {context.cluster} has insecure-skip-tls-verify or proxy-url: remove it")
    url = parse_url(cluster.server)
    if url.scheme != "https" or not url.host:
        raise ValueError(f"server {cluster.server} of cluster {context.cluster} is no https:// URL")
    return Access(
        host=url.host,
        port=url.port or 443,
        prefix=(url.path or "").rstrip("/"),
        server_name=cluster.tls_server_name,
        authority=_pem(cluster.certificate_authority_data, cluster.certificate_authority, folder),
        certificate=_pem(user.client_certificate_data, user.client_certificate, folder),
        key=_pem(user.client_key_data, user.client_key, folder),
        token=user.token.encode() or (folder / user.token_file if user.token_file else b""),
    )


def _named(those: list[_Named], name: str, what: str) -> _Named:
    for each in those:
        if each.name == name:
            return each
    raise ValueError(f"it has no {what} {name}")


def _pem(data: str, path: str, folder: Path) -> bytes | Path:
    """Return a PEM, or the file that has it. Data goes before a file, as for kubectl."""
    if data:
        return base64.b64decode(data, validate=True)
    return folder / path if path else b""


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a pair by a file in memory: OpenSSL takes no bytes, and a key should not come to a disk."""
    with os.fdopen(os.memfd_create("client-certificate"), "wb", buffering=0) as file:
        file.write(certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
