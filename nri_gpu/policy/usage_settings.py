"""Settings of what GPUs do, and of the record of who had them."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.policy.forms import about, text

OFF: Final = "off"
_DIR: Final = text(
    r"(?:(?:/(?!\.\.?(?:/|$))[!-.0-~]+)+/?|off)?", "empty, an absolute path below /, or the word off", 1024
)


class UsageSettings(Struct, frozen=True, kw_only=True):
    """Samples of what GPUs do (docs/usage.md), and the record of who had which GPU (docs/record.md)."""

    samples: Annotated[
        bool,
        about(
            "Sample it: with each query of the inventory, and while somebody asks each second, by a process of its own "
            "that holds NVML open meanwhile, for GPUs that are held."
        ),
    ] = True
    dir: Annotated[
        str,
        _DIR,
        about(
            "Folder, root's, of what is kept over a boot: who had which GPU, and GPUs out of use. Empty: the systemd "
            "unit's state directory, else /var/lib/nri-gpu where only root can change it; in a pod only if it is "
            "mounted; a simulated node then has none. off: nothing is kept."
        ),
    ] = ""
    keep_days: Annotated[int, Meta(ge=1, le=3650), about("Days after which the record is deleted.")] = 90
    keep_mib: Annotated[
        int, Meta(ge=1, le=1024), about("MiB that the record may have; its oldest eighth goes before it has more.")
    ] = 64
