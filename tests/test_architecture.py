"""The house keeps its shape: import arrows, heavy imports in their place, sizes of files and functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# folder -> the folders of kvferry it may import (itself always).
_CONTRACTS = frozenset({"proto", "core"})
_BELOW_ENGINE = _CONTRACTS | {"text", "resolution", "kvcache", "models", "transceiver"}
_EVERYTHING = _BELOW_ENGINE | {"engine", "prefill", "decode", "router"}
MAY_IMPORT: dict[str, frozenset[str]] = {
    "proto": frozenset(),
    "core": frozenset({"proto"}),
    "text": _CONTRACTS,
    "resolution": _CONTRACTS,
    "router": _CONTRACTS | {"text", "resolution"},
    "kvcache": _CONTRACTS | {"text", "resolution"},
    "transceiver": _CONTRACTS | {"text", "resolution", "kvcache"},
    "models": _CONTRACTS | {"text", "resolution", "kvcache"},
    "engine": _BELOW_ENGINE,
    "prefill": _BELOW_ENGINE | {"engine"},
    "decode": _BELOW_ENGINE | {"engine"},
    "cluster": _EVERYTHING,
    "bench": _EVERYTHING | {"cluster"},
    "cli": _EVERYTHING | {"cluster", "bench"},
}
FOLDERS = frozenset(MAY_IMPORT)
TORCH_FREE = frozenset({"proto", "core", "text", "resolution", "router"})
# The message modules stay behind core/codec.py; gRPC shells (servers and clients) speak them too.
GRPC_SHELL = re.compile(r"(^|_)(service|server|client)$")
NAMED_SHELLS = frozenset({"core/codec.py", "core/cache_codec.py", "router/pool.py", "cluster/membership.py"})
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = frozenset({"utils.py", "util.py", "common.py", "helpers.py", "misc.py"})


def _sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def _tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import statement, lazy ones included; `from a import b` gives a and a.b."""
    package = ("kvferry", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module)) if node.module else ".".join(base)
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _violations(paths: list[Path], forbidden: object) -> list[str]:
    """One line per import for which `forbidden(folder, module)` is true."""
    assert callable(forbidden)
    found = []
    for path in paths:
        relative = path.relative_to(ROOT)
        for line, module in _imports(path):
            if forbidden(relative.parts[0], module):
                found.append(f"{relative}:{line} imports {module}")
    return sorted(set(found))


def _folder_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "kvferry" else None


def _breaks_arrow(folder: str, module: str) -> bool:
    target = _folder_of(module)
    return target is not None and target != folder and target not in MAY_IMPORT[folder]


def _is(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_folders_import_only_along_the_arrows() -> None:
    assert _violations(_sources(), _breaks_arrow) == []


def test_arrow_check_notices_a_wrong_import() -> None:
    assert _breaks_arrow("core", "kvferry.engine.llm")
    assert _breaks_arrow("prefill", "kvferry.decode")
    assert not _breaks_arrow("cli", "kvferry.cluster")


def test_no_bare_folder_names() -> None:
    def bare(_folder: str, module: str) -> bool:
        return module.split(".", maxsplit=1)[0] in FOLDERS

    assert _violations(_sources() + _tests(), bare) == []


def test_torch_stays_out_of_the_light_folders() -> None:
    def heavy(folder: str, module: str) -> bool:
        return folder in TORCH_FREE and _is(module, "torch")

    assert _violations(_sources(), heavy) == []


def test_ray_stays_in_cluster() -> None:
    def ray(folder: str, module: str) -> bool:
        return folder != "cluster" and _is(module, "ray")

    assert _violations(_sources(), ray) == []


def test_tests_do_not_import_each_other() -> None:
    names = {path.stem for path in _tests() if path.parent.name != "support"} | {"tests"}

    def sibling(_folder: str, module: str) -> bool:
        return module.split(".", maxsplit=1)[0] in names

    assert _violations(_tests(), sibling) == []
    assert [str(path) for path in _tests() if path.name == "__init__.py"] == []


def test_message_modules_stay_behind_the_codec() -> None:
    found = []
    for path in _sources():
        relative = path.relative_to(ROOT)
        if str(relative) in NAMED_SHELLS or relative.parts[0] == "proto" or GRPC_SHELL.search(path.stem):
            continue
        found += [f"{relative}:{line} imports {module}" for line, module in _imports(path) if "_pb2" in module]
    assert found == []


@pytest.mark.parametrize("path", _sources() + _tests(), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_is_short_and_named(path: Path) -> None:
    assert path.name not in VAGUE_NAMES
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{path} has {lines} lines"


@pytest.mark.parametrize("path", _sources() + _tests(), ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_contents_pages_hold_no_logic() -> None:
    """An `__init__.py` re-exports: docstring, imports, `__all__`; a lazy `__getattr__` at the most."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("__init__.py"):
            for node in _tree(path).body:
                lazy = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
                plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.Assign | ast.AnnAssign | ast.If)
                assert plain or lazy, f"{path}:{node.lineno} is not a re-export"
