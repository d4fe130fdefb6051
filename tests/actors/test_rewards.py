"""What a user's reward may do wrong: each misdeed costs its sample, never the group, the pool or the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from counterflow.actors.reward_process import Scored, zeroed
from counterflow.actors.rewards import RewardPool, exact, last_number, math_verify, resolve_rewards
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, RunFailed

MISBEHAVING = """
import ctypes, os, signal, sys, time
leak = []

def brevity(completion, record):
    if completion == "bad":
        raise ValueError("it is bad")
    return len(completion)

def reward(completion, record):
    if completion == "slow":
        time.sleep(0.6)
    if completion == "raise":
        raise ValueError("first line\\nsecond line")
    if completion == "exit":
        sys.exit(3)
    if completion == "hang":
        while True:
            time.sleep(1)
    if completion == "hang in C":
        ctypes.CDLL(None).sleep(3600)
    if completion == "die":
        os._exit(5)
    if completion == "die quietly":
        os._exit(0)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "eat":
        while True:
            leak.append(bytearray(64 << 20))
    if completion == "unpicklable error":
        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__()
        raise Odd(1, 2)
    if completion == "mutate":
        record["answer"] = "changed"
    return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "huge": 10**400,
            "pid": os.getpid(), "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "torch": "torch" in sys.modules or "ray" in sys.modules}.get(completion, record["answer"] == "7")
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "misbehaving_reward.py").write_text(MISBEHAVING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def config(name: str = "misbehaving_reward:reward", **changes: Any) -> RunConfig:
    reward = {"name": name, "timeout_s": 1.0, "memory_bytes": 1 << 29, **changes}
    return RunConfig.model_validate({"reward": reward})


@pytest.fixture
def pool(user_module: Path) -> Iterator[RewardPool]:
    pool = RewardPool(config())
    yield pool
    pool.close()


def score(pool: RewardPool, *completions: str) -> list[float | None]:
    async def bounded() -> list[float | None]:
        async with asyncio.timeout(60):
            return await pool.score(list(completions), {"prompt": "3+4=", "answer": "7"})

    return asyncio.run(bounded())


@pytest.mark.parametrize(
    ("misdeed", "reason"),
    [
        ("raise", "raised"),
        ("exit", "raised"),
        ("unpicklable error", "raised"),
        ("hang", "timeout"),
        ("hang in C", "timeout"),
        ("die", "crashed"),
        ("die quietly", "timeout"),
        ("segfault", "crashed"),
        ("eat", "crashed"),
        ("nan", "not_finite"),
        ("inf", "not_finite"),
        ("huge", "not_finite"),
        ("text", "not_finite"),
        ("none", "not_finite"),
    ],
)
def test_a_misdeed_costs_only_its_sample(pool: RewardPool, misdeed: str, reason: str) -> None:
    assert score(pool, "good", misdeed, "good") == [1.0, None, 1.0]
    assert {name: count for name, count in pool.failures.items() if count} == {reason: 1}
    assert pool.last_error is not None
    assert pool.last_error.startswith(f"{reason}: ")
    assert repr(misdeed) in pool.last_error
    assert "\n" not in pool.last_error


def test_a_reward_out_of_memory_is_told_which_bound_to_raise(pool: RewardPool) -> None:
    assert score(pool, "eat") == [None]
    assert "reward.memory_bytes = 536870912" in str(pool.last_error)


def test_a_reward_that_changes_its_record_does_not_change_it_for_others(pool: RewardPool) -> None:
    assert score(pool, "mutate", "good") == [0.0, 1.0]


def test_a_queue_of_hanging_samples_does_not_eat_the_deadline_of_the_next(pool: RewardPool) -> None:
    async def all_groups() -> list[list[float | None]]:
        record = {"prompt": "", "answer": "7"}
        groups = [["hang"], ["hang"], ["hang"], ["good", "good"]]
        return await asyncio.gather(*(pool.score(group, record) for group in groups))

    assert asyncio.run(all_groups()) == [[None], [None], [None], [1.0, 1.0]]


def test_a_hanging_sample_costs_its_group_one_deadline(pool: RewardPool) -> None:
    assert score(pool, "good") == [1.0]
    started = time.monotonic()
    assert score(pool, *["good"] * 5, "hang", "good", "slow") == [1.0] * 5 + [None, 1.0, 1.0]
    assert time.monotonic() - started < 5  # one deadline, the slow one, a fresh process; nine deadlines are 9 s


def test_several_misdeeds_in_a_group_cost_a_sample_each(pool: RewardPool) -> None:
    assert score(pool, "hang", "good", "die", "raise", "slow", "eat") == [None, 1.0, None, None, 1.0, None]
    assert pool.failures == {"raised": 1, "timeout": 1, "crashed": 2, "not_finite": 0, "not_started": 0}


def test_samples_slower_together_than_one_deadline_all_get_their_reward(pool: RewardPool) -> None:
    assert score(pool, *["slow"] * 8) == [1.0] * 8
    assert sum(pool.failures.values()) == 0


def test_an_evaluation_whose_reward_never_returns_ends_by_its_deadline(pool: RewardPool) -> None:
    async def evaluate() -> list[list[float | None]]:
        calls = (pool.score([text], {"answer": "7"}, deadline_s=2.5) for text in ["good"] + ["hang"] * 511)
        return await asyncio.gather(*calls)

    assert score(pool, "good") == [1.0]
    started = time.monotonic()
    assert asyncio.run(evaluate()) == [[1.0]] + [[None]] * 511
    assert time.monotonic() - started < 2.5 + 1.0 + 4.0
    assert pool.failures["timeout"] + pool.failures["not_started"] == 511
    assert 0 < pool.failures["timeout"] < 8
    assert score(pool, "good") == [1.0]


def test_a_process_killed_between_two_groups_is_replaced(pool: RewardPool) -> None:
    (pid,) = score(pool, "pid")
    assert pid is not None
    os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.5)
    assert score(pool, "good", "good") == [1.0, 1.0]
    assert sum(pool.failures.values()) == 0


def test_a_reward_process_ignores_ctrl_c_and_imports_no_torch(pool: RewardPool) -> None:
    assert score(pool, "sigint", "torch") == [1.0, 0.0]


def test_close_kills_a_hanging_process_within_a_second_and_fails_who_waits(user_module: Path) -> None:
    pool = RewardPool(config(timeout_s=300.0, workers=2))
    pids = [int(pid) for pid in score(pool, "pid") if pid is not None]

    async def close_while_scoring() -> float:
        waiting = [asyncio.create_task(pool.score(["hang in C"], {"answer": "7"})) for _ in range(3)]
        await asyncio.sleep(3)
        started = time.monotonic()
        pool.close()
        taken = time.monotonic() - started
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, RunFailed) for outcome in outcomes), outcomes
        return taken

    assert asyncio.run(close_while_scoring()) < 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(RunFailed):
        score(pool, "good")


def test_a_cancelled_score_gives_its_process_back(pool: RewardPool) -> None:
    async def cancel_then_score() -> list[float | None]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await pool.score(["hang"], {"answer": "7"})
        await asyncio.sleep(0.5)
        return await pool.score(["good"], {"answer": "7"})

    assert asyncio.run(cancel_then_score()) == [1.0]


def test_a_record_that_cannot_be_sent_is_a_failed_sample(pool: RewardPool) -> None:
    assert asyncio.run(pool.score(["good", "good"], {"answer": lambda: 7})) == [None, None]
    assert score(pool, "good") == [1.0]


def test_a_reward_that_cannot_be_loaded_says_so_for_every_sample(user_module: Path) -> None:
    pool = RewardPool(config("no_such_module:reward"))
    assert score(pool, "a", "b") == [None, None]
    assert "no_such_module cannot be imported" in str(pool.last_error)
    pool.close()


DRIVER = """
import asyncio, sys, time
from counterflow.actors.rewards import RewardPool
from counterflow.configs.schema import RunConfig

def main():
    config = RunConfig.model_validate({"reward": {"name": "misbehaving_reward:reward", "timeout_s": 300}})
    pool = RewardPool(config)
    print(int(asyncio.run(pool.score(["pid"], {"answer": "7"}))[0]), flush=True)
    asyncio.run(pool.score(["hang in C"], {"answer": "7"}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_reward_processes_end_with_their_actor_and_print_nothing_of_their_own(
    user_module: Path, ending: signal.Signals
) -> None:
    (user_module / "driver.py").write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, "driver.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert driver.stdout is not None
    reward_pid = int(driver.stdout.readline())
    time.sleep(0.5)
    if ending == signal.SIGINT:
        os.killpg(driver.pid, ending)
    else:
        driver.send_signal(ending)
    _, errors = driver.communicate(timeout=120)
    gone_by = time.monotonic() + 5
    while psutil.pid_exists(reward_pid) and time.monotonic() < gone_by:
        time.sleep(0.05)
    assert not psutil.pid_exists(reward_pid)
    assert errors.count("Traceback") <= (2 if ending == signal.SIGINT else 0), errors
    assert "spawn_main" not in errors


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("042", "042", 1.0), (" 042\n", "042", 1.0), ("42", "042", 0.0), ("", "042", 0.0), ("042 0", "042", 0.0)],
)
def test_exact_forgives_blanks_and_nothing_else(completion: str, answer: str, reward: float) -> None:
    assert exact(completion, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('The letter "e" appears 2 times.', 1.0),
        ("It appears Twice", 1.0),
        ("not 3 but two", 1.0),
        ("2, or rather 3", 0.0),
        ("1.2", 0.0),
        ("12", 0.0),
        ("often", 0.0),
        ("", 0.0),
    ],
)
def test_last_number_reads_the_last_number_whole_and_nothing_else(completion: str, reward: float) -> None:
    assert last_number(completion, {"answer": "2"}) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so it is $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        ("the answer is 1/2", "0.5", 1.0),
        ("first 41, then 42", "42", 1.0),
        (r"$\boxed{43}$", "42", 0.0),
        ("no idea", "42", 0.0),
        ("", "42", 0.0),
        ("A", "A", 1.0),
    ],
)
def test_math_verify_compares_values_not_spellings(completion: str, answer: str, reward: float) -> None:
    assert math_verify(completion, {"answer": answer}) == reward


def test_math_verify_works_in_the_pool_without_its_own_alarms() -> None:
    pool = RewardPool(config("math_verify", timeout_s=10))
    assert asyncio.run(pool.score([r"$\frac{2}{4}$", "3"], {"answer": "1/2"})) == [1.0, 0.0]
    pool.close()


@pytest.mark.parametrize(
    "completion", ["3", " 3\n", "There are <answer> 3 </answer>.", "<answer>4</answer> <answer>3</answer>"]
)
def test_reasoning_gym_reads_the_last_answer_tag_or_the_whole_response(completion: str) -> None:
    task = {"kind": "reasoning_gym", "name": "letter_counting", "size": 4}
    found = resolve_rewards(RunConfig.model_validate({"task": task, "reward": {"name": "reasoning_gym"}}))
    reward, _ = found["reasoning_gym"]
    assert reward(completion, {"question": "?", "answer": "3", "metadata": {}}) == 1.0
    assert reward("4", {"question": "?", "answer": "3", "metadata": {}}) == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "did you mean exact?"),
        ("whatever", "package.module:function"),
        ("no_such_module:reward", "no_such_module cannot be imported"),
        ("broken_reward:reward", "SyntaxError"),
        ("misbehaving_reward:rewards", "misbehaving_reward.py has no rewards"),
        ("misbehaving_reward:leak", "cannot be called"),
        ("misbehaving_reward:", "package.module:function"),
        ("reasoning_gym", "needs task.kind = reasoning_gym, not jsonl"),
    ],
)
def test_a_reward_that_does_not_exist_is_refused_before_the_run(user_module: Path, name: str, message: str) -> None:
    (user_module / "broken_reward.py").write_text(textwrap.dedent("def reward(:"))
    with pytest.raises(ConfigError) as error:
        resolve_rewards(config(name))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_parts_add_up_to_another_reward_or_are_lost(user_module: Path) -> None:
    parts = {"misbehaving_reward:reward": 2.0, "misbehaving_reward:brevity": -0.5}
    pool = RewardPool(RunConfig.model_validate({"reward": {"parts": parts, "timeout_s": 5.0}}))
    try:
        found = asyncio.run(pool.score_parts(["plain", "bad"], {"answer": "7"}))
    finally:
        pool.close()
    assert (found[0].reward, found[0].parts) == (2 * 1 - 0.5 * 5, dict(zip(parts, (1.0, 5.0), strict=True)))
    assert (found[1].reward, found[1].failure, found[1].parts) == (None, "raised", {})
    assert found[1].message == "misbehaving_reward:brevity: ValueError: it is bad"


def test_truncated_response_of_no_reward_keeps_one_or_loses_its_parts() -> None:
    assert zeroed(Scored(2.0, parts={"exact": 1.0})) == Scored(0.0, parts={"exact": 1.0})
    assert zeroed(Scored(None, "timeout", "late")) == Scored(None, "timeout", "late")


def test_part_that_does_not_exist_is_refused_by_another_key(user_module: Path) -> None:
    reward = {"parts": {"exact": 1.0, "misbehaving_reward:absent": 1.0}}
    with pytest.raises(ConfigError, match=r"reward.parts = misbehaving_reward:absent: .* has no absent"):
        resolve_rewards(RunConfig.model_validate({"reward": reward}))
