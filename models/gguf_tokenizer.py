"""The tokenizer a GGUF file carries, as the files of an HF checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry.core import CheckpointError
from kvferry.models.gguf_checkpoint import GGUFCheckpoint

# Token types of GGUF's vocabulary.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# `tokenizer.ggml.pre`: how byte-level BPE cuts text before merging.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": _digits_then_bytes,
    "llama-bpe": lambda: _split(_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST),
    "qwen2": lambda: _split(_CONTRACTIONS + _WORDS + r"\p{N}" + _REST),
}


def build_tokenizer(checkpoint: GGUFCheckpoint) -> Tokenizer:
    """Raises CheckpointError naming a tokenizer model or pre-tokenizer that is not known."""
    kind = checkpoint.required("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(checkpoint)
    elif kind == "llama":
        tokenizer = _sentence_piece(checkpoint)
    else:
        raise CheckpointError(f"{checkpoint.path} has a tokenizer of kind {kind!r}; known: gpt2, llama", field="model")
    _add_special(tokenizer, checkpoint)
    return tokenizer


def tokenizer_config(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """The contents of tokenizer_config.json, chat template included."""
    tokens: list[str] = checkpoint.required("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config()["max_position_embeddings"],
        "add_bos_token": bool(checkpoint.field("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for key, name in names.items():
        token_id = checkpoint.field(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[key] = tokens[token_id]
    template = checkpoint.field("tokenizer.chat_template")
    return config | ({"chat_template": template} if template else {})


def write_tokenizer(checkpoint: GGUFCheckpoint, directory: Path) -> None:
    build_tokenizer(checkpoint).save(str(directory / "tokenizer.json"))


def _byte_level(checkpoint: GGUFCheckpoint) -> Tokenizer:
    pre = checkpoint.field("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise CheckpointError(f"{checkpoint.path} has pre-tokenizer {pre!r}; known: {known}", field="model")
    merges = [tuple(merge.split(" ", 1)) for merge in checkpoint.required("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=_vocab(checkpoint), merges=merges))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(checkpoint: GGUFCheckpoint) -> Tokenizer:
    vocab = _vocab(checkpoint)
    merges = _merges_by_score(vocab, checkpoint.required("tokenizer.ggml.scores"))
    unknown = checkpoint.required("tokenizer.ggml.tokens")[checkpoint.field("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if checkpoint.field("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best: list every pair in that order."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, token_id in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], (left, right)))
    return [pair for *_, pair in sorted(ranked)]


def _vocab(checkpoint: GGUFCheckpoint) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(checkpoint.required("tokenizer.ggml.tokens"))}


def _add_special(tokenizer: Tokenizer, checkpoint: GGUFCheckpoint) -> None:
    tokens: list[str] = checkpoint.required("tokenizer.ggml.tokens")
    types: list[int] = checkpoint.field("tokenizer.ggml.token_type", [])
    special = [tokens[i] for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)]
    defined = [tokens[i] for i, kind in enumerate(types) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in defined])
