"""What `doctor` takes for containerd's effective configuration is what containerd itself takes."""

import subprocess
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from nri_gpu.doctor.go_toml import seconds
from nri_gpu.doctor.runtime_settings import CRI_PLUGINS, NRI, containerd_settings
from nri_gpu.doctor.runtimes import release_of
from tests.support import config, packages
from tests.support.waiting import wait_for

Files = Mapping[str, str | bytes]
TABLE = f'[plugins."{NRI}"]\n'
NEW, OLD = CRI_PLUGINS[:2]


def cri(name: str, handler: str, *settings: str) -> str:
    plugin = name if name == "cri" else f'"{name}"'
    lines = "\n".join(settings)
    return f'[plugins.{plugin}]\n{lines}\n[plugins.{plugin}.containerd]\ndefault_runtime_name = "{handler}"\n'


def mixed(first: str, second: str) -> Files:
    """Two files, the first of which imports the other."""
    version, _, rest = first.partition("\n")
    return {"config.toml": f'{version}\nimports = ["b.toml"]\n{rest}', "b.toml": second}


def nri(*lines: str, table: str = TABLE) -> str:
    return "\n".join(("version = 2", table.strip(), *lines, ""))


# Files as bytes: what makes them a file of TOML to one library, and none to another.
LATIN = "é".encode("latin-1")
BYTES: dict[str, bytes] = {
    "a byte that is no UTF-8 in a comment": b"# caf" + LATIN + b"\n" + nri("disable = true").encode(),
    "in a string": nri("disable = true", 'socket_path = "/run/?"').encode().replace(b"?", LATIN),
    "in a string that nobody reads": b"root = '" + LATIN + b"'\n" + nri("disable = true").encode(),
    "a byte order mark": nri("disable = true").encode("utf-8-sig"),
    "a byte order mark alone": b"\xef\xbb\xbf",
    "UTF-16": nri("disable = true").encode("utf-16"),
    "CRLF": nri("disable = true").replace("\n", "\r\n").encode(),
    "CR": nri("disable = true").replace("\n", "\r").encode(),
    "CR in a comment": b"# a\rb\n" + nri("disable = true").encode(),
    "tabs": nri("\tdisable\t=\ttrue").encode(),
    "NUL in a comment": b"# a\0b\n" + nri("disable = true").encode(),
    "DEL in a comment": b"# a\x7fb\n" + nri("disable = true").encode(),
    "NUL in a string": nri('socket_path = "/run/\0"').encode(),
    "NUL at the end": nri("disable = true").encode() + b"\0",
    "a form feed": b"\f\n" + nri("disable = true").encode(),
    "empty": b"",
    "a comment alone": b"# nothing",
    "no end of the last line": nri("disable = true").encode().rstrip(),
}
TEXTS = {
    "a table twice": nri("disable = true", TABLE),
    "a key twice": nri("disable = true", "disable = false"),
    "a table after those below it": nri("disable = true", "[plugins]"),
    "a table twice, with none of its own": nri("[plugins]", "[plugins]"),
    "a plugin without quotes": nri("disable = true", table=TABLE.replace('"', "")),
    "in single quotes": nri("disable = true", table=TABLE.replace('"', "'")),
    "escaped": nri("disable = true", table=TABLE.replace("nri.v1", "n\\u0072i.v1")),
    "inline": f'version = 2\nplugins = {{"{NRI}" = {{disable = true}}}}\n',
    "dotted": f'version = 2\nplugins."{NRI}".disable = true\n',
    "a plugin in another case": nri("disable = true", table=TABLE.replace("io.", "IO.")),
    "text for a switch": nri('disable = "true"'),
    "a number for a switch": nri("disable = 1"),
    "a number for a folder": f"root = 1\n{nri()}",
    "text for the version": 'version = "2"\n',
    "a fraction for the version": "version = 2.0\n",
    "a switch for the version": "version = true\n",
    "version 0": "version = 0\n",
    "a list for the version": "version = []\n",
    "disabled text": f'version = 2\ndisabled_plugins = "{NRI}"\n',
    "disabled numbers": "version = 2\ndisabled_plugins = [1]\n",
    "disabled, an empty name": 'version = 2\ndisabled_plugins = [""]\n',
    "required numbers": "version = 2\nrequired_plugins = [1]\n",
    "a list of tables": nri("disable = true", table=f"[{TABLE.strip()}]"),
    "unknown keys": f"color = 1\n{nri('disable = true', 'color = 1')}",
}
CASES = {
    **{
        f"{key}, {value}": nri(f"{key} = {value}")
        for key in ("Disable", "DISABLE", "dISABLE")
        for value in ("true", "false")
    },
    **{f"{key} on top": nri("disable = false", table=TABLE.replace("plugins", key)) for key in ("Plugins", "PLUGINS")},
    **{f"{key} on top": f'version = 2\n{key} = ["{NRI}"]\n' for key in ("Disabled_plugins", "DISABLED_PLUGINS")},
    **{f"{key} on top": f"{key} = 2\n{TABLE}disable = false\n" for key in ("Version", "VERSION")},
    "both, upper case first": nri("Disable = true", "disable = false"),
    "both, lower case first": nri("disable = false", "Disable = true"),
    "capitals, and lower case": nri("DISABLE = false", "disable = true"),
    "a validator in two cases": nri(
        f"[plugins.'{NRI}'.Default_Validator]",
        "Enable = true",
        f"[plugins.'{NRI}'.default_validator]",
        "Required_plugins = ['x']",
    ),
    **{
        f"{key} of CRI in {version}": f'version = {version}\n[plugins."{plugin}"]\n{key} = true\n'
        for key in ("Enable_selinux", "ENABLE_SELINUX")
        for version, plugin in ((2, OLD), (3, NEW))
    },
    **{
        f"{table} and {key} in {version}": f'version = {version}\n[plugins."{plugin}".{table}]\n{key} = "runc2"\n'
        for table, key in (("Containerd", "default_runtime_name"), ("containerd", "Default_Runtime_Name"))
        for version, plugin in ((2, OLD), (3, NEW))
    },
}
WRITTEN = (
    '5|0|-1|2_000_000_000|0x10|5.0|true|inf|["5s"]|"5s"|".5s"|"5.s"|".s"|"s"|"5"|"0"|"+0"|"1m30s"|"1h1h"|"+5s"|"-5s"|'
    '"5 s"|" 5s"|"5S"|"5us"|"5µs"|"5μs"|"5d"|""|"1e3s"|"9999999999h"|"2562047h47m16s"|"0.5ns"'
)
DURATIONS = {f"a timeout of {each}": nri(f"plugin_request_timeout = {each}") for each in WRITTEN.split("|")}
SELINUX = "enable_selinux = true"
FILES: dict[str, Files] = {
    **{name: {"config.toml": text} for name, text in (BYTES | TEXTS | CASES | DURATIONS).items()},
    **{
        f"{key} on top": {
            "config.toml": f'version = 2\n{key} = ["b.toml"]\n',
            "b.toml": nri("plugin_request_timeout = '9s'"),
        }
        for key in ("Imports", "IMPORTS")
    },
    "an import in another case": {
        "config.toml": f'version = 2\nimports = ["b.toml"]\n{TABLE}Disable = true\n',
        "b.toml": nri("disable = false"),
    },
    "an import that another case outdoes": {
        "config.toml": f'version = 2\nimports = ["b.toml"]\n{TABLE}disable = false\n',
        "b.toml": nri("Disable = true"),
    },
    "an import that is no UTF-8": {"config.toml": 'version = 2\nimports = ["b.toml"]\n', "b.toml": b"# " + LATIN},
    **{
        f"drop-ins by {pattern}": {
            "config.toml": f'version = 2\nimports = ["conf.d/{pattern}"]\n',
            "conf.d/.hidden.toml": nri("disable = true"),
            "conf.d/b.toml": nri("plugin_request_timeout = '9s'"),
            "conf.d/c.TOML": nri("plugin_request_timeout = '10s'"),
        }
        for pattern in ("*.toml", "[ab]*.toml", "[^b]*.toml", "?*.toml", "*.[tT]*", "*", "../conf.d/./*.toml")
    },
    "drop-ins in the order of their names": {
        "config.toml": 'version = 2\nimports = ["conf.d/*.toml"]\n',
        "conf.d/9.toml": nri("disable = false", "plugin_request_timeout = '9s'"),
        "conf.d/10.toml": nri("disable = true", "plugin_request_timeout = '10s'"),
    },
    "drop-ins in the order of their folders": {
        "config.toml": 'version = 2\nimports = ["*/c.toml"]\n',
        "a/c.toml": nri("disable = false"),
        "a-b/c.toml": nri("disable = true"),
    },
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
def test_doctor_and_containerd_agree(runtime: packages.Runtime, tmp_path: Path, files: Files) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    main = str(tmp_path / "config.toml")
    command = [str(runtime.containerd), "--config", main, "config", "dump"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    ours = containerd_settings(Path("/"), main, release_of(runtime.release))
    if done.returncode:
        assert [each for each in ours.faults if not each.unseen]
        return
    assert ours.faults == ()
    dumped = tomllib.loads(done.stdout)
    full = {"cri": OLD} if runtime.number >= (2, 0) else {}
    assert {full.get(each, each) for each in ours.disabled_plugins} == set(dumped["disabled_plugins"])
    theirs = dumped["plugins"].get(NRI)
    if theirs is None:
        assert NRI in ours.disabled_plugins
        return
    on_by_default = runtime.number >= (2, 0)
    assert (not on_by_default if ours.nri.disable is None else ours.nri.disable) == theirs["disable"]
    assert seconds(ours.nri.plugin_request_timeout) == pytest.approx(
        seconds(theirs["plugin_request_timeout"]), abs=1e-9
    )
    assert ours.nri.socket_path == theirs["socket_path"]
    if "default_validator" in theirs:
        assert ours.nri.default_validator.required_plugins == tuple(theirs["default_validator"]["required_plugins"])
    plugin = next((dumped["plugins"][name] for name in (NEW, OLD, "cri") if name in dumped["plugins"]), None)
    if plugin is None:
        return  # it is disabled
    assert ours.cri.enable_selinux == plugin["enable_selinux"]
    assert ours.cri.containerd.default_runtime_name == plugin["containerd"]["default_runtime_name"]
    if (handler := ours.cri.containerd.default_runtime_name) != "runc":
        (where,) = ours.said["cri.containerd.default_runtime_name"]
        assert f'default_runtime_name = "{handler}"' in Path(where).read_text().lower()


RUNC = 'runtime_type = "io.containerd.runc.v2"'
NVIDIAS = {  # what the toolkit's drop-in says, with and without --set-as-default
    "beside": f"CRI.containerd.runtimes.nvidia]\n{RUNC}\n",
    "default": f'CRI.containerd]\ndefault_runtime_name = "nvidia"\nCRI.containerd.runtimes.nvidia]\n{RUNC}\n',
    "default alone": 'CRI.containerd]\ndefault_runtime_name = "nvidia"\n',
    "another case": f'CRI.containerd]\ndefault_runtime_name = "NVIDIA"\nCRI.containerd.runtimes.nvidia]\n{RUNC}\n',
    "no default": 'CRI.containerd]\ndefault_runtime_name = ""\n',
    "no handlers": "CRI.containerd.runtimes]\n",
    "a table of its own": f"CRI.containerd.default_runtime]\n{RUNC}\nCRI.containerd.runtimes.nvidia]\n{RUNC}\n",
    "both": f'CRI.containerd]\ndefault_runtime_name = "nvidia"\nCRI.containerd.default_runtime]\n{RUNC}\n',
    "of version 2": f"""version = 2
[plugins."{OLD}".containerd]\ndefault_runtime_name = "nvidia"
[plugins."{OLD}".containerd.runtimes.nvidia]\n{RUNC}\n""",
    "by both names": f'''[plugins."{OLD}".containerd]\ndefault_runtime_name = "nvidia"
[plugins."{OLD}".containerd.runtimes.nvidia]\n{RUNC}\nCRI.containerd.runtimes.x]\n{RUNC}\n''',
    "another plugin": '[plugins."io.containerd.gc.v1.scheduler"]\nschedule_delay = "1s"\n',
}


@pytest.mark.parametrize("dropped", NVIDIAS.values(), ids=NVIDIAS)
@pytest.mark.short
def test_doctor_knows_whether_cri_comes_up(runtime: packages.Runtime, tmp_path: Path, dropped: str) -> None:
    layout, v3 = config.Layout(tmp_path), runtime.number >= (2, 0)
    text = config.render(layout, v3=v3, runc=packages.runc(), nri=True, request_timeout_s=2.0)
    version, rest = text.split("\n", 1)
    layout.config.write_text(f'{version}\nimports = ["99-nvidia.toml"]\n{rest}')
    table = f'[plugins."{NEW if v3 else OLD}"'
    first = "" if dropped.startswith("version") else f"{version}\n"
    (tmp_path / "99-nvidia.toml").write_text(f"{first}{dropped.replace('CRI', table)}")
    client: list[str | Path] = [runtime.ctr, "--connect-timeout", "1s", "--address", layout.cri_socket, "plugins", "ls"]

    def plugins() -> str:
        return subprocess.run(client, capture_output=True, text=True, check=False).stdout

    with ExitStack() as ends, layout.log.open("wb") as log:
        process = subprocess.Popen([runtime.containerd, "-c", layout.config], stdout=log, stderr=log)
        ends.callback(process.wait)
        ends.callback(process.terminate)
        wait_for("containerd", lambda: bool(plugins()), 30.0)
        (cri,) = (
            words for line in plugins().splitlines() if (words := line.split())[:2] == ["io.containerd.grpc.v1", "cri"]
        )
        opened = layout.nri_socket.exists()
    ours = containerd_settings(Path("/"), str(layout.config), release_of(runtime.release))
    assert ours.faults == ()
    assert (ours.cri_fault is None) == (cri[-1] == "ok") == opened
