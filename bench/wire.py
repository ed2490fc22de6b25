"""What a KV wire format costs in precision: a fixed text is read on from a context that travelled in it.

The first tokens of the text are the context. The rest is computed over their keys and values as stored, and as they
come out of each wire format; the next-token distributions are compared at every position. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvferry.bench.floor import machine
from kvferry.core import BlockTable, DType, TokenRange
from kvferry.engine.attention import PagedAttention
from kvferry.engine.operators import operators_for
from kvferry.engine.spans import AttentionChunk
from kvferry.kvcache.pool import build_pool
from kvferry.models import CausalLM, ForwardBatch, load_model, progress_bar, resolve_model
from kvferry.text import Tokenizer
from kvferry.transceiver.wire_format import WireFormat, wire_layouts
from kvferry.transceiver.wire_pool import WirePools

TOKENS_PER_BLOCK = 16
CONTEXT_TOKENS = 192
TEXT = """\
The ferry left the northern quay at six in the morning, as it had done every day since the bridge was washed away. It
carried bread, letters, two bicycles and a box of young trees that somebody on the island had ordered from the nursery
in town. The captain, who had learned the channel from her father, kept close to the western bank, where the current is
slow and the mud does not shift from one week to the next. Half way across the wind turned. She lowered the small sail,
started the engine and told the passengers that they would be some ten minutes late.

Nobody minded. The schoolteacher read aloud from a book about the stars: how the light of the nearest one takes more
than four years to reach us, how the planets got their names, and why the same face of the moon always looks down. A boy
asked whether there were ferries on the moon. There is no water there, she said, and without water nobody needs a ferry.
He thought about this for a while. Then he said that it must be easy to walk everywhere, and that he would rather live
where the rivers are.

When they came near the island the fog lifted. The harbour master stood at the end of the pier with a lantern that he
had forgotten to put out, and waved. First the letters were handed over, because people wait for letters; then the
bread, which was still warm; then the trees, one after the other, until the deck was empty. By noon the boat was on its
way back, with apples, wool, and a letter for the nursery that asked for twenty more trees in the spring.
"""


@dataclass(frozen=True, slots=True)
class WireRow:
    """kl_mean, kl_max: nats, from the distribution over the stored context to the one over the travelled context.
    same_greedy: share of positions with the same most likely token. nbytes_ratio: what travels, against stored."""

    wire_format: str
    context_tokens: int
    positions: int
    kl_mean: float
    kl_max: float
    same_greedy: float
    nbytes_ratio: float


def measure(model_dir: Path, context: int = CONTEXT_TOKENS) -> list[WireRow]:
    model = load_model(model_dir, operators_for())
    tokens = torch.tensor(Tokenizer.load(model_dir).encode(TEXT)[: model.limits.max_context_tokens])
    assert len(tokens) > context, "the text is longer than the context"
    stored = _continued(model, tokens, context, WireFormat.STORED)
    return [
        _compare(model, stored, _continued(model, tokens, context, wire), context, wire)
        for wire in (WireFormat.INT8, WireFormat.FP8)
    ]


@torch.inference_mode()
def _continued(model: CausalLM, tokens: torch.Tensor, context: int, wire: WireFormat) -> torch.Tensor:
    """Log probabilities, float64 [tokens after the context, vocabulary]."""
    layouts = model.layouts(TOKENS_PER_BLOCK, DType.FLOAT32)
    blocks = -(-len(tokens) // TOKENS_PER_BLOCK)
    pools = [build_pool(layout, blocks, "cpu") for layout in layouts]

    def compute(start: int, stop: int) -> torch.Tensor:
        chunk = AttentionChunk(start, stop - start, (tuple(range(blocks)),) * len(pools), (0,) * len(pools))
        batch = ForwardBatch(
            token_ids=tokens[start:stop],
            positions=torch.arange(start, stop),
            logit_rows=torch.arange(stop - start),
            attention=PagedAttention(pools, [chunk]),
        )
        return model.forward(batch)

    compute(0, context)
    if wire is not WireFormat.STORED:
        travelling = WirePools(pools, [build_pool(layout, blocks, "cpu") for layout in wire_layouts(layouts, wire)])
        tables = [BlockTable(tuple(range(blocks)), ()) for _ in layouts]
        slots = travelling.take(tables, TokenRange(0, context))
        travelling.fill(slots, tables)
        travelling.empty(slots, tables, TokenRange(0, context))
    return compute(context, len(tokens)).double().log_softmax(-1)


def _compare(model: CausalLM, stored: torch.Tensor, travelled: torch.Tensor, context: int, wire: WireFormat) -> WireRow:
    divergence = (stored.exp() * (stored - travelled)).sum(-1)
    layouts = model.layouts(TOKENS_PER_BLOCK, DType.FLOAT32)
    moved = sum(layout.token_nbytes for layout in wire_layouts(layouts, wire))
    return WireRow(
        wire_format=wire.value,
        context_tokens=context,
        positions=len(stored),
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        same_greedy=float((stored.argmax(-1) == travelled.argmax(-1)).double().mean()),
        nbytes_ratio=moved / sum(layout.token_nbytes for layout in layouts),
    )


def as_table(rows: Sequence[WireRow]) -> Table:
    table = Table("format", "context", "positions", "KL mean", "KL max", "same token", "bytes", title="KV wire formats")
    for row in rows:
        cells = (f"{row.kl_mean:.2e}", f"{row.kl_max:.2e}", f"{row.same_greedy:.1%}", f"{row.nbytes_ratio:.2f}")
        table.add_row(row.wire_format, f"{row.context_tokens}", f"{row.positions}", *cells)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.wire", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name, a model directory or a .gguf file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    with progress_bar() as progress:
        model_dir = resolve_model(options.model, progress)
    rows = measure(model_dir)
    if options.json:
        print(json.dumps({"machine": machine(torch.get_num_threads()), "rows": [asdict(row) for row in rows]}))
    else:
        Console().print(as_table(rows))


if __name__ == "__main__":
    main()
