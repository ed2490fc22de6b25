"""What a GGUF file says, in the words of an HF checkpoint: config and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from kvferry.core import CheckpointError


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How one GGUF architecture maps to an HF class. permuted: llama.cpp reorders the rows of q and k."""

    architecture: str
    model_type: str
    permuted: bool


FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2", permuted=False),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3", permuted=False),
}

_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MAGIC = b"GGUF"
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and later store their rope scaling as a table of factors; these three never varied.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", field="model") from None
    if magic != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}", field="model")


class GGUFCheckpoint:
    """A GGUF file, opened. Raises CheckpointError naming the file and what of it is missing or unsupported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_magic(path)
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, OSError, KeyError, IndexError) as error:
            # The reader's own words are about arrays it could not cut from the file.
            raise CheckpointError(
                f"{path} is damaged or cut short: its GGUF header cannot be read", field="model"
            ) from error
        name = self.field("general.architecture")
        if name not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise CheckpointError(f"{path} has GGUF architecture {name!r}; known: {known}", field="model")
        self._prefix = str(name)
        self.family = FAMILIES[self._prefix]
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key: a number, a string or a list of them."""
        entry = self._reader.fields.get(key)
        return default if entry is None else entry.contents()

    def required(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise CheckpointError(f"{self.path} lacks the metadata key {key}", field="model")
        return value

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as float32: what a conversion has to do."""
        return sum(4 * int(tensor.n_elements) for tensor in self._tensors.values())

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        heads = int(self._hyper("attention.head_count"))
        hidden = int(self._hyper("embedding_length"))
        config = {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": int(self._hyper("feed_forward_length")),
            "num_hidden_layers": int(self._hyper("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._hyper("attention.head_count_kv", heads)),
            "head_dim": int(self._hyper("attention.key_length", hidden // heads)),
            "hidden_act": "silu",
            "max_position_embeddings": int(self._hyper("context_length")),
            # GGUF keeps float32: print the shortest decimal that means the same number.
            "rms_norm_eps": float(str(np.float32(self._hyper("attention.layer_norm_rms_epsilon")))),
            "rope_theta": float(str(np.float32(self._hyper("rope.freq_base", 10000.0)))),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "torch_dtype": "float32",
        }
        if self.family.model_type != "qwen2":
            config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        return config | self.special_tokens()

    def special_tokens(self) -> dict[str, Any]:
        """bos, eos and pad ids as config.json and generation_config.json spell them; eos may be a list."""
        ends = [self.field("tokenizer.ggml.eos_token_id"), self.field("tokenizer.ggml.eot_token_id")]
        eos = list(dict.fromkeys(int(end) for end in ends if end is not None))
        bos, pad = self.field("tokenizer.ggml.bos_token_id"), self.field("tokenizer.ggml.padding_token_id")
        tokens = {"bos_token_id": bos, "eos_token_id": eos[0] if len(eos) == 1 else eos or None, "pad_token_id": pad}
        return {key: value for key, value in tokens.items() if value is not None}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF name and value of every tensor, in file order. Quantised ones become float32."""
        for name, tensor in self._tensors.items():
            if name != _ROPE_FACTORS:
                yield self._hf_name(name), self._value(name, tensor)

    def _hyper(self, key: str, default: Any = None) -> Any:
        full = f"{self._prefix}.{key}"
        return self.required(full) if default is None else self.field(full, default)

    def _vocab_size(self) -> int:
        tensor = self._tensors.get("token_embd.weight")
        if tensor is None:
            raise CheckpointError(f"{self.path} lacks the tensor token_embd.weight", field="model")
        return int(tensor.shape[1])

    def _rope_scaling(self) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._tensors:
            factors = np.asarray(self._tensors[_ROPE_FACTORS].data, dtype=np.float32)
            return {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3_ROPE}
        kind = self._hyper("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise CheckpointError(f"{self.path} scales rope by {kind!r}; known: linear, yarn", field="model")
        scaling = {"rope_type": kind, "factor": float(self._hyper("rope.scaling.factor"))}
        original = self._hyper("rope.scaling.original_context_length", 0)
        return scaling | ({"original_max_position_embeddings": int(original)} if original else {})

    def _hf_name(self, name: str) -> str:
        if name in _TOP_TENSORS:
            return _TOP_TENSORS[name]
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
            return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"
        raise CheckpointError(f"{self.path} holds a tensor of unknown purpose: {name}", field="model")

    def _value(self, name: str, tensor: Any) -> torch.Tensor:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be dequantised: {error}", field="model") from None
        if self.family.permuted and ".attn_q." in name:
            values = _unpermute(values, int(self._hyper("attention.head_count")))
        if self.family.permuted and ".attn_k." in name:
            heads = int(self._hyper("attention.head_count"))
            values = _unpermute(values, int(self._hyper("attention.head_count_kv", heads)))
        return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))


def _unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undoes llama.cpp's interleaving: row 2i + j of a head goes back to row j * (head_dim / 2) + i."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
