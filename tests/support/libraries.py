"""What tests of an optional backend need of the machine."""

from __future__ import annotations

import pytest

from kvferry.resolution import probe_libraries

_missing = sorted(probe_libraries("MOONCAKE"))

needs_mooncake = pytest.mark.skipif(bool(_missing), reason=f"MOONCAKE needs {' and '.join(_missing)}")
"""`make setup` brings the module; libibverbs is the system's (apt-get install --no-install-recommends libibverbs1)."""
