"""Layers of compiled parts, computed in one call.

Called one by one from Python, the kernels of a layer cost more than a sixth of a decoding step on top: each leaves the
caches full of weights, and the interpreter comes back to none of its own data. Other threads run meanwhile, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.engine.attention import PagedAttention
from kvferry.engine.native import kernels
from kvferry.engine.native_operators import NativeInt8Linear, NativeLinear, rms_norm, silu_product
from kvferry.models import Attention, DecoderLayer, Layer, Linear, PlainStack, RMSNorm


def native_stack(layers: Sequence[Layer]) -> Layer:
    """One call for all of them, if every part of each is compiled; else one after the other."""
    compiled = [layer for layer in layers if isinstance(layer, DecoderLayer) and _is_compiled(layer)]
    return NativeStack(compiled) if compiled and len(compiled) == len(layers) else PlainStack(layers)


class NativeStack:
    """The same kernels in the same order as the layers' own, so the same bits."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._plain = PlainStack(layers)  # the parts live as long as this does
        self._indices = [layer.attention.layer for layer in layers]
        self._shapes = [(layer.attention.kv_heads, layer.attention.head_dim) for layer in layers]
        self._hidden = len(layers[0].attention_norm.weight)
        self._stack = kernels.DecoderLayers(self._hidden)
        for layer in layers:
            attention, mlp = layer.attention, layer.mlp
            self._stack.add(
                layer.attention_norm.weight.data_ptr(),
                layer.attention_norm.eps,
                _packed(attention.qkv),
                _packed(attention.out),
                attention.heads,
                attention.kv_heads,
                attention.head_dim,
                attention.head_dim**-0.5,
                layer.mlp_norm.weight.data_ptr(),
                layer.mlp_norm.eps,
                _packed(mlp.gate_up),
                _packed(mlp.down),
            )

    def __call__(self, x: torch.Tensor, turn: torch.Tensor, attention: Attention) -> torch.Tensor:
        if not isinstance(attention, PagedAttention):
            return self._plain(x, turn, attention)
        places = attention.native_places(self._indices, self._shapes)
        if places is None or x.dtype != torch.float32 or not x.is_contiguous():
            return self._plain(x, turn, attention)
        rows = attention.rows
        if x.shape != (rows, self._hidden) or any(turn.numel() != rows * dim // 2 for _, dim in self._shapes):
            got = f"{tuple(x.shape)}, turned by {tuple(turn.shape)}"
            raise ValueError(f"wanted {rows} rows of {self._hidden}, got {got}")
        turn = turn.contiguous()  # here, so that it lives as long as the call
        self._stack.run(x.data_ptr(), rows, places, turn.data_ptr(), torch.get_num_threads())
        return x


def _is_compiled(layer: DecoderLayer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    norms = (layer.attention_norm, layer.mlp_norm)
    return (
        all(isinstance(linear, NativeLinear) for linear in linears)
        and all(map(_is_compiled_norm, norms))
        and attention.q_norm is None
        and attention.k_norm is None
        and mlp.silu_product is silu_product
    )


def _is_compiled_norm(norm: RMSNorm) -> bool:
    weight = norm.weight
    return norm.operator is rms_norm and weight.dtype == torch.float32 and weight.is_contiguous()


def _packed(linear: Linear) -> kernels.PackedLinear:
    assert isinstance(linear, NativeLinear), "checked before"
    bias = 0 if linear.bias is None else linear.bias.data_ptr()
    return (
        linear.packed.data_ptr(),
        bias,
        linear.outputs,
        linear.columns,
        isinstance(linear, NativeInt8Linear),
    )
