"""How a run stands on its server: what is leased, what is buffered, and which learner is heard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import redis

from counterflow.buffer.store import Keys


@dataclass(frozen=True, slots=True)
class Row:
    """A group on the stream, in the run's directory of groups."""

    entry_id: bytes
    oldest_version: int
    newest_version: int
    """Of the weights that sampled its tokens; -1 without tokens."""
    added_at: int
    """The learner's version when the group was added, as far as the server knew it."""
    tokens: int
    text: bytes = b""
    """As it stands in the directory."""

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """The row that add.lua wrote."""
        entry_id, tokens, _, oldest, newest, added_at = text.split()
        return cls(entry_id, int(oldest), int(newest), int(added_at), int(tokens), text)

    @property
    def arrival(self) -> tuple[int, ...]:
        """Sorts rows as they arrived."""
        return tuple(int(part) for part in self.entry_id.split(b"-"))


@dataclass(frozen=True)
class Standing:
    """How the run stands, read in one transaction."""

    server: str
    """A name of the server process: another one after each start."""
    term: str
    """Of the learner that is heard."""
    version: int
    admitted: int
    """The number that the next admission gets."""
    leases: dict[int, float]
    """Groups being generated, and the Unix time in seconds at which each lease ends."""
    buffered: dict[int, Row]
    strangers: int
    """Entries on the stream that are not in the directory."""


def read_standing(client: redis.Redis, keys: Keys, known: Mapping[bytes, Row] = MappingProxyType({})) -> Standing:
    """How the run stands now. Raises what the client raises.

    Args:
        known: rows of the directory by their texts, which are not parsed again.
    """
    with client.pipeline(transaction=True) as pipeline:
        server = _ask_name(client, keys, pipeline)
        pipeline.hmget(keys.state, "term", "version", "admitted")
        pipeline.zrange(keys.leases, 0, -1, withscores=True)
        pipeline.hgetall(keys.buffered)
        pipeline.xlen(keys.stream)
        answers: list[Any] = pipeline.execute()
    *told, (term, version, admitted), leases, buffered, entries = answers
    return Standing(
        server=server or _name(told[0]),
        term=(term or b"").decode(),
        version=int(version or 0),
        admitted=int(admitted or 0),
        leases={int(n): ends_ms / 1000 for n, ends_ms in leases},
        buffered={int(n): known.get(text) or Row.parse(text) for n, text in buffered.items()},
        strangers=entries - len(buffered),
    )


def read_heard(client: redis.Redis, keys: Keys) -> tuple[str, str]:
    """The name of the server process, and the term of the learner that it hears. Raises what the client raises."""
    with client.pipeline(transaction=True) as pipeline:
        server = _ask_name(client, keys, pipeline)
        answers: list[Any] = pipeline.hget(keys.state, "term").execute()
    return server or _name(answers[0]), (answers[-1] or b"").decode()


def _ask_name(client: redis.Redis, keys: Keys, pipeline: Any) -> str:
    """The server's name, or an empty one where the pipeline will tell it: a cluster's has no room for the question.

    It comes first: a server that starts in between is then found out the next time.
    """
    if isinstance(client, redis.RedisCluster):
        return _name(client.info("server", target_nodes=client.get_node_from_key(keys.state)))
    pipeline.info("server")
    return ""


def _name(info: dict[str, Any]) -> str:
    return str(info["run_id"])
