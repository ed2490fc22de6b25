"""Every family through prefill -> NIXL -> decode in processes of their own, without Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_checkpoint
from families import BLOCK, DISAGGREGATED, FAMILIES, LENGTHS, OPT_IN_REUSE, WITHOUT_REUSE
from plain_cluster import PlainCluster, running_pair

from kvferry.core import DType, GroupKind, KVLayout, SamplingParams
from kvferry.models import load_model, torch_operators

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
CASES = [(name, manager, "NIXL", "PYTHON") for manager, names in DISAGGREGATED.items() for name in names]
CASES += [
    ("nemotron_h", "V1", "NIXL", "CPP"),
    ("nemotron_h", "V2", "SHM", "PYTHON"),
    ("nemotron_h", "V1", "SHM", "CPP"),
]
"""Every route that states can take."""
SNAPSHOT_TOKENS = 32


class FamilyPair:
    """One prefill and one decode worker over a family's checkpoint."""

    def __init__(self, name: str, manager: str, cluster: PlainCluster) -> None:
        self.name, self.manager, self.cluster = name, manager, cluster
        model = load_model(cluster.model_dir, torch_operators())
        self.layouts = model.layouts(BLOCK, DType.FLOAT32)

    def cold_nbytes(self, tokens: int) -> int:
        """Of a prompt that decode knows nothing of: what its next token can look back to, in whole blocks."""
        return sum(
            layout.slot_nbytes
            if layout.kind.is_state
            else (tokens - self._oldest(layout, tokens)) * layout.token_nbytes
            for layout in self.layouts
        )

    def warm_nbytes(self, tokens: int, held: int) -> int:
        """Of a prompt whose first `held` tokens decode has in the groups that keep everything: the rest of these, and
        of the others what the next token can look back to."""
        if (self.name, self.manager) in WITHOUT_REUSE:
            return self.cold_nbytes(tokens)
        return sum(
            layout.slot_nbytes
            if layout.kind.is_state
            else (tokens - (self._oldest(layout, tokens) or held)) * layout.token_nbytes
            for layout in self.layouts
        )

    def _oldest(self, layout: KVLayout, tokens: int) -> int:
        if layout.window is None or self.manager == "V1":
            return 0
        chunked = layout.kind is GroupKind.CHUNKED
        oldest = tokens // layout.window * layout.window if chunked else max(0, tokens + 1 - layout.window)
        return min(tokens, oldest // BLOCK * BLOCK)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path
) -> Iterator[FamilyPair]:
    name, manager, backend, runtime = request.param
    work_dir = tmp_path_factory.mktemp(f"{name}-{manager}")
    model_dir = random_checkpoint(FAMILIES[name](), work_dir / "model")
    for file in tiny_llama_dir.glob("tokenizer*"):
        shutil.copy(file, model_dir)
    settings = {
        "kv_cache.manager": manager,
        "kv_cache.bytes": 16 << 20,
        "kv_cache.tokens_per_block": BLOCK,
        "kv_cache.snapshot_tokens": SNAPSHOT_TOKENS,
        "router.lost_after_s": 60.0,  # a busy machine is no fault here, and a replay would move more bytes
        "transceiver.backend": backend,
        "transceiver.runtime": runtime,
    }
    if name in OPT_IN_REUSE and manager == "V2":
        settings["kv_cache.prefix_reuse"] = "true"
    with running_pair(model_dir, work_dir, settings) as cluster:
        yield FamilyPair(name, manager, cluster)


def prompt_of(length: int, seed: int) -> list[int]:
    """The same for seeds that are equal modulo 200."""
    return [3 + (7 * i + 31 * seed + i * i % 13) % 200 for i in range(length)]


def test_golden_at_every_boundary_and_the_bytes_are_those_of_the_layouts(
    pair: FamilyPair, reference: Any, assert_golden: Any
) -> None:
    model = reference.load(pair.cluster.model_dir)
    for length in LENGTHS:
        prompt = prompt_of(length, length)
        completed = pair.cluster.complete(prompt, GREEDY)
        assert completed.route["disaggregated"]
        assert len(completed.token_ids) == 32
        assert_golden(model, prompt, completed.token_ids)
        assert completed.route["transferred_bytes"] == pair.cold_nbytes(length), f"of {length} tokens"
    pair.cluster.assert_baseline()


@pytest.mark.parametrize("shared", [16, 40, 48, 64, 96])
def test_prompts_that_share_a_beginning_are_golden_on_either_worker(
    pair: FamilyPair, reference: Any, assert_golden: Any, shared: int
) -> None:
    """Decode was sent a window's last blocks only: where an older prefix is asked for again, it may not make do
    with blocks that it never got."""
    model = reference.load(pair.cluster.model_dir)
    first = prompt_of(110, 1000 + shared)
    for prompt in (first, first, first[:shared] + prompt_of(41, 2000 + shared), first[: shared + 1], first):
        completed = pair.cluster.complete(prompt, GREEDY)
        assert_golden(model, prompt, completed.token_ids)
        assert completed.route["transferred_bytes"] <= pair.cold_nbytes(len(prompt))


def test_a_window_does_not_keep_decode_from_what_it_holds_of_the_rest(
    pair: FamilyPair, reference: Any, assert_golden: Any
) -> None:
    """The same prompt, and another one that begins like it: blocks of full attention that are here do not move, though
    the window was here only as it was at the end of the first."""
    model = reference.load(pair.cluster.model_dir)
    first = prompt_of(100, 171)
    branch = first[:64] + prompt_of(41, 172)
    for prompt, nbytes in (
        (first, pair.cold_nbytes(100)),
        (first, pair.warm_nbytes(100, held=96)),
        (branch, pair.warm_nbytes(105, held=64)),
        (branch, pair.warm_nbytes(105, held=96)),
    ):
        completed = pair.cluster.complete(prompt, GREEDY)
        assert_golden(model, prompt, completed.token_ids)
        assert completed.route["transferred_bytes"] == nbytes
    pair.cluster.assert_baseline()


def test_several_at_once_are_golden(pair: FamilyPair, reference: Any, assert_golden: Any) -> None:
    model = reference.load(pair.cluster.model_dir)
    prompts: Sequence[list[int]] = [prompt_of(length, 50 + length) for length in (5, 20, 31, 64, 99, 120)]
    for prompt, completed in zip(prompts, pair.cluster.complete_all(prompts, GREEDY), strict=True):
        assert_golden(model, prompt, completed.token_ids)
    pair.cluster.assert_baseline()


@pytest.mark.parametrize("pair", [case for case in CASES if case[:2] == ("nemotron_h", "V2")], indirect=True)
def test_states_are_reused_where_a_snapshot_was_taken(pair: FamilyPair, reference: Any, assert_golden: Any) -> None:
    """A prompt of whole blocks moves once; the next turn moves what follows decode's last block, and one state."""
    states = [layout for layout in pair.layouts if layout.kind.is_state]
    model = reference.load(pair.cluster.model_dir)
    per_token = sum(layout.token_nbytes for layout in pair.layouts if not layout.kind.is_state)
    prompt = prompt_of(80, 3000)
    first, again = (pair.cluster.complete(prompt, GREEDY) for _ in range(2))
    assert first.route["transferred_bytes"] == pair.cold_nbytes(80)
    assert again.route["transferred_bytes"] == 0
    assert again.usage["cached_tokens"] == 64, "what prefill found: it must compute a token"
    turn = [*prompt, *first.token_ids, *prompt_of(9, 3001)]
    second = pair.cluster.complete(turn, GREEDY)
    assert second.route["transferred_bytes"] == (len(turn) - 96) * per_token + sum(s.slot_nbytes for s in states)
    for asked, completed in ((prompt, first), (prompt, again), (turn, second)):
        assert_golden(model, asked, completed.token_ids)
    pair.cluster.assert_baseline()
