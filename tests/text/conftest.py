"""Small tokenizers of the kinds checkpoints come with, written as checkpoint directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris.",
    "Zażółć gęślą jaźń; съешь же ещё этих мягких французских булок.",
    "こんにちは世界。今日はいい天気ですね。 안녕하세요 세계 مرحبا بالعالم",
    "emoji 😀😀 👩‍👩‍👧‍👦 🏳️‍🌈 and code: def f(x):\n\treturn x  # done\n\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _write(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 style byte-level BPE; merges cross character boundaries of multi-byte scripts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool→call>"])
    return _write(tmp_path_factory.mktemp("byte_level"), tokenizer)


@pytest.fixture(scope="session")
def byte_fallback_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SentencePiece style: spaces are U+2581, characters outside the vocabulary become byte tokens."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;é世"
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "he", "▁the"]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return _write(tmp_path_factory.mktemp("byte_fallback"), tokenizer)


@pytest.fixture(scope="session")
def word_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """WordPiece: a decoder that needs neighbouring tokens."""
    words = ["[UNK]", *SPECIAL, "the", "fox", "jump", "##s", "##ed", "over", ".", ",", "dog"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|(?=[.,])"), "removed")
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return _write(tmp_path_factory.mktemp("word"), tokenizer)
