"""Which kernels compute on the CPU: the compiled ones, or torch's.

The compiled module is looked for once, after torch, whose OpenMP runtime it shares.
"""

from __future__ import annotations

import importlib.util
import logging
from enum import Enum
from functools import cache
from types import ModuleType

import torch

from kvferry.core import ConfigError

logger = logging.getLogger(__name__)


class Kernels(Enum):
    """AUTO: the compiled ones where they can be loaded, else torch's, with a warning."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"

    @classmethod
    def of(cls, name: str) -> Kernels:
        """Raises ConfigError naming the choices."""
        try:
            return cls(name)
        except ValueError:
            choices = ", ".join(member.value for member in cls)
            raise ConfigError(
                f"engine.kernels must be one of {choices}, got {name!r}", field="engine.kernels"
            ) from None


def use_native(kernels: Kernels, device: torch.device) -> bool:
    """Raises ConfigError when the compiled kernels were asked for and cannot serve."""
    if kernels is Kernels.TORCH or (kernels is Kernels.AUTO and device.type != "cpu"):
        return False
    if device.type != "cpu":
        raise ConfigError(
            f"engine.kernels is native, but they compute on the CPU and engine.device is {device}: set it to auto",
            field="engine.kernels",
        )
    if _load() is not None:
        return True
    if kernels is Kernels.NATIVE:
        raise ConfigError(
            "engine.kernels is native, but kvferry.engine.native.kernels was not built: install kvferry with a C++ "
            "compiler at hand, or set engine.kernels to auto",
            field="engine.kernels",
        )
    return False


def use_triton(kernels: Kernels, device: torch.device) -> bool:
    """On CUDA devices, where Triton can be imported (torch's CUDA builds bring it)."""
    return device.type == "cuda" and kernels is not Kernels.TORCH and _has_triton()


@cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning("triton is not installed: torch's operators attend on the GPU instead (slower)")
    return False


@cache
def _load() -> ModuleType | None:
    try:
        from kvferry.engine.native import kernels
    except ImportError as error:
        logger.warning("the compiled kernels cannot be loaded, torch computes instead (slower): %s", error)
        return None
    return kernels
