"""Real engines under every transport: no token of another version, no request lost, whoever joins, leaves or dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from collective_peers import Peer, Peers
from live_engines import CLOSE, LONG, SAMPLES, SHORT, Answer, Asker, Engines, Learner, make_model, name

from counterflow.actors.heartbeat import Heartbeat
from counterflow.cluster import process_environment
from counterflow.configs.schema import RunConfig
from counterflow.errors import ProcessDied, WeightSyncError
from counterflow.weight_sync.buckets import Header, plan
from counterflow.weight_sync.collective import Sender
from counterflow.weight_sync.fingerprint import Fingerprints
from counterflow.weight_sync.group import Group, Invitation
from counterflow.weight_sync.publisher import Shipment

if TYPE_CHECKING:
    from counterflow.actors.vllm_engine import VllmEngine


WITHIN_S = 500.0
"""Seconds after which a test hangs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


def settings(model: Path, **weight_sync: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model, "context_length": 256},
            "sampling": {"max_tokens": 60, "temperature": 0.8},
            "admission": {"samples_per_group": SAMPLES},
            "actors": {"kv_cache_bytes": 64 << 20},
            # Buckets that cut tensors.
            "weight_sync": {"bucket_bytes": 1 << 14, **weight_sync},
        }
    )


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engines(model: Path, runner: asyncio.Runner) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in process_environment(cpus=1, gpus=0).items():
            patch.setenv(name, value)
        engines = Engines(settings(model))
        yield engines
        engines.close()


@asynccontextmanager
async def learning(config: RunConfig, folder: Path, seed: int = 0) -> AsyncIterator[Learner]:
    learner = Learner(config, folder, seed)
    try:
        yield learner
    finally:
        await learner.close()


def test_hanging_engine_is_taken_for_one_at_work(
    model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path
) -> None:
    config = settings(model)

    async def main() -> None:
        async with learning(config, tmp_path) as learner:
            asker = Asker(await engines.one(learner, 0, config))
            await learner.join(name(0), asker.engine)
            heart = Heartbeat(asker.engine, timeout_s=5.0)
            async with asker.at_work():
                for _ in range(4):
                    await asker.more()
                    await learner.deliver()
                    heart.check()
            engines.stop(asker.engine)
            with pytest.raises(ProcessDied, match="the engine hangs: it said nothing for 5 s"):
                while True:
                    heart.check()
                    await asyncio.sleep(0.05)
            engines.kill(asker.engine)
            engines.forget(asker.engine)

    runner.run(main())


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_late_engine_serves_a_version_before_the_newest(
    transport: str, model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path
) -> None:
    config = settings(model, transport=transport)

    async def main() -> None:
        async with learning(config, tmp_path) as learner:
            asker = Asker(await engines.one(learner, 0, config))
            await learner.join(name(0), asker.engine)
            async with asker.at_work():
                for _ in range(7):
                    await learner.deliver()
                late = Asker(await engines.one(learner, 1, config))
                await learner.join(name(1), late.engine)
                assert late.engine.version == learner.delivery.served == 7
                joined = await late.ask(SHORT) + await late.ask(LONG)
                assert all(answer.versions == [7] for answer in joined)
                await learner.deliver()
                after = await late.ask(SHORT) + await late.ask(LONG)
                assert all(answer.versions == [8] for answer in after)
            assert learner.given_up == [] and asker.lost == asker.engine.restarted == 0
            assert learner.worst(asker.answers + late.answers) < CLOSE

    runner.run(asyncio.wait_for(main(), WITHIN_S))


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_engine_that_leaves_during_an_update_keeps_it_from_the_others(
    transport: str, model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path
) -> None:
    config = settings(model, transport=transport, timeout_s=24)

    async def main() -> None:
        loading, gone = asyncio.Event(), asyncio.Event()

        class Leaver:
            async def load(self, shipment: Shipment) -> Sequence[Fingerprints]:
                loading.set()
                await gone.wait()
                raise WeightSyncError("engine 1 is not here any more")

            async def serve(self, version: int) -> None:
                raise AssertionError

        async with learning(config, tmp_path) as learner:
            asker = Asker((await engines.serve(learner, 2, config))[0])
            await learner.join(name(0), asker.engine)
            await learner.join(name(1), Leaver())
            async with asker.at_work():
                await asker.more()
                await learner.publish()
                await loading.wait()
                learner.delivery.leave(name(1))
                gone.set()
                await learner.delivery.arrived()
                assert (asker.engine.version, learner.delivery.served) == (1, 1)
                await learner.deliver()
                await asker.more()
            assert learner.given_up == [] and learner.delivery.actors == (name(0),)
            assert asker.lost == asker.engine.restarted == 0
            assert {version for answer in asker.answers for version in answer.versions} == {0, 1, 2}
            assert learner.worst(asker.answers) < CLOSE

    runner.run(asyncio.wait_for(main(), WITHIN_S))


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("updates", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_update_under_load_loses_a_request_or_mixes_versions(
    transport: str, updates: int, model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path
) -> None:
    config = settings(model, transport=transport)

    async def main() -> None:
        async with learning(config, tmp_path) as learner, AsyncExitStack() as stack:
            askers = [Asker(engine) for engine in await engines.serve(learner, 2, config)]
            for i, asker in enumerate(askers):
                await learner.join(name(i), asker.engine)
                await stack.enter_async_context(asker.at_work())
            for _ in range(updates):
                # Some responses begin with each version, others are in their middle.
                await asyncio.gather(*(asker.more() for asker in askers))
                await learner.deliver()
            await asyncio.gather(*(asker.more() for asker in askers))
            await stack.aclose()
            assert learner.given_up == [] and learner.delivery.repeated == learner.delivery.skipped == 0
            for asker in askers:
                assert asker.lost == asker.engine.restarted == 0
                assert {answer.completion.finish_reason for answer in asker.answers} <= {"stop", "length"}
                versions = [answer.versions for answer in asker.answers]
                assert {version for found in versions for version in found} == set(range(updates + 1))
                assert sum(len(found) > 1 for found in versions) > updates
                assert learner.worst(asker.answers) < CLOSE

    runner.run(asyncio.wait_for(main(), WITHIN_S))


def test_new_request_meets_the_cache_of_an_older_version(
    model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model, in_flight="keep", recompute=False)

    from vllm.inputs.engine import tokens_input

    def unsalted(prompt_token_ids: list[int], cache_salt: str) -> Any:
        return tokens_input(prompt_token_ids)

    async def main() -> None:
        async with learning(config, tmp_path) as learner:
            asker = Asker(await engines.one(learner, 0, config))
            await learner.join(name(0), asker.engine)
            fresh: list[Answer] = []
            async with asker.at_work():
                for _ in range(6):
                    await asker.more()
                    await learner.deliver()
                    fresh += await asker.ask(LONG) + await asker.ask(SHORT)
                answers = list(asker.answers)
            assert asker.lost == 0 and all(len(answer.versions) == 1 for answer in fresh)
            assert learner.worst(fresh) < CLOSE
            begun = [answer.completion.version_spans[0].end for answer in answers]
            gaps = list(zip(learner.gaps(answers), begun, strict=True))
            assert max(gap[:end].max(initial=0) for gap, end in gaps) < CLOSE
            # Those that went on did so with the old cache: were there none to meet, nothing would have been seen.
            assert max(gap[end:].max(initial=0) for gap, end in gaps) > 100 * CLOSE

            monkeypatch.setattr("counterflow.actors.vllm_engine.tokens_input", unsalted)
            async with asker.at_work():
                await asker.more()
                await learner.deliver()
                unkept = await asker.ask(LONG)
            assert learner.worst(unkept) > 100 * CLOSE

    runner.run(asyncio.wait_for(main(), WITHIN_S))


def test_version_that_comes_again_meets_the_cache_of_its_first_weights(
    model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path
) -> None:
    config = settings(model, in_flight="keep", recompute=False)

    async def main() -> None:
        for seed in (0, 1000):
            async with learning(config, tmp_path, seed) as learner:
                asker = Asker(await engines.one(learner, 0, config))
                await learner.join(name(0), asker.engine)
                await learner.deliver()
                answers = await asker.ask(LONG)
                assert all(answer.versions == [1] for answer in answers)
                assert learner.worst(answers) < CLOSE

    runner.run(asyncio.wait_for(main(), WITHIN_S))


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_response_goes_on_under_another_version(
    in_flight: str, model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path
) -> None:
    config = settings(model, in_flight=in_flight)

    async def main() -> None:
        async with learning(config, tmp_path) as learner:
            asker = Asker(await engines.one(learner, 0, config))
            await learner.join(name(0), asker.engine)
            async with asker.at_work():
                for _ in range(6):
                    await asker.more()
                    await learner.deliver()
                await asker.more()
            assert learner.given_up == [] and asker.lost == 0
            assert (asker.engine.restarted > 0) == (in_flight == "abort")
            assert {answer.completion.finish_reason for answer in asker.answers} <= {"stop", "length"}
            assert all(len(answer.versions) == 1 for answer in asker.answers)
            assert {answer.versions[0] for answer in asker.answers} == set(range(7))
            assert learner.worst(asker.answers) < CLOSE

    runner.run(asyncio.wait_for(main(), WITHIN_S))


@pytest.mark.parametrize(("in_flight", "every"), [("keep", 1), ("wait", 6), ("abort", 6)])
def test_update_that_failed_half_way_spoils_the_next(
    in_flight: str,
    every: int,
    model: Path,
    engines: Engines,
    runner: asyncio.Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings(model, transport="gloo", in_flight=in_flight)
    spoiled: list[int] = []
    transmit = Sender._transmit

    def faulty(self: Sender, header: Header, payload: torch.Tensor, group: Group) -> list[dist.Work]:
        if header.index in spoiled:
            spoiled.clear()
            payload[5] ^= 1
        return transmit(self, header, payload, group)

    monkeypatch.setattr(Sender, "_transmit", faulty)

    async def main() -> None:
        async with learning(config, tmp_path) as learner:
            asker = Asker(await engines.one(learner, 0, config))
            await learner.join(name(0), asker.engine)
            async with asker.at_work():
                buckets = range(0, len(plan(learner.layout, config.weight_sync.bucket_bytes)), every)
                for bucket in buckets:
                    await asker.more()
                    spoiled.append(bucket)
                    await learner.deliver()
                    assert learner.given_up == [] and asker.engine.version == learner.version
                await asker.more()
            assert learner.delivery.repeated == len(buckets)
            assert asker.lost == 0
            assert learner.worst(asker.answers) < CLOSE

    runner.run(asyncio.wait_for(main(), WITHIN_S))


def test_version_that_was_cut_off_on_disk_is_served(
    model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path
) -> None:
    config = settings(model, transport="disk", folder=tmp_path / "shared")

    async def main() -> None:
        async with learning(config, tmp_path) as learner:
            asker = Asker(await engines.one(learner, 0, config))

            class CutOff:
                cut = False

                async def load(self, shipment: Shipment) -> Sequence[Fingerprints]:
                    if shipment.version == 3 and not self.cut:
                        self.cut = True
                        os.truncate(shipment.way["path"], 1000)
                    return await asker.engine.load(shipment)

                async def serve(self, version: int) -> None:
                    await asker.engine.serve(version)

            await learner.join(name(0), CutOff())
            async with asker.at_work():
                for _ in range(4):
                    await asker.more()
                    await learner.deliver()
                    assert learner.given_up == []
                await asker.more()
            (error,) = learner.retried
            assert "policy version 3 was not loaded" in error and "version-00000003.safetensors cannot be read" in error
            assert asker.lost == asker.engine.restarted == 0
            assert {version for answer in asker.answers for version in answer.versions} == set(range(5))
            assert learner.worst(asker.answers) < CLOSE
        assert list((tmp_path / "shared").iterdir()) == []

    runner.run(asyncio.wait_for(main(), WITHIN_S))


def test_engine_killed_during_a_broadcast_takes_another_down(
    model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model, transport="gloo")
    deadly: dict[int, VllmEngine] = {}
    transmit = Sender._transmit

    def killing(self: Sender, header: Header, payload: torch.Tensor, group: Group) -> list[dist.Work]:
        if victim := deadly.pop(header.index, None):
            engines.kill(victim)
        return transmit(self, header, payload, group)

    monkeypatch.setattr(Sender, "_transmit", killing)

    async def main() -> None:
        async with learning(config, tmp_path) as learner:
            survivor, victim = await engines.serve(learner, 2, config)
            asker = Asker(survivor)
            await learner.join(name(0), survivor)
            await learner.join(name(1), victim)
            async with asker.at_work():
                await asker.more()
                await learner.deliver()
                await asker.more()
                buckets = len(plan(learner.layout, config.weight_sync.bucket_bytes))
                deadly[random.Random(7).randrange(1, buckets)] = victim
                await learner.deliver()
                ((lost, reason),) = learner.given_up
                assert lost == name(1) and "died" in reason
                assert (survivor.version, learner.delivery.served) == (2, 2)
                await asker.more()
                await learner.deliver()
                await asker.more()
            assert asker.lost == survivor.restarted == 0
            assert {version for answer in asker.answers for version in answer.versions} == {0, 1, 2, 3}
            assert learner.worst(asker.answers) < CLOSE
            engines.forget(victim)

    runner.run(asyncio.wait_for(main(), WITHIN_S))


@pytest.mark.slow
def test_receivers_killed_at_any_moment_spoil_an_engine(
    model: Path, engines: Engines, runner: asyncio.Runner, tmp_path: Path
) -> None:
    config = settings(model, transport="gloo")
    moments = random.Random(5)

    async def main() -> None:
        async with learning(config, tmp_path) as learner:
            peers = Peers(learner.layout)
            asker = Asker(await engines.one(learner, 0, config))
            await learner.join(name(0), asker.engine)
            try:
                async with asker.at_work():
                    for kill in range(20):
                        victim = f"victim-{kill}"
                        (peer,) = await asyncio.to_thread(peers.start, f"{victim}/0")
                        await learner.join(victim, Bare(peer))
                        await learner.publish()
                        await asyncio.sleep(moments.uniform(0, 0.6))
                        peer.signal(signal.SIGKILL)
                        await learner.delivery.arrived()
                        if victim in learner.delivery.actors:
                            # It had loaded the version before it died.
                            await learner.deliver()
                        lost, reason = learner.given_up[-1]
                        assert len(learner.given_up) == kill + 1 and lost == victim and victim in reason
                        assert asker.engine.version == learner.delivery.served == learner.version
                        await asker.more()
            finally:
                peers.end(*peers.all)
            assert asker.lost == asker.engine.restarted == 0
            assert learner.worst(asker.answers) < CLOSE

    runner.run(asyncio.wait_for(main(), WITHIN_S))


class Bare:
    """A receiver without an engine, which loads versions slowly."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._joined: Invitation | None = None

    async def load(self, shipment: Shipment) -> Sequence[Fingerprints]:
        return [await asyncio.to_thread(self._receive, shipment)]

    async def serve(self, version: int) -> None:
        """There is nothing to go on with."""

    def _receive(self, shipment: Shipment) -> Fingerprints:
        invitation = Invitation.from_dict(shipment.way["invitation"])
        try:
            if self._joined != invitation:
                self._joined = None
                self._peer.ask("join", invitation)
                self._peer.answer()
                self._joined = invitation
            self._peer.ask("fingerprints", shipment.version, 0.02)
            held: Fingerprints = self._peer.answer()
        except WeightSyncError:
            self._joined = None
            raise
        except (EOFError, OSError) as error:
            raise ProcessDied(f"{self._peer.name} died") from error
        return held
