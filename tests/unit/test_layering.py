"""The shape of the code: imports point inwards only, and nothing grows beyond its size."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import gateway

ROOT = Path(gateway.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
COMPOSITION_ROOT = {
    "__init__", "__main__", "cli", "config", "explained", "run", "screen", "service", "simulated",
}  # fmt: skip


@dataclass(frozen=True)
class Room:
    """What a folder's files may import beside the standard library and each other."""

    rooms: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()


def room(rooms: str = "", packages: str = "") -> Room:
    return Room(frozenset(rooms.split()), frozenset(packages.split()))


ROOMS = {
    "core": room("", "xxhash"),
    "api": room("core prompt upstream observe", "fastapi fastapi_offline starlette uvicorn orjson"),
    "prompt": room("core", "tokenizers jinja2 orjson huggingface_hub xxhash"),
    "upstream": room("", "httptools"),
    "workers": room("core", "httpx msgspec prometheus_client zmq"),
    "engine": room("", "vllm"),
    "bench": room("core", "httpx rich matplotlib"),
    "observe": room("core engine", "orjson prometheus_client"),
}

NOT_FOR_THE_CORE = {
    "asyncio", "concurrent", "datetime", "http", "io", "logging", "multiprocessing", "os",
    "pathlib", "queue", "random", "secrets", "selectors", "socket", "subprocess", "sys",
    "threading", "time", "urllib", "uuid",
}  # fmt: skip
"""No clock, no input or output, no logging, no chance: the core decides, the shell acts."""

CORE_LINES, FILE_LINES, FUNCTION_LINES, PARAMETERS = 200, 300, 50, 5
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}


def room_of(path: Path) -> str | None:
    """The folder under gateway/ that a file is in; None for the composition root."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else None


def imports(tree: ast.AST) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            name = node.module or ""
            # `from gateway.api import wire` imports the module gateway.api.wire.
            whole = name.count(".") >= 2
            found |= {name if whole else f"{name}.{alias.name}" for alias in node.names}
    return found


def wrong_imports(path: Path, tree: ast.AST) -> list[str]:
    """What a file imports that its room may not."""
    own = room_of(path)
    if own is None:
        return []
    allowed = ROOMS[own]
    wrong = []
    for name in sorted(imports(tree)):
        package, _, rest = name.partition(".")
        if package == "gateway":
            target = rest.partition(".")[0]
            right = target == "__version__" or target == own or target in allowed.rooms
        elif package in sys.stdlib_module_names:
            right = own != "core" or package not in NOT_FOR_THE_CORE
        else:
            right = package in allowed.packages
        if not right:
            wrong.append(name)
    return wrong


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in every)


def names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


each_file = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(ROOT).with_suffix(""))
)


@each_file
def test_imports_point_inwards_only(path: Path) -> None:
    assert wrong_imports(path, parse(path)) == []


@each_file
def test_files_and_functions_are_of_a_size(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines < (CORE_LINES if room_of(path) == "core" else FILE_LINES)
    for function in functions(parse(path)):
        assert function.end_lineno is not None
        length = function.end_lineno - function.lineno + 1
        assert length < FUNCTION_LINES, f"{function.name} has {length} lines"
        assert parameters(function) <= PARAMETERS, f"{function.name} has {parameters(function)}"


@each_file
def test_only_background_tasks_catch_everything(path: Path) -> None:
    """And they say so in the log; whoever else catches everything hands it on."""
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = {"BaseException"} if node.type is None else names(node.type)
        if not caught & {"Exception", "BaseException"}:
            continue
        hands_on = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        logs = "log.exception(" in ast.unparse(node)
        assert hands_on or logs, f"line {node.lineno}"


def test_every_file_has_a_room_and_a_name_that_says_something() -> None:
    for path in FILES:
        own = room_of(path)
        assert own in ROOMS or (own is None and path.stem in COMPOSITION_ROOT), path
        assert path.stem not in EMPTY_NAMES
        assert len(path.relative_to(ROOT).parts) <= 2


# --- the rules themselves, seen to refuse


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("core/x.py", "import httpx", ["httpx"]),
        ("core/x.py", "from time import monotonic", ["time.monotonic"]),
        ("core/x.py", "def f():\n    import random", ["random"]),
        ("core/x.py", "from gateway.api import wire", ["gateway.api.wire"]),
        ("core/x.py", "from gateway import config", ["gateway.config"]),
        ("core/x.py", "from gateway.core.blocks import Prompt\nimport math", []),
        ("upstream/x.py", "from gateway.core.router import Router", ["gateway.core.router"]),
        ("workers/x.py", "from gateway.upstream.pool import Pool", ["gateway.upstream.pool"]),
        ("observe/x.py", "import gateway.api.relay", ["gateway.api.relay"]),
        ("prompt/x.py", "import transformers", ["transformers"]),
        ("api/x.py", "from gateway.workers.fleet import Fleet", ["gateway.workers.fleet"]),
        ("api/x.py", "from gateway import __version__\nimport orjson", []),
    ],
)
def test_a_wrong_import_is_seen(file: str, line: str, wrong: list[str]) -> None:
    assert wrong_imports(ROOT / file, ast.parse(line)) == wrong


def test_parameters_are_counted_without_self() -> None:
    tree = ast.parse("class A:\n def f(self, a, /, b, *rest, c=1, **more): ...")
    assert [parameters(function) for function in functions(tree)] == [3]
