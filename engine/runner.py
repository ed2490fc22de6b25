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
from kvferry.engine.kernels import Kernels
from kvferry.engine.linear import PRECISIONS
from kvferry.engine.operators import operators_for
from kvferry.engine.pinning import pin_this_thread
from kvferry.engine.rank_group import RankGroup
from kvferry.engine.rank_leader import RankCommand, RankLeader, rank_device, shard_of_rank
from kvferry.engine.rank_pipe import Message
from kvferry.engine.sampler import RowRequest, Sampled, sample
from kvferry.engine.sequence import Sequence
from kvferry.engine.settings import EngineSettings
from kvferry.engine.spans import AttentionChunk
from kvferry.engine.stage import Stage
from kvferry.engine.step_message import MessageKind, StepPlan
from kvferry.kvcache import KVCache, KVPool, PageLog
from kvferry.models import load_model
from kvferry.models.checked import count, text_config
from kvferry.resolution import read_config

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
    """A loaded model on its device. Stateless between steps: all state is in the caches it is given.

    layouts: of the pools of this rank. leader: where the worker has other ranks; `close` ends those.
    """

    def __init__(self, stage: Stage, settings: EngineSettings, leader: RankLeader | None = None) -> None:
        self.settings = settings
        self.leader = leader
        self.stage = stage
        self.limits = _limit_context(stage.model.limits, settings)
        own = stage.model.layouts(settings.tokens_per_block, settings.kv_dtype)
        self.layouts: tuple[KVLayout, ...] = leader.layouts[0] if leader is not None else own

    @classmethod
    def load(cls, model_dir: Path, settings: EngineSettings, command: RankCommand | None = None) -> ModelRunner:
        """Sets this process's compute threads, loads the weights, and starts the worker's other ranks with theirs.
        command: how those are started.

        Raises CheckpointError, ConfigError, RankLostError."""
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        started = time.monotonic()
        leader = RankLeader(model_dir, settings, command) if settings.ranks > 1 else None
        try:
            runner = cls(load_stage(model_dir, settings, 0, leader.group if leader else None), settings, leader)
            if leader is not None:
                leader.await_loaded()
        except BaseException:
            if leader is not None:
                leader.close()
            raise
        logger.info(
            "loaded %s in %.1f s, %d rank(s) of %d threads",
            model_dir,
            time.monotonic() - started,
            settings.ranks,
            torch.get_num_threads(),
        )
        return runner

    def pin(self) -> None:
        """Call on the thread that computes, before its first step: binds it and its helpers as the settings say."""
        pin_this_thread(self.settings.first_core, torch.get_num_threads())

    @property
    def page_log(self) -> PageLog | None:
        """For the manager of this rank, which decides for all."""
        return self.leader.page_log if self.leader is not None else None

    def pool_nbytes(self, nbytes: int) -> int:
        """What of `nbytes` for the worker's pools is this rank's. Raises ConfigError when it is too little."""
        return self.leader.budget(nbytes) if self.leader is not None else nbytes

    def open_pools(self, pools: Seq[KVPool], told: Message | None = None) -> list[Message]:
        """Call once, before the first step: the other ranks make their pools like these. told: see `RankLeader.serve`.
        Returns what each says."""
        return self.leader.serve(pools, told) if self.leader is not None else []

    def settle_pages(self) -> None:
        """The other ranks are told what has been done to pages since the last step, such as copies, without waiting for
        the next. Raises RankLostError."""
        if self.leader is not None:
            self.leader.settle()

    @torch.inference_mode()
    def execute(self, chunks: Seq[Chunk], pools: Seq[KVPool]) -> list[Sampled | None]:
        """Computes the chunks and samples for those that complete; None for the others.

        Advances each cache's history and publishes its full blocks. The sampled tokens are not appended yet. Raises
        RankLostError when the worker's ranks are no longer in step, which nothing mends.
        """
        # Noted before histories advance: `completes` is about what is uncomputed now.
        samples = {chunk.sequence.key: chunk.completes for chunk in chunks}
        logits = self.forward(chunks, pools)
        sampled = iter(sample(logits, [_row(chunk.sequence) for chunk in chunks if samples[chunk.sequence.key]]))
        return [next(sampled) if samples[chunk.sequence.key] else None for chunk in chunks]

    def forward(self, chunks: Seq[StepPart], pools: Seq[KVPool]) -> torch.Tensor:
        """Computes the chunks; the logits of those that complete, float32 [completing, vocab], in order.

        Advances each cache's history and publishes its full blocks. Raises as `execute`.
        """
        logits = self._compute(plan_step(chunks, len(pools)), pools)
        for chunk in chunks:
            _advance(chunk, self.settings.tokens_per_block)
        return logits

    def _compute(self, plan: StepPlan, pools: Seq[KVPool]) -> torch.Tensor:
        if self.leader is None:
            logits = self.stage.compute(plan, pools)
        else:
            try:
                self.leader.announce(MessageKind.STEP, plan)
                logits = self.stage.compute(plan, pools)
            except Exception as error:
                raise self.leader.fail(error) from error
        assert logits is not None, "rank 0 has the logits"
        return logits

    def close(self) -> None:
        if self.leader is not None:
            self.leader.close()


def load_stage(model_dir: Path, settings: EngineSettings, rank: int, group: RankGroup | None) -> Stage:
    """What `rank` of a worker computes. group: all ranks; None where there is but one."""
    device, kernels = rank_device(settings, rank), Kernels.of(settings.kernels)
    operators, shard = operators_for(device, settings.precision, kernels), shard_of_rank(rank, settings)
    dtype = PRECISIONS.get(settings.precision).dtype
    model = load_model(model_dir, operators, dtype, device, shard=shard, collectives=group)
    between = settings.pipeline_parallel > 1
    hidden = count(text_config(read_config(model_dir)), "hidden_size") if between else 0
    return Stage(model, torch.device(device), kernels, hidden, dtype, shard, group)


def plan_step(chunks: Seq[StepPart], groups: int) -> StepPlan:
    token_ids: list[int] = []
    logit_rows: list[int] = []
    attention_chunks = []
    for chunk in chunks:
        start, cache = chunk.cache.history, chunk.cache
        token_ids += chunk.tokens[start : start + chunk.length]
        if chunk.completes:
            logit_rows.append(len(token_ids) - 1)
        attention_chunks.append(
            AttentionChunk(
                start=start,
                length=chunk.length,
                block_tables=tuple(cache.block_table(group) for group in range(groups)),
                first_blocks=tuple(cache.first_block(group) for group in range(groups)),
            )
        )
    return StepPlan(token_ids, logit_rows, attention_chunks)


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
