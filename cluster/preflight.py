"""What is checked before the first process starts: everything that can be known without computing.

A worker finds the same faults when it loads, tens of seconds later and in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvferry.cluster.config import WorkerConfig
from kvferry.cluster.roles import RolePlan
from kvferry.core import CheckpointError, ConfigError, Resolution
from kvferry.engine import KV_DTYPES, EngineSettings, rank_device, rank_layouts
from kvferry.kvcache.factory import NO_CONNECTORS_OF_RANKS, NO_TIERS_OF_RANKS
from kvferry.kvcache.pool import blocks_for_budget
from kvferry.models import CausalLM, inspect_model
from kvferry.text import Tokenizer
from kvferry.transceiver import RANKS_NEED_PYTHON
from kvferry.transceiver.memory import available_nbytes
from kvferry.transceiver.wire_format import WireFormat, wire_layouts


def engine_settings(config: WorkerConfig, threads: int | None, first_core: int = 0) -> EngineSettings:
    """What a worker's engine is told. first_core: where its cores begin, if it is to keep to some. Raises ConfigError
    naming the setting."""
    engine, cache = config.engine, config.kv_cache
    return EngineSettings(
        device=engine.device,
        precision=engine.precision,
        kernels=engine.kernels,
        threads=threads,
        first_core=first_core if engine.pin_threads else None,
        kv_dtype=KV_DTYPES[cache.dtype],
        tokens_per_block=cache.tokens_per_block,
        max_batch=engine.max_batch,
        step_token_budget=engine.step_token_budget,
        max_step_ms=engine.max_step_ms,
        max_queued=engine.max_queued,
        max_context_tokens=engine.max_context_tokens,
        min_partial_tokens=cache.min_partial_tokens,
        snapshot_tokens=cache.snapshot_tokens,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        check_cache=cache.debug,
    )


def check_worker_settings(config: WorkerConfig) -> None:
    """What one worker needs of the machine it runs on: its devices, and memory for its pools. Raises ConfigError."""
    settings = engine_settings(config, threads=None)
    for rank in range(settings.ranks):
        check_device(rank_device(settings, rank))
    if settings.ranks > 1 and config.kv_cache.host_bytes:
        raise ConfigError(NO_TIERS_OF_RANKS, field="kv_cache.host_bytes")
    if settings.ranks > 1 and config.kv_cache.connector is not None:
        raise ConfigError(NO_CONNECTORS_OF_RANKS, field="kv_cache.connector")
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
        wire = WireFormat(plan.config.transceiver.wire_format)
        check_ranks(settings, plan.resolution, wire)
        layouts = rank_layouts(model_dir, settings) if settings.ranks > 1 else []
        held = [layout for rank in layouts for layout in rank]
        whole = model.layouts(settings.tokens_per_block, settings.kv_dtype)
        blocks_for_budget(held or whole, plan.config.kv_cache.bytes)
        wire_layouts(whole, wire)


def check_ranks(settings: EngineSettings, resolution: Resolution, wire: WireFormat) -> None:
    """Raises ConfigError when workers of several ranks cannot exchange KV through the transceiver they resolved to, or
    in this wire format."""
    if settings.ranks == 1:
        return
    setting = "engine.tensor_parallel" if settings.tensor_parallel > 1 else "engine.pipeline_parallel"
    if resolution.runtime not in (None, "PYTHON"):
        raise ConfigError(f"transceiver {resolution.transceiver}: {RANKS_NEED_PYTHON}", field=setting)
    if wire is not WireFormat.STORED:
        raise ConfigError(
            f"transceiver.wire_format {wire.value} is built for workers of one rank, and {setting} makes more: set it "
            "to stored",
            field="transceiver.wire_format",
        )


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
