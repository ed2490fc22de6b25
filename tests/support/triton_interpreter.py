"""Import before anything that defines Triton kernels: they run in Triton's interpreter, on the CPU. Modules of tests
that import this are skipped where Triton is missing."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed: pip install '.[triton]'")
