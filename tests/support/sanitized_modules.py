"""A pytest plugin: runs the tests with native modules built elsewhere, such as those with sanitizers.

KVFERRY_NATIVE_MODULES: ``module=path`` pairs, separated by blanks. What is named and cannot be loaded is an error.
"""

from __future__ import annotations

import importlib.util
import os
import sys

for pair in os.environ["KVFERRY_NATIVE_MODULES"].split():
    name, _, path = pair.partition("=")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
