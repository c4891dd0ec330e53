from __future__ import annotations

from nri_gpu.domain.edits import DeviceNode, Edits, Mount

NODE = DeviceNode("/dev/nvidia0", 195, 0)


def test_the_same_path_twice_is_one_and_the_later_wins() -> None:
    edits = Edits.of(devices=(NODE, DeviceNode("/dev/nvidia0", 195, 9)), mounts=(Mount("/a", "/1"), Mount("/a", "/2")))
    assert [node.minor for node in edits.devices.values()] == [9]
    assert [mount.source for mount in edits.mounts.values()] == ["/2"]


def test_a_node_is_open_to_all_users_unless_said_otherwise_and_a_mount_is_read_only() -> None:
    assert (NODE.mode, NODE.uid, NODE.gid) == (0o666, 0, 0)
    # runc tries a file system of type "bind" where neither bind nor rbind stands among the options.
    assert {"rbind", "ro", "nosuid", "nodev"} <= set(Mount("/a", "/b").options)
