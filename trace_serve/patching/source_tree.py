"""Looks up dotted names in Python sources without importing or running any of them."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Literal

from trace_serve.errors import ConfigError

_MAX_SOURCE = 16 << 20
_MAX_DEPTH = 32
_FIELD = "--sglang-wheel"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotThere(LookupError):
    """The message says which part of the name is missing, and from what."""


@dataclass(frozen=True)
class Found:
    """Attributes:
    kind: what the name stands for; `external` is something imported from outside the tree.
    node: the definition or the assigned expression; None for a module and for what is external.
    module: the module that holds it.
    """

    kind: Literal["module", "class", "function", "value", "external"]
    node: ast.AST | None
    module: str


class Wheel:
    """The sources in a wheel file.

    Args:
        path: the wheel.
        distribution: the name it has to have.

    Raises:
        ConfigError: not a wheel of that distribution; `field` is `--sglang-wheel`.
    """

    def __init__(self, path: Path, distribution: str) -> None:
        self._trees: dict[str, ast.Module] = {}
        try:
            self._zip = zipfile.ZipFile(path)
            self._names = frozenset(self._zip.namelist())
            self._directories = frozenset(str(parent) for name in self._names for parent in PurePosixPath(name).parents)
            metadata = [name for name in self._names if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
            header = HeaderParser().parsestr(self._zip.read(metadata[0]).decode() if len(metadata) == 1 else "")
        except (OSError, zipfile.BadZipFile, UnicodeDecodeError) as exc:
            raise ConfigError(f"{_FIELD}: {path}: cannot be read as a wheel: {exc}", field=_FIELD) from exc
        name, self.version = header.get("Name", ""), header.get("Version", "")
        if name.lower() != distribution or not self.version:
            raise ConfigError(
                f"{_FIELD}: {path}: got a wheel of {name or 'nothing'}, expected one of {distribution}; "
                f"get it with `pip download --no-deps {distribution}==VERSION`",
                field=_FIELD,
            )

    def read(self, path: str) -> bytes | None:
        """The content of one file; None when the wheel has none of that name.

        Raises:
            ConfigError: the file is damaged, or larger than any source.
        """
        if path not in self._names:
            return None
        try:
            if self._zip.getinfo(path).file_size > _MAX_SOURCE:
                raise ConfigError(f"{_FIELD}: {path} is larger than {_MAX_SOURCE} bytes", field=_FIELD)
            return self._zip.read(path)
        except (zipfile.BadZipFile, OSError) as exc:
            raise ConfigError(f"{_FIELD}: {path} is damaged: {exc}", field=_FIELD) from exc

    def find(self, dotted: str) -> Found:
        """What a name like `package.module.Class.method` stands for, inherited and re-exported names included.

        Raises:
            NotThere: it does not exist.
            ConfigError: a source on the way cannot be parsed.
        """
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if self._file(module) is not None:
                return self._below(Found("module", None, module), parts[length:], 0)
            # A package without an `__init__.py`: whatever follows would have to be a file in it.
            if length < len(parts) and module.replace(".", "/") in self._directories:
                raise NotThere(f"there is no module {module}.{parts[length]}")
        raise NotThere(f"there is no module {parts[0]}")

    def _below(self, found: Found, rest: Sequence[str], depth: int) -> Found:
        for name in rest:
            if found.kind == "external":
                return found
            if found.kind == "module":
                found = self._in_module(found.module, name, depth)
            elif isinstance(found.node, ast.ClassDef):
                owner = found.node.name
                member = self._in_class(found, name, depth)
                if member is None:
                    raise NotThere(f"class {owner} of {found.module} has no {name}")
                found = member
            else:
                raise NotThere(f"{found.module}: {name} is not looked up in a {found.kind}")
        return found

    def _in_module(self, module: str, name: str, depth: int) -> Found:
        if depth > _MAX_DEPTH:
            raise NotThere(f"{module}: {name} is imported in a circle")
        found = None
        stars = []
        for node in _statements(self._parse(module).body):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                stars.append(self._origin(module, node))
            elif _binds(node, name):
                found = node
        if isinstance(found, ast.ImportFrom):
            original = next(alias.name for alias in found.names if (alias.asname or alias.name) == name)
            origin = self._origin(module, found)
            if self._file(f"{origin}.{original}") is not None:
                return Found("module", None, f"{origin}.{original}")
            return (
                self._in_module(origin, original, depth + 1) if self._file(origin) else Found("external", None, origin)
            )
        if isinstance(found, ast.Import):
            return Found("external", None, module)
        if found is not None:
            return _definition(found, module)
        for origin in stars:
            if self._file(origin):
                try:
                    return self._in_module(origin, name, depth + 1)
                except NotThere:
                    continue
        if self._file(f"{module}.{name}") is not None:
            return Found("module", None, f"{module}.{name}")
        raise NotThere(f"module {module} has no {name}")

    def _in_class(self, owner: Found, name: str, depth: int) -> Found | None:
        assert isinstance(owner.node, ast.ClassDef)
        if depth > _MAX_DEPTH:
            return None
        for node in reversed(list(_statements(owner.node.body))):
            if _binds(node, name):
                return _definition(node, owner.module)
        for base in owner.node.bases:
            try:
                parent = self._below(Found("module", None, owner.module), ast.unparse(base).split("."), depth + 1)
            except NotThere:
                continue
            if isinstance(parent.node, ast.ClassDef):
                member = self._in_class(parent, name, depth + 1)
                if member is not None:
                    return member
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._file(module) or ""
        parts = module.split(".")
        # A package counts as one level of its own.
        keep = len(parts) - node.level + path.endswith("/__init__.py")
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def _file(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in self._names), None)

    def _parse(self, module: str) -> ast.Module:
        if module not in self._trees:
            path = self._file(module) or ""
            try:
                self._trees[module] = ast.parse(self.read(path) or b"", path)
            except (SyntaxError, ValueError) as exc:
                raise ConfigError(f"{_FIELD}: {path} cannot be parsed: {exc}", field=_FIELD) from exc
        return self._trees[module]


def parameters(node: Function) -> tuple[str, ...]:
    """Names of a function's parameters in the order in which `inspect.signature` gives them."""
    given = node.args
    groups = [
        [*given.posonlyargs, *given.args],
        [given.vararg] if given.vararg else [],
        given.kwonlyargs,
        [given.kwarg] if given.kwarg else [],
    ]
    return tuple(argument.arg for group in groups for argument in group)


def imported_names(source: bytes, package: str) -> dict[str, int]:
    """Dotted names that a source imports from a package, anywhere in it, with the first line that does."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom | ast.Import):
            for name in names:
                if name.split(".")[0] == package:
                    found.setdefault(name, node.lineno)
    return found


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement that runs in a scope, also below `if`, `try` and `with`, but not what only type checkers see."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, field, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.ClassDef | Function):
        return node.name == name
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name.split(".")[0]) == name for alias in node.names)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(leaf, ast.Name) and leaf.id == name for target in targets for leaf in ast.walk(target))


def _definition(node: ast.stmt, module: str) -> Found:
    if isinstance(node, ast.ClassDef):
        return Found("class", node, module)
    if isinstance(node, Function):
        return Found("function", node, module)
    return Found("value", getattr(node, "value", None), module)
