"""Who computes: model families on shared layers, checkpoints and their conversion."""

from kvferry.models.base import (
    Attention,
    CausalLM,
    Config,
    ForwardBatch,
    Linear,
    LinearFactory,
    Weights,
)
from kvferry.models.convert import convert_gguf
from kvferry.models.loader import KNOWN_MODELS, load_model, model_fingerprint, read_config, resolve_model
from kvferry.models.progress import ProgressCallback, progress_bar

__all__ = [
    "KNOWN_MODELS",
    "Attention",
    "CausalLM",
    "Config",
    "ForwardBatch",
    "Linear",
    "LinearFactory",
    "ProgressCallback",
    "Weights",
    "convert_gguf",
    "load_model",
    "model_fingerprint",
    "progress_bar",
    "read_config",
    "resolve_model",
]
