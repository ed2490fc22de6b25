"""The engine's C++ test: four threads load through it while its backend misbehaves. `make sanitize` runs it watched."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "transceiver" / "native"
SOURCES = [NATIVE / f"{name}.cpp" for name in ("engine", "faulty_backend", "memory_backend")]


def test_no_load_that_is_called_good_has_wrong_bytes(tmp_path: Path) -> None:
    program, test = tmp_path / "engine_stress", Path(__file__).with_name("engine_stress.cpp")
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
    subprocess.run(["c++", *flags, *map(str, SOURCES), str(test), "-pthread", "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    counts = re.fullmatch(r"(\d+) good, (\d+) stale, (\d+) failed, (\d+) wrong\n", done.stdout)
    assert counts is not None, done.stdout + done.stderr
    good, stale, failed, wrong = map(int, counts.groups())
    assert done.returncode == 0, done.stdout
    assert good + stale + failed == 4 * 300
    assert wrong == 0
    assert min(good, stale, failed) > 0
