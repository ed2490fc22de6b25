"""One step: forward pass and sampling, shared by every role."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kvferry.core import ConfigError, KVLayout, ModelLimits
from kvferry.engine.attention import PagedAttention
from kvferry.engine.kernels import Kernels
from kvferry.engine.linear import PRECISIONS
from kvferry.engine.operators import operators_for
from kvferry.engine.sampler import RowRequest, Sampled, sample
from kvferry.engine.sequence import Sequence
from kvferry.engine.settings import EngineSettings
from kvferry.engine.spans import AttentionChunk
from kvferry.engine.states import PagedStates
from kvferry.kvcache import KVCache, KVPool
from kvferry.models import CausalLM, ForwardBatch, load_model

logger = logging.getLogger(__name__)


class StepPart(Protocol):
    """The next `length` uncomputed tokens of one cache, which has capacity for them."""

    @property
    def tokens(self) -> Seq[int]:
        """The sequence's, from position 0."""

    @property
    def length(self) -> int: ...

    @property
    def cache(self) -> KVCache: ...

    @property
    def completes(self) -> bool:
        """Nothing is left to compute after it: the next token can be chosen."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `length` uncomputed tokens of a sequence. Its cache has capacity for them."""

    sequence: Sequence[Any]
    length: int

    @property
    def tokens(self) -> Seq[int]:
        return self.sequence.tokens

    @property
    def cache(self) -> KVCache:
        cache = self.sequence.cache
        assert cache is not None, "a scheduled sequence has a cache"
        return cache

    @property
    def completes(self) -> bool:
        """Nothing is left to compute after it: the next token can be sampled."""
        return self.length == self.sequence.uncomputed


class ModelRunner:
    """A loaded model on its device. Stateless between steps: all state is in the caches it is given."""

    def __init__(self, model: CausalLM, settings: EngineSettings) -> None:
        self.model = model
        self.settings = settings
        self._device = torch.device(settings.device)
        self._kernels = Kernels.of(settings.kernels)
        self.limits = _limit_context(model.limits, settings)
        self.layouts: tuple[KVLayout, ...] = model.layouts(settings.tokens_per_block, settings.kv_dtype)
        self._has_states = any(layout.kind.is_state for layout in self.layouts)

    @classmethod
    def load(cls, model_dir: Path, settings: EngineSettings) -> ModelRunner:
        """Sets this process's compute threads and loads the weights. Raises CheckpointError, ConfigError."""
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        started = time.monotonic()
        operators = operators_for(settings.device, settings.precision, Kernels.of(settings.kernels))
        dtype = PRECISIONS.get(settings.precision).dtype
        runner = cls(load_model(model_dir, operators, dtype, settings.device), settings)
        logger.info("loaded %s in %.1f s, %d threads", model_dir, time.monotonic() - started, torch.get_num_threads())
        return runner

    @torch.inference_mode()
    def execute(self, chunks: Seq[Chunk], pools: Seq[KVPool]) -> list[Sampled | None]:
        """Computes the chunks and samples for those that complete; None for the others.

        Advances each cache's history and publishes its full blocks. The sampled tokens are not appended yet.
        """
        # Noted before histories advance: `completes` is about what is uncomputed now.
        samples = {chunk.sequence.key: chunk.completes for chunk in chunks}
        logits = self.forward(chunks, pools)
        sampled = iter(sample(logits, [_row(chunk.sequence) for chunk in chunks if samples[chunk.sequence.key]]))
        return [next(sampled) if samples[chunk.sequence.key] else None for chunk in chunks]

    @torch.inference_mode()
    def forward(self, chunks: Seq[StepPart], pools: Seq[KVPool]) -> torch.Tensor:
        """Computes the chunks; the logits of those that complete, float32 [completing, vocab], in order.

        Advances each cache's history and publishes its full blocks.
        """
        logits = self.model.forward(self._batch(chunks, pools))
        for chunk in chunks:
            _advance(chunk, self.settings.tokens_per_block)
        return logits

    def _batch(self, chunks: Seq[StepPart], pools: Seq[KVPool]) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        attention_chunks = []
        groups = range(len(pools))
        for chunk in chunks:
            start, cache = chunk.cache.history, chunk.cache
            token_ids += chunk.tokens[start : start + chunk.length]
            positions += range(start, start + chunk.length)
            if chunk.completes:
                logit_rows.append(len(token_ids) - 1)
            attention_chunks.append(
                AttentionChunk(
                    start=start,
                    length=chunk.length,
                    block_tables=tuple(cache.block_table(group) for group in groups),
                    first_blocks=tuple(cache.first_block(group) for group in groups),
                )
            )
        return ForwardBatch(
            token_ids=torch.tensor(token_ids, device=self._device),
            positions=torch.tensor(positions, device=self._device),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=self._device),
            attention=PagedAttention(pools, attention_chunks, self._kernels),
            states=PagedStates(pools, attention_chunks) if self._has_states else None,
        )


def _advance(chunk: StepPart, block: int) -> None:
    cache = chunk.cache
    before = cache.history
    cache.advance(before + chunk.length)
    if cache.history // block > before // block:
        cache.commit(chunk.tokens)


def _row(sequence: Sequence[Any]) -> RowRequest:
    return RowRequest(
        sampling=sequence.request.sampling,
        position=len(sequence.tokens),
        prompt_ids=sequence.request.prompt_token_ids,
        output_ids=sequence.output_ids,
        suppressed=sequence.suppressed_ids,
    )


def _limit_context(limits: ModelLimits, settings: EngineSettings) -> ModelLimits:
    wanted = settings.max_context_tokens
    if wanted is None:
        return limits
    if wanted > limits.max_context_tokens:
        raise ConfigError(
            f"engine.max_context_tokens is {wanted}, but the model was made for {limits.max_context_tokens}",
            field="engine.max_context_tokens",
        )
    return ModelLimits(limits.vocab_size, wanted)
