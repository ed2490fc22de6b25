"""Beam search as transformers does it."""

from __future__ import annotations

from typing import Any

import torch


@torch.inference_mode()
def transformers_beams(
    model: Any, prompt: list[int], width: int, max_tokens: int, eos: int | None = None, **settings: Any
) -> list[tuple[list[int], float]]:
    """transformers' sequences and scores, best first."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    sequences = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        sequences.append((tokens[: tokens.index(eos) + 1] if eos in tokens else tokens, score))
    return sequences
