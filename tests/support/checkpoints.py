"""Tiny random checkpoints, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def random_checkpoint(config: Any, directory: Path, auto: str = "AutoModelForCausalLM", seed: int = 1) -> Path:
    """Saves a model of a transformers config, every weight (norms and biases too) drawn; returns `directory`."""
    torch.manual_seed(seed)
    model = getattr(transformers, auto).from_config(config)
    drawn = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if is_learned(name))]
    with torch.no_grad():
        for name, tensor in drawn:
            tensor.normal_(_mean(name), 0.2)
    model.save_pretrained(directory)
    return directory


def _mean(name: str) -> float:
    """Time steps of recurrent layers are short, or nothing would be remembered for longer than a token or two."""
    if name.endswith("dt_bias"):
        return -4.0
    return 1.0 if "norm" in name or "scal" in name else 0.0


def is_learned(name: str) -> bool:
    """Buffers that a checkpoint holds, unlike tables that are computed anew."""
    return name.endswith(("layer_scalar", "e_score_correction_bias"))
