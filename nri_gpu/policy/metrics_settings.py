"""Settings of the metrics for Prometheus."""

from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import Struct

from nri_gpu.policy.forms import FOLDER, SOCKET_PATH_MAX, about, text

PORT_MAX: Final = 65535
# An address and a port, or a path; `address_of` tells which numbers are an address.
_LISTEN: Final = text(
    r"(?:[0-9.]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}|(?:/(?!\.\.?(?:/|$))[!-.0-~]+)+|",
    "empty, an address and port such as 127.0.0.1:9464, or an absolute path to a socket",
    SOCKET_PATH_MAX,
)


class MetricsSettings(Struct, frozen=True, kw_only=True):
    """Metrics of this node for Prometheus (docs/metrics.md)."""

    listen: Annotated[
        str,
        _LISTEN,
        about(
            "Where metrics are served by HTTP, at /metrics: an address and port such as 127.0.0.1:9464, or the path "
            "of a Unix socket. Empty: nowhere.",
            flag="--metrics",
        ),
    ] = ""
    public: Annotated[
        bool,
        about(
            "Whether that address may be one that other machines reach: they can read the names of all pods with GPUs.",
            flag="--metrics-public",
        ),
    ] = False
    usage: Annotated[
        bool,
        about(
            "Also what GPUs and their holders do: memory, utilization, how long idle (docs/usage.md). Each scrape then "
            "samples the GPUs that are held for some seconds."
        ),
    ] = False
    guard_dir: Annotated[
        str, FOLDER, about("The guard's --run-dir, where it reports its status. Ignored in a pod.")
    ] = "/run/nri-gpu-guard"


def address_of(listen: str) -> tuple[str, int] | None:
    """Return the address and port, or None for the path of a socket. Raises: ValueError: it is no address."""
    if not listen or listen.startswith("/"):
        return None
    from ipaddress import ip_address  # only where an address is given: it takes some milliseconds

    host, _, port = listen.rpartition(":")
    if int(port) > PORT_MAX:
        raise ValueError(f"port {port} is over {PORT_MAX}")
    return str(ip_address(host.strip("[]"))), int(port)


def metrics_faults(settings: MetricsSettings) -> Iterator[tuple[str, str]]:
    """Yield the faults between keys: key path and sentence of each."""
    try:
        address = address_of(settings.listen)
    except ValueError as error:
        yield "metrics.listen", f"{error}: write an address and port such as 127.0.0.1:9464"
        return
    if address and not settings.public and address[0] != "::1" and not address[0].startswith("127."):
        yield (
            "metrics.listen",
            f"{address[0]} is not this machine's loopback, so others could read the names of pods there: write "
            "127.0.0.1, or set metrics.public = true",
        )
