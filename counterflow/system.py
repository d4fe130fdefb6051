"""A run, built and supervised: the server, Ray, the actors and the learner, from the first check to the report.

The supervisor owns every deadline. It drives the learner step by step, has each version delivered to the actors, and
watches the actors; trajectories flow past it, through the buffer.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from counterflow import preflight
from counterflow.actors.rollout import ActorState, RolloutActor
from counterflow.actors.tasks import TaskSet
from counterflow.buffer.connection import Address
from counterflow.buffer.server import embedded_server
from counterflow.buffer.store import read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.cluster import Cluster, bundles, connect
from counterflow.configs.schema import RunConfig
from counterflow.display import Display
from counterflow.errors import CounterflowError, DeadlineExceeded, RunFailed
from counterflow.learner.learner import Learner, StepResult
from counterflow.learner.objective_choice import check_objective
from counterflow.metrics import Metrics
from counterflow.recorder import Recorder, summarize, wilson, write_summary
from counterflow.records import EvaluationRecord, Ledger
from counterflow.weight_sync.delivery import Delivery
from counterflow.weight_sync.publisher import slot_paths

T = TypeVar("T")

_WATCH_S = 1.0
_STATE_TIMEOUT_S = 60.0
_FAREWELL_S = 1.0


def run(config: RunConfig) -> Path:
    """Run to the end; returns the report's path.

    Raises:
        ConfigError, UnavailableError: nothing was started.
        RunFailed: the run died; its folder says what it did until then.
        KeyboardInterrupt: interrupted; all processes have ended and the run folder is readable.
    """
    origin, task, warnings = preflight.check(config)
    with ExitStack() as outermost:
        metrics = Metrics(config.metrics, max_lag=config.admission.max_lag)
        outermost.callback(metrics.close)
        folder = preflight.make_run_folder(config)
        return Run(config, origin, task, folder, metrics).main(warnings)


class Run:
    """One run: its processes, its records, and how it ended."""

    def __init__(self, config: RunConfig, origin: Origin, task: TaskSet, folder: Path, metrics: Metrics) -> None:
        self.config, self.origin, self.task, self.folder, self.metrics = config, origin, task, folder, metrics
        self.recorder = Recorder(folder)
        self.started_at = time.time()
        self.display = Display(config.run.steps)
        self.ledger: Ledger | None = None
        self.reward_failures: dict[str, int] = {}
        self._evaluating: asyncio.Task[None] | None = None

    def main(self, warnings: list[str]) -> Path:
        """Run, and leave summary and report whatever happens."""
        from counterflow.report.render import write_report

        status, reason = "failed", None
        try:
            with self.display:
                self.display.note(f"run {self.config.run.name} in {self.folder}, metrics at {self.metrics.url}")
                for line in check_objective(self.config).lines:
                    self.display.note(line)
                for warning in warnings:
                    self.display.note(f"warning: {warning}")
                asyncio.run(self._supervise())
            status = "completed"
        except KeyboardInterrupt:
            status, reason = "interrupted", "stopped by the user"
            raise
        except CounterflowError as error:
            reason = str(error)
            raise
        finally:
            self.recorder.flush()
            summary = summarize(
                self.recorder.records,
                status=status,  # type: ignore[arg-type]
                ledger=self.ledger,
                wall_s=time.time() - self.started_at,
                max_lag=self.config.admission.max_lag,
                seed=self.config.run.seed,
                reason=reason,
            )
            write_summary(self.folder, summary)
            report = write_report(self.folder)
        return report

    async def _supervise(self) -> None:
        supervisor = asyncio.current_task()
        assert supervisor is not None
        with ExitStack() as stack:
            for path in slot_paths(self.origin.run_id):
                stack.callback(path.unlink, missing_ok=True)
            address = self._buffer(stack)
            self.display.note("starting Ray")
            cluster = stack.enter_context(connect(self.config))
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, supervisor.cancel)
            self._spawn(cluster, address)
            try:
                await self._live(address)
            except* CounterflowError as group:
                raise _first(group) from None
            finally:
                self.ledger = self._last_ledger(address)
                await self._farewell()

    def _buffer(self, stack: ExitStack) -> Address:
        buffer = self.config.buffer
        if buffer.url:
            return Address(buffer.url, buffer.connect_timeout_s)
        return stack.enter_context(embedded_server(self.folder / "buffer", buffer.connect_timeout_s * 2))

    def _spawn(self, cluster: Cluster, address: Address) -> None:
        places = bundles(self.config)
        common = (self.config, address, self.origin, self.started_at)
        self.learner = cluster.spawn(Learner, places[0], 0, *common, cluster.cores(0))
        self.actors = [
            cluster.spawn(RolloutActor, place, i + 1, i, *common, cluster.cores(i + 1))
            for i, place in enumerate(places[1:])
        ]

    async def _live(self, address: Address) -> None:
        """Start, then train under watch until the last step is taken."""
        await self._start()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(address))
            await self._train()
            watch.cancel()
        await self._observe_actors()

    async def _start(self) -> None:
        self.display.note(f"starting the learner and {len(self.actors)} actor(s): vLLM takes a while")
        timeout_s = self.config.run.start_timeout_s
        paths, layout = await _call(self.learner.weight_slots.remote(), "the learner to load its model", timeout_s)
        await asyncio.gather(
            *(
                _call(actor.start.remote(paths, layout), f"actor {i} to start its engine", timeout_s)
                for i, actor in enumerate(self.actors)
            )
        )
        self.delivery = Delivery(
            stage=lambda slot: _call(self.learner.stage.remote(slot), "the learner to stage its weights", timeout_s),
            loads=[_loader(actor) for actor in self.actors],
            timeout_s=self.config.weight_sync.timeout_s,
        )

    async def _train(self) -> None:
        """The run itself: evaluate, then step, publish and now and then evaluate, then evaluate again."""
        run, every = self.config.run, self.config.evaluation.every
        await self._evaluate(0)
        await asyncio.gather(*(actor.begin.remote() for actor in self.actors))
        for step in range(1, run.steps + 1):
            result: StepResult = await _call(
                self.learner.step.remote(), f"step {step} of the learner", run.step_timeout_s + _STATE_TIMEOUT_S
            )
            await self.delivery.publish()
            self._record(result)
            if every and step % every == 0 and step < run.steps:
                await self._evaluate_beside(step)
        if self._evaluating is not None:
            await self._evaluating
        await self._evaluate(run.steps)
        await _call(self.learner.save.remote(self.folder / "model"), "the learner to save", run.step_timeout_s)
        self._copy_tokenizer()

    async def _evaluate_beside(self, step: int) -> None:
        """Evaluate while training goes on; an evaluation that is still running is waited for first."""
        if self._evaluating is not None:
            await self._evaluating
        self._evaluating = asyncio.create_task(self._evaluate(step))

    async def _evaluate(self, step: int) -> None:
        """Greedy accuracy on the held-out set at one policy version: no other version arrives meanwhile."""
        await self.delivery.arrived()
        async with self.delivery.hold:
            began, version = self._now(), self.delivery.served
            count = min(self.config.evaluation.prompts, len(self.task.heldout))
            scores = await asyncio.gather(
                *(
                    _call(
                        actor.evaluate.remote(i, len(self.actors), count),
                        f"the evaluation of version {version} on actor {i}",
                        self.config.run.step_timeout_s,
                    )
                    for i, actor in enumerate(self.actors)
                )
            )
        flat = [score for part in scores for score in part]
        successes = sum(score is not None and score >= self.config.evaluation.success for score in flat)
        low, high = wilson(successes, len(flat))
        record = EvaluationRecord(
            step=step,
            policy_version=version,
            time_s=self._now(),
            successes=successes,
            n=len(flat),
            low=low,
            high=high,
            duration_s=self._now() - began,
        )
        self.recorder.add_evaluation(record)
        self.metrics.observe_evaluation(record)
        self.display.note(
            f"held-out at version {version}: {successes}/{len(flat)} = {record.rate:.3f} [{low:.3f}, {high:.3f}]"
        )

    def _record(self, result: StepResult) -> None:
        steps = self.recorder.records.steps
        before = steps[-1] if steps else None
        elapsed = result.record.time_s - (before.time_s if before else 0.0)
        generated = result.record.tokens_generated - (before.tokens_generated if before else 0)
        record = replace(
            result.record,
            actors_tokens_per_s=generated / elapsed if elapsed > 0 else 0.0,
            publish_debt=result.record.policy_version - self.delivery.served,
        )
        self.recorder.add_step(record)
        self.recorder.add_intervals(result.intervals)
        self.metrics.observe_step(record)
        evaluations = self.recorder.records.evaluations
        self.display.step(record, evaluation=evaluations[-1] if evaluations else None)

    async def _watch(self, address: Address) -> None:
        """Ask every actor how it is, again and again; the first that cannot answer ends the run."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await self._observe_actors()
            self.ledger = await asyncio.to_thread(read_ledger, address, self.origin.run_id)
            self.metrics.observe_ledger(self.ledger)
            self.recorder.flush()

    async def _observe_actors(self) -> None:
        states: list[ActorState] = await asyncio.gather(
            *(
                _call(actor.state.remote(), f"actor {i} to say how it is", _STATE_TIMEOUT_S)
                for i, actor in enumerate(self.actors)
            )
        )
        for index, state in enumerate(states):
            self.recorder.add_intervals(state.intervals)
            if state.last_error is not None:
                self.display.note(f"actor {index}: {state.last_error}")

    def _last_ledger(self, address: Address) -> Ledger | None:
        with suppress(Exception):
            return read_ledger(address, self.origin.run_id)
        return self.ledger

    async def _farewell(self) -> None:
        """Give every process a second to end by itself. Ray and the process list see to the rest."""
        import ray

        goodbyes = [self.learner.close.remote(), *(actor.stop.remote() for actor in self.actors)]
        with suppress(Exception):
            await asyncio.to_thread(ray.wait, goodbyes, num_returns=len(goodbyes), timeout=_FAREWELL_S)

    def _copy_tokenizer(self) -> None:
        for path in self.config.model.path.iterdir():
            if (
                path.suffix in {".json", ".jinja", ".model", ".txt"}
                and not (self.folder / "model" / path.name).exists()
            ):
                shutil.copy(path, self.folder / "model")

    def _now(self) -> float:
        return time.time() - self.started_at


def _loader(actor: Any) -> Callable[[Any], Awaitable[int]]:
    async def load(staged: Any) -> int:
        return await actor.update_weights.remote(staged)  # type: ignore[no-any-return]

    return load


async def _call(answer: Awaitable[Any], reason: str, timeout_s: float) -> Any:
    """Await a Ray call under a deadline, with the callee's own error where it raised one of ours.

    Raises:
        DeadlineExceeded: no answer in time.
        RunFailed: the process died, or raised an error that is not ours.
    """
    import ray

    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError as error:
        raise DeadlineExceeded("the supervisor", reason, timeout_s) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, CounterflowError):
            raise error.cause from error
        raise RunFailed(f"while waiting for {reason}: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise RunFailed(f"while waiting for {reason}: a process died: {str(error).strip()}") from error


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
