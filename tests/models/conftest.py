"""A model under test without an engine: plain linears, attention without pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.models import ForwardBatch, load_model, torch_operators
from kvferry.models.rope import rotate

Logits = Callable[[Path, Sequence[int]], torch.Tensor]
Checkpoint = Callable[[Any], Path]


def _dense_attention(windows: dict[int, int | None]) -> Callable[..., torch.Tensor]:
    """Causal attention of one whole sequence over itself, by the textbook."""

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, turn: torch.Tensor
    ) -> torch.Tensor:
        q, k = rotate(q, turn), rotate(k, turn)
        share, n = q.shape[1] // k.shape[1], len(q)
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        distance = torch.arange(n).view(-1, 1) - torch.arange(n)
        window = windows[layer]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

    return attend


@pytest.fixture(scope="session")
def our_logits() -> Logits:
    """`our_logits(model_dir, token_ids)`: float32 [tokens, vocab] of the native model."""

    def run(model_dir: Path, token_ids: Sequence[int]) -> torch.Tensor:
        from kvferry.core import DType

        model = load_model(model_dir, torch_operators())
        layouts = model.layouts(16, DType.FLOAT32)
        windows = {layer: layout.window for layout in layouts for layer in layout.layers}
        rows = torch.arange(len(token_ids))
        batch = ForwardBatch(torch.tensor(list(token_ids)), rows, rows, _dense_attention(windows))
        return model.forward(batch)

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """`checkpoint(transformers_config)`: a random checkpoint of it, every weight (norms and biases too) drawn."""

    def write(config: Any) -> Path:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(tmp_path / "checkpoint")
        return tmp_path / "checkpoint"

    return write
