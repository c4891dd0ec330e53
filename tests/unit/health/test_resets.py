"""What an XID says of a GPU, what the driver says to that, and what proves that a reset was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import Struct, json
from msgspec.structs import replace

from nri_gpu.domain.health import EventType, GpuEvent, Health, HealthState, RecoveryAction, Sign
from nri_gpu.domain.node import Inventory
from nri_gpu.health.applications import Failures
from nri_gpu.health.health_file import load_health, save_health
from nri_gpu.health.node_health import NO_UNITS, SOON, NodeHealth
from nri_gpu.policy.health_settings import HealthSettings, ResetBy
from tests.support.health import PARTS, UUIDS, at, look, with_parts, xid

HEALTHY, SUSPECT, BAD, RECOVERING = (HealthState[name] for name in ("HEALTHY", "SUSPECT", "BAD", "RECOVERING"))
RULES = HealthSettings(hold_down_s=100, reprobe_s=10)
QUIET = replace(RULES, reset=ResetBy.QUIET)
NONE, RESET = RecoveryAction.NONE, RecoveryAction.GPU_RESET
DOUBLE_BIT = GpuEvent(UUIDS[0], int(EventType.DOUBLE_BIT_ECC))
STORM = GpuEvent(UUIDS[0], int(EventType.ECC_STORM))


def shows(*signs: Sign, action: RecoveryAction | None = None, pending: bool | None = None) -> Inventory:
    """Two GPUs, the first of which is so."""
    inventory = look(signs, ())
    return replace(
        inventory,
        gpus=tuple(
            replace(gpu, recovery_action=action, remap_pending=pending if gpu.index == 0 else None)
            for gpu in inventory.gpus
        ),
    )


WELL, ANSWERS, DEMANDS = shows(), shows(action=NONE), shows(Sign.RESET_REQUIRED, action=RESET)


class Node:
    """One GPU's health, told from one moment to the next."""

    def __init__(self, rules: HealthSettings = RULES, first: Inventory = WELL) -> None:
        self.rules, self.module, self.shown = rules, "boot/7", first
        self.health = NodeHealth()
        self.look(0, first)

    def look(self, seconds: float, inventory: Inventory, began: float | None = None) -> HealthState:
        self.shown = inventory
        self.health = self.health.after_inventory(
            inventory, self.rules, at(seconds), began_s=began, module=self.module
        )[0]
        return self.state

    def event(self, seconds: float, event: GpuEvent) -> HealthState:
        self.health = self.health.after_event(event, self.rules, at(seconds), self.module)[0]
        return self.state

    @property
    def state(self) -> HealthState:
        return self.health.records[UUIDS[0]].health.state

    def settles(self, seconds: float, inventory: Inventory = WELL) -> HealthState:
        """Two looks, long after."""
        self.look(seconds, inventory)
        return self.look(seconds + 50, inventory)


def test_an_event_that_takes_a_word_back_and_is_fatal_itself_is_no_change() -> None:
    node = Node(replace(RULES, fatal_xids=frozenset({94})))
    assert (node.event(1, DOUBLE_BIT), node.event(2, xid(94))) == (BAD, BAD)
    health = node.health.records[UUIDS[0]].health
    assert (health.changes, health.why.partition(",")[0]) == (1, "XID 94")


# --- the driver's recovery action -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "state"), [(46, BAD), (145, SUSPECT), (999, SUSPECT), (48, BAD)])
def test_the_catalogue_holds_until_the_driver_answers(number: int, state: HealthState) -> None:
    node = Node(first=ANSWERS)
    assert node.event(5, xid(number)) is state
    assert node.look(6, ANSWERS, began=4) is state, "it was asked before"
    assert node.look(7, WELL) is state, "it could not be asked"
    assert node.look(8, shows(action=RecoveryAction.DRAIN_P2P)) is state, "that concerns its peers"
    assert node.look(9, ANSWERS, began=5) is HEALTHY
    record = node.health.records[UUIDS[0]]
    assert record.health.why.endswith(": the driver's recovery action is none")
    assert (record.words, record.reset, record.trouble_s) == ({}, None, float("-inf"))


@pytest.mark.parametrize("number", [46, 145, 69, 13, 109, 45])
def test_the_driver_makes_it_bad_whatever_the_catalogue_says(number: int) -> None:
    node = Node(first=ANSWERS)
    node.event(5, xid(number))
    assert node.look(6, DEMANDS) is BAD
    assert node.settles(1000, DEMANDS) is BAD
    assert node.look(1055, ANSWERS) is BAD, (
        "none after a demand is a reset that was done, and a whole hold-down follows"
    )
    assert node.look(1060, ANSWERS) is RECOVERING
    assert node.look(1149, ANSWERS) is RECOVERING
    assert node.look(1150, ANSWERS) is HEALTHY


def test_a_take_back_leaves_what_else_is_wrong() -> None:
    node = Node(first=ANSWERS)
    node.event(5, xid(46))
    node.event(6, STORM)
    assert node.look(20, ANSWERS) is SUSPECT, "the storm remains"
    assert node.event(40, STORM) is BAD
    node.event(41, xid(46))
    assert node.look(42, ANSWERS) is BAD
    assert node.look(60, ANSWERS) is RECOVERING
    node.event(61, xid(62))
    assert node.look(62, ANSWERS) is RECOVERING, "as it was, and not anew"
    assert node.look(140, ANSWERS) is HEALTHY


def test_the_lists_of_the_operator_are_not_taken_back() -> None:
    node = Node(replace(RULES, fatal_xids=frozenset({69})), ANSWERS)
    node.event(5, xid(69))
    assert node.look(6, ANSWERS) is BAD
    assert node.settles(200, ANSWERS) is HEALTHY, "they end by quiet"


def test_the_driver_answers_for_a_mig_device() -> None:
    parts = with_parts(ANSWERS, 0, 0)
    node = Node(first=parts)
    node.event(5, GpuEvent(UUIDS[0], int(EventType.XID), 145, 1, 0))
    assert node.health.records[PARTS[0]].health.state is SUSPECT
    node.look(6, parts)
    assert node.health.records[PARTS[0]].health.state is HEALTHY


# --- contained errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "apart_s", "state"),
    [
        (xid(94), DOUBLE_BIT, 9, HEALTHY),
        (DOUBLE_BIT, xid(94), 9, HEALTHY),
        (xid(94), DOUBLE_BIT, 10, BAD),
        (DOUBLE_BIT, xid(94), 10, BAD),
        (xid(63), DOUBLE_BIT, 1, BAD),
    ],
)
def test_a_double_bit_error_beside_a_contained_one(
    first: GpuEvent, second: GpuEvent, apart_s: int, state: HealthState
) -> None:
    node = Node()
    node.event(100, first)
    assert node.event(100 + apart_s, second) is state


def test_a_contained_error_takes_back_the_double_bit_event_alone() -> None:
    node = Node()
    node.event(100, DOUBLE_BIT)
    node.event(101, xid(48))
    assert node.event(102, xid(94)) is BAD
    assert "XID 48" in node.health.records[UUIDS[0]].health.why


def test_a_pending_remap_does_not_hide_the_sicker_gpu() -> None:
    """A lasting sign is no incident, and hides none; the healthy GPU is not the one that is withheld."""
    pending = shows(Sign.REMAP_PENDING, pending=True)
    node = Node(first=pending)
    for seconds in (50, 95, 140):
        for gpu in (0, 1):
            node.event(seconds, xid(94, gpu))
        assert node.health.offered_to_nobody(frozenset()) == ({UUIDS[0]} if seconds == 140 else set())
        node.look(seconds + 1, pending)
    assert node.health.records[UUIDS[1]].health.state is HEALTHY
    shown = {
        held: node.health.applied_to(pending, RULES, held).gpus[0].unavailable for held in (NO_UNITS, frozenset(UUIDS))
    }
    assert shown == {NO_UNITS: SOON, frozenset(UUIDS): ""}
    assert not node.health.withheld, "nobody's container is stopped for it"
    node.look(200, shows(pending=False))
    assert not node.health.offered_to_nobody(frozenset())


def test_where_the_driver_has_a_recovery_action_that_says_when() -> None:
    pending = shows(Sign.REMAP_PENDING, action=NONE, pending=True)
    node = Node(first=pending)
    for seconds in (50, 95, 140, 185):
        node.event(seconds, xid(94))
    assert not node.health.offered_to_nobody(frozenset())


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ((50, 95), BAD),
        ((50, 55), SUSPECT),
        ((50, 160), SUSPECT),
        ((50,), SUSPECT),
    ],
)
def test_the_second_incident_makes_a_gpu_bad_whatever_sign_it_shows(steps: tuple[int, ...], state: HealthState) -> None:
    for shown in (WELL, shows(Sign.REMAP_PENDING)):
        node = Node(first=shown)
        for seconds in steps:
            node.look(seconds - 1, shown)
            node.event(seconds, STORM)
        assert node.state is state


# --- proofs of a reset ------------------------------------------------------------------------------------------------


def reload(node: Node) -> None:
    node.module = "boot/8"


def boot(node: Node) -> None:
    node.module = "another boot/7"


def remap(node: Node) -> None:
    node.look(100, shows(Sign.REMAP_PENDING, pending=True))
    node.shown = shows(pending=False)


def answer(node: Node) -> None:
    node.look(100, DEMANDS)
    node.shown = ANSWERS


def word(node: Node) -> None:
    node.health = node.health.after_repair(UUIDS[0])


@pytest.mark.parametrize("number", [95, 48, 62, 119, 120, 140])
@pytest.mark.parametrize("proof", [reload, boot, remap, answer, word])
def test_only_a_proof_ends_it(proof: Callable[[Node], None], number: int) -> None:
    node = Node()
    node.event(5, xid(number))
    assert node.settles(2000) is BAD, "quiet proves nothing"
    assert "a reset is due since XID" in node.health.applied_to(WELL, RULES).gpus[0].unavailable
    node.health = json.decode(json.encode(node.health), type=NodeHealth)  # a restart
    node.shown = WELL
    proof(node)
    assert node.settles(3000, node.shown) is HEALTHY


NO_PROOFS = {
    "the module is not loaded": ("", WELL),
    "a remap that was never pending": ("boot/7", shows(pending=False)),
    "the driver tells of its peers": ("boot/7", shows(action=RecoveryAction.RECOVER_IMEX_DOMAIN)),
}


@pytest.mark.parametrize(("module", "shown"), NO_PROOFS.values(), ids=NO_PROOFS)
def test_what_is_no_proof(module: str, shown: Inventory) -> None:
    node = Node()
    node.event(5, xid(95))
    node.module = module
    assert node.settles(2000, shown) is BAD


def test_a_module_that_was_loaded_anew_before_the_xid_proves_nothing() -> None:
    node = Node()
    reload(node)
    node.event(5, xid(95))
    assert node.settles(2000) is BAD


def test_quiet_where_policy_says_so() -> None:
    node = Node(QUIET)
    node.event(5, xid(95))
    assert node.look(20, WELL) is RECOVERING
    assert node.look(104, WELL) is RECOVERING
    assert node.look(105, WELL) is HEALTHY


# --- the file ---------------------------------------------------------------------------------------------------------

OLD = (
    f'{{"records":{{"{UUIDS[0]}":{{"health":{{"state":"bad","since":1700000005.0,"why":"XID 95, uncontained ECC error",'
    f'"changes":1}},"trouble_s":5.0,"place":"0","bus_id":"0000:10:00.0"}}}}}}'
)


def test_a_gpu_that_an_earlier_version_called_bad_ends_as_it_did() -> None:
    node = Node()
    node.health = json.decode(OLD, type=NodeHealth)
    assert node.look(20, WELL) is RECOVERING
    assert node.look(105, WELL) is HEALTHY


class EarlierRecord(Struct, frozen=True, omit_defaults=True):
    """As the version before due resets reads it."""

    health: Health = Health()
    trouble_s: float = float("-inf")
    doubt_s: float | None = None
    place: str = ""
    bus_id: str = ""


class EarlierHealth(Struct, frozen=True):
    records: dict[str, EarlierRecord]


def test_the_file_is_read_back_and_by_an_earlier_version_too(tmp_path: Path) -> None:
    node, file = Node(), tmp_path / "health.json"
    node.event(5, DOUBLE_BIT)
    node.event(6, xid(95))
    node.event(7, STORM)
    node.event(8, xid(145, gpu=1))
    failures = Failures().having(UUIDS[0], frozenset({"ml"}), 9)
    save_health(file, node.health, failures)
    assert load_health(file) == (node.health, failures)
    earlier = json.decode(file.read_bytes(), type=EarlierHealth).records
    assert [earlier[uuid].health.state for uuid in UUIDS[:2]] == [BAD, SUSPECT]
    assert earlier[UUIDS[0]].trouble_s == 7
