"""The private containerd's files: where each lies below its base folder, and its config.toml."""

from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.support import image

# Keys that moved between configuration versions 2 (containerd 1.7) and 3 (2.x).
CRI_V2: Final = "io.containerd.grpc.v1.cri"
CRI_RUNTIME_V3: Final = "io.containerd.cri.v1.runtime"
CRI_IMAGES_V3: Final = "io.containerd.cri.v1.images"


class Layout(Struct, frozen=True):
    """Every path of one instance. base must be short: a unix socket's path has at most 107 bytes."""

    base: Path

    @property
    def config(self) -> Path:
        return self.base / "config.toml"

    @property
    def root(self) -> Path:
        """Where containerd keeps images and containers; in memory, for it waits for the disk at every step."""
        return self.base / "root"

    @property
    def log(self) -> Path:
        return self.base / "containerd.log"

    @property
    def supervisor_log(self) -> Path:
        return self.base / "supervisor.log"

    @property
    def lock(self) -> Path:
        return self.base / "supervisor.lock"

    @property
    def cri_socket(self) -> Path:
        return self.base / "ctrd.sock"

    @property
    def nri_socket(self) -> Path:
        # In a folder of its own, as on a real node: a plugin watches that folder for the socket to come back.
        return self.base / "nri" / "nri.sock"

    @property
    def plugin_path(self) -> Path:
        return self.base / "nri-plugins"

    @property
    def plugin_config_path(self) -> Path:
        return self.base / "nri-conf.d"

    @property
    def cdi(self) -> Path:
        return self.base / "cdi"

    @property
    def runc_wrapper(self) -> Path:
        return self.base / "runc"

    def make(self) -> None:
        """Create the folders that containerd only reads."""
        for folder in (self.plugin_path, self.plugin_config_path, self.cdi):
            folder.mkdir()


class Choices(Struct, frozen=True):
    """What may differ between two instances. Times in seconds, as containerd's NRI section means them."""

    config_version: int
    runc: Path
    nri: bool = True
    request_timeout_s: float = 2.0
    registration_timeout_s: float = 5.0


def render(layout: Layout, choices: Choices) -> str:
    """The whole config.toml."""
    return "\n".join((_common(layout, choices), _CRI[choices.config_version](layout, choices)))


def _common(layout: Layout, choices: Choices) -> str:
    return f"""\
version = {choices.config_version}
root = "{layout.root}"
state = "{layout.base}/state"
[grpc]
  address = "{layout.cri_socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{layout.base}/opt"
[plugins."io.containerd.nri.v1.nri"]
  disable = {"false" if choices.nri else "true"}
  socket_path = "{layout.nri_socket}"
  plugin_path = "{layout.plugin_path}"
  plugin_config_path = "{layout.plugin_config_path}"
  plugin_request_timeout = "{choices.request_timeout_s}s"
  plugin_registration_timeout = "{choices.registration_timeout_s}s"
"""


def _cri_v2(layout: Layout, choices: Choices) -> str:
    return f"""\
[plugins."{CRI_V2}"]
  sandbox_image = "{image.NAME}"
{_cri_shared(layout)}
  [plugins."{CRI_V2}".cni]
    bin_dir = "{layout.base}/cni"
    conf_dir = "{layout.base}/cni"
{_runtime(CRI_V2, choices)}"""


def _cri_v3(layout: Layout, choices: Choices) -> str:
    return f"""\
[plugins."{CRI_IMAGES_V3}".pinned_images]
  sandbox = "{image.NAME}"
[plugins."{CRI_RUNTIME_V3}"]
{_cri_shared(layout)}
  [plugins."{CRI_RUNTIME_V3}".cni]
    bin_dirs = ["{layout.base}/cni"]
    conf_dir = "{layout.base}/cni"
{_runtime(CRI_RUNTIME_V3, choices)}"""


def _cri_shared(layout: Layout) -> str:
    # A negative oom_score_adj needs a capability that root in a test machine may lack.
    return f"""\
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["{layout.cdi}"]"""


def _runtime(cri: str, choices: Choices) -> str:
    return f"""\
  [plugins."{cri}".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{cri}".containerd.runtimes.runc.options]
      BinaryName = "{choices.runc}"
"""


_CRI: Final = {2: _cri_v2, 3: _cri_v3}
