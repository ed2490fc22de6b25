"""The operators of a device, a precision and a choice of kernels."""

from __future__ import annotations

import torch

from kvferry.engine.kernels import Kernels, use_native
from kvferry.engine.linear import linear_factory
from kvferry.models import Operators, torch_operators


def operators_for(
    device: str | torch.device = "cpu", precision: str = "fp32", kernels: Kernels = Kernels.AUTO
) -> Operators:
    """Raises ConfigError naming the setting that cannot be served."""
    linear = linear_factory(device, precision, kernels)
    exact = linear_factory(device, "fp32", kernels) if precision == "int8" else linear
    if not use_native(kernels, torch.device(device)):
        return torch_operators(linear, exact)
    from kvferry.engine.native_operators import rms_norm, silu_product
    from kvferry.engine.native_stack import native_stack

    return Operators(linear, exact, rms_norm, silu_product, native_stack)
