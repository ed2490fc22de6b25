"""What an operator can set: one model, read from YAML, flags and environment by `config_sources`.

Defaults are for one machine without a GPU. Ports of 0 mean: any free one, and advertised.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvferry.core import Role

_SIZE = re.compile(r"(?i)\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
OVERRIDABLE = ("transceiver", "kv_cache", "engine")


def _parse_nbytes(value: object) -> object:
    """``512MiB``, ``2GB`` or a plain number."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"a size such as 512MiB or 2GB, got {value!r}")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _auto_or_upper(value: object) -> object:
    return _upper(value) if isinstance(value, str) and value.lower() != "auto" else value


NumBytes = Annotated[int, BeforeValidator(_parse_nbytes)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """Unknown keys are refused, and a validated configuration does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TransceiverConfig(Section):
    backend: Annotated[str, BeforeValidator(_upper)] = Field(
        default="DEFAULT", description="NONE (aggregated serving), DEFAULT, NIXL, UCX, MOONCAKE, SHM or a third party's"
    )
    runtime: Annotated[Literal["auto", "CPP", "PYTHON"], BeforeValidator(_auto_or_upper)] = Field(
        default="auto", description="auto: what the model prefers, if the backend can run it"
    )
    wire_format: Literal["stored", "fp8", "int8"] = Field(
        default="stored",
        description="how KV travels; fp8 and int8 lose precision and need memory of their own",
    )
    nixl_plugin: Annotated[str, BeforeValidator(_upper)] = Field(
        default="UCX", min_length=1, description="which of NIXL's plug-ins moves the bytes, on backend NIXL"
    )
    transfer_timeout_ms: int | None = Field(default=60_000, ge=1, description="longer transfers fail; null: never")
    lease_s: float = Field(default=30.0, gt=0, description="prefill keeps an advertised cache this long unheard")
    on_transfer_failure: Literal["recompute", "fail"] = Field(
        default="recompute", description="decode computes a prompt itself whose KV did not arrive, or fails the request"
    )
    max_quarantined: float = Field(
        default=0.25, ge=0, le=1, description="share of blocks that late writers may block before decode is unhealthy"
    )


class KVCacheConfig(Section):
    manager: Annotated[Literal["auto", "V1", "V2"], BeforeValidator(_auto_or_upper)] = Field(
        default="auto", description="auto: what the model prefers, if the transceiver can drive it"
    )
    core: Literal["cpp", "python"] = Field(default="cpp", description="which implementation keeps the books of V2")
    bytes: NumBytes = Field(default=512 << 20, ge=1, description="one worker's block pools, such as 512MiB or 2GB")
    host_bytes: NumBytes = Field(default=0, ge=0, description="host memory below the pools, per worker; 0: none")
    disk_bytes: NumBytes = Field(default=0, ge=0, description="files below the host tier of V2, per worker; 0: none")
    disk_dir: str | None = Field(default=None, description="folder for these files, on every worker's machine")
    connector: str | None = Field(default=None, description="external KV store: directory, or a package's; V1 only")
    connector_address: str = Field(default="", description="where that store is; directory: a folder for all workers")
    dtype: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32", description="what K and V are kept in; int8: with a scale per token and head"
    )
    tokens_per_block: int = Field(default=16, ge=1, le=1024, description="tokens of one KV block")
    debug: bool = Field(
        default=False,
        description="slow: fresh blocks hold NaN, guard pages, an idle worker checks its books",
    )
    event_capacity: int = Field(default=8192, ge=0, description="KV events kept for readers that are behind; 0: none")
    typical_tokens: int | None = Field(
        default=4096,
        ge=1,
        description="length of a typical request, by which V2 gives windows less memory; null: equal block counts",
    )
    prefix_reuse: bool | None = Field(default=None, description="null: what suits the model")
    min_partial_tokens: int = Field(
        default=0, ge=0, description="V2 copies a cached block that shares this many tokens; 0: whole blocks only"
    )
    snapshot_tokens: int = Field(
        default=256, ge=1, description="V2 keeps the states of Mamba layers for reuse this many tokens apart"
    )

    @field_validator("connector_address")
    @classmethod
    def _for_a_connector(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("connector") is None:
            raise ValueError(f"unset: there is no kv_cache.connector that would use {value}")
        return value


class EngineConfig(Section):
    device: str = Field(default="cpu", description="torch device the worker computes on")
    precision: str = Field(default="fp32", description="what linears compute in: fp32; int8 on the CPU; bf16 on a GPU")
    kernels: Literal["auto", "native", "torch"] = Field(
        default="auto", description="auto: the compiled CPU kernels if they can be loaded, else torch's"
    )
    threads: int | None = Field(default=None, ge=1, description="compute threads of one rank; null: cores / ranks")
    pin_threads: bool = Field(
        default=False,
        description="each rank computes on cores of its own; for machines this cluster has to itself",
    )
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="ranks, a process each, that share every layer")
    pipeline_parallel: int = Field(default=1, ge=1, le=64, description="groups of such ranks, with some layers each")
    max_batch: int = Field(default=64, ge=1, description="sequences computed in one step")
    step_token_budget: int = Field(default=512, ge=1, description="most tokens of one step")
    max_step_ms: float = Field(default=250.0, ge=1, description="steps shrink to stay below it; cancels wait for one")
    max_queued: int = Field(default=1024, ge=1, description="requests waiting in one worker before it refuses more")
    max_context_tokens: int | None = Field(default=None, ge=2, description="prompt and answer; null: the model's own")
    speculative: str | None = Field(default=None, description="two-model: recognised, and refused until it is built")
    lora_adapters: tuple[str, ...] = Field(default=(), description="recognised, and refused until it is built")

    @field_validator("speculative")
    @classmethod
    def _no_speculation(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError(f"unset: speculative decoding ({value}) is not built in this version")
        return value

    @field_validator("lora_adapters")
    @classmethod
    def _no_lora(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            raise ValueError("empty: LoRA serving is not built in this version")
        return value


class RouterConfig(Section):
    grpc_port: Port = Field(default=0, description="gRPC front end; 0: any free port")
    http_port: Port = Field(default=0, description="OpenAI-style HTTP front end; 0: any free port")
    prefill_policy: str = Field(default="least_loaded", description="how prefill workers are chosen")
    decode_policy: str = Field(default="least_loaded", description="how decode workers are chosen")
    schedule: Literal["prefill_first", "decode_first"] = Field(
        default="prefill_first",
        description="decode_first: decode reserves before the prompt is computed and loads it part by part meanwhile",
    )
    max_running: int = Field(default=256, ge=1, description="requests in the workers at once")
    max_queued: int = Field(default=1024, ge=0, description="requests waiting for a place; past it RESOURCE_EXHAUSTED")
    retries: int = Field(default=2, ge=0, description="how often a request is started again after a worker failed")
    worker_wait_s: float = Field(default=10.0, ge=0, description="how long a request waits while no worker can take it")
    queue_timeout_s: float = Field(default=60.0, gt=0, description="how long a request waits for a place")
    request_timeout_s: float = Field(default=600.0, gt=0, description="deadline of requests that bring none")
    lost_after_s: float = Field(
        default=2.5, gt=1.0, description="a worker that reports every second is lost after this long without a report"
    )


class RoleConfig(Section):
    """How many workers of a role, and what differs for them: `prefill.engine.max_batch: 8`."""

    count: int = Field(default=1, ge=0, le=1024, description="workers of this role")
    transceiver: dict[str, Any] = Field(default_factory=dict, description="overrides for this role")
    kv_cache: dict[str, Any] = Field(default_factory=dict, description="overrides for this role")
    engine: dict[str, Any] = Field(default_factory=dict, description="overrides for this role")

    @model_validator(mode="before")
    @classmethod
    def _bare_count(cls, value: object) -> object:
        """`prefill: 2` is short for `prefill: {count: 2}`."""
        return value if isinstance(value, Mapping) else {"count": value}

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        return {name: getattr(self, name) for name in OVERRIDABLE}


class WorkerConfig(Section):
    """The settings of one role's workers, overrides applied."""

    transceiver: TransceiverConfig = Field(default_factory=TransceiverConfig)
    kv_cache: KVCacheConfig = Field(default_factory=KVCacheConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)


class ClusterConfig(WorkerConfig):
    model: str = Field(default="smollm2", description="a known name, a Hugging Face directory, or a .gguf file")
    served_model_name: str | None = Field(default=None, description="what clients call it; null: the same as model")
    prefill: RoleConfig = Field(default_factory=RoleConfig)
    decode: RoleConfig = Field(default_factory=RoleConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    host: str = Field(default="127.0.0.1", description="address the router binds")
    worker_host: str = Field(default="127.0.0.1", description="address workers bind and advertise; auto: their node's")
    insecure_bind: bool = Field(default=False, description="allow addresses beyond loopback: nothing is encrypted")
    ray_address: str | None = Field(default=None, description="an existing Ray cluster; null: start one here")
    ready_timeout_s: float = Field(default=300.0, gt=0, description="how long `up` waits for all workers")
    state_dir: str = Field(default="", description="where the cluster's state file and logs live")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", description="of every worker's log")

    @field_validator("host", "worker_host")
    @classmethod
    def _known_address(cls, value: str) -> str:
        if value in ("auto", "localhost"):
            return value
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f"an IP address, localhost or auto, got {value!r}") from None
        return value

    @property
    def aggregated(self) -> bool:
        """Backend NONE: every decode worker serves whole requests, and there is no prefill role."""
        return self.transceiver.backend == "NONE"

    def role_overrides(self, role: Role) -> dict[str, dict[str, Any]]:
        return (self.prefill if role is Role.PREFILL else self.decode).overrides

    def role_count(self, role: Role) -> int:
        if self.aggregated:
            return self.decode.count if role is Role.AGGREGATED else 0
        return {Role.PREFILL: self.prefill.count, Role.DECODE: self.decode.count, Role.AGGREGATED: 0}[role]
