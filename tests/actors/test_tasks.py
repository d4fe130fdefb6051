"""What may be wrong with prompts: bad files, bad parameters, prompts that do not fit, an order that repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterflow.actors.tasks import TaskSet, load_task, prompt_index
from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
)


def character_tokenizer(chat_template: str | None = None, appends_eos: bool = False) -> Any:
    """A real tokenizer of single characters: token count = text length."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<eos>": 1} | {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if appends_eos:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = chat_template
    return fast


def load(task: dict[str, Any], tokenizer: Any = None, **sections: dict[str, Any]) -> TaskSet:
    config = RunConfig.model_validate({"task": task, **sections})
    return load_task(config, tokenizer or character_tokenizer())


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(count)]


def refused(task: dict[str, Any], tokenizer: Any = None, **sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        load(task, tokenizer, **sections)
    message = str(error.value)
    assert "\n" not in message
    return message


@settings(max_examples=50)
@given(size=st.integers(1, 200), epoch=st.integers(0, 5), seed=st.integers(0, 2**31 - 1))
def test_no_prompt_is_skipped_or_repeated_within_an_epoch(size: int, epoch: int, seed: int) -> None:
    visited = [prompt_index(epoch * size + position, size, seed) for position in range(size)]
    assert sorted(visited) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(epoch: int, seed: int) -> tuple[int, ...]:
        return tuple(prompt_index(epoch * 50 + position, 50, seed) for position in range(50))

    orders = [order(epoch, seed) for epoch in range(4) for seed in range(4)]
    assert len(set(orders)) == 16


def test_the_order_is_the_same_in_every_process_and_release() -> None:
    assert [prompt_index(n, 5, 0) for n in range(10)] == [3, 2, 1, 0, 4, 0, 1, 2, 4, 3]


def test_a_negative_admission_is_an_error() -> None:
    with pytest.raises(ValueError, match="admission -1"):
        prompt_index(-1, 5, 0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "1+1="', "line 3: not JSON"),
        ("[1]", "line 3: is a list"),
        ("7", "line 3: is a number"),
        ({"answer": "2"}, "line 3: the key `prompt` is missing; it has answer"),
        ({"prompt": "1+1="}, "line 3: the key `answer` is missing"),
        ({"prompt": 7, "answer": "2"}, "line 3: `prompt` is a number"),
        ({"prompt": "1+1=", "answer": None}, "line 3: `answer` is null"),
        ({"prompt": "1+1=", "answer": ["2"]}, "line 3: `answer` is a list"),
        ({"prompt": [], "answer": "2"}, "line 3: `prompt` is an empty list"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "line 3: a chat message must be"),
        ({"prompt": ["hello"], "answer": "2"}, "line 3: a chat message must be"),
        (
            {"prompt": [{"role": "user", "content": "hi"}], "answer": "2"},
            "line 3: the prompt is a list of chat messages",
        ),
        ({"prompt": "", "answer": "2"}, "line 3: the prompt has no tokens"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: Any, expected: str) -> None:
    path = write(tmp_path / "train.jsonl", *sums(2), line, *sums(2))
    message = refused({"path": path})
    assert message.startswith(f"{path}, {expected}")


def test_a_line_that_is_not_utf8_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff", "answer": "b"}\n')
    assert "line 2: not UTF-8" in refused({"path": path})


def test_a_missing_unset_or_empty_file_is_refused(tmp_path: Path) -> None:
    assert "task.path is not set" in refused({})
    assert "No such file" in refused({"path": tmp_path / "none.jsonl"})
    assert "Is a directory" in refused({"path": tmp_path})
    assert "the file is empty" in refused({"path": write(tmp_path / "empty.jsonl")})
    assert "the file is empty" in refused({"path": write(tmp_path / "blank.jsonl", "", "  ")})


def test_answers_of_every_scalar_type_become_text(tmp_path: Path) -> None:
    answers = ["042", 42, 4.5, True]
    path = write(tmp_path / "train.jsonl", *({"prompt": f"{a}?", "answer": a, "level": 3} for a in answers))
    task = load({"path": path, "heldout_path": path})
    assert [prompt.record["answer"] for prompt in task.train] == ["042", "42", "4.5", "true"]
    assert [prompt.prompt_id for prompt in task.train] == [1, 2, 3, 4]
    assert task.train[0].record["level"] == 3


def test_a_blank_line_or_byte_order_mark_does_not_shift_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n\r\n{"prompt": "c", "answer": "d"}')
    assert [prompt.prompt_id for prompt in load({"path": path, "heldout_path": path}).train] == [1, 3]


def test_a_prompt_without_room_for_a_response_is_refused_or_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *sums(8), *({"prompt": "1+1" * n, "answer": "x"} for n in (4, 5)))
    sections = {"model": {"context_length": 20}, "sampling": {"max_tokens": 10}}
    message = refused({"path": path}, **sections)
    assert message.startswith(f"{path}, line 9: the prompt has 12 tokens")
    assert "leaves 10 (2 of 10 prompts" in message
    task = load({"path": path, "overlong": "drop"}, **sections)
    assert task.overlong == 2
    assert len(task.train) + len(task.heldout) == 8


def test_dropping_every_prompt_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *({"prompt": "1+1" * 9, "answer": str(n)} for n in range(4)))
    sections = {"model": {"context_length": 20}, "sampling": {"max_tokens": 10}}
    assert "would leave none" in refused({"path": path, "overlong": "drop"}, **sections)


def test_a_response_as_long_as_the_context_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *sums(4))
    sections = {"model": {"context_length": 20}, "sampling": {"max_tokens": 20}}
    assert "leaves no room for a prompt" in refused({"path": path}, **sections)


@pytest.mark.parametrize(("lines", "wanted", "heldout"), [(100, 10, 10), (100, 50, 25), (8, 512, 2), (2, 512, 1)])
def test_held_out_lines_are_never_trained_on(tmp_path: Path, lines: int, wanted: int, heldout: int) -> None:
    path = write(tmp_path / "train.jsonl", *sums(lines))
    task = load({"path": path}, evaluation={"prompts": wanted})
    assert len(task.heldout) == heldout
    assert sorted(p.prompt_id for p in [*task.train, *task.heldout]) == list(range(1, lines + 1))
    other = load({"path": path}, evaluation={"prompts": wanted}, run={"seed": 1})
    assert load({"path": path}, evaluation={"prompts": wanted}) == task
    assert lines < 8 or other.heldout != task.heldout


def test_a_held_out_text_leaves_training_wherever_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *sums(10), *sums(10))
    task = load({"path": path}, evaluation={"prompts": 3})
    assert not {p.token_ids for p in task.train} & {p.token_ids for p in task.heldout}


def test_a_file_too_small_to_split_is_refused(tmp_path: Path) -> None:
    for lines in (sums(1), [sums(1)[0], sums(1)[0]]):
        path = write(tmp_path / "train.jsonl", *lines)
        assert "lower evaluation.prompts" in refused({"path": path})


def test_text_becomes_a_user_message_where_there_is_a_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    lines = [{"prompt": "a", "answer": "x"}, {"prompt": messages, "answer": "x"}]
    path = write(tmp_path / "train.jsonl", *lines)
    tokenizer = character_tokenizer(TEMPLATE)

    def texts(**task: Any) -> list[str]:
        loaded = load({"path": path, "heldout_path": path, **task}, tokenizer)
        return [tokenizer.decode(list(prompt.token_ids)) for prompt in loaded.train]

    assert texts() == ["[user]a[me]", "[system]own[user]b[me]"]
    assert texts(system_prompt="short") == ["[system]short[user]a[me]", "[system]own[user]b[me]"]
    assert texts(chat=False) == ["a", "[system]own[user]b[me]"]


def test_chat_without_a_template_or_a_system_prompt_without_chat_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *sums(4))
    assert "line 1: task.chat is true, but the tokenizer" in refused({"path": path, "chat": True})
    assert "line 1: task.system_prompt is set, but" in refused({"path": path, "system_prompt": "be brief"})


def test_a_template_that_refuses_the_messages_is_told_with_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *sums(4))
    tokenizer = character_tokenizer("{{ raise_exception('roles must\nalternate') }}")
    assert "line 1: the chat template of" in refused({"path": path}, tokenizer)


def test_an_eos_that_the_tokenizer_appends_is_taken_off(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *sums(4))
    task = load({"path": path}, character_tokenizer(appends_eos=True))
    assert all(1 not in prompt.token_ids for prompt in task.train)


GYM: dict[str, Any] = {"kind": "reasoning_gym", "name": "letter_counting", "size": 40}


def test_reasoning_gym_never_evaluates_on_a_training_question() -> None:
    task = load({**GYM, "parameters": {"max_words": 6}}, evaluation={"prompts": 20}, model={"context_length": 512})
    assert (len(task.train), len(task.heldout)) == (40, 20)
    questions = {prompt.record["prompt"] for prompt in task.train}
    assert not questions & {prompt.record["prompt"] for prompt in task.heldout}
    assert task.train[0].record["metadata"]["source_dataset"] == "letter_counting"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": None}, "task.name is not set"),
        ({"name": "leter_counting"}, "did you mean letter_counting?"),
        ({"parameters": {"max_word": 3}}, "did you mean max_words? It has min_words, max_words"),
        ({"parameters": {"seed": 3}}, "set run.seed instead"),
        ({"parameters": {"size": 3}}, "set task.size instead"),
        ({"parameters": {"min_words": 9, "max_words": 3}}, "max_words must be >= min_words"),
        ({"parameters": {"min_words": "many"}}, "refuses"),
    ],
)
def test_a_reasoning_gym_task_or_parameter_that_does_not_exist_is_refused(changes: Any, expected: str) -> None:
    assert expected in refused({**GYM, **changes})


def test_a_reasoning_gym_task_with_too_few_questions_is_refused() -> None:
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = {"kind": "reasoning_gym", "name": "chain_sum", "size": 4000, "parameters": parameters}
    assert "every held-out question is also a training question" in refused(task, evaluation={"prompts": 4})
