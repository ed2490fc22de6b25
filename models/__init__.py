"""Who computes: model families on shared layers, checkpoints and their conversion."""

from kvferry.models.base import (
    Attention,
    CausalLM,
    Config,
    ForwardBatch,
    Layer,
    Linear,
    LinearFactory,
    StackFactory,
    StateRun,
    States,
    Weights,
)
from kvferry.models.convert import convert_gguf
from kvferry.models.layers import DecoderLayer, RMSNorm
from kvferry.models.loader import (
    inspect_model,
    load_model,
    model_fingerprint,
    resolve_model,
)
from kvferry.models.operators import (
    Operators,
    PlainLinear,
    PlainStack,
    RMSNormOperator,
    SiluProduct,
    plain_linear,
    torch_operators,
)
from kvferry.models.progress import ProgressCallback, progress_bar
from kvferry.models.shard import WHOLE, Shard
from kvferry.models.sharding import Collectives

__all__ = [
    "WHOLE",
    "Attention",
    "CausalLM",
    "Collectives",
    "Config",
    "DecoderLayer",
    "ForwardBatch",
    "Layer",
    "Linear",
    "LinearFactory",
    "Operators",
    "PlainLinear",
    "PlainStack",
    "ProgressCallback",
    "RMSNorm",
    "RMSNormOperator",
    "Shard",
    "SiluProduct",
    "StackFactory",
    "StateRun",
    "States",
    "Weights",
    "convert_gguf",
    "inspect_model",
    "load_model",
    "model_fingerprint",
    "plain_linear",
    "progress_bar",
    "resolve_model",
    "torch_operators",
]
