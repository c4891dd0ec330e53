"""Whatever text stands where a signed grant, a kubelet's token or a claim's marker does: valid only as we signed it.

No text raises, with a wrong mac or with the right one, as an older or newer version might have signed it.
"""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.allocation import Allocated
from nri_gpu.domain.container import ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.dra.markers import read_marker
from nri_gpu.kubelet.required_device import read_tokens, token_key, write_token
from nri_gpu.ledger.grant_text import SignedGrant, mac_of, sign_grant, verify_grant
from tests.fuzz.target import Target, chosen, named, words
from tests.support.plugin import KEY

GRANT: Final = Grant(
    container_id=ContainerId("c"),
    container_name="main",
    pod_id=PodId("p"),
    pod_uid=PodUid("uid"),
    pod_name="train",
    namespace="ml",
    uuids=(GpuUuid("GPU-0a100004-0000-4000-8000-000000000000"),),
    mode=Mode.EXCLUSIVE,
    generation="580.95.05-1a2b3c4d",
)
SIGNED: Final = sign_grant(GRANT, KEY)
RESOURCE: Final = "nvidia.com/gpu"
TOKEN: Final = write_token(RESOURCE, GRANT.uuids, KEY, shared=False)
MARKER_NAME: Final = "NRI_GPU_CLAIM_A_B_0"
_CONTEXTS: Final = {"token": b"nri-gpu kubelet token:", "marker": b"nri-gpu claim marker:"}


def _marker(body: str) -> str:
    return f"{body};mac={mac_of(body, KEY, _CONTEXTS['marker'])}"


def check_grant(data: bytes) -> bool:
    text = data.decode(errors="surrogateescape")
    valid = isinstance(verify_grant(text, GRANT.pod_uid, GRANT.container_id, KEY), SignedGrant)
    assert valid == (text == SIGNED)
    assert not isinstance(verify_grant(text, GRANT.pod_uid, ContainerId("another"), KEY), SignedGrant)
    return valid


def check_token(data: bytes) -> bool:
    text = data.decode(errors="surrogateescape")
    for each in (text, f"{text};mac={mac_of(text, KEY, _CONTEXTS['token'])}"):
        found = read_tokens({token_key(RESOURCE): each}, KEY)
        if isinstance(found, Allocated):
            assert found.devices
    return isinstance(read_tokens({token_key(RESOURCE): text}, KEY), Allocated)


def check_marker(data: bytes) -> bool:
    name, _, text = data.decode(errors="surrogateescape").partition("=")
    read_marker(name, _marker(text), KEY)
    found = read_marker(name, text, KEY)
    assert found is None or name.endswith(f"_{found.device}")
    return found is not None


SIGNED_TEXTS: Final = Target(
    chosen({"grant": check_grant, "token": check_token, "marker": check_marker}),
    good=[
        *named("grant", SIGNED),
        *named("token", TOKEN),
        *named("marker", f"{MARKER_NAME}={_marker('v1;claim=a-b;device=0')}"),
    ],
    bad=[
        *named("grant", "", SIGNED[:-1], SIGNED.replace("exclusive", "shared")),
        *named("token", "", TOKEN.replace("exclusive", "shared")),
        *named("marker", f"{MARKER_NAME}=v1;claim=a-b;device=x", "="),
    ],
    pieces=words("v1; mode= uuid= gen= mac= resource= ids= claim= device= exclusive none ;; =="),
    bytes_max=2000,
)
TARGETS: Final = {"signed": SIGNED_TEXTS}
