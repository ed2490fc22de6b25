"""A model in bfloat16, as it runs on a GPU, by torch's operators on the CPU: near float32, in chunks and in one go."""

from __future__ import annotations

from pathlib import Path

import torch

from kvferry.core import DType
from kvferry.engine.attention import PagedAttention
from kvferry.engine.kernels import Kernels
from kvferry.engine.spans import AttentionChunk
from kvferry.kvcache.pool import build_pool
from kvferry.models import CausalLM, ForwardBatch, load_model, torch_operators

TOKENS = torch.tensor([5 + (11 * i) % 390 for i in range(70)])  # token 0 is all zeros


def logits(model: CausalLM, kv_dtype: DType, cuts: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab], the prompt computed in chunks that end at `cuts`."""
    layouts = model.layouts(16, kv_dtype)
    pools = [build_pool(layout, 5, "cpu") for layout in layouts]
    parts, start = [], 0
    for stop in cuts:
        rows = torch.arange(stop - start)
        chunk = AttentionChunk(start, stop - start, ((4, 0, 2, 1, 3),), (0,))
        attention = PagedAttention(pools, [chunk], Kernels.TORCH)
        parts.append(model.forward(ForwardBatch(TOKENS[start:stop], start + rows, rows, attention)))
        start = stop
    return torch.cat(parts)


def test_logits_are_near_those_of_float32(tiny_llama_dir: Path) -> None:
    exact = logits(load_model(tiny_llama_dir, torch_operators()), DType.FLOAT32, [70])
    half = load_model(tiny_llama_dir, torch_operators(), torch.bfloat16)
    for kv_dtype in (DType.BFLOAT16, DType.INT8):
        for cuts in ([70], [33, 34, 35, 70]):
            ours = logits(half, kv_dtype, cuts)
            assert ours.dtype is torch.float32
            similarity = torch.nn.functional.cosine_similarity(ours, exact, dim=-1)
            assert float(similarity.min()) > 0.995
