"""The learner's process as a run sees it: brought to where the run was, and known when it is what died.

Lives in the supervisor's loop.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from counterflow.calls import call
from counterflow.configs.schema import RunConfig
from counterflow.errors import CounterflowError, LearnerDied, ProcessDied
from counterflow.learner.learner import Standing
from counterflow.telemetry import Telemetry

_ANSWER_TIMEOUT_S = 60.0
_LIVES_TIMEOUT_S = 5.0


async def catch_up(learner: Any, config: RunConfig, telemetry: Telemetry) -> Standing:
    """Have the learner take the archived steps again that its checkpoint lacks; returns where it stands then.

    Comes before any actor. Each step has the deadline of a step; a new run has none to take.

    Args:
        learner: the Ray actor.
    """
    standing: Standing = await call(learner.standing.remote(), "the learner to say where it stands", _ANSWER_TIMEOUT_S)
    if standing.version == 0:
        return standing
    begins_with = f"the checkpoint of version {standing.checkpoint}" if standing.checkpoint else "the model itself"
    telemetry.note(f"going on from version {standing.version}: {begins_with}, and the steps after it taken again")
    taken, reason = 0, "the learner to take an archived step again"
    while (result := await call(learner.catch_up.remote(), reason, config.run.step_timeout_s)) is not None:
        telemetry.again(result.record, served=standing.version)
        taken += 1
    telemetry.event("run_resumed", policy_version=standing.version, checkpoint=standing.checkpoint, steps_again=taken)
    if (lost := standing.lost) is not None:
        telemetry.event("branch_lost", **asdict(lost))
        telemetry.note(
            f"versions {lost.regained + 1} to {lost.lost_up_to} are lost: version {lost.lost_up_to} has the weights of "
            f"version {lost.regained} now; {lost.archive} keeps what was left of the old archive"
        )
    return standing


async def named(learner: Any, failure: CounterflowError) -> CounterflowError:
    """The failure of a run, named as the learner's death where that is what it was."""
    if not isinstance(failure, ProcessDied):
        return failure
    try:
        await call(learner.layout.remote(), "the learner to say that it lives", _LIVES_TIMEOUT_S)
    except ProcessDied:
        return LearnerDied(str(failure))
    except CounterflowError:
        pass
    return failure
