"""Responses of several turns: tokens stay as they were sampled, what an environment says is not trained."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from counterflow.actors import environments
from counterflow.actors.calculator import Calculator, calculate
from counterflow.actors.environments import EnvironmentLoop, Step, chat_message, resolve_environment
from counterflow.actors.episodes import Episode, Player
from counterflow.actors.generation import Completion
from counterflow.actors.reward_process import Scored
from counterflow.actors.scoring import Scoring
from counterflow.actors.tasks import Prompt
from counterflow.buffer.trajectory import VersionSpan
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError, RunFailed

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=<>?. \u2063'"
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>")
PROMPT = Prompt(1, (9, 8, 7), {"prompt": "jih", "answer": "ab"})


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, but for `ab`: encoded it is one, sampled it may be two."""
    vocabulary = {letter: i for i, letter in enumerate([*LETTERS, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    made.chat_template = CHAT
    return made


TOKENIZER = merging_tokenizer()


class Script:
    """An engine whose turns the test wrote. Meets what a Player asks of an engine."""

    def __init__(self, *turns: Sequence[int], reasons: dict[int, str] | None = None) -> None:
        self._turns, self._reasons = turns, reasons or {}
        self.contexts: list[tuple[int, ...]] = []
        self.rooms: list[int] = []
        self.seeds: list[int | None] = []

    async def extend(self, token_ids: Sequence[int], max_tokens: int, seed: int | None = None) -> Completion:
        turn = len(self.contexts) % len(self._turns)
        self.contexts.append(tuple(token_ids))
        self.rooms.append(max_tokens)
        self.seeds.append(seed)
        said = list(self._turns[turn][:max_tokens])
        reason = self._reasons.get(turn, "stop") if len(said) == len(self._turns[turn]) else "length"
        logprobs = np.full(len(said), -0.5 - turn, np.float32)
        return Completion(np.asarray(said, np.int32), logprobs, (VersionSpan(turn, 0, len(said)),), reason)

    async def decode_greedily(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Completion:
        assert max_tokens is not None
        return await self.extend(token_ids, max_tokens)


class Says:
    """An environment that says what the test wrote, then that it is over."""

    def __init__(self, *steps: Step | Exception) -> None:
        self._steps = iter(steps)
        self.heard: list[list[int]] = []

    def __call__(self, tokenizer: Any) -> Says:
        return self

    async def reset(self, record: dict[str, Any]) -> None:
        assert record == PROMPT.record

    async def step(self, turn_token_ids: Sequence[int]) -> Step:
        self.heard.append(list(turn_token_ids))
        step = next(self._steps, Step(done=True))
        if isinstance(step, Exception):
            raise step
        return step


def player(environment: Any, max_tokens: int = 64, turns: int = 8, **run: Any) -> Player:
    config = RunConfig.model_validate(
        {
            "run": run,
            "sampling": {"max_tokens": max_tokens, "stop": ["</calc>"]},
            "task": {"environment": "calculator", "turns": turns, "environment_timeout_s": 0.2},
            "admission": {"samples_per_group": 2},
        }
    )
    made = Player(config, TOKENIZER)
    made._make = environment
    return made


def play(environment: Any, script: Any, **options: Any) -> Episode:
    return asyncio.run(player(environment, **options).decode_greedily(script, PROMPT))


def test_sampled_tokens_are_merged_on_their_way_through_text() -> None:
    a, b, end = (TOKENIZER.convert_tokens_to_ids(token) for token in ("a", "b", "<|end|>"))
    assert TOKENIZER.encode(TOKENIZER.decode([a, b])) == [TOKENIZER.convert_tokens_to_ids("ab")]

    class Chat(Says):
        async def step(self, turn_token_ids: Sequence[int]) -> Step:
            await super().step(turn_token_ids)
            return Step(chat_message(TOKENIZER, "tool", "ab", turn_token_ids), done=len(self.heard) == 2)

    chat, script = Chat(), Script([a, b, end], [b, a, b, end])
    episode = play(chat, script)
    message = TOKENIZER.encode("<|tool|>ab<|end|><|assistant|>")
    assert len(message) == 4
    assert chat.heard == [[a, b, end], [b, a, b, end]]
    assert script.contexts == [PROMPT.token_ids, (*PROMPT.token_ids, a, b, end, *message)]
    assert episode.token_ids.tolist() == [a, b, end, *message, b, a, b, end]
    assert (episode.finish_reason, episode.last_turn) == ("stop", 7)
    # A turn that a stop text ended, not the template's token, is closed by the environment.
    assert chat_message(TOKENIZER, "tool", "ab", [a, b]) == (end, *message)


def test_what_the_environment_says_is_trained_or_has_a_logprob() -> None:
    episode = play(Says(Step((5, 6), 0.25), Step((4,), 0.5), Step((), 1.0, done=True)), Script([1, 2], [3], [1, 1]))
    assert episode.token_ids.tolist() == [1, 2, 5, 6, 3, 4, 1, 1]
    assert episode.loss_mask is not None
    assert episode.loss_mask.tolist() == [True, True, False, False, True, False, True, True]
    assert episode.logprobs.tolist() == [-0.5, -0.5, 0, 0, -1.5, 0, -2.5, -2.5]
    assert episode.version_spans == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 6), VersionSpan(2, 6, 8))
    assert (episode.reward, episode.last_turn) == (1.75, 6)


def test_response_without_an_answer_carries_a_mask() -> None:
    assert play(Says(), Script([1, 2])).loss_mask is None


@given(
    turns=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=6),
    answers=st.lists(st.lists(st.integers(31, 40), max_size=6), max_size=6),
    most=st.integers(1, 20),
    allowed=st.integers(1, 6),
)
def test_response_outgrows_its_room_or_loses_tokens(
    turns: list[list[int]], answers: list[list[int]], most: int, allowed: int
) -> None:
    script = Script(*turns)
    episode = play(Says(*(Step(tuple(said)) for said in answers)), script, max_tokens=most, turns=allowed)
    tokens, mask = episode.token_ids.tolist(), episode.loss_mask
    assert 0 < len(tokens) <= most and len(script.contexts) <= allowed
    assert len(tokens) == len(episode.logprobs) == episode.version_spans[-1].end
    whole = (*PROMPT.token_ids, *tokens)
    for context, room in zip(script.contexts, script.rooms, strict=True):
        assert whole[: len(context)] == context and room == most - (len(context) - len(PROMPT.token_ids)) > 0
    sampled = [token < 31 for token in tokens]
    assert sampled == (list(mask) if mask is not None else [True] * len(tokens))
    assert sampled[episode.last_turn :] == [True] * (len(tokens) - episode.last_turn)


@pytest.mark.parametrize(
    ("failure", "words"),
    [(ZeroDivisionError("by a tool"), "step of calculator raised ZeroDivisionError"), (None, "environment_timeout_s")],
)
def test_failing_environment_takes_its_group_with_it(failure: Exception | None, words: str) -> None:
    class Hangs(Says):
        async def step(self, turn_token_ids: Sequence[int]) -> Step:
            await asyncio.sleep(3600)
            return Step()

    bad = Hangs() if failure is None else Says(failure)
    sides = iter([bad, Says(Step((), 1.0, done=True))])
    failed, fine = asyncio.run(player(lambda _: next(sides)).sample(Script([1, 2]), PROMPT, 0))  # type: ignore[arg-type]
    assert (fine.reward, fine.error) == (1.0, "") and failed.reward is None and words in failed.error
    assert failed.token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("nothing", "step of calculator returned str, not a Step"),
        (Step((-4,)), "token ids that the tokenizer does not have"),
        (Step((10**6,)), "token ids that the tokenizer does not have"),
        (lambda: Step((1.5,)), "token ids must be whole numbers, not (1.5,)"),  # type: ignore[arg-type]
        (lambda: Step(5), "token ids must be whole numbers, not 5"),  # type: ignore[arg-type]
        (lambda: Step(reward=None), "reward must be a number, not None"),  # type: ignore[arg-type]
        (Step(reward=1e308), "add up to no finite number"),
        (TimeoutError("a tool"), "step of calculator raised RuntimeError: TimeoutError: a tool"),
        (SystemExit(1), "step of calculator raised RuntimeError: SystemExit: 1"),
        (asyncio.CancelledError(), "step of calculator raised RuntimeError: CancelledError"),
    ],
)
def test_environment_that_answers_nonsense_ends_the_run(answer: Any, words: str) -> None:
    class Babbles(Says):
        async def step(self, turn_token_ids: Sequence[int]) -> Step:
            if isinstance(answer, BaseException):
                raise answer
            if callable(answer):
                return answer()  # type: ignore[no-any-return]
            return answer  # type: ignore[no-any-return]

    sides = iter([Babbles(), Says(Step((), 1.0, done=True))])
    failed, fine = asyncio.run(player(lambda _: next(sides)).sample(Script([1, 2]), PROMPT, 0))  # type: ignore[arg-type]
    assert (fine.reward, fine.error) == (1.0, "") and failed.reward is None and words in failed.error


class Blocks(Says):
    """Keeps its thread until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.begun = 0

    async def step(self, turn_token_ids: Sequence[int]) -> Step:
        self.begun += 1
        self.go.wait(60)
        return Step(done=True)


def test_environment_that_blocks_its_thread_blocks_its_actor_or_others() -> None:
    blocks = Blocks()
    sides = [blocks, Says(Step((), 1.0, done=True))]
    made = player(lambda _: sides.pop(0))

    async def one_after_the_other() -> tuple[Episode, Episode, int]:
        playing = asyncio.create_task(made.decode_greedily(Script([1, 2]), PROMPT))  # type: ignore[arg-type]
        beats = 0
        while not playing.done():
            await asyncio.sleep(0.01)
            beats += 1
        return await playing, await made.decode_greedily(Script([1, 2]), PROMPT), beats  # type: ignore[arg-type]

    failed, fine, beats = asyncio.run(one_after_the_other())
    blocks.go.set()
    assert failed.reward is None and "step of calculator did not answer" in failed.error and beats > 3
    assert (fine.reward, fine.error) == (1.0, "")


def test_call_that_was_given_up_in_the_queue_is_made_all_the_same() -> None:
    loop, blocks, calls = EnvironmentLoop(), Blocks(), []
    thread = loop._threads[0]

    async def counted() -> None:
        calls.append(1)

    async def both() -> list[Any]:
        answers = loop.answer(lambda: blocks.step([]), 0.05), loop.answer(counted, 0.05)
        return await asyncio.gather(*answers, return_exceptions=True)

    assert [type(answer) for answer in asyncio.run(both())] == [TimeoutError, TimeoutError]
    blocks.go.set()
    thread.join(60)
    assert not thread.is_alive() and not calls


def test_environments_block_threads_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_MOST_BLOCKED", 1)
    monkeypatch.setattr(environments, "_ROUND_TRIP_S", 0.05)
    blocks = Blocks()
    made = player(lambda _: blocks)
    with pytest.raises(RunFailed, match="task.environment keeps 2 threads of one actor from going on"):
        asyncio.run(made.sample(Script([1, 2]), PROMPT, 0))  # type: ignore[arg-type]
        asyncio.run(made.sample(Script([1, 2]), PROMPT, 0))  # type: ignore[arg-type]
    blocks.go.set()


def test_token_behind_a_gap_in_the_vocabulary_is_refused() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.get_vocab = lambda: {"a": 0, "b": 99}  # type: ignore[method-assign]
    assert Player(player(Says())._config, tokenizer)._last_id == 99


def test_two_turns_share_their_seed() -> None:
    script = Script([1], [2])
    sides = [Says(Step((5,))), Says(Step((5,)))]
    asyncio.run(player(lambda _: sides.pop(), deterministic=True).sample(script, PROMPT, 3))  # type: ignore[arg-type]
    again = Script([1], [2])
    sides = [Says(Step((5,))), Says(Step((5,)))]
    asyncio.run(player(lambda _: sides.pop(), deterministic=True).sample(again, PROMPT, 3))  # type: ignore[arg-type]
    assert script.seeds == again.seeds and len(set(script.seeds)) == 4 and None not in script.seeds


def test_calculator_leaves_a_call_unanswered() -> None:
    calculator = Calculator(TOKENIZER)
    call = TOKENIZER.encode("so <calc>12*3</calc>")
    step = asyncio.run(calculator.step(call))
    assert TOKENIZER.decode(step.token_ids) == "<result>36</result>" and not step.done
    assert asyncio.run(calculator.step(TOKENIZER.encode("36."))).done


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*3", "36"),
        (" (1+2) / 4 ", "0.75"),
        ("-2**3", "-8"),
        ("7//2 + 7%4", "6"),
        ("0.1+0.2", "0.3"),
        ("2**64", "18446744073709551616"),
        ("1/0", "error"),
        ("9**9**9", "error"),
        ("2**0.5", "error"),
        ("1e999", "error"),
        ("__import__('os')", "error"),
        ("1 if 2 else 3", "error"),
        ("True", "error"),
        ("(" * 99 + "1" + ")" * 99, "1"),
        ("1+" * 200 + "1", "error"),
        ("", "error"),
    ],
)
def test_calculator_is_wrong_or_breaks(expression: str, value: str) -> None:
    assert calculate(expression) == value


@given(st.text(alphabet="0123456789.+-*/%()eE, j_", max_size=40))
def test_calculator_raises(expression: str) -> None:
    assert calculate(expression)


@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda e: st.tuples(e, st.sampled_from("+-*"), e).map("({0[0]}{0[1]}{0[2]})".format),
        max_leaves=8,
    )
)
def test_calculator_disagrees_with_python(expression: str) -> None:
    assert calculate(expression) == str(Fraction(eval(expression)))


@pytest.mark.parametrize(
    ("environment", "stop", "words"),
    [
        ("calculater", [], r"task\.environment = calculater: no such environment"),
        ("calculator", [], r'set sampling\.stop to \["</calc>"\]'),
        ("missing_module:Tool", [], r"task\.environment = missing_module:Tool: missing_module cannot be imported"),
        ("json:Tool", [], r"has no Tool"),
    ],
)
def test_environment_that_is_not_there_is_found_out_late(environment: str, stop: list[str], words: str) -> None:
    config = RunConfig.model_validate({"task": {"environment": environment}, "sampling": {"stop": stop}})
    with pytest.raises(ConfigError, match=words):
        resolve_environment(config)


class Pool:
    """A reward pool whose rewards the test wrote, and which remembers what it was given to read."""

    def __init__(self, *scored: Scored) -> None:
        self.scored, self.read, self.noted = list(scored), [""], [""]

    async def score_parts(self, texts: list[str], record: Any, deadline_s: float | None = None) -> list[Scored]:
        self.read = texts
        return self.scored

    def note(self, failure: str, message: str) -> None:
        self.noted.append(message)


def rewards(pool: Pool, episodes: list[Episode], reward: dict[str, Any]) -> list[Scored]:
    config = RunConfig.model_validate(
        {"task": {"environment": "calculator"}, "sampling": {"stop": ["</calc>"]}, "reward": reward}
    )
    return asyncio.run(Scoring(config, TOKENIZER, pool).group(0, PROMPT, episodes))  # type: ignore[arg-type]


def test_environments_reward_is_lost_among_the_parts() -> None:
    words = TOKENIZER.encode("so 36")
    episode = play(Says(Step((5,), 0.5), Step((), 1.5, done=True)), Script([1, 2], words))
    pool = Pool(Scored(3.0, parts={"exact": 3.0}))
    (sample,) = rewards(pool, [episode], {"name": "exact"})
    assert (sample.reward, sample.parts) == (5.0, {"exact": 3.0, "environment": 2.0})
    assert pool.read == ["so 36"]
    pool = Pool(Scored(6.0, parts={"exact": 3.0, "environment": 0.0}))
    (sample,) = rewards(pool, [episode], {"parts": {"exact": 2.0, "environment": 0.25}})
    assert (sample.reward, sample.parts) == (6.5, {"exact": 3.0, "environment": 2.0})


def test_failed_environment_or_cut_response_is_rewarded() -> None:
    failed = play(Says(Step((5,), 9.0), ValueError("broken")), Script([1], [2]))
    cut = play(Says(Step((5,), 9.0)), Script([1], [2] * 99))
    pool = Pool(*[Scored(1.0, parts={"exact": 1.0})] * 2)
    of_failed, of_cut = rewards(pool, [failed, cut], {"truncated": "zero_reward"})
    assert of_failed.reward is None and "broken" in pool.noted[-1]
    assert of_cut.reward == 0.0 and of_cut.parts == {"exact": 1.0, "environment": 9.0}


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_reward_that_is_no_number_reaches_the_learner(reward: float) -> None:
    class Careless(Says):
        async def step(self, turn_token_ids: Sequence[int]) -> Step:
            return Step(reward=reward)

    episode = play(Careless(), Script([1]))
    assert episode.reward is None and "must be a finite number" in episode.error
