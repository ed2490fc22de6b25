"""A recorded hour of conversations, for replays that need prefixes as people share them."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

CONVERSATION = Path(__file__).parent / "data" / "mooncake_conversation.jsonl.xz"
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """blocks: an id per 512-token block of the prompt; equal ids stand for equal prefixes up to that block."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def load_trace(path: Path = CONVERSATION) -> list[TraceRequest]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [_request(json.loads(line)) for line in lines]


def _request(fields: dict[str, object]) -> TraceRequest:
    arrival, prompt, output = (fields[name] for name in ("timestamp", "input_length", "output_length"))
    blocks = fields["hash_ids"]
    assert isinstance(arrival, int)
    assert isinstance(prompt, int)
    assert isinstance(output, int)
    assert isinstance(blocks, list)
    return TraceRequest(arrival / 1000, prompt, output, tuple(blocks))
