"""`nri-gpu replay`: the requests of an audit log, decided again with the recorded policies or another one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta, Struct

from nri_gpu.cli.page import Line, Tone
from nri_gpu.cli.render import answer
from nri_gpu.domain.errors import CommandError, Exit, PolicyError, fault_of
from nri_gpu.domain.text import counted
from nri_gpu.policy.model import Policy
from nri_gpu.records.audit_records import Compared, PassedOver, Replay
from nri_gpu.records.policy_file import PolicyText, build_policy, load_policy
from nri_gpu.system.storage import open_input

STRANGE_MAX: Final = 3  # lines
LINE_MAX: Final = 64 << 20  # bytes; a node's record has some 200 kB

RecordedAnswer = Annotated[
    object,
    Meta(
        description="As the audit log has it, with its fields.",
        extra_json_schema={
            "type": "object",
            "required": ["decision"],
            "properties": {"decision": {"enum": ["inject", "pass", "refuse"]}},
            "additionalProperties": True,
        },
    ),
]


class DifferentDecision(Struct, frozen=True, kw_only=True):
    """A decision that differs. at_s: when it was recorded, seconds since the epoch."""

    at_s: float
    namespace: str
    pod: str
    container: str
    container_id: str
    recorded: RecordedAnswer
    now: RecordedAnswer


class ReplayDocument(Struct, frozen=True, tag_field="schema", tag="nri-gpu/replay/v1", omit_defaults=True):
    """The comparison: how many decisions were computed again, which differ, and how many lines are no records.

    passed_over: decisions that the log does not have whole; left out where there are none.
    """

    decisions: int
    unreadable_lines: int
    different: tuple[DifferentDecision, ...]
    passed_over: tuple[PassedOver, ...] = ()


def run(args: argparse.Namespace) -> int:
    """Print what differs. Return 1 if something does, or a line is no record, or 78 if a file is no audit log."""
    instead = load_policy(args.policy, all_options=False) if args.policy else None
    decisions, unreadable, different, passed_over = 0, 0, list[Compared](), list[PassedOver]()
    try:
        for compared in compare(recorded_lines(map(Path, args.files)), instead):
            if isinstance(compared, str):
                unreadable += 1
                print(f"nri-gpu: {compared}", file=sys.stderr)
                continue
            if isinstance(compared, PassedOver):
                passed_over.append(compared)
                continue
            decisions += 1
            if not compared.same:
                different.append(compared)
    except OSError as error:
        raise CommandError(Exit.of_input(error), fault_of(error)) from None
    document = ReplayDocument(decisions, unreadable, tuple(map(_different, different)), tuple(passed_over))
    answer(args, document, _lines(decisions, different, passed_over))
    return Exit.FINDING if different or unreadable else Exit.OK


def recorded_lines(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield each line with where it stands. Raises: OSError."""
    for file in files:
        with open_input(file) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE_MAX), b""), 1):
                yield f"{file}:{number}", line.decode(errors="replace")


def compare(lines: Iterable[tuple[str, str]], instead: Policy | None = None) -> Iterator[Compared | PassedOver | str]:
    """Yield every decision, in order, or a sentence for a line that is no record. lines: each with where it stands.

    Raises: CommandError, if a file begins with STRANGE_MAX such lines.
    """
    replay, strange, known = Replay(_read_policy, instead), 0, False
    for place, line in lines:
        if place.endswith(":1"):
            strange, known = 0, False
        try:
            compared = replay.take(json.loads(line)) if line.strip() else None
        except (ValueError, TypeError, RecursionError) as error:
            yield f"{place}: {error}"
            strange += 1
            if strange == STRANGE_MAX and not known:
                told = f"{place.rpartition(':')[0]} is no audit log: its first {strange} lines are none of one"
                raise CommandError(Exit.CONFIGURATION, f"{told}; name audit.jsonl of a state folder") from None
        else:
            known = known or bool(line.strip())
            if compared:
                yield compared


def _read_policy(name: str, text: str) -> Policy:
    """Return a recorded policy. It was valid then, but this version of nri-gpu may find faults in it."""
    try:
        return build_policy(PolicyText(name, text), all_options=False) if name else Policy.default()
    except PolicyError as error:
        return Policy.broken(str(error.faults[0]))


def _lines(decisions: int, different: list[Compared], passed_over: list[PassedOver]) -> Iterator[Line]:
    for over in passed_over:
        yield Line(f"{_time(over.at_s)} {over.namespace}/{over.pod} {over.container}".rstrip(), Tone.HEAD)
        yield Line(f"  passed over: {over.why}", Tone.WARN)
    for each in different:
        pod = each.container.pod
        yield Line(f"{_time(each.at)} {pod.namespace}/{pod.name} {each.container.name}", Tone.HEAD)
        yield Line(f"  - {_answer_text(each.recorded)}", Tone.BAD)
        yield Line(f"  + {_answer_text(each.now)}", Tone.GOOD)
    count = len(different)
    same = f"{count} differ{'s' * (count == 1)}" if count else "none differs"
    passed = f", {sum(each.decisions for each in passed_over)} passed over" if passed_over else ""
    yield Line(f"{counted(decisions, 'decision')}, {same}{passed}", Tone.HEAD)


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def _answer_text(answer: Mapping[str, object]) -> str:
    match answer:
        case {"decision": "inject", "gpu_uuids": [*uuids], "mode": mode, "rule": rule, "edits_sha256": str(digest)}:
            return f"granted {', '.join(map(str, uuids)) or 'nothing'} ({mode}, {rule}) {digest[:12]}"
        case {"decision": "refuse", "code": code, "reason": reason}:
            return f"refused [{code}]: {reason}"
        case _:
            return f"passed: {answer.get('reason', '')}"


def _different(each: Compared) -> DifferentDecision:
    return DifferentDecision(
        at_s=each.at,
        namespace=each.container.pod.namespace,
        pod=each.container.pod.name,
        container=each.container.name,
        container_id=each.container.id,
        recorded=each.recorded,
        now=each.now,
    )
