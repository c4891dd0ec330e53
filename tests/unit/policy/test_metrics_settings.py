"""[metrics]: off by default, and an address that others reach only where the file says so."""

from __future__ import annotations

import pytest

from nri_gpu.domain.errors import PolicyError
from nri_gpu.policy.metrics_settings import MetricsSettings, address_of
from nri_gpu.policy.read import parse_policy


def parsed(**metrics: object) -> MetricsSettings:
    return parse_policy({"metrics": metrics}, "policy.toml").metrics


def test_off_by_default() -> None:
    assert parse_policy({}, "policy.toml").metrics.listen == ""


GOOD = {
    "127.0.0.1:9464": ("127.0.0.1", 9464),
    "127.9.9.9:1": ("127.9.9.9", 1),
    "[::1]:65535": ("::1", 65535),
    "/run/nri-gpu/metrics.sock": None,
    "": None,
}


@pytest.mark.parametrize(("listen", "address"), GOOD.items())
def test_loopback_and_sockets(listen: str, address: tuple[str, int] | None) -> None:
    assert address_of(parsed(listen=listen).listen) == address


@pytest.mark.parametrize("listen", ["0.0.0.0:9464", "[::]:9464", "10.0.0.1:9464", "[2001:db8::1]:9464"])
def test_other_addresses_must_be_wanted(listen: str) -> None:
    assert parsed(listen=listen, public=True).listen == listen
    with pytest.raises(PolicyError, match=r"metrics.listen.*is not this machine's loopback.*metrics.public = true"):
        parsed(listen=listen)


BAD = {
    "a name": ("localhost:9464", "an address and port such as"),
    "no port": ("127.0.0.1", "an address and port such as"),
    "port 0": ("127.0.0.1:0", "an address and port such as"),
    "no such port": ("127.0.0.1:70000", "port 70000 is over 65535"),
    "no such address": ("127.0.0.256:9464", "127.0.0.256"),
    "IPv6 without brackets": ("::1:9464", "an address and port such as"),
    "a relative path": ("run/metrics.sock", "an address and port such as"),
    "dots": ("/run/../metrics.sock", "an address and port such as"),
    "too long": (f"/{'x' * 107}", "107"),
}


@pytest.mark.parametrize(("listen", "sentence"), BAD.values(), ids=BAD)
def test_what_is_no_address(listen: str, sentence: str) -> None:
    with pytest.raises(PolicyError) as raised:
        parsed(listen=listen, public=True)
    assert sentence in str(raised.value)
