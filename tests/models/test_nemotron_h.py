"""Nemotron-H gives the logits that transformers gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import NemotronHConfig as ReferenceConfig

from kvferry.core import CheckpointError, DType, GroupKind
from kvferry.models import ForwardBatch, load_model, torch_operators
from kvferry.models.nemotron_h import NemotronHConfig

MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
STATE_TOLERANCE = 1e-3

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES: dict[str, dict[str, Any]] = {
    "every-kind": {"layers_block_type": [MAMBA, MOE, MAMBA, ATTENTION, MLP]},
    "mamba-and-attention": {"layers_block_type": [MAMBA, ATTENTION], "num_key_value_heads": 6, "vocab_size": 307},
    "one-group-long-kernel": {"layers_block_type": [ATTENTION, MAMBA, MLP], "n_groups": 1, "conv_kernel": 7},
    "biases": {
        "layers_block_type": [MAMBA, ATTENTION, MLP],
        "use_bias": True,
        "mlp_bias": True,
        "use_conv_bias": False,
        "mlp_hidden_act": "silu",
    },
    "latent-experts-in-groups": {
        "layers_block_type": [MOE, MAMBA, ATTENTION],
        "moe_latent_size": 20,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
    },
    "long-steps": {"layers_block_type": [MAMBA, ATTENTION], "time_step_min": 0.05},
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, checkpoint: Any, assert_logits: Any) -> None:
    assert_logits(checkpoint(ReferenceConfig(**{**SIZES, **SHAPES[name]})), STATE_TOLERANCE)


def test_a_mamba_layer_has_two_states_and_other_layers_none(checkpoint: Any) -> None:
    model = load_model(checkpoint(ReferenceConfig(**SIZES, **SHAPES["every-kind"])), torch_operators())
    layouts = {layout.kind: layout for layout in model.layouts(16, DType.BFLOAT16)}
    assert {kind: layout.layers for kind, layout in layouts.items()} == {
        GroupKind.CONV: (0, 2),
        GroupKind.SSM: (0, 2),
        GroupKind.FULL: (3,),
    }
    channels = 6 * 12 + 2 * 2 * 8
    assert layouts[GroupKind.CONV].slot_nbytes == 2 * 3 * channels * 4
    assert layouts[GroupKind.SSM].slot_nbytes == 2 * 6 * 12 * 8 * 4
    assert layouts[GroupKind.SSM].dtype is DType.FLOAT32
    assert layouts[GroupKind.FULL].dtype is DType.BFLOAT16


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (15, 16, 17), (63, 64, 65, 66), tuple(range(1, 90))])
def test_what_is_computed_in_steps_is_what_is_computed_at_once(
    cuts: tuple[int, ...], checkpoint: Any, fresh_states: Any
) -> None:
    """The states alone carry a model without attention from one step to the next."""
    kinds = [MAMBA, MLP, MAMBA]
    model = load_model(checkpoint(ReferenceConfig(**SIZES, layers_block_type=kinds)), torch_operators())
    token_ids = torch.randint(3, 211, (90,), generator=torch.Generator().manual_seed(3))
    states, layouts = fresh_states, model.layouts(16, DType.FLOAT32)

    def logits(states: Any, start: int, stop: int) -> torch.Tensor:
        rows = torch.arange(stop - start)
        batch = ForwardBatch(token_ids[start:stop], rows + start, rows, no_attention, states.next(stop - start))
        return model.forward(batch)

    whole, carried = logits(states(layouts), 0, 90), states(layouts)
    steps = [logits(carried, start, stop) for start, stop in zip((0, *cuts), (*cuts, 90), strict=True)]
    torch.testing.assert_close(torch.cat(steps), whole, rtol=0, atol=1e-4 * float(whole.abs().max()))


def no_attention(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("no layer attends")


@pytest.mark.parametrize(
    ("written", "kinds"),
    [
        ({"layers_block_type": ["mamba", "attention"]}, (MAMBA, ATTENTION)),
        ({"layer_types": [MAMBA, ATTENTION]}, (MAMBA, ATTENTION)),
        ({"hybrid_override_pattern": "M-M*E"}, (MAMBA, MLP, MAMBA, ATTENTION, MOE)),
    ],
)
def test_layers_are_listed_in_each_way_there_is(written: dict[str, Any], kinds: tuple[str, ...]) -> None:
    assert NemotronHConfig.from_json({**SIZES, **written}).kinds == kinds


def test_what_a_config_leaves_out_is_what_the_class_means() -> None:
    usual = ReferenceConfig()
    ours = NemotronHConfig.from_json({"layers_block_type": [MAMBA, MOE]})
    assert (ours.shape.vocab_size, ours.shape.hidden_size, ours.shape.head_dim) == (
        usual.vocab_size,
        usual.hidden_size,
        usual.head_dim,
    )
    assert (ours.mamba.heads, ours.mamba.head_dim, ours.mamba.groups, ours.mamba.state_dim, ours.mamba.kernel) == (
        usual.mamba_num_heads,
        usual.mamba_head_dim,
        usual.n_groups,
        usual.ssm_state_size,
        usual.conv_kernel,
    )
    assert (ours.mamba.least_step, ours.shape.norm_eps) == (usual.time_step_min, usual.layer_norm_epsilon)
    assert ours.experts is not None
    assert (ours.experts.router.experts, ours.experts.router.chosen) == (usual.n_routed_experts, 2)
    assert (ours.experts.width, ours.width) == (usual.moe_intermediate_size, usual.intermediate_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": None}, "config.json lacks layers_block_type"),
        ({"layers_block_type": ["mamba", "window"]}, "bad layers_block_type"),
        ({"layers_block_type": None, "hybrid_override_pattern": "MX"}, "bad hybrid_override_pattern"),
        ({"n_groups": 4}, "mamba_num_heads .6. is no multiple of n_groups .4."),
        ({"conv_kernel": 1}, "conv_kernel must be a whole number of at least 2"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; known: silu"),
        ({"mlp_hidden_act": "tanh"}, "mlp_hidden_act is 'tanh'; known: relu2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok .9. is above what 1 groups of 6 hold"),
    ],
)
def test_a_bad_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        NemotronHConfig.from_json({**SIZES, **SHAPES["every-kind"], **changes})
