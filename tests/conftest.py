"""Models and references that every part's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from kvferry.models import resolve_model

AssertGolden = Callable[[Any, Sequence[int], Sequence[int]], int]

NEAR_TIE = 1e-4
MAX_NEAR_TIE_SHARE = 0.02

# On a shared machine an example of a millisecond may take a second: how long one takes proves nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as an HF directory; converted on first use, then cached."""
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 layers (6 heads on 2 KV heads, odd vocabulary) with a tokenizer and chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = _tiny_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@dataclass(slots=True)
class Reference:
    """Plain transformers in fp32, one loaded model per directory."""

    _models: dict[Path, Any] = field(default_factory=dict)

    def load(self, model_dir: Path) -> Any:
        from transformers import AutoModelForCausalLM

        model_dir = model_dir.resolve()
        if model_dir not in self._models:
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
            self._models[model_dir] = model.eval()
        return self._models[model_dir]

    @torch.inference_mode()
    def logits(self, model: Any, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab]: row i is the distribution of what follows token i."""
        logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)])).logits
        return logits[0]

    @torch.inference_mode()
    def greedy(self, model: Any, prompt_ids: Sequence[int], max_tokens: int, eos_ids: Sequence[int] = ()) -> list[int]:
        """Up to max_tokens greedy tokens; stops after one of eos_ids (none: never)."""
        from transformers import DynamicCache

        output: list[int] = []
        step, cache = torch.tensor([list(prompt_ids)]), DynamicCache()
        while len(output) < max_tokens and not (output and output[-1] in eos_ids):
            logits = model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1).logits
            output.append(int(logits[0, -1].argmax()))
            step = torch.tensor([output[-1:]])
        return output


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@dataclass(slots=True)
class _Tally:
    positions: int = 0
    near_ties: int = 0


@pytest.fixture(scope="session")
def assert_golden(reference: Reference) -> Iterator[AssertGolden]:
    """`assert_golden(reference_model, prompt_ids, output_ids)` fails unless the output is the reference's greedy one.

    Each token must be the reference's choice given all before it (which is equality up to the first difference,
    and teacher forcing beyond it). Where the top two logits are closer than 1e-4 either will do; such positions
    are returned, counted over the session, and may be at most 2% of all.
    """
    tally = _Tally()

    def check(model: Any, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        assert output_ids, "no output to compare"
        logits = reference.logits(model, [*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
        top = logits.topk(2).values
        near = top[:, 0] - top[:, 1] < NEAR_TIE
        chosen = logits.gather(1, torch.tensor(output_ids).view(-1, 1)).squeeze(1)
        # At a near tie either of the tied tokens is right; elsewhere only the first.
        behind = top[:, 0] - chosen
        wrong = torch.where(near, behind >= NEAR_TIE, behind > 0).nonzero().flatten().tolist()
        assert not wrong, (
            f"token {wrong[0]} is {output_ids[wrong[0]]}, the reference says {int(logits[wrong[0]].argmax())} "
            f"(behind by {float(behind[wrong[0]]):.2e}); {len(wrong)} of {len(output_ids)} differ"
        )
        tally.positions += len(output_ids)
        tally.near_ties += int(near.sum())
        return int(near.sum())

    yield check
    allowed = max(1, int(MAX_NEAR_TIE_SHARE * tally.positions))
    assert tally.near_ties <= allowed, f"{tally.near_ties} near ties in {tally.positions} positions"


_CORPUS = """The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the capital of France.
A router sends each prompt to a worker, which computes its cache; another one produces the tokens.
Once upon a time there was a small ferry that carried letters across the river every morning and every evening.
Grüße aus Köln, où est la gare? 東京は日本の首都です。 0 1 2 3 4 5 6 7 8 9 10 100 1000 def main(): return None
"""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tiny_tokenizer() -> Any:
    """A byte-level BPE of 509 tokens at most, trained here; every text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=509,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
    )
