"""docs/quickstart/docker.md, followed on a Debian 13 that systemd has booted, with its own Docker."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.packages.conftest import AT, Debs
from tests.packages.test_one_machine import PROGRAMS, write_runc
from tests.packages.test_systemd import GPUS
from tests.support import image, packages, pages
from tests.support.booted_root import BootedRoot, starting
from tests.support.driver_root import make_driver_root

UNITS: Final = Path("/run/systemd/system")
# No bridge, no firewall and no setting of the kernel's: the system has no right to make them.
ENGINE: Final = "/usr/sbin/dockerd -H fd:// --bridge=none --iptables=false --ip6tables=false --ip-forward=false"
DOCKER: Final = """\
#!/bin/sh
[ "$1" = run ] && shift && set -- run --network none "$@"
exec /usr/bin/docker "$@"
"""
# Docker cannot keep layers on an overlay, which the machine's root is. The package is installed as where it starts
# nothing: daemon and guard would wait for a containerd with NRI, two minutes.
BEGIN: Final = """
set -e
systemctl stop docker docker.socket containerd
for each in docker containerd; do mount -t tmpfs tmpfs /var/lib/$each; done
systemctl reset-failed docker
systemctl start docker
docker load --input /images/debian.tar
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod +x /usr/sbin/policy-rc.d
dpkg -i {packages}
rm /usr/sbin/policy-rc.d
"""
WITHOUT: Final = "docker run --rm --device nvidia.com/gpu=0 debian:12 true"


def test_a_reader_follows_it(debs: Debs, tmp_path: Path) -> None:
    """Which says, too, what Docker says while its CDI is off."""
    own = {name: tmp_path / name for name in ("programs", "images", "docker.service.d", "nri-gpu-cdi.service.d")}
    for each in own.values():
        each.mkdir()
    write_runc(own["programs"])
    for name, text in {"docker": DOCKER, "nri-gpu": f'#!/bin/sh\nexec /usr/bin/nri-gpu "$@" {GPUS}\n'}.items():
        (own["programs"] / name).write_text(text)
        (own["programs"] / name).chmod(0o755)
    service = f"/usr/bin/nri-gpu cdi generate --output /run/cdi/nri-gpu.json {GPUS}"
    for name, command in {"docker.service.d": ENGINE, "nri-gpu-cdi.service.d": service}.items():
        (own[name] / "test.conf").write_text(starting(command))
    image.build(own["images"] / "debian.tar", packages.busybox(), image.ImageSpec("debian:12"))
    seen = {
        own["programs"]: PROGRAMS,
        own["images"]: "/images",
        debs.folder: AT,
        make_driver_root(tmp_path / "driver"): "/driver",
        **{own[name]: str(UNITS / name) for name in own if name.endswith(".d")},
    }
    with BootedRoot("trixie", seen, included=("docker.io", "docker-cli")) as root:
        root.run("bash", "-c", BEGIN.format(packages=" ".join(debs.this)))
        page = pages.FOLDER / "docker.md"
        said = root.try_run(*WITHOUT.split()).stdout.strip().removesuffix(".")
        assert said.removeprefix("docker: Error response from daemon: ") in page.read_text()
        pages.follow(page, lambda script: root.try_run("bash", "-c", script).stdout)
