"""What is checked before the first process starts: everything that can be known without computing.

A worker finds the same faults when it loads, tens of seconds later and in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvferry.cluster.config import WorkerConfig
from kvferry.cluster.roles import RolePlan
from kvferry.core import CheckpointError, ConfigError
from kvferry.engine import KV_DTYPES, EngineSettings
from kvferry.kvcache.pool import blocks_for_budget
from kvferry.models import CausalLM, inspect_model
from kvferry.text import Tokenizer
from kvferry.transceiver.memory import available_nbytes


def engine_settings(config: WorkerConfig, threads: int | None) -> EngineSettings:
    """What a worker's engine is told. Raises ConfigError naming the setting."""
    engine, cache = config.engine, config.kv_cache
    return EngineSettings(
        device=engine.device,
        precision=engine.precision,
        kernels=engine.kernels,
        threads=threads,
        kv_dtype=KV_DTYPES[cache.dtype],
        tokens_per_block=cache.tokens_per_block,
        max_batch=engine.max_batch,
        step_token_budget=engine.step_token_budget,
        max_step_ms=engine.max_step_ms,
        max_queued=engine.max_queued,
        max_context_tokens=engine.max_context_tokens,
        min_partial_tokens=cache.min_partial_tokens,
        snapshot_tokens=cache.snapshot_tokens,
    )


def check_worker_settings(config: WorkerConfig) -> None:
    """What one worker needs of the machine it runs on: its device, and memory for its pools. Raises ConfigError."""
    engine_settings(config, threads=None)
    check_device(config.engine.device)
    if torch.device(config.engine.device).type == "cpu":
        check_memory(config.kv_cache.bytes + config.kv_cache.host_bytes, workers=1)


def check_workers(plans: Sequence[RolePlan]) -> None:
    """Engine settings, devices and memory, for workers that all run on this machine. Raises ConfigError."""
    for plan in plans:
        check_worker_settings(plan.config)
    # Pools of accelerators are in their own memory; each worker checks those when it loads.
    on_host = [plan for plan in plans if torch.device(plan.config.engine.device).type == "cpu"]
    total = sum(plan.count * (plan.config.kv_cache.bytes + plan.config.kv_cache.host_bytes) for plan in on_host)
    check_memory(total, workers=sum(plan.count for plan in on_host))


def check_checkpoint(model_dir: Path, plans: Sequence[RolePlan]) -> None:
    """The checkpoint, and what every role sets against it. Raises CheckpointError, ConfigError."""
    model = inspect_model(model_dir)
    _check_vocabulary(Tokenizer.load(model_dir), model, model_dir)
    for plan in plans:
        settings = engine_settings(plan.config, threads=None)
        blocks_for_budget(model.layouts(settings.tokens_per_block, settings.kv_dtype), plan.config.kv_cache.bytes)


def check_device(name: str) -> None:
    """Raises ConfigError when torch knows no such device, or this machine has none."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"engine.device {name!r} cannot be used on this machine: {reason}; set engine.device to cpu",
            field="engine.device",
        ) from None


def check_memory(nbytes: int, workers: int) -> None:
    available = available_nbytes()
    if nbytes > available:
        raise ConfigError(
            f"kv_cache.bytes and kv_cache.host_bytes of {workers} worker{'s' if workers != 1 else ''} come to "
            f"{nbytes} bytes, but this machine has {available} available: lower kv_cache.bytes",
            field="kv_cache.bytes",
        )


def _check_vocabulary(tokenizer: Tokenizer, model: CausalLM, model_dir: Path) -> None:
    if tokenizer.vocab_size > model.limits.vocab_size:
        raise CheckpointError(
            f"{model_dir / 'tokenizer.json'} knows {tokenizer.vocab_size} tokens, config.json says vocab_size "
            f"{model.limits.vocab_size}: they belong to different models",
            field="model",
        )
