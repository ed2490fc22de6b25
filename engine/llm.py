"""One aggregated worker in this process: the engine without a cluster, and the golden reference."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kvferry.core import (
    DECODE_TRANSITIONS,
    DecodeLeg,
    FinishReason,
    InvalidRequestError,
    KVFerryError,
    Lifecycle,
    OutputDelta,
    Resolution,
    SamplingParams,
    TokenLogprob,
    Usage,
    WorkerRequest,
    check_prompt,
    new_request_id,
    resolve_max_tokens,
)
from kvferry.engine.beam_search import BeamPrompt, BeamSearcher
from kvferry.engine.beams import BeamParams, FinishedBeam
from kvferry.engine.connectors import open_connector
from kvferry.engine.generation import DecodeSequence, GenerationScheduler
from kvferry.engine.runner import ModelRunner
from kvferry.engine.settings import EngineSettings
from kvferry.kvcache import BackgroundCopier, KVCacheManager, KVConnector, create_manager
from kvferry.models import model_fingerprint, resolve_model
from kvferry.resolution import ResolveRequest, prefix_reuse_enabled, read_config, resolve
from kvferry.text import Tokenizer

DEFAULT_KV_BYTES = 1 << 30

Prompt = str | Mapping[str, Any]
"""Text, or {"prompt_token_ids": [...]}, either with an optional "cache_salt"."""


@dataclass(slots=True)
class Completion:
    """What one prompt got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)

    def add(self, delta: OutputDelta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.usage = delta.usage


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One sequence of a beam search. token_ids: a stop token included, of which the text has nothing.

    score: cumulative_logprob / len(token_ids) ** length_penalty."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamCompletion:
    """What a beam search found for one prompt, best score first."""

    sequences: list[BeamSequence]


class LLM:
    """``LLM("smollm2").generate(["Hello"], SamplingParams(max_tokens=32, temperature=0))``.

    model: a known name, a Hugging Face directory or a GGUF file. manager: auto, V1 or V2. kv_bytes: the size of the
    KV pools, of all ranks together. kv_core: cpp or python, who keeps V2's books. kv_host_bytes: the size of the host
    tier; kv_disk_bytes and kv_disk_dir: of V2's tier below it. kv_typical_tokens: see `CacheOptions`. prefix_reuse:
    None is what suits the model. beam_width: above 1, the engine gets a manager that serves `beam_search`.
    kv_connector, kv_connector_address: an external KV store and where it is. settings: fields of `EngineSettings`; of
    several ranks the others are processes of their own, until `close`. Raises ConfigError naming a setting. Not
    thread-safe.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        manager: str = "auto",
        kv_bytes: int = DEFAULT_KV_BYTES,
        kv_core: str = "cpp",
        kv_host_bytes: int = 0,
        kv_disk_bytes: int = 0,
        kv_disk_dir: Path | None = None,
        kv_typical_tokens: int | None = None,
        prefix_reuse: bool | None = None,
        beam_width: int = 1,
        kv_connector: str | None = None,
        kv_connector_address: str = "",
        **settings: Any,
    ) -> None:
        model_dir = resolve_model(os.fspath(model))
        self.resolution = _resolve(model_dir, manager, prefix_reuse, beam_width, kv_connector)
        self.tokenizer = Tokenizer.load(model_dir)
        self._runner = ModelRunner.load(model_dir, EngineSettings(**settings))
        reuse = prefix_reuse_enabled(read_config(model_dir), self.resolution.manager, prefix_reuse)
        try:
            connector = self._open_connector(kv_connector, kv_connector_address, model_dir)
            self.manager = self._manager(
                kv_bytes,
                prefix_reuse=reuse,
                core=kv_core,
                host_bytes=kv_host_bytes,
                disk_bytes=kv_disk_bytes,
                disk_dir=kv_disk_dir,
                connector=connector,
                typical_tokens=kv_typical_tokens,
                copier=BackgroundCopier(self._runner.settings.device) if kv_host_bytes else None,
            )
        except BaseException:
            self._runner.close()
            raise
        self._events: list[tuple[int, object]] = []
        self._scheduler = GenerationScheduler(self._runner, self.manager, lambda *event: self._events.append(event))

    def _open_connector(self, name: str | None, address: str, model_dir: Path) -> KVConnector | None:
        if name is None:
            return None
        precision = self._runner.settings.precision
        return open_connector(name, address, self._runner.layouts, model_fingerprint(model_dir), precision)

    def _manager(self, kv_bytes: int, **options: Any) -> KVCacheManager:
        """Of the pools of every rank. options: see `create_manager`."""
        manager = create_manager(
            self.resolution.manager,
            self._runner.layouts,
            self._runner.pool_nbytes(kv_bytes),
            page_log=self._runner.page_log,
            step_tokens=self._runner.settings.step_token_budget,
            **options,
        )
        self._runner.open_pools(manager.pools)
        return manager

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """One completion per prompt, in order. Raises the first error, after the others have been cancelled."""
        choices = _per_prompt(prompts, sampling or SamplingParams())
        waiting = [self._sequence(prompt, choice) for prompt, choice in zip(prompts, choices, strict=True)]
        completions = {sequence.key: Completion() for sequence in waiting}
        waiting.reverse()
        try:
            self._run(waiting, completions)
        except BaseException:
            self._scheduler.close()
            self._events.clear()
            raise
        return list(completions.values())

    def beam_search(
        self,
        prompts: Sequence[Prompt],
        beam_width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
    ) -> list[BeamCompletion]:
        """The `beam_width` best sequences that the search finds for each prompt; see `BeamParams`. Raises ConfigError
        where the engine's KV cache manager serves no beams, InvalidRequestError naming a parameter."""
        stops = frozenset(stop_token_ids) | (frozenset() if ignore_eos else self.tokenizer.eos_token_ids)
        params = BeamParams(beam_width, max_tokens, length_penalty, early_stopping, stops)
        given = [self._beam_prompt(prompt, params) for prompt in prompts]
        found = BeamSearcher(self._runner, self.manager).run(given, params)
        return [BeamCompletion([self._beam_sequence(beam) for beam in beams]) for beams in found]

    def _beam_prompt(self, prompt: Prompt, params: BeamParams) -> BeamPrompt:
        token_ids, salt = self._token_ids(prompt)
        check_prompt(token_ids, self._runner.limits)
        resolve_max_tokens(SamplingParams(max_tokens=params.max_tokens), len(token_ids), self._runner.limits)
        return BeamPrompt(tuple(token_ids), salt)

    def _beam_sequence(self, beam: FinishedBeam) -> BeamSequence:
        token_ids = list(beam.token_ids)
        stopped = beam.finish_reason is FinishReason.STOP
        text = self.tokenizer.decode(token_ids[:-1] if stopped else token_ids)
        return BeamSequence(token_ids, text, beam.logprob, beam.score, beam.finish_reason)

    def _run(self, waiting: list[DecodeSequence], completions: dict[int, Completion]) -> None:
        room = self._runner.settings.max_queued
        while waiting or self._scheduler.has_work:
            while waiting and self._scheduler.queued < room:
                self._scheduler.add(waiting.pop())
            self._scheduler.step()
            events, self._events[:] = list(self._events), []
            for key, event in events:
                if isinstance(event, KVFerryError):
                    raise event
                assert isinstance(event, OutputDelta)
                completions[key].add(event)

    def _sequence(self, prompt: Prompt, sampling: SamplingParams) -> DecodeSequence:
        token_ids, salt = self._token_ids(prompt)
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(63))
        request = WorkerRequest(new_request_id(), tuple(token_ids), sampling, scope=salt)
        leg = Lifecycle(DecodeLeg.QUEUED, DECODE_TRANSITIONS)
        return DecodeSequence(request, leg, self._runner.limits, self.tokenizer)

    def _token_ids(self, prompt: Prompt) -> tuple[Sequence[int], str]:
        """And the salt."""
        given = {"prompt_token_ids": self.tokenizer.encode(prompt)} if isinstance(prompt, str) else prompt
        return _mapped_prompt(given)

    def close(self) -> None:
        self._scheduler.close()
        self.manager.close()
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _resolve(
    model_dir: Path, manager: str, prefix_reuse: bool | None, beam_width: int, kv_connector: str | None
) -> Resolution:
    config = read_config(model_dir)
    request = ResolveRequest(
        architecture=(config.get("architectures") or [""])[0],
        config=config,
        backend="NONE",
        manager=manager,
        prefix_reuse=prefix_reuse,
        beam_width=beam_width,
        kv_connector=kv_connector,
    )
    return resolve(request)


def _per_prompt(
    prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
) -> Sequence[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * len(prompts)
    if len(sampling) != len(prompts):
        raise InvalidRequestError(f"{len(prompts)} prompts, but {len(sampling)} sampling parameters", field="sampling")
    return sampling


def _mapped_prompt(prompt: Mapping[str, Any]) -> tuple[Sequence[int], str]:
    known = {"prompt_token_ids", "cache_salt"}
    unknown = set(prompt) - known
    if unknown or "prompt_token_ids" not in prompt:
        raise InvalidRequestError(
            f"a prompt mapping has the keys {sorted(known)}, got {sorted(prompt)}", field="prompt"
        )
    return prompt["prompt_token_ids"], prompt.get("cache_salt", "")
