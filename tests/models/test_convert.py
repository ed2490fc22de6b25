"""GGUF files become HF directories that mean the same, once, whoever asks at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvferry.core import CheckpointError, ConfigError
from kvferry.models import convert, convert_gguf, resolve_model
from kvferry.resolution import read_config

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    if "smollm2_dir" not in request.fixturenames:
        monkeypatch.setenv(convert.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_gguf(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return write_gguf(tiny_llama_dir, tmp_path / "tiny.gguf")


def write_gguf(model_dir: Path, path: Path, pre: str = "gpt-2") -> Path:
    """A llama GGUF of an HF directory, as llama.cpp's converter lays it out."""
    config = read_config(model_dir)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    _add_tokenizer(writer, model_dir, pre)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        layer = stem.removeprefix("model.layers.").split(".", 1)
        short = GGUF_NAMES[layer[1] if stem.startswith("model.layers.") else stem]
        values = tensor.numpy()
        if short in heads:
            values = values.reshape(heads[short], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        prefix = f"blk.{layer[0]}." if stem.startswith("model.layers.") else ""
        writer.add_tensor(f"{prefix}{short}.{kind}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, model_dir: Path, pre: str) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(vocab["<|im_start|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_eot_token_id(vocab["<|endoftext|>"])
    writer.add_chat_template("{{ messages[0]['content'] }}")


def test_tensors_come_back_as_they_were(tiny_gguf: Path, tiny_llama_dir: Path) -> None:
    converted = load_file(convert_gguf(tiny_gguf) / "model.safetensors")
    original = load_file(tiny_llama_dir / "model.safetensors")
    assert converted.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(converted[name], tensor), name


def test_config_and_special_tokens(tiny_gguf: Path, tiny_llama_dir: Path) -> None:
    directory = convert_gguf(tiny_gguf)
    config, original = read_config(directory), read_config(tiny_llama_dir)
    for key in ("architectures", "vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        assert config[key] == original[key], key
    assert config["tie_word_embeddings"] is False
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0]}


def test_the_tokenizer_gives_the_same_ids_and_template(tiny_gguf: Path, tiny_llama_dir: Path) -> None:
    from transformers import AutoTokenizer

    directory = convert_gguf(tiny_gguf)
    ours, theirs = AutoTokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(tiny_llama_dir)
    for text in ("The quick brown fox", "  naïve 東京 🎉\n\n12345", "<|im_start|>user\nhi<|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_token == "<|im_end|>"
    assert ours.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"


def test_a_second_conversion_is_the_cached_first(tiny_gguf: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    first = convert_gguf(tiny_gguf, lambda what, done, total: reports.append((what, done, total)))
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
    assert reports[-1][1] == reports[-1][2]
    assert "tiny.gguf" in reports[0][0]
    assert resolve_model(tiny_gguf, lambda what, done, total: pytest.fail("converted twice")) == first


def test_another_file_of_the_same_name_is_converted_anew(tiny_gguf: Path, tiny_llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = write_gguf(tiny_llama_dir, tmp_path / "elsewhere" / "tiny.gguf", pre="smollm")
    assert convert_gguf(tiny_gguf) != convert_gguf(other)


def test_large_checkpoints_are_sharded(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, our_logits: Any) -> None:
    whole = our_logits(convert_gguf(tiny_gguf), [5, 6, 7])
    monkeypatch.setattr(convert, "_SHARD_NBYTES", 200_000)
    monkeypatch.setattr(convert, "CONVERTER_VERSION", "sharded")
    directory = convert_gguf(tiny_gguf)
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 1
    assert torch.equal(our_logits(directory, [5, 6, 7]), whole)


def test_two_processes_at_once_convert_once(tiny_gguf: Path, cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kvferry.models import convert_gguf\n"
        "reports = []\n"
        "print(convert_gguf(Path(sys.argv[1]), lambda *report: reports.append(report)), len(reports))"
    )
    command = [sys.executable, "-c", program, str(tiny_gguf)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0].split() for process in running]
    assert answers[0][0] == answers[1][0]
    assert sorted(int(count) > 0 for _, count in answers) == [False, True]
    assert [path.suffix for path in sorted((cache / "converted").iterdir())] == ["", ".lock"]


def test_what_a_dead_process_left_is_removed(tiny_gguf: Path, cache: Path) -> None:
    target = convert_gguf(tiny_gguf)
    left_over = target.with_name(f"{target.name}.part-dead")
    target.rename(left_over)
    assert convert_gguf(tiny_gguf) == target
    assert not left_over.exists()


def test_a_failed_conversion_leaves_nothing(tiny_llama_dir: Path, tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tiny_llama_dir, tmp_path / "odd.gguf", pre="klingon")
    with pytest.raises(CheckpointError, match="pre-tokenizer 'klingon'; known: default, gpt-2, llama-bpe"):
        convert_gguf(path)
    assert [entry.suffix for entry in (cache / "converted").iterdir()] == [".lock"]


def test_no_gguf_and_no_known_architecture_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is no model")
    with pytest.raises(CheckpointError, match=r"text.gguf is no GGUF file"):
        convert_gguf(tmp_path / "text.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "starcoder")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="GGUF architecture 'starcoder'; known: llama, qwen2, qwen3"):
        convert_gguf(tmp_path / "other.gguf")


def test_an_unusable_cache_names_the_variable(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(convert.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="set KVFERRY_CACHE to a writable folder"):
        convert_gguf(tiny_gguf)


def test_smollm2_tokenizes_as_published(smollm2_dir: Path) -> None:
    """Ids as the published tokenizer gives them: digits one by one, bytes for what the vocabulary lacks."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in 1984"))[-4:] == ["1", "9", "8", "4"]
    for text in ("Hello, world!", "naïve 東京 🎉", "  two  spaces\n\ttab"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == 2
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no GGUF file: it does not begin with GGUF"),
        (b"PK\x03\x04 something else", "is no GGUF file: it does not begin with GGUF"),
        (b"GGUF\x03\x00\x00\x00", "is damaged or cut short: its GGUF header cannot be read"),
    ],
)
def test_what_is_no_gguf_is_told_in_our_words(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        convert_gguf(tmp_path / "bad.gguf")
    assert caught.value.message == f"{tmp_path / 'bad.gguf'} {words}"
