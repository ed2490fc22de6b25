"""What a precision costs in quality: next-token distributions over a fixed text, against those of fp32.

Every choice of `engine.precision` and `kv_cache.dtype` reads the same tokens in the same chunks, so that most of what
it attends to comes from its cache. Results do not depend on the machine's speed; the last digits may on its kernels.
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

from kvferry.bench.floor import TOKENS_PER_BLOCK, machine
from kvferry.core import DType
from kvferry.engine import KV_DTYPES
from kvferry.engine.attention import PagedAttention
from kvferry.engine.operators import operators_for
from kvferry.engine.spans import AttentionChunk
from kvferry.kvcache.pool import build_pool
from kvferry.models import CausalLM, ForwardBatch, load_model, progress_bar, resolve_model
from kvferry.text import Tokenizer

TEXT = Path(__file__).parent / "data" / "precision.txt"
CPU_PRECISIONS = ("fp32", "int8")
CHUNK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class PrecisionRow:
    """kl_*: Kullback-Leibler divergence of the next token's distribution from fp32's, in nats, over positions.
    agreement: share of positions with the same most likely token. perplexity: of the text itself."""

    precision: str
    kv_dtype: str
    positions: int
    kl_mean: float
    kl_p99: float
    agreement: float
    perplexity: float


def log_probabilities(model: CausalLM, tokens: Sequence[int], kv_dtype: DType) -> torch.Tensor:
    """float32 [tokens, vocab]: of what follows each token."""
    layouts = model.layouts(TOKENS_PER_BLOCK, kv_dtype)
    blocks = -(-len(tokens) // TOKENS_PER_BLOCK)
    pools = [build_pool(layout, blocks, "cpu") for layout in layouts]
    parts = []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        ids = torch.tensor(tokens[start : start + CHUNK_TOKENS])
        tables = (tuple(range(blocks)),) * len(pools)
        chunk = AttentionChunk(start, len(ids), tables, (0,) * len(pools))
        rows = torch.arange(len(ids))
        batch = ForwardBatch(ids, start + rows, rows, PagedAttention(pools, [chunk]))
        parts.append(model.forward(batch).log_softmax(dim=-1))
    return torch.cat(parts)


def compare(
    precision: str, kv_dtype: str, tokens: Sequence[int], ours: torch.Tensor, exact: torch.Tensor
) -> PrecisionRow:
    """ours, exact: as `log_probabilities` gives them."""
    divergence = (exact.exp() * (exact - ours)).sum(dim=-1)
    followed = ours[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
    return PrecisionRow(
        precision=precision,
        kv_dtype=kv_dtype,
        positions=len(tokens),
        kl_mean=float(divergence.mean()),
        kl_p99=float(divergence.quantile(0.99)),
        agreement=float((ours.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean()),
        perplexity=float((-followed.mean()).exp()),
    )


def measure(model_dir: Path, most_tokens: int) -> list[PrecisionRow]:
    """One row per precision and KV type; one model is in memory at a time."""
    tokens = Tokenizer.load(model_dir).encode(TEXT.read_text(encoding="utf-8"))[:most_tokens]
    rows: list[PrecisionRow] = []
    exact: torch.Tensor | None = None
    for precision in CPU_PRECISIONS:
        model = load_model(model_dir, operators_for("cpu", precision))
        for kv_dtype in KV_DTYPES:
            ours = log_probabilities(model, tokens, KV_DTYPES[kv_dtype])
            exact = ours if exact is None else exact
            rows.append(compare(precision, kv_dtype, tokens, ours, exact))
    return rows


def as_table(rows: Sequence[PrecisionRow]) -> Table:
    table = Table(title=f"against fp32 with fp32 K and V, {rows[0].positions} positions")
    for name in ("precision", "KV", "KL mean", "KL p99", "same token", "perplexity"):
        table.add_column(name, justify="left" if name in ("precision", "KV") else "right")
    for row in rows:
        table.add_row(
            row.precision,
            row.kv_dtype,
            f"{row.kl_mean:.5f}",
            f"{row.kl_p99:.4f}",
            f"{row.agreement:.1%}",
            f"{row.perplexity:.3f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.precision", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a known name, a model directory or a .gguf file")
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of the text to read")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.threads < 1:
        parser.error("--tokens must be at least 2, --threads at least 1")
    with progress_bar() as progress:
        model_dir = resolve_model(options.model, progress)
    torch.set_num_threads(options.threads)
    rows = measure(model_dir, options.tokens)
    if options.json:
        facts = machine(options.threads)
        del facts["precision"]  # a column here
        print(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}))
    else:
        Console().print(as_table(rows))


if __name__ == "__main__":
    main()
