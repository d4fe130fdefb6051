"""The responses to one prompt, decoded by a transformers model: one token further for all of them at each step.

Flows in: a prompt's token ids, a model whose weights may change between two steps, a generator a response. Flows out:
completions. Responses that end leave the batch, so that all rows have one length and none is ever padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from counterflow.actors.generation import Completion
from counterflow.buffer.trajectory import spans
from counterflow.configs.generation import SamplingSection

End = Callable[[list[int]], str | None]
"""Why a response ends with the last of these tokens, its own; None where it goes on."""


@dataclass
class Response:
    """One response on its way."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of each token, the version that sampled it."""
    finish_reason: str | None = None

    def completion(self) -> Completion:
        """The response as it is kept."""
        return Completion(
            np.asarray(self.token_ids, np.int32),
            np.asarray(self.logprobs, np.float32),
            spans(self.versions),
            self.finish_reason or "abort",
        )


def sampled_from(sampling: SamplingSection) -> LogitsProcessorList:
    """From a model's logits to those of the distribution that is sampled: temperature, then top-k, then top-p."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


class Decoding:
    """Responses that share a prompt.

    Args:
        generators: one for each response; `greedily` takes the likeliest token and leaves them alone.
    """

    def __init__(
        self,
        model: Any,
        prompt_token_ids: Sequence[int],
        generators: Sequence[torch.Generator],
        warpers: LogitsProcessorList,
        end: End,
        *,
        greedily: bool = False,
    ) -> None:
        self._model, self._warpers, self._end, self._greedily = model, warpers, end, greedily
        self._ids = torch.tensor([list(prompt_token_ids)] * len(generators), device=model.device)
        self._going_on = list(zip([Response() for _ in generators], generators, strict=True))
        self._responses = [response for response, _ in self._going_on]
        self._cache: Any = None
        self.version: int | None = None
        """That of the last step."""

    @property
    def done(self) -> bool:
        """Whether every response has ended."""
        return not self._going_on

    def completions(self) -> list[Completion]:
        """The responses, once they are done."""
        return [response.completion() for response in self._responses]

    @torch.inference_mode()
    def step(self, version: int, *, recompute: bool) -> None:
        """Sample the next token of every response that goes on.

        Args:
            version: whose weights the model holds.
            recompute: whether a key-value cache of other weights is made anew, or attended to as it is.
        """
        if self.version != version and recompute:
            self._cache = None
        self.version = version
        logprobs = torch.log_softmax(self._warpers(self._ids, self._logits().float()), -1)
        chosen = logprobs.argmax(-1) if self._greedily else self._sample(logprobs)
        self._ids = torch.cat([self._ids, chosen[:, None]], 1)
        values = logprobs.gather(-1, chosen[:, None]).flatten().tolist()
        for (response, _), token, value in zip(self._going_on, chosen.tolist(), values, strict=True):
            response.token_ids.append(token)
            response.logprobs.append(value)
            response.versions.append(version)
            response.finish_reason = self._end(response.token_ids)
        self._leave()

    def _logits(self) -> Tensor:
        """Of the next token, [responses that go on, vocabulary]."""
        if self._cache is not None:
            return self._forward(self._ids[:, -1:])
        if any(response.token_ids for response, _ in self._going_on):
            return self._forward(self._ids)
        return self._read_prompt()

    def _read_prompt(self) -> Tensor:
        """Once for all responses."""
        logits = self._forward(self._ids[:1])
        self._cache.batch_repeat_interleave(len(self._ids))
        return logits.expand(len(self._ids), -1)

    def _forward(self, ids: Tensor) -> Tensor:
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def _sample(self, logprobs: Tensor) -> Tensor:
        """A token a row: the first of independent clocks to ring, each at the rate of its token's probability."""
        clocks = torch.empty_like(logprobs)
        for row, (_, generator) in zip(clocks, self._going_on, strict=True):
            row.exponential_(generator=generator)
        return (logprobs.exp() / clocks).argmax(-1)

    def _leave(self) -> None:
        kept = [i for i, (response, _) in enumerate(self._going_on) if response.finish_reason is None]
        if len(kept) == len(self._going_on):
            return
        self._going_on = [self._going_on[i] for i in kept]
        if kept:
            rows = torch.tensor(kept, device=self._ids.device)
            self._ids = self._ids[rows]
            self._cache.batch_select_indices(rows)
