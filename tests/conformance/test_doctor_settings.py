"""What `doctor` takes for containerd's effective configuration is what containerd itself takes."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from nri_gpu.doctor.runtime_settings import CRI_PLUGINS, NRI, containerd_settings
from nri_gpu.doctor.runtimes import release_of
from tests.support import packages

TABLE = f'[plugins."{NRI}"]\n'
NEW, OLD = CRI_PLUGINS[:2]


def cri(name: str, handler: str, *settings: str) -> str:
    plugin = name if name == "cri" else f'"{name}"'
    lines = "\n".join(settings)
    return f'[plugins.{plugin}]\n{lines}\n[plugins.{plugin}.containerd]\ndefault_runtime_name = "{handler}"\n'


def mixed(first: str, second: str) -> dict[str, str]:
    """Two files, the first of which imports the other."""
    version, _, rest = first.partition("\n")
    return {"config.toml": f'{version}\nimports = ["b.toml"]\n{rest}', "b.toml": second}


SELINUX = "enable_selinux = true"
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
    "one that imports itself": {
        "config.toml": f'version = 2\nimports = ["config.toml", "./config.toml", "*.toml"]\n{cri(OLD, "x")}'
    },
    "a list of a plugin is replaced": mixed(
        f'version = 2\n[plugins."{NRI}".default_validator]\nrequired_plugins = ["a"]\n',
        f'version = 2\n[plugins."{NRI}".default_validator]\nrequired_plugins = ["b"]\n',
    ),
    "a handler of an import": mixed(f"version = 2\n{cri(OLD, 'x', SELINUX)}", f"version = 2\n{cri(OLD, 'nvidia')}"),
    "2 imports 3": mixed(f"version = 2\n{cri(OLD, 'x', SELINUX)}", f"version = 3\n{cri(NEW, 'nvidia')}"),
    "2 imports 3, other tables": mixed(
        f"version = 2\n{cri(OLD, 'x', SELINUX)}", f"version = 3\n{TABLE}disable = true\n"
    ),
    "3 imports 2": mixed(f"version = 3\n{cri(NEW, 'x', SELINUX)}", f"version = 2\n{cri(OLD, 'nvidia')}"),
    "3 imports one without a version": mixed(f"version = 3\n{cri(NEW, 'x', SELINUX)}", cri(NEW, "nvidia")),
    "2 imports 4": mixed(f"version = 2\n{cri(OLD, 'x', SELINUX)}", f"version = 4\n{cri(NEW, 'nvidia')}"),
    "4 imports 2": mixed(f"version = 4\n{cri(NEW, 'x', SELINUX)}", f"version = 2\n{cri(OLD, 'nvidia')}"),
    "both names in one of 3": {"config.toml": f"version = 3\n{cri(OLD, 'x', SELINUX)}{cri(NEW, 'y')}"},
    "both names in one of 4": {"config.toml": f"version = 4\n{cri(OLD, 'x', SELINUX)}{cri(NEW, 'y')}"},
    "3 imports 5": mixed("version = 3\n", "version = 5\n"),
    "5 imports 2": mixed("version = 5\n", "version = 2\n"),
    "5": {"config.toml": "version = 5\n"},
    "NRI's short name in 1": {"config.toml": "[plugins.nri]\ndisable = true\nplugin_request_timeout = '9s'\n"},
    "NRI's URI in 1": {"config.toml": f"{TABLE}disable = false\nplugin_request_timeout = '9s'\n"},
    "a URI of CRI in 1": {"config.toml": cri(OLD, "x", SELINUX)},
    "imports of folders below": {
        "config.toml": 'version = 2\nimports = ["**/*.toml"]\n',
        "conf.d/a.toml": f"version = 2\n{TABLE}disable = true\n",
        "conf.d/below/b.toml": f'version = 2\n{TABLE}plugin_request_timeout = "9s"\n',
    },
    "imports that are no list": {"config.toml": 'version = 2\nimports = "conf.d/*.toml"\n'},
    "a short name in 2": {"config.toml": 'version = 2\ndisabled_plugins = ["cri"]\n'},
    "a short name in 1": {"config.toml": 'disabled_plugins = ["cri"]\n'},
    "a short name in 1, which imports 2": mixed('disabled_plugins = ["cri"]\n', "version = 2\n"),
    "half a name in 2": {"config.toml": 'version = 2\ndisabled_plugins = ["a.b"]\n'},
    "a short table in 2": {"config.toml": f"version = 2\n{cri('cri', 'x', SELINUX)}"},
    "none": {"config.toml": f"{cri('cri', 'x', SELINUX)}"},
    "none imports 2": mixed(f"root = '/var/x'\n{cri(OLD, 'x', SELINUX)}", f"version = 2\n{TABLE}disable = true\n"),
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
@pytest.mark.short
def test_doctor_and_containerd_agree(runtime: packages.Runtime, tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    config = str(tmp_path / "config.toml")
    command = [str(runtime.containerd), "--config", config, "config", "dump"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = containerd_settings(Path("/"), config, release_of(runtime.release))
    if done.returncode:
        assert [each for each in ours.faults if not each.unseen]
        return
    assert ours.faults == ()
    dumped = tomllib.loads(done.stdout)
    theirs = dumped["plugins"][NRI]
    on_by_default = runtime.number >= (2, 0)
    assert (not on_by_default if ours.nri.disable is None else ours.nri.disable) == theirs["disable"]
    assert ours.nri.plugin_request_timeout == theirs["plugin_request_timeout"]
    assert ours.nri.socket_path == theirs["socket_path"]
    full = {"cri": OLD} if runtime.number >= (2, 0) else {}
    assert {full.get(each, each) for each in ours.disabled_plugins} == set(dumped["disabled_plugins"])
    if "default_validator" in theirs:
        assert ours.nri.default_validator.required_plugins == tuple(theirs["default_validator"]["required_plugins"])
    plugin = next((dumped["plugins"][name] for name in (NEW, OLD, "cri") if name in dumped["plugins"]), None)
    if plugin is None:
        return  # it is disabled
    assert ours.cri.enable_selinux == plugin["enable_selinux"]
    assert ours.cri.containerd.default_runtime_name == plugin["containerd"]["default_runtime_name"]
    if (handler := ours.cri.containerd.default_runtime_name) != "runc":
        (where,) = ours.said["cri.containerd.default_runtime_name"]
        assert f'default_runtime_name = "{handler}"' in Path(where).read_text()
