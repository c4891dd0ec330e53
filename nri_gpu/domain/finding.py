"""Findings: statements of `check` and `doctor` on a node and its policy, each written where its subject is."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from nri_gpu.domain.names import POLICY_FILE


class Level(StrEnum):
    """The severity of a finding. UNSEEN: it could not be looked at, and the finding says how it can be.

    NOTE: somebody wants to know it, and nothing has to be done.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"
    UNSEEN = "unseen"


class Finding(Struct, frozen=True):
    """A finding. subject: what it is about. meaning: a sentence. fix: lines to copy, or empty if nothing is wrong."""

    level: Level
    subject: str
    meaning: str
    fix: tuple[str, ...] = ()


def ok(subject: str, meaning: str) -> Finding:
    return Finding(Level.OK, subject, meaning)


def note(subject: str, meaning: str, *fix: str) -> Finding:
    return Finding(Level.NOTE, subject, meaning, fix)


def warning(subject: str, meaning: str, *fix: str) -> Finding:
    return Finding(Level.WARNING, subject, meaning, fix)


def error(subject: str, meaning: str, *fix: str) -> Finding:
    return Finding(Level.ERROR, subject, meaning, fix)


def unseen(subject: str, why: str, *fix: str) -> Finding:
    return Finding(Level.UNSEEN, subject, why, fix)


def in_policy(meaning: str, setting: str = "it", value: str = "", subject: str = "policy advice") -> Finding:
    """Warn of a setting that the policy should change. value: what to write there, as TOML, where that is known."""
    table, _, key = setting.rpartition(".")
    written = (f"# in {POLICY_FILE}:", f"{key} = {value}    # below [{table}]")
    steps = written if value else (f"# change {setting} in {POLICY_FILE}, then:",)
    return warning(subject, meaning, *steps, "nri-gpu check && systemctl reload nri-gpu")
