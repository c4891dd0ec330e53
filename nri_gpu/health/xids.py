"""NVIDIA's XID catalogue: each number with its meaning and the action that it asks for, and what that does here.

Source: docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, catalogue 610, 172 numbers. The spreadsheet of
October 2025 (leptonai/gpud: components/accelerator/nvidia/xid/catalog_generated.go) has the same actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

CATALOGUE: Final = "610"


class Action(StrEnum):
    """The immediate action, in the catalogue's words; it names none for some numbers."""

    IGNORE = "IGNORE"
    RESTART_APP = "RESTART_APP"
    RESET_GPU = "RESET_GPU"
    RESTART_VM = "RESTART_VM"
    RESTART_BM = "RESTART_BM"
    CHECK_MECHANICALS = "CHECK_MECHANICALS"
    WORKFLOW_XID_45 = "WORKFLOW_XID_45"
    WORKFLOW_XID_48 = "WORKFLOW_XID_48"
    WORKFLOW_NVLINK_ERR = "WORKFLOW_NVLINK_ERR"
    WORKFLOW_NVLINK5_ERR = "WORKFLOW_NVLINK5_ERR"
    UPDATE_SWFW = "UPDATE_SWFW"
    CHECK_UVM = "CHECK_UVM"
    XID_154 = "XID_154"
    CONTACT_SUPPORT = "CONTACT_SUPPORT"
    NO_ACTION = ""


class ActionClass(StrEnum):
    """The consequence of an action for a GPU."""

    NOTHING = "nothing"
    RESTART = "restart-application"
    RESET = "reset"  # of the GPU, or more
    UNCLEAR = "unclear"  # the driver's recovery action says it, if anything does
    UNKNOWN = "unknown"  # the number is not in the catalogue


CLASSES: Final[Mapping[Action, ActionClass]] = {
    Action.IGNORE: ActionClass.NOTHING,
    Action.RESTART_APP: ActionClass.RESTART,
    Action.RESET_GPU: ActionClass.RESET,
    Action.RESTART_VM: ActionClass.RESET,
    Action.RESTART_BM: ActionClass.RESET,
    Action.CHECK_MECHANICALS: ActionClass.RESET,
    # The catalogue says of these two workflows, too, that a reset is needed to clear the error.
    Action.WORKFLOW_XID_48: ActionClass.RESET,
    Action.WORKFLOW_NVLINK_ERR: ActionClass.RESET,
    Action.WORKFLOW_XID_45: ActionClass.UNCLEAR,
    Action.WORKFLOW_NVLINK5_ERR: ActionClass.UNCLEAR,
    Action.UPDATE_SWFW: ActionClass.UNCLEAR,
    Action.CHECK_UVM: ActionClass.UNCLEAR,
    Action.XID_154: ActionClass.UNCLEAR,
    Action.CONTACT_SUPPORT: ActionClass.UNCLEAR,
    Action.NO_ACTION: ActionClass.UNCLEAR,
}
# Errors of applications, as NVIDIA's device plugin calls them (NVIDIA/k8s-device-plugin: internal/rm/health.go). Any
# program can cause them, so only the driver's recovery action makes a GPU bad for them.
APPLICATIONS: Final = frozenset({13, 31, 43, 45, 68, 109})
CONTAINED: Final = 94  # an ECC error that ended the programs it met, and no others

# Unused on all GPUs from Ampere on. Their action is CONTACT_SUPPORT.
UNUSED: Final = (
    1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26, 27, 28, 29, 30, 33, 34, 35, 36,
    42, 47, 49, 50, 51, 52, 53, 55, 56, 57, 58, 59, 61, 65, 73, 81, 87, 90, 91, 111, 112, 113, 114, 115, 116,
    117, 118, 122, 123, 124, 125, 138,
)  # fmt: skip
# Number, action and meaning.
ROWS: Final = (
    (8, Action.RESTART_APP, "GPU stopped processing"),
    (11, Action.RESTART_APP, "invalid or corrupted push buffer stream"),
    (13, Action.RESTART_APP, "graphics engine exception"),
    (14, Action.IGNORE, "made-up error"),
    (25, Action.RESTART_APP, "invalid or illegal push buffer stream"),
    (31, Action.RESTART_APP, "GPU memory page fault"),
    (32, Action.RESTART_APP, "invalid or corrupted push buffer stream"),
    (37, Action.IGNORE, "driver firmware error"),
    (38, Action.IGNORE, "driver firmware error"),
    (39, Action.RESTART_APP, "copy engine 0 exception"),
    (40, Action.RESTART_APP, "copy engine 1 exception"),
    (41, Action.RESTART_APP, "copy engine 2 exception"),
    (43, Action.IGNORE, "GPU stopped processing"),
    (44, Action.IGNORE, "graphics engine fault during a context switch"),
    (45, Action.WORKFLOW_XID_45, "preemptive cleanup"),
    (46, Action.RESET_GPU, "GPU stopped processing"),
    (48, Action.WORKFLOW_XID_48, "double-bit ECC error"),
    (54, Action.CHECK_MECHANICALS, "auxiliary power is not connected"),
    (60, Action.RESTART_APP, "video processor exception"),
    (62, Action.RESET_GPU, "internal micro-controller halt"),
    (63, Action.IGNORE, "memory row remapped or page retired"),
    (64, Action.RESET_GPU, "memory row or page could not be retired"),
    (66, Action.IGNORE, "illegal access by the driver"),
    (67, Action.IGNORE, "illegal access by the driver"),
    (68, Action.RESTART_APP, "video decoder 0 exception"),
    (69, Action.RESTART_APP, "graphics engine class error"),
    (70, Action.RESTART_APP, "copy engine 3 error"),
    (71, Action.RESTART_APP, "copy engine 4 error"),
    (72, Action.RESTART_APP, "copy engine 5 error"),
    (74, Action.WORKFLOW_NVLINK_ERR, "NVLink error"),
    (75, Action.RESTART_APP, "copy engine 6 error"),
    (76, Action.RESTART_APP, "copy engine 7 error"),
    (77, Action.RESTART_APP, "copy engine 8 error"),
    (78, Action.UPDATE_SWFW, "vGPU start error"),
    (79, Action.RESTART_BM, "GPU has fallen off the bus"),
    (80, Action.RESTART_APP, "corrupted data sent to the GPU"),
    (82, Action.RESTART_APP, "JPEG engine 0 error"),
    (83, Action.RESTART_APP, "video decoder 1 error"),
    (84, Action.RESTART_APP, "video decoder 2 error"),
    (85, Action.RESTART_APP, "copy engine 9 error"),
    (86, Action.RESTART_APP, "optical flow engine exception"),
    (88, Action.RESTART_APP, "video decoder 3 error"),
    (89, Action.RESTART_APP, "video decoder 4 error"),
    (92, Action.IGNORE, "many single-bit ECC errors"),
    (93, Action.IGNORE, "InfoROM wear limit exceeded"),
    (94, Action.RESTART_APP, "contained ECC error"),
    (95, Action.RESET_GPU, "uncontained ECC error"),
    (96, Action.RESTART_APP, "video decoder 5 error"),
    (97, Action.RESTART_APP, "video decoder 6 error"),
    (98, Action.RESTART_APP, "video decoder 7 error"),
    (99, Action.RESTART_APP, "JPEG engine 1 error"),
    (100, Action.RESTART_APP, "JPEG engine 2 error"),
    (101, Action.RESTART_APP, "JPEG engine 3 error"),
    (102, Action.RESTART_APP, "JPEG engine 4 error"),
    (103, Action.RESTART_APP, "JPEG engine 5 error"),
    (104, Action.RESTART_APP, "JPEG engine 6 error"),
    (105, Action.RESTART_APP, "JPEG engine 7 error"),
    (106, Action.IGNORE, "SMBPBI test message"),
    (107, Action.IGNORE, "silent SMBPBI test message"),
    (108, Action.IGNORE, "NVLink remote translation error"),
    (109, Action.RESET_GPU, "context switch timeout"),
    (110, Action.RESET_GPU, "security fault"),
    (119, Action.RESET_GPU, "GSP does not answer"),
    (120, Action.RESET_GPU, "GSP error"),
    (121, Action.IGNORE, "corrected C2C error"),
    (126, Action.RESTART_APP, "copy engine 10 error"),
    (127, Action.RESTART_APP, "copy engine 11 error"),
    (128, Action.RESTART_APP, "copy engine 12 error"),
    (129, Action.RESTART_APP, "copy engine 13 error"),
    (130, Action.RESTART_APP, "copy engine 14 error"),
    (131, Action.RESTART_APP, "copy engine 15 error"),
    (132, Action.RESTART_APP, "copy engine 16 error"),
    (133, Action.RESTART_APP, "copy engine 17 error"),
    (134, Action.RESTART_APP, "copy engine 18 error"),
    (135, Action.RESTART_APP, "copy engine 19 error"),
    (136, Action.RESET_GPU, "link training failed"),
    (137, Action.IGNORE, "NVLink privilege error"),
    (139, Action.RESTART_APP, "optical flow engine 1 error"),
    (140, Action.RESET_GPU, "unrecovered ECC error"),
    (141, Action.IGNORE, "CUDA fast path error"),
    (142, Action.CONTACT_SUPPORT, "video encoder 3 error"),
    (143, Action.RESET_GPU, "GPU could not be initialized"),
    (144, Action.WORKFLOW_NVLINK5_ERR, "NVLink SAW error"),
    (145, Action.WORKFLOW_NVLINK5_ERR, "NVLink RLW error"),
    (146, Action.WORKFLOW_NVLINK5_ERR, "NVLink TLW error"),
    (147, Action.WORKFLOW_NVLINK5_ERR, "NVLink TREX error"),
    (148, Action.WORKFLOW_NVLINK5_ERR, "NVLink NVLPW_CTRL error"),
    (149, Action.WORKFLOW_NVLINK5_ERR, "NVLink NETIR error"),
    (150, Action.WORKFLOW_NVLINK5_ERR, "NVLink MSE error"),
    (151, Action.RESTART_VM, "key rotation error"),
    (152, Action.IGNORE, "DLA SMMU error"),
    (153, Action.IGNORE, "DLA timeout"),
    (154, Action.XID_154, "GPU recovery action changed"),
    (155, Action.RESET_GPU, "NVLink error defined by software"),
    (156, Action.RESET_GPU, "resource retired"),
    (157, Action.IGNORE, "resource could not be retired"),
    (158, Action.RESET_GPU, "fatal GPU timeout"),
    (159, Action.CHECK_UVM, "CHI error without data"),
    (160, Action.IGNORE, "channel retired"),
    (161, Action.IGNORE, "channel could not be retired"),
    (162, Action.NO_ACTION, "power smoothing engaged again"),
    (163, Action.NO_ACTION, "power smoothing disengaged"),
    (164, Action.NO_ACTION, "power smoothing hardware is near its end of life"),
    (165, Action.NO_ACTION, "power smoothing hardware is at its end of life"),
    (166, Action.NO_ACTION, "NVLink traffic before its encryption was set up"),
    (167, Action.NO_ACTION, "fatal PCIe timeout"),
    (168, Action.NO_ACTION, "memory capacity is reduced"),
    (169, Action.NO_ACTION, "SEC2 micro-controller halt"),
    (170, Action.NO_ACTION, "NVLink interrupt in confidential computing mode"),
    (171, Action.NO_ACTION, "uncorrectable DRAM error"),
    (172, Action.NO_ACTION, "uncorrectable SRAM error"),
    *((number, Action.CONTACT_SUPPORT, "unused") for number in UNUSED),
)


class Xid(Struct, frozen=True):
    """A row of the catalogue."""

    action: Action
    meaning: str


XIDS: Final[Mapping[int, Xid]] = {number: Xid(action, meaning) for number, action, meaning in ROWS}


def class_of(xid: int) -> ActionClass:
    """Return the class of a number's action."""
    found = XIDS.get(xid)
    return CLASSES[found.action] if found else ActionClass.UNKNOWN


def xid_name(xid: int) -> str:
    """Return `XID 79, GPU has fallen off the bus`."""
    found = XIDS.get(xid)
    meaning = found.meaning if found else "not in NVIDIA's catalogue"
    return f"XID {xid}, {meaning}"
