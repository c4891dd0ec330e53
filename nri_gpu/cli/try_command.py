"""`nri-gpu try`: see trial/trial.py."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from nri_gpu.decision.offered import Way
from nri_gpu.domain.errors import CommandError, Exit
from nri_gpu.policy.document import options_in
from nri_gpu.records.policy_file import load_policy
from nri_gpu.trial.trial_pod import Attempt, attempts

if TYPE_CHECKING:
    from nri_gpu.trial.trial import Trial
    from nri_gpu.trial.trial_verdict import TrialOutcome

# The rights of the test's account; the chart's Role has the same.
LOOKING: Final = "list on pods"
ASKING: Final = "create, get and delete on pods, list on events"
CLAIMING: Final = "create and delete on resourceclaims"


def run(args: argparse.Namespace) -> int:
    """Print what became of each attempt. Return 0 if all went well, or 1."""
    if bool(args.pod) == bool(args.observers):
        raise CommandError(Exit.USAGE, "name the pod in which this runs with --pod, or else observers with --observers")
    place = _place(args.place or "{}")
    tried = () if args.observers else attempts(load_policy(args.policy, options_in(vars(args))))
    from nri_gpu.dra.api_access import AccessError, in_cluster
    from nri_gpu.dra.api_server import ApiServer, ApiServerError
    from nri_gpu.trial.trial import Trial, lacking

    try:
        api = ApiServer(in_cluster())
    except AccessError as error:
        raise CommandError(Exit.PERMISSION if error.denied else Exit.CONFIGURATION, error) from None
    trial = Trial(api, args.namespace)
    try:
        if args.observers:
            return asyncio.run(_until_told(_look(trial, args.observers)))
        return asyncio.run(_until_told(_ask(trial, args.pod, tried, place)))
    except ApiServerError as error:
        print(f"failed: {lacking(error, _rights(tried))}")
    except asyncio.CancelledError:
        print("failed: it was told to stop; what it made is deleted")
    finally:
        api.close()
    return Exit.FINDING


def _place(text: str) -> Mapping[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise CommandError(Exit.USAGE, f"--place is no part of a pod's spec, as a JSON object: {error}") from None


def _rights(tried: Sequence[Attempt]) -> str:
    claims = any(each.way is Way.DRA for each in tried)
    return f"{ASKING}, {CLAIMING}" if claims else ASKING if tried else LOOKING


async def _until_told(work: Coroutine[object, object, int]) -> int:
    """Do it until it is done or a signal comes, which cancels it once: what follows is the deletion."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    return await task


async def _look(trial: Trial, selector: str) -> int:
    return _printed("", await trial.observers(selector))


async def _ask(trial: Trial, pod: str, tried: Sequence[Attempt], place: Mapping[str, object]) -> int:
    own, code = await trial.own_pod(pod), int(Exit.OK)
    for attempt in tried:
        outcome = await trial.ask(attempt, own, f"{pod}-{attempt.way}", place)
        code = max(code, _printed(f"{attempt.phrase}{' ' if outcome.good else ': '}", outcome))
    return code


def _printed(subject: str, outcome: TrialOutcome) -> int:
    print(f"{'ok' if outcome.good else 'failed'}: {subject}{outcome.sentence}", flush=True)
    return Exit.OK if outcome.good else Exit.FINDING
