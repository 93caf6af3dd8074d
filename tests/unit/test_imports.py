"""Imports point one way: the pure packages know neither SGLang nor each other's insides; they run without a model."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sglang_dspark"
PURE = ["schedule", "cost", "confidence", "kernels", "observe", "replay", "files"]


def imports(file: Path) -> Iterator[str]:
    """Every module a file imports, wherever in it, relative imports resolved."""
    package = ["sglang_dspark", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def pure_files() -> list[Path]:
    return [
        file
        for name in PURE
        for file in (*sorted((PACKAGE / name).rglob("*.py")), PACKAGE / f"{name}.py")
        if file.is_file()
    ]


def test_there_is_something_to_check():
    assert len(pure_files()) >= 15


@pytest.mark.parametrize("file", pure_files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_pure_module_imports_neither_sglang_nor_the_inside_of_another_package(file: Path):
    own = file.relative_to(PACKAGE).parts[0]
    for module in imports(file):
        parts = module.split(".")
        assert parts[0] not in ("sglang", "sgl_kernel"), f"{file} imports {module}"
        if parts[0] != "sglang_dspark" or len(parts) < 2:
            continue
        assert parts[1] in PURE, f"{file} imports {module}, which is not pure"
        inside = (PACKAGE / parts[1]).joinpath(*parts[2:3])
        if parts[1] != own and len(parts) > 2:
            assert not (inside.is_dir() or inside.with_suffix(".py").is_file()), f"{file} reaches into {module}"


def raw_settings(file: Path) -> Iterator[str]:
    """Every field that a file reads from ``server_args`` itself."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
            owner = node.value
            if getattr(owner, "id", None) == "server_args" or getattr(owner, "attr", None) == "server_args":
                yield node.attr


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_settings_are_read_as_sglang_resolved_them(file: Path):
    """What SGLang decides, such as the device, never gets into its ServerArgs: those hold what the user said."""
    by_users = ["speculative_algorithm"] if file.name == "plugin.py" else []  # DSPARK, which resolves to EAGLE
    assert list(raw_settings(file)) == by_users
