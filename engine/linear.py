"""Linears packed once per device. Which packing is a fixed table, so that all workers round alike.

Measured on two cores, fp32, all linears of SmolLM2-135M, milliseconds at 1 / 4 / 8 / 16 / 512 rows:
plain F.linear 45 / 63 / 60 / 89 / 683, MKL prepacked 32 / 67 / 62 / 84 / 684, oneDNN prepacked for 1 row
26 / 32 / 42 / 54 / 659, for 16 rows 26 / 22 / 25 / 33 / 695. So: oneDNN, packed for 16 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kvferry.core import Registry
from kvferry.models import Linear, LinearFactory

_PACK_ROWS = 16
"""What oneDNN chooses its blocking for; a packed weight serves any number of rows."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The weight as it is: what GPUs and unknown devices get."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class OneDNNLinear:
    """packed: the weight in oneDNN's own blocked order; nothing keeps the plain one."""

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Copies `weight` into oneDNN's order. Without oneDNN in this torch, a plain linear."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PlainLinear(weight, bias)
    with torch.inference_mode():
        return OneDNNLinear(torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS), bias)


def keep_plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return PlainLinear(weight, bias)


def linear_factory(device: str | torch.device = "cpu", precision: str = "fp32") -> LinearFactory:
    """The packing of `device` at `precision`. Raises ConfigError naming the known precisions."""
    on_cpu = PRECISIONS.get(precision)
    return on_cpu if torch.device(device).type == "cpu" else keep_plain


PRECISIONS: Registry[LinearFactory] = Registry("precision", "engine.precision")
"""How linears are packed on the CPU, by precision."""

PRECISIONS.register("fp32", pack_onednn)
