"""Policies as TOML gives them, good and bad: the parser's cases, and what its JSON Schema must agree on."""

from __future__ import annotations

from typing import Any, Final

from nri_gpu.policy.document import SECTIONS
from nri_gpu.policy.forms import Setting, settings_of

Raw = dict[str, Any]

# Dotted key path, `plugin.socket` -> the setting.
SETTINGS: Final[dict[str, Setting]] = {
    f"{section}.{key}": setting for section, cls in SECTIONS.items() for key, setting in settings_of(cls).items()
}

GOOD: Final[dict[str, Raw]] = {
    "nothing": {},
    "version alone": {"schema": 1},
    "longest socket": {"plugin": {"socket": "/" + "s" * 106}},
    "folder with a slash": {"driver": {"root": "/usr/local/nvidia/"}},
    "odd folders": {"driver": {"library_dirs": ["/run/opengl-driver/lib", "/opt/driver/"]}},
    "handlers of virtual machines": {"runtimes": {"refuse": ["kata-qemu*", "firecracker"]}},
    "no handler": {"runtimes": {"refuse": []}},
    "extras": {"extras": {"allowed": ["drm", "imex", "mig-config"]}},
    "namespaces": {"namespaces": {"allow": ["ml-*", "a?", "[a-c]x", "[!a]"], "deny": ["*"], "otherwise": "ignore"}},
    "most patterns": {"namespaces": {"allow": [f"n{number}" for number in range(256)]}},
    "strays": {"stray": {"enabled": True, "exceptions": ["/usr/bin/dcgm*", "a/*"]}},
    "monitors": {"foreign": {"monitors": ["gpu-operator/nvidia-dcgm-exporter-*", "gpu-operator/*", "a/b[0-9]?"]}},
    "limits": {"limits": {"gpus_per_container": 0, "containers_per_gpu": 1, "gpus_per_node": 100_000}},
    "requests by environment": {"environment": {"may_ask": ["legacy-*"], "may_ask_all": True}},
    "stale": {"inventory": {"stale": "refuse", "stale_after_s": 86400}},
    "no tables": {"rule": [], "pool": []},
    "kubelet": {
        "kubelet": {"enabled": True, "resource": "example.com/Gpu_x.y", "mig_strategy": "mixed", "replicas": 64}
    },
    "beside others": {
        "kubelet": {
            "podresources": "",
            "inject_for": ["nvidia.com/gpu", "nvidia.com/mig-*"],
            "reservations": ["kai-resource-reservation"],
        }
    },
    "beside others, with a resource of our own": {
        "kubelet": {"enabled": True, "resource": "example.com/gpu", "inject_for": ["nvidia.com/*"]}
    },
    "kubelet's pool": {"kubelet": {"pool": "a", "registration": "watcher"}, "pool": [{"name": "a", "device": ["0"]}]},
    "rules": {
        "rule": [
            {"allow": True},
            {"allow": False, "reason": "no GPUs here", "otherwise": "ignore", "name": "a.b"},
            {"allow": True, "namespace": "a", "pod": ["b*"], "container": "c", "runtime_handler": ["d", "e"]},
            {"allow": True, "labels": {"team": "", "app.kubernetes.io/name": "x-*"}, "qos": "guaranteed"},
            {"allow": True, "qos": ["burstable", "besteffort"], "default_mode": "shared", "modes": ["shared"]},
            {"allow": True, "default_capabilities": ["utility"], "capabilities": ["utility", "compute"]},
            {"allow": True, "limits": {"gpus_per_pod": 1}},
        ]
    },
    "pools": {
        "rule": [{"allow": True, "pool": "a"}, {"allow": True, "pool": ["a", "b"]}],
        "pool": [
            {"name": "a", "device": ["0", "12:3", "0000:3b:00.0", "GPU-8f3a1c2e-0000-4000-8000-000000000001"]},
            {"name": "b", "model": "*H100*", "memory_at_least": "40Gi", "memory_at_most": "80G", "namespaces": []},
            {"name": "c", "mig": ["1g.10gb", "1g.10gb+me"], "namespaces": ["x-*"], "containers_per_gpu": "unlimited"},
        ],
    },
    "shortest times": {"inventory": {"refresh_s": 1}, "ledger": {"created_grace_s": 5}},
}

# name -> raw policy, key path of its only fault, words of the sentence
BAD: Final[dict[str, tuple[Raw, str, str]]] = {
    "newer version": ({"schema": 2}, "schema", "must be 1"),
    "version as text": ({"schema": "1"}, "schema", "the only version that this nri-gpu reads, not a string"),
    "unknown section": ({"plugins": {}}, "plugins", 'unknown section (did you mean "plugin"?'),
    "unknown key at the top": ({"colour": 1}, "colour", "unknown key, known: schema"),
    "key without its section": ({"socket": "/x"}, "socket", "it belongs under [plugin]"),
    "key in the wrong section": ({"driver": {"socket": "/x"}}, "driver.socket", "it belongs under [plugin]"),
    "mistyped key": ({"driver": {"rot": "/"}}, "driver.rot", 'did you mean "root"?'),
    "odd key": ({"driver": {"a\nb": 1}}, 'driver."a\\nb"', "unknown key, known: root, host_root, library_dirs, stage_"),
    "section as a value": ({"driver": "/"}, "driver", "must be a table, [driver], not a string"),
    "name as a number": ({"plugin": {"name": 1}}, "plugin.name", "must be a string, not an integer"),
    "index of three digits": ({"plugin": {"index": "100"}}, "plugin.index", "over the limit of 2"),
    "long socket": ({"plugin": {"socket": "/" + "s" * 107}}, "plugin.socket", "over the limit of 107"),
    "socket is a folder": ({"plugin": {"socket": "/run/"}}, "plugin.socket", "an absolute path"),
    "way up": ({"driver": {"root": "/usr/../etc"}}, "driver.root", '"." or ".."'),
    "library folder of the root": ({"driver": {"library_dirs": ["/"]}}, "driver.library_dirs[0]", "below /"),
    "too many library folders": (
        {"driver": {"library_dirs": [f"/{number}" for number in range(17)]}},
        "driver.library_dirs",
        "17 items, over the limit of 16",
    ),
    "unknown extra": ({"extras": {"allowed": ["imex:0"]}}, "extras.allowed[0]", 'cannot be "imex:0"'),
    "unknown mode": ({"defaults": {"mode": "share"}}, "defaults.mode", 'did you mean "shared"?'),
    "no capabilities": ({"defaults": {"capabilities": []}}, "defaults.capabilities", "must not be empty"),
    "monitors of any namespace": (
        {"foreign": {"monitors": ["*/*"]}},
        "foreign.monitors[0]",
        "no wildcard in the namespace",
    ),
    "monitors of namespaces by a range": (
        {"foreign": {"monitors": ["a/*", "gpu-[a-z]/exporter"]}},
        "foreign.monitors[1]",
        "no wildcard in the namespace",
    ),
    "monitors of some namespace": ({"foreign": {"monitors": ["gpu-?/x"]}}, "foreign.monitors[0]", "no wildcard"),
    "a monitor without its namespace": ({"foreign": {"monitors": ["dcgm-*"]}}, "foreign.monitors[0]", "namespace/pod"),
    "a monitor of no namespace": ({"foreign": {"monitors": ["/dcgm"]}}, "foreign.monitors[0]", "namespace/pod"),
    "a monitor by its program": ({"foreign": {"monitors": ["/usr/bin/dcgm*"]}}, "foreign.monitors[0]", "namespace/pod"),
    "a pod without its namespace": (
        {"stray": {"exceptions": ["dcgm-exporter"]}},
        "stray.exceptions[0]",
        "namespace/pod or a path",
    ),
    "handler as text": ({"runtimes": {"refuse": "kata*"}}, "runtimes.refuse", "must be an array, not a string"),
    "namespace as text": ({"namespaces": {"allow": "*"}}, "namespaces.allow", "must be an array, not a string"),
    "namespace twice": ({"namespaces": {"deny": ["a", "b", "a"]}}, "namespaces.deny[2]", "listed twice"),
    "unknown way": ({"namespaces": {"otherwise": "deny"}}, "namespaces.otherwise", "known: refuse, ignore"),
    "truth for a word": ({"environment": {"disarm": False}}, "environment.disarm", "not a boolean"),
    "text for a truth": ({"requirements": {"check": "no"}}, "requirements.check", "true or false, not a string"),
    "too long": ({"ledger": {"created_grace_s": 3601}}, "ledger.created_grace_s", "must be 5 to 3600, not 3601"),
    "huge": ({"inventory": {"refresh_s": 10**30}}, "inventory.refresh_s", "not a huge number"),
    "negative": ({"ledger": {"created_grace_s": -5}}, "ledger.created_grace_s", "not -5"),
    "fraction": ({"inventory": {"refresh_s": 1.5}}, "inventory.refresh_s", "not a float"),
    "limit of no sharers": ({"limits": {"containers_per_gpu": 0}}, "limits.containers_per_gpu", "must be 1 to"),
    "another word": ({"limits": {"gpus_per_pod": "none"}}, "limits.gpus_per_pod", 'or "unlimited", not "none"'),
    "rule as a section": ({"rule": {"allow": True}}, "rule", "must be an array of tables, in double brackets"),
    "rule as a value": ({"rule": [1]}, "rule[0]", "must be a table, not an integer"),
    "rule without a verdict": ({"rule": [{"pod": "x"}]}, "rule[0]", "allow is missing"),
    "no pattern": ({"rule": [{"allow": True, "pod": []}]}, "rule[0].pod", "must not be empty: leave the key out"),
    "pattern with a blank": ({"rule": [{"allow": True, "pod": ["a", "b c"]}]}, "rule[0].pod[1]", "without blanks"),
    "labels as a list": ({"rule": [{"allow": True, "labels": ["x"]}]}, "rule[0].labels", "must be a table of label"),
    "odd label": ({"rule": [{"allow": True, "labels": {"a b": "x"}}]}, 'rule[0].labels."a b"', "the label must be"),
    "unknown class of several": ({"rule": [{"allow": True, "qos": ["best"]}]}, "rule[0].qos[0]", "known: guaranteed"),
    "reason in another script": ({"rule": [{"allow": False, "reason": "caf\u00e9"}]}, "rule[0].reason", "ASCII"),
    "too many rules": ({"rule": [{"allow": True}] * 8193}, "rule", "8193 tables, over the limit of 8192"),
    "pool without a name": ({"pool": [{"device": ["0"]}]}, "pool[0]", "name is missing"),
    "device of a pool by half a UUID": ({"pool": [{"name": "a", "device": ["GPU-8f3a"]}]}, "pool[0].device[0]", "UUID"),
    "size without a unit we know": (
        {"pool": [{"name": "a", "memory_at_least": "40GB"}]},
        "pool[0].memory_at_least",
        'must be a size such as "40Gi"',
    ),
    "no MIG profile": ({"pool": [{"name": "a", "mig": ["1g"]}]}, "pool[0].mig[0]", "a MIG profile"),
    "resource without a prefix": ({"kubelet": {"resource": "gpu"}}, "kubelet.resource", "a resource such as"),
    "resource of Kubernetes' own": ({"kubelet": {"resource": "x.kubernetes.io/gpu"}}, "kubelet.resource", "a resource"),
    "no resource to inject for": ({"kubelet": {"inject_for": ["gpu"]}}, "kubelet.inject_for[0]", "a resource such as"),
    "socket that is no path": ({"kubelet": {"podresources": "x"}}, "kubelet.podresources", "empty or an absolute path"),
    "XID twice": ({"health": {"fatal_xids": [79, 79]}}, "health.fatal_xids[1]", "79 is listed twice"),
}

# Files of an earlier version -> what each means now, and what of it is ignored.
OLD: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "strays are stopped": (
        '[stray]\nenabled = true\naction = "stop"\nnamespaces = ["ml-*"]\n',
        "[stray]\nenabled = true\n",
        ("stray.action, line 3,", "stray.namespaces, line 4,"),
    ),
    "nothing else stands in its table": ('[stray]\naction = "stop"\n', "#", ("stray.action, line 2,",)),
    "of any kind": ("stray = { namespaces = 7 }\n", "#", ("stray.namespaces, line 1,",)),
    "profiles are allowed": (
        '[extras]\nallowed = ["drm", "profile"]\n[defaults]\nextras = ["profile"]\n'
        '[[rule]]\nallow = true\nextras = ["profile"]\ndefault_extras = ["rdma", "profile"]\n',
        '[extras]\nallowed = ["drm"]\n[[rule]]\nallow = true\nextras = []\ndefault_extras = ["rdma"]\n',
        (
            "extras.allowed[1], line 2,",
            "defaults.extras[0], line 4,",
            "rule[0].extras[0], line 7,",
            "rule[0].default_extras[1], line 8,",
        ),
    ),
}
