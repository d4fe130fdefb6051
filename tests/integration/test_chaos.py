"""kill -9 of producers, learner and server at random moments: nothing is lost or trained twice, the ledger closes.

The processes are real ones, the moments follow from a seed. Where power is cut, the server also loses the end of its
log, which a kill alone does not do.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from groups import make_group
from killing import kill_server

from counterflow.actors.tasks import prompt_index
from counterflow.buffer.admission import open_groups
from counterflow.buffer.archive import Archive, read_steps
from counterflow.buffer.codec import encode
from counterflow.buffer.connection import Address, connect
from counterflow.buffer.consumer import Consumer
from counterflow.buffer.producer import Capacity, Producer
from counterflow.buffer.reading import Reading
from counterflow.buffer.server import EmbeddedServer
from counterflow.buffer.store import Keys, read_ledger
from counterflow.buffer.trajectory import Origin
from counterflow.cli_ledger import find
from counterflow.place import Place, write_place

GROUPS_PER_STEP, MAX_LAG, EPOCHS = 4, 3, 3
ORIGIN = Origin(run_id="chaos", model_fingerprint="model", tokenizer_fingerprint="tokenizer", sampling="{}")
CAPACITY = Capacity(groups=40, bytes=1 << 30, groups_per_step=GROUPS_PER_STEP)


@dataclass(frozen=True)
class Setting:
    """What is killed, how often, and how the run is set up.

    With `long_leases` a group that nobody brings is not given out again within the test, and has one attempt.
    """

    kills: int
    prompts: int
    victims: tuple[str, ...]
    uses: int = 1
    long_leases: bool = False

    @property
    def groups(self) -> int:
        return self.prompts * EPOCHS

    @property
    def steps(self) -> int:
        return self.groups * self.uses // GROUPS_PER_STEP


def generate(address: Address, setting: Setting, hurry: Path, seed: int) -> None:
    """A producer: leases, takes its time, adds; now and then an attempt fails."""

    def pause(moments: random.Random) -> float:
        return 0 if hurry.exists() else moments.uniform(0, 0.12)

    async def one(producer: Producer, version: int, moments: random.Random) -> None:
        opened = open_groups(version, MAX_LAG, GROUPS_PER_STEP, setting.groups, setting.uses)
        leases, _ = await producer.admit(opened, wanted=3)
        if not leases:
            await asyncio.sleep(0.02)
        for lease in leases:
            await asyncio.sleep(pause(moments))
            group = make_group(lease.admission, version=version, tokens=moments.randint(1, 5))
            if moments.random() < 0.05 and not setting.long_leases:
                await producer.fail(lease, group.response_tokens)
            else:
                await producer.add(group, encode(group, ORIGIN.schema()))

    async def main() -> None:
        lease_s, attempts = (600.0, 1) if setting.long_leases else (1.5, 10_000)
        producer = Producer(address, ORIGIN.run_id, capacity=CAPACITY, lease_s=lease_s, attempts=attempts)
        moments, client = random.Random(seed), connect(address)
        version = 0
        while True:
            # Versions reach a producer late, or not at all while the server is away.
            try:
                version = int(client.hget(Keys.of(ORIGIN.run_id).state, "version") or 0)
            except Exception:
                await asyncio.sleep(0.05)
            await one(producer, version, moments)

    asyncio.run(main())


def learn(address: Address, folder: Path, setting: Setting, seed: int) -> None:
    """A learner: takes a batch, "trains", commits."""
    moments = random.Random(seed)
    consumer = Consumer(address, ORIGIN, Archive(folder, ORIGIN, segment_bytes=1 << 16), Reading(uses=setting.uses))
    while consumer.version < setting.steps:
        entries = consumer.take(GROUPS_PER_STEP, timeout_s=60)
        time.sleep(moments.uniform(0, 0.01))
        consumer.commit(entries, consumer.version + 1)
    consumer.close()


class Chaos:
    """The processes, and the one who kills them."""

    def __init__(self, folder: Path, server: EmbeddedServer, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.folder, self.server, self.moments = folder, server, random.Random(seed)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__])
        self.killed: Counter[str] = Counter()
        self.producers = [self.producer() for _ in range(2)]
        self.learner = self.new_learner()

    def producer(self) -> ForkServerProcess:
        seed = self.moments.randrange(1 << 30)
        return self.begin(generate, self.server.address, self.setting, self.folder / "hurry", seed)

    def new_learner(self) -> ForkServerProcess:
        seed = self.moments.randrange(1 << 30)
        return self.begin(learn, self.server.address, self.folder / "archive", self.setting, seed)

    def begin(self, target: object, *args: object) -> ForkServerProcess:
        process = self.context.Process(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        process.start()
        return process

    def begin_to_learn(self) -> None:
        """Wait until the first step is committed; the test's own deadline ends a wait that is too long."""
        while not read_ledger(self.server.address, ORIGIN.run_id).trained:
            assert self.learner.exitcode is None, "the learner died by itself"
            time.sleep(0.05)

    def strike(self) -> None:
        """Kill one process and start it again, after a while or at once."""
        time.sleep(self.moments.uniform(0, 0.6))
        victim = self.moments.choice(self.setting.victims)
        self.killed[victim] += 1
        if victim == "producer":
            index = self.moments.randrange(len(self.producers))
            self.end(self.producers[index])
            self.producers[index] = self.producer()
        elif victim == "learner":
            self.end(self.learner)
            self.learner = self.new_learner()
        else:
            kill_server(self.server.address)
            if victim != "server":
                self.cut_log()
            time.sleep(self.moments.uniform(0, 0.3))
            assert self.server.revive()

    def cut_log(self) -> None:
        logs = sorted((self.folder / "buffer").rglob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
        size = logs[-1].stat().st_size
        os.truncate(logs[-1], max(0, size - self.moments.randrange(20_000)))

    def end(self, process: ForkServerProcess) -> None:
        process.kill()
        process.join()

    def calm(self) -> None:
        """Let the run come to its end; the test's own deadline ends a wait that is too long."""
        (self.folder / "hurry").touch()
        self.learner.join()
        for process in self.producers:
            self.end(process)


KILLED = ("producer", "learner", "server")
POWER_CUT = "server and the end of its log"


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(12, 60, KILLED), id="12 kills"),
        pytest.param(Setting(100, 480, KILLED), id="100 kills", marks=pytest.mark.slow),
        pytest.param(Setting(100, 480, (*KILLED, POWER_CUT)), id="100 kills and power cuts", marks=pytest.mark.slow),
        pytest.param(Setting(40, 240, (*KILLED, POWER_CUT), uses=2), id="each group twice", marks=pytest.mark.slow),
        pytest.param(
            Setting(40, 240, ("learner", POWER_CUT), long_leases=True), id="long leases", marks=pytest.mark.slow
        ),
    ],
)
def test_kills_lose_groups_or_train_them_twice(tmp_path: Path, setting: Setting) -> None:
    (tmp_path / "config.yaml").write_text(f"buffer: {{uses: {setting.uses}}}\n")
    with EmbeddedServer(tmp_path / "buffer", timeout_s=20) as server:
        write_place(tmp_path, Place(server.address.url, ORIGIN.run_id))
        chaos = Chaos(tmp_path, server, setting, seed=0)
        chaos.begin_to_learn()
        for _ in range(setting.kills):
            chaos.strike()
            assert chaos.learner.exitcode in (None, 0), "the learner died by itself"
            assert all(producer.exitcode is None for producer in chaos.producers), "a producer died by itself"
        assert chaos.learner.exitcode is None, "the run ended before the last kill: give it more prompts"
        chaos.calm()
        assert chaos.learner.exitcode == 0
        found = find(tmp_path)
        with connect(server.address) as client:
            assert list(client.scan_iter(f"{Keys.of(ORIGIN.run_id).payloads}*")) == [], "payloads without a group"
    ledger = found.ledger
    print(f"killed {dict(chaos.killed)}; {ledger}")
    steps = list(read_steps(tmp_path / "archive"))
    trained = [batch.column("admission")[0].as_py() for step in steps for batch in step.groups]
    in_order = [range(n, n + GROUPS_PER_STEP) for n in range(0, setting.groups, GROUPS_PER_STEP)]
    assert trained == [n for batch in in_order for _ in range(setting.uses) for n in batch]
    assert [step.learner_version for step in steps] == list(range(setting.steps))
    assert found.complaints == [] and ledger.trained == setting.groups
    assert (ledger.buffered, ledger.in_flight) == (0, 0)
    assert set(ledger.dropped) <= {"duplicate"}
    # Only a cut log loses what was acknowledged.
    assert ledger.regenerated == 0 or POWER_CUT in setting.victims
    prompts = Counter(prompt_index(n, setting.prompts, seed=0) for n in trained)
    assert set(prompts.values()) == {EPOCHS * setting.uses} and len(prompts) == setting.prompts
