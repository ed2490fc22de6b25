"""The real tokenizer, against the library its checkpoint was written for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.text import OutputText, Tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "Zażółć gęślą jaźń; съешь же ещё этих мягких булок",
    "東京は日本の首都です。안녕하세요 مرحبا",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀😀\n\n\tdef f(x):\n        return  x\r\n",
    "<|im_start|>user\nspecials inside<|im_end|>",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_dir)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_the_reference(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference(text).input_ids
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special=skip) == expected
    output = OutputText(tokenizer, ["never to be found"])
    streamed = "".join(output.push([token_id]) for token_id in ids) + output.flush()
    assert streamed == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is the capital of France?"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi 😀"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "And now?"},
        ],
    ],
)
def test_chat_equals_the_reference(tokenizer: Tokenizer, reference: Any, messages: list[dict[str, str]]) -> None:
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.encode_chat(messages) == reference(expected, add_special_tokens=False).input_ids


def test_vocabulary_and_end(tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.vocab_size == len(reference) == 49152
    assert tokenizer.eos_token_ids == {reference.eos_token_id}
