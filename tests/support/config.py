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


def render(
    layout: Layout, *, v3: bool, runc: Path, nri: bool, request_timeout_s: float, systemd_cgroup: bool = False
) -> str:
    """The whole config.toml.

    v3: in configuration version 3, else 2. request_timeout_s: NRI's, of a plugin's answer. systemd_cgroup: runc asks
    systemd for the containers' cgroups.
    """
    cri, folders = (CRI_RUNTIME_V3, "bin_dirs") if v3 else (CRI_V2, "bin_dir")
    programs = f'["{layout.base}/cni"]' if v3 else f'"{layout.base}/cni"'
    images = f'[plugins."{CRI_IMAGES_V3}".pinned_images]\n  sandbox = "{image.NAME}"' if v3 else ""
    sandbox = "" if v3 else f'sandbox_image = "{image.NAME}"'
    # A negative oom_score_adj needs a capability that root in a test machine may lack.
    return f"""\
version = {3 if v3 else 2}
root = "{layout.root}"
state = "{layout.base}/state"
[grpc]
  address = "{layout.cri_socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{layout.base}/opt"
[plugins."io.containerd.nri.v1.nri"]
  disable = {"false" if nri else "true"}
  socket_path = "{layout.nri_socket}"
  plugin_path = "{layout.plugin_path}"
  plugin_config_path = "{layout.plugin_config_path}"
  plugin_request_timeout = "{request_timeout_s}s"
{images}
[plugins."{cri}"]
  {sandbox}
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["{layout.cdi}"]
  [plugins."{cri}".cni]
    {folders} = {programs}
    conf_dir = "{layout.base}/cni"
  [plugins."{cri}".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{cri}".containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = {str(systemd_cgroup).lower()}
"""
