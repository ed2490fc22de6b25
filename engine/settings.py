"""The few values an engine takes. The configuration file and its flags live in ``cluster/``."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core import ConfigError, DType
from kvferry.engine.kernels import Kernels
from kvferry.engine.linear import check_precision

KV_DTYPES = {"fp32": DType.FLOAT32, "bf16": DType.BFLOAT16, "int8": DType.INT8}
"""What K and V can be kept in, by the names that precisions have."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Raises ConfigError naming the setting.

    precision: what the linears compute in. kv_dtype: what K and V are kept in.
    kernels: auto, native or torch (see `Kernels`).
    threads: compute threads of one rank of this worker (None: all cores this process may use). first_core: the first
    rank's threads are bound to so many cores from this place among those it may use, the next rank's to the following
    ones (None: not bound).
    tensor_parallel, pipeline_parallel: the worker's ranks, a process each, are as many as their product.
    max_batch: sequences computed in one step. step_token_budget: most tokens of one step; the budget in force
    shrinks below it so that a step stays under max_step_ms, since cancels and new streams wait for a step's end.
    max_queued: requests waiting for a place before new ones are refused. min_partial_tokens: from how many tokens on
    the beginning of a cached block is reused by copy (0: whole blocks only). snapshot_tokens: how far apart the states
    of models that have some are kept for reuse, in tokens, where the manager can. check_cache: whenever there is
    nothing to compute the KV cache's books and guards are checked; a fault ends the engine.
    """

    device: str = "cpu"
    precision: str = "fp32"
    kernels: str = "auto"
    threads: int | None = None
    first_core: int | None = None
    kv_dtype: DType = DType.FLOAT32
    tokens_per_block: int = 16
    max_batch: int = 64
    step_token_budget: int = 512
    max_step_ms: float = 250.0
    max_queued: int = 1024
    max_context_tokens: int | None = None
    min_partial_tokens: int = 0
    snapshot_tokens: int = 256
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    check_cache: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def __post_init__(self) -> None:
        Kernels.of(self.kernels)
        check_precision(self.device, self.precision)
        for name in (
            "threads",
            "tokens_per_block",
            "max_batch",
            "step_token_budget",
            "max_step_ms",
            "max_queued",
            "tensor_parallel",
            "pipeline_parallel",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine.{name} must be at least 1, got {value}", field=f"engine.{name}")
        if self.snapshot_tokens < 1:
            raise ConfigError(
                f"kv_cache.snapshot_tokens must be at least 1, got {self.snapshot_tokens}",
                field="kv_cache.snapshot_tokens",
            )
