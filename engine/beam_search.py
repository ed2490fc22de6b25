"""Beam search on a model: beams are forks of one cache, computed side by side."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvferry.core import ConfigError, InvalidRequestError
from kvferry.engine.beams import BeamGroup, BeamParams, Continuation, FinishedBeam
from kvferry.engine.budget import StepBudget, plan_chunks
from kvferry.engine.runner import ModelRunner
from kvferry.kvcache import ForkableCache, KVCacheManager


@dataclass(frozen=True, slots=True)
class BeamPrompt:
    token_ids: tuple[int, ...]
    scope: str = ""


@dataclass(slots=True, eq=False)
class _Beam:
    """tokens: prompt, then output; all but the last are in the cache once the prompt has been computed."""

    tokens: list[int]
    cache: ForkableCache

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.cache.history


@dataclass(frozen=True, slots=True)
class _Part:
    """The next `length` uncomputed tokens of a beam."""

    beam: _Beam
    length: int

    @property
    def tokens(self) -> Sequence[int]:
        return self.beam.tokens

    @property
    def cache(self) -> ForkableCache:
        return self.beam.cache

    @property
    def completes(self) -> bool:
        return self.length == self.beam.uncomputed


@dataclass(slots=True, eq=False)
class _Search:
    """One prompt's. beams: the caches of `group.running`, in the same order."""

    group: BeamGroup
    beams: list[_Beam] = field(default_factory=list)
    blocks: int = 0

    def close(self) -> None:
        for beam in self.beams:
            beam.cache.close()
        self.beams.clear()


class BeamSearcher:
    """Has the manager to itself while `run` is running."""

    def __init__(self, runner: ModelRunner, manager: KVCacheManager) -> None:
        self._runner = runner
        self._manager = manager
        self._size = runner.settings.tokens_per_block
        self._budget = StepBudget(runner.settings.step_token_budget, runner.settings.max_step_ms)

    def run(self, prompts: Sequence[BeamPrompt], params: BeamParams) -> list[Sequence[FinishedBeam]]:
        """The finished sequences of each prompt, best first. Raises InvalidRequestError when the pools could never hold
        the beams of a prompt, ConfigError when the manager serves none."""
        searches = [_Search(BeamGroup(params), blocks=self._most_blocks(prompt, params)) for prompt in prompts]
        waiting = deque(zip(searches, prompts, strict=True))
        live: list[_Search] = []
        try:
            while waiting or live:
                while waiting and self._fits(waiting[0][0], live, params):
                    search, prompt = waiting.popleft()
                    search.beams = [self._open(prompt)]
                    live.append(search)
                self._step(live, params)
                live = [search for search in live if not search.group.done]
        finally:
            for search in live:
                search.close()
        return [search.group.finished for search in searches]

    def _most_blocks(self, prompt: BeamPrompt, params: BeamParams) -> int:
        """What the beams of a prompt hold at most: the prompt's full blocks together, the rest each for itself."""
        shared = len(prompt.token_ids) // self._size
        each = -(-(len(prompt.token_ids) + params.max_tokens) // self._size) - shared
        blocks = shared + params.beam_width * each
        if blocks > self._blocks:
            raise InvalidRequestError(
                f"{params.beam_width} beams of {len(prompt.token_ids) + params.max_tokens} tokens need {blocks} KV "
                f"blocks, but the pool has {self._blocks}: lower beam_width or max_tokens, or raise kv_cache.bytes",
                field="beam_width",
            )
        return blocks

    @property
    def _blocks(self) -> int:
        return self._manager.max_tokens() // self._size

    def _fits(self, search: _Search, live: Sequence[_Search], params: BeamParams) -> bool:
        """Room is kept for all that beams may come to hold, so that none ever has to make way for another."""
        taken = sum(other.blocks for other in live)
        beams = (len(live) + 1) * params.beam_width
        return not live or (taken + search.blocks <= self._blocks and beams <= self._runner.settings.max_batch)

    def _open(self, prompt: BeamPrompt) -> _Beam:
        tokens = list(prompt.token_ids)
        cache = self._manager.open(prompt.scope, tokens, max_reuse=len(tokens) - 1)
        if not isinstance(cache, ForkableCache):
            cache.close()
            raise ConfigError(
                f"KV cache manager {self._manager.version} serves no beam search of this model: build the engine with "
                "LLM(..., beam_width=N), or with manager='V1' (models with recurrent states have none)",
                field="beam_width",
            )
        return _Beam(tokens, cache)

    def _step(self, live: Sequence[_Search], params: BeamParams) -> None:
        beams = [beam for search in live for beam in search.beams]
        lengths = plan_chunks(beams, self._budget.tokens)
        parts = [_Part(beam, length) for beam, length in zip(beams, lengths, strict=True) if length]
        for part in parts:
            part.cache.reserve(part.cache.history + part.length)
        completing = [part.beam for part in parts if part.completes]
        started = time.monotonic()
        logits = self._runner.forward(parts, self._manager.pools)
        self._budget.observe(sum(lengths), time.monotonic() - started)
        rows = {id(beam): row for row, beam in enumerate(completing)}
        for search in live:
            if all(id(beam) in rows for beam in search.beams):
                self._extend(search, logits[[rows[id(beam)] for beam in search.beams]], params)

    def _extend(self, search: _Search, logits: torch.Tensor, params: BeamParams) -> None:
        survivors = search.group.extend(_best(logits, [beam.logprob for beam in search.group.running], params))
        if search.group.done:
            search.close()
            return
        parents, search.beams = search.beams, []
        taken: set[int] = set()
        chosen = {survivor.parent for survivor in survivors}
        for index, parent in enumerate(parents):
            if index not in chosen:
                parent.cache.close()
        for survivor in survivors:
            parent = parents[survivor.parent]
            cache = parent.cache.fork() if survivor.parent in taken else parent.cache
            taken.add(survivor.parent)
            search.beams.append(_Beam([*parent.tokens, survivor.token_id], cache))


def _best(logits: torch.Tensor, logprobs: Sequence[float], params: BeamParams) -> list[Continuation]:
    """logits: float32 [beams, vocab]; logprobs: of the beams so far. The best continuations of all, best first."""
    scores = logits.log_softmax(dim=-1) + torch.tensor(logprobs, device=logits.device)[:, None]
    values, places = scores.flatten().topk(min(params.candidates, scores.numel()))
    vocab = logits.shape[1]
    return [
        Continuation(place // vocab, place % vocab, value)
        for place, value in zip(places.tolist(), values.tolist(), strict=True)
    ]
