"""What `doctor` takes for containerd's effective configuration is what containerd itself takes."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from nri_gpu.doctor.runtime import release_of
from nri_gpu.doctor.runtime_settings import NRI, containerd_settings
from tests.support import packages

TABLE = f'[plugins."{NRI}"]\n'
FILES: dict[str, dict[str, str]] = {
    "one file": {"config.toml": f"version = 2\n{TABLE}disable = false\n"},
    "an import of another table": {
        "config.toml": f'version = 2\nimports = ["conf.d/*.toml"]\n{TABLE}plugin_request_timeout = "9s"\n',
        "conf.d/a.toml": 'version = 2\ndisabled_plugins = ["io.containerd.snapshotter.v1.zfs"]\n',
    },
    "an import of the same table": {
        "config.toml": f'version = 2\nimports = ["conf.d/*.toml"]\n{TABLE}plugin_request_timeout = "9s"\n',
        "conf.d/a.toml": f"version = 2\n{TABLE}disable = true\n",
    },
    "two imports of the same table": {
        "config.toml": 'version = 2\nimports = ["conf.d/*.toml"]\n',
        "conf.d/a.toml": f'version = 2\n{TABLE}disable = true\nplugin_request_timeout = "7s"\n',
        "conf.d/b.toml": f'version = 2\n{TABLE}disable = false\nsocket_path = "/run/x.sock"\n',
    },
    "imports of imports": {
        "config.toml": f'version = 2\nimports = ["first.toml"]\n{TABLE}disable = true\n',
        "first.toml": 'version = 2\nimports = ["second.toml"]\n',
        "second.toml": f"version = 2\n{TABLE}disable = false\n",
    },
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
@pytest.mark.short
def test_doctor_and_containerd_agree(runtime: packages.Runtime, tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    config = str(tmp_path / "config.toml")
    command = [str(runtime.containerd), "--config", config, "config", "dump"]
    dumped = tomllib.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    theirs = dumped["plugins"][NRI]
    ours = containerd_settings(Path("/"), config, release_of(runtime.release))
    assert ours.faults == ()
    on_by_default = runtime.number >= (2, 0)
    assert (not on_by_default if ours.nri.disable is None else ours.nri.disable) == theirs["disable"]
    assert ours.nri.plugin_request_timeout == theirs["plugin_request_timeout"]
    assert ours.nri.socket_path == theirs["socket_path"]
    assert set(ours.disabled_plugins) == set(dumped["disabled_plugins"])
