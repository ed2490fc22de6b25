"""Nemotron-H: Mamba2, attention without positions, and feed-forward layers, one of them per layer and none twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.core import CheckpointError
from kvferry.models.attention import GroupedAttention, HeadShape, load_out, load_qkv
from kvferry.models.base import Config, Linear, Weights
from kvferry.models.checked import FULL, Shape, count, number
from kvferry.models.feedforward import (
    Activation,
    Experts,
    MixtureOfExperts,
    PlainFeedForward,
    activation_named,
    load_plain_feed_forward,
)
from kvferry.models.group_router import GroupRouter, RouterShape, load_router
from kvferry.models.layers import PackedRow, RMSNorm, load_packed
from kvferry.models.mamba2 import MambaShape, load_mamba2
from kvferry.models.operators import Operators
from kvferry.models.stack import Cached, LayerCache, LayerStack, StackNames, Step, load_norm

MAMBA, MLP, MOE = "linear_attention", "mlp", "moe"
_KINDS = (MAMBA, FULL, MLP, MOE)
_OLDER_NAMES = {"mamba": MAMBA, "attention": FULL}
_LETTERS = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE}
_NAMES = StackNames(("backbone.", "model."), "embeddings", "norm_f")
"""As checkpoints are written, and as the library's own class calls them."""

_USUAL = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "vocab_size": 131072,
    "hidden_size": 4096,
}
_USUAL_EXPERTS = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """latent: width of what experts see instead of the hidden state (None: the hidden state itself)."""

    router: RouterShape
    width: int
    shared_width: int
    latent: int | None


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """config.json, checked. kinds: per layer. experts: None where no layer has any."""

    shape: Shape
    kinds: tuple[str, ...]
    mamba: MambaShape
    experts: ExpertSizes | None
    width: int
    activation: Activation
    mlp_bias: bool
    mamba_bias: bool
    conv_bias: bool

    @classmethod
    def from_json(cls, config: Config) -> NemotronHConfig:
        """Raises CheckpointError naming the key that is missing or bad."""
        kinds = _kinds(config)
        # The class never ties its head, whatever the config says.
        layers = {"num_hidden_layers": len(kinds), "tie_word_embeddings": False}
        eps = {"rms_norm_eps": config.get("layer_norm_epsilon")}
        return cls(
            shape=Shape.from_json({**config, **layers, **eps}, _USUAL, eps=1e-5),
            kinds=kinds,
            mamba=_mamba_shape(config),
            experts=_expert_sizes(config) if MOE in kinds else None,
            width=count(config, "intermediate_size", 21504),
            activation=activation_named(config, "mlp_hidden_act", "relu2"),
            mlp_bias=bool(config.get("mlp_bias", False)),
            mamba_bias=bool(config.get("use_bias", False)),
            conv_bias=bool(config.get("use_conv_bias", True)),
        )


def _kinds(config: Config) -> tuple[str, ...]:
    """The layers, listed by name or, in older configs, by one letter each."""
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        listed = config.get(key)
        if listed is None:
            continue
        names = _LETTERS if isinstance(listed, str) else {**_OLDER_NAMES, **{kind: kind for kind in _KINDS}}
        if not isinstance(listed, str | list | tuple) or not listed or not all(name in names for name in listed):
            raise CheckpointError(
                f"config.json: bad {key} (known: {', '.join(_KINDS)}, or the letters {' '.join(_LETTERS)}): {listed!r}",
                field=key,
            )
        return tuple(names[name] for name in listed)
    raise CheckpointError("config.json lacks layers_block_type", field="layers_block_type")


def _mamba_shape(config: Config) -> MambaShape:
    if config.get("mamba_hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"config.json: mamba_hidden_act is {config['mamba_hidden_act']!r}; known: silu", field="mamba_hidden_act"
        )
    heads, groups = count(config, "mamba_num_heads", 128), count(config, "n_groups", 8)
    if heads % groups:
        raise CheckpointError(
            f"config.json: mamba_num_heads ({heads}) is no multiple of n_groups ({groups})", field="n_groups"
        )
    return MambaShape(
        heads=heads,
        head_dim=count(config, "mamba_head_dim", 64),
        groups=groups,
        state_dim=count(config, "ssm_state_size", 128),
        kernel=count(config, "conv_kernel", 4, least=2),
        least_step=number(config, "time_step_min", 0.001),
    )


def _expert_sizes(config: Config) -> ExpertSizes:
    given = {key: value for key, value in config.items() if value is not None}
    latent = config.get("moe_latent_size")
    return ExpertSizes(
        router=RouterShape.from_json({**_USUAL_EXPERTS, **given}, chosen=2),
        width=count(config, "moe_intermediate_size", 7688),
        shared_width=count(config, "moe_shared_expert_intermediate_size", 7688),
        latent=None if latent is None else count(config, "moe_latent_size"),
    )


Mixer = Callable[[torch.Tensor, Step], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: RMSNorm
    mixer: Mixer


class NemotronH(LayerStack):
    """Layers of multi-token prediction (`mtp.`) are not loaded."""

    def __init__(self, config: Config, weights: Weights, operators: Operators) -> None:
        c = NemotronHConfig.from_json(config)
        attending = LayerCache.attending(c.shape.kv_heads, c.shape.head_dim, None)
        caches: dict[str, Cached] = {MAMBA: c.mamba.caches, FULL: attending}
        super().__init__(c.shape, [caches.get(kind) for kind in c.kinds], [], weights, operators, names=_NAMES)
        self._layers = [
            _load_layer(c, f"{self.prefix}layers.{i}.", i, weights, operators) for i in range(c.shape.layers)
        ]

    def _run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        for layer in self._layers:
            x = x + layer.mixer(layer.norm(x), step)
        return x


def _load_layer(c: NemotronHConfig, prefix: str, index: int, weights: Weights, operators: Operators) -> _Layer:
    norm = load_norm(operators, weights, f"{prefix}norm", c.shape.hidden_size, c.shape.norm_eps)
    return _Layer(norm, _load_mixer(c, f"{prefix}mixer.", index, weights, operators))


def _load_mixer(c: NemotronHConfig, prefix: str, index: int, weights: Weights, operators: Operators) -> Mixer:
    hidden, kind = c.shape.hidden_size, c.kinds[index]
    if kind == MAMBA:
        return load_mamba2(
            weights,
            prefix,
            index,
            c.mamba,
            hidden,
            bias=c.mamba_bias,
            conv_bias=c.conv_bias,
            eps=c.shape.norm_eps,
            linear=operators.linear,
        )
    if kind == FULL:
        return _load_attention(c, prefix, index, weights, operators)
    if kind == MLP:
        return TokenWise(_load_feed_forward(c, prefix, hidden, c.width, weights, operators))
    return TokenWise(_load_experts(c, prefix, weights, operators))


@dataclass(frozen=True, slots=True)
class TokenWise:
    """A mixer that looks at nothing but the token itself."""

    layer: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.layer(x)


@dataclass(frozen=True, slots=True)
class LatentExperts:
    """Experts that work on a narrower copy of the hidden state."""

    route: GroupRouter
    narrow: Linear
    experts: Experts
    widen: Linear
    shared: PlainFeedForward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.widen(self.experts(self.narrow(x), self.route(x))) + self.shared(x)


def _load_attention(
    c: NemotronHConfig, prefix: str, index: int, weights: Weights, operators: Operators
) -> GroupedAttention:
    heads, hidden = HeadShape(c.shape.heads, c.shape.kv_heads, c.shape.head_dim), c.shape.hidden_size
    return GroupedAttention(
        layer=index,
        qkv=load_qkv(weights, prefix, heads, hidden, False, None, operators.linear),
        out=load_out(weights, prefix, heads, hidden, False, operators.linear),
        shape=heads,
        scale=heads.head_dim**-0.5,
        rope=None,
    )


def _load_feed_forward(
    c: NemotronHConfig, prefix: str, hidden: int, width: int, weights: Weights, operators: Operators
) -> PlainFeedForward:
    return load_plain_feed_forward(weights, prefix, hidden, width, c.activation, c.mlp_bias, operators.linear)


def _load_experts(
    c: NemotronHConfig, prefix: str, weights: Weights, operators: Operators
) -> MixtureOfExperts | LatentExperts:
    assert c.experts is not None
    hidden, sizes, linear = c.shape.hidden_size, c.experts, operators.linear
    router = load_router(weights, f"{prefix}gate", sizes.router, hidden, operators.exact_linear)
    shared = _load_feed_forward(c, f"{prefix}shared_experts.", hidden, sizes.shared_width, weights, operators)
    columns = hidden if sizes.latent is None else sizes.latent
    experts = Experts(
        [
            load_plain_feed_forward(weights, f"{prefix}experts.{n}.", columns, sizes.width, c.activation, False, linear)
            for n in range(sizes.router.experts)
        ]
    )
    if sizes.latent is None:
        return MixtureOfExperts(router, experts, shared)
    narrow = load_packed(weights, [PackedRow(f"{prefix}fc1_latent_proj", columns, c.mlp_bias)], hidden, linear)
    widen = load_packed(weights, [PackedRow(f"{prefix}fc2_latent_proj", hidden, c.mlp_bias)], columns, linear)
    return LatentExperts(router, narrow, experts, widen, shared)
