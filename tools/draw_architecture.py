"""Draws docs/architecture.svg: the packages of this checkout and which imports which, read from their source.

    python tools/draw_architecture.py [--check]

A box is a package; the modules beside the packages share boxes (`TOGETHER`). An arrow goes from what imports to what is
imported, is dashed where every such import waits inside a function, and is left out where a chain of others says it
already. --check writes nothing and exits with 1 when the file is not what would be written.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs/architecture.svg"
DISTRIBUTIONS = ("trace_serve", "eval_gate")
FILL = {"trace_serve": "#e3eefb", "eval_gate": "#fbeee0"}

TOGETHER = {
    "trace_serve.__main__": "trace_serve.command line",
    "trace_serve.cli": "trace_serve.command line",
    "trace_serve.doctor": "trace_serve.command line",
    "trace_serve.quickstart": "trace_serve.command line",
    "eval_gate.cli": "eval_gate.commands",
}
"""Modules beside the packages, to their boxes; further ones of eval_gate are `run and verdict`."""

BOX_W, BOX_H, GAP_X, GAP_Y, MARGIN = 138, 34, 22, 66, 24

LAZY = re.compile(r"(trace_serve|eval_gate)(\.\w+)+:\w+")
"""The text by which a command names what it loads when it is called."""

Edges = dict[tuple[str, str], bool]
"""(importer, imported) -> whether an import happens when the module is loaded."""


def component(module: str) -> str:
    """The box of a dotted module name: its package below the distribution, or the module itself at the top."""
    top = ".".join(module.split(".")[:2])
    if top in TOGETHER:
        return TOGETHER[top]
    alone = (ROOT / top.replace(".", "/")).with_suffix(".py").is_file()
    return "eval_gate.run and verdict" if alone and top.startswith("eval_gate.") else top


def modules() -> dict[str, Path]:
    """Dotted name to file, for every module of the two distributions."""
    found = {}
    for distribution in DISTRIBUTIONS:
        for path in sorted((ROOT / distribution).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.Module, known: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """Every module of ours that a file imports, and whether that happens at load. Type checking does not count."""

    def visit(node: ast.AST, loading: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Constant) and isinstance(child.value, str) and LAZY.fullmatch(child.value):
                yield child.value.partition(":")[0], False
            elif isinstance(child, ast.Import):
                yield from ((name.name, loading) for name in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module is not None and child.level == 0:
                for name in child.names:
                    below = f"{child.module}.{name.name}"
                    yield (below if below in known else child.module), loading
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, loading and not inside)

    for name, loading in visit(tree, True):
        if name.split(".")[0] in DISTRIBUTIONS:
            yield name, loading


def graph() -> tuple[list[str], Edges]:
    """The boxes and the arrows between them."""
    known = modules()
    boxes = sorted({component(name) for name in known} - set(DISTRIBUTIONS))
    edges: Edges = {}
    for name, path in known.items():
        source = component(name)
        for target, loading in imports(ast.parse(path.read_text("utf-8")), known):
            goal = component(target)
            if source != goal and source in boxes and goal in boxes:
                edges[source, goal] = edges.get((source, goal), False) or loading
    return boxes, _reduced(edges)


def _reduced(edges: Edges) -> Edges:
    """Without the arrows that a longer way says too; arrows between boxes that import each other stay."""
    kept = dict(edges)
    for arrow in sorted(edges):
        source, target = arrow
        if (target, source) not in edges:
            rest = {other for other in kept if other != arrow and (kept[other] or not kept[arrow])}
            if target in _reachable(source, rest):
                del kept[arrow]
    return kept


def _reachable(box: str, arrows: set[tuple[str, str]]) -> set[str]:
    seen: set[str] = set()
    todo = [box]
    while todo:
        here = todo.pop()
        following = {target for source, target in arrows if source == here} - seen
        seen |= following
        todo += following
    return seen


def layers(boxes: list[str], edges: Edges) -> list[list[str]]:
    """Rows from the commands down to what imports nothing; boxes that import each other share a row."""
    below: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        below[source].add(target)

    reach = {box: _reachable(box, set(edges)) for box in boxes}
    depth: dict[str, int] = {}

    def measure(box: str) -> int:
        if box not in depth:
            group = {other for other in reach[box] if box in reach[other]} | {box}
            outside = {target for member in group for target in below[member]} - group
            level = 1 + max((measure(target) for target in outside), default=-1)
            depth.update(dict.fromkeys(group, level))
        return depth[box]

    for box in boxes:
        measure(box)
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for box in boxes:
        rows[max(depth.values()) - depth[box]].append(box)
    return _ordered(rows, edges)


def _ordered(rows: list[list[str]], edges: Edges) -> list[list[str]]:
    """Each row by the mean place of its neighbours, a few times over, so that arrows cross less."""
    for _ in range(8):
        place = {box: (i + 0.5) / len(row) for row in rows for i, box in enumerate(row)}
        for row in rows:
            pull = {}
            for box in row:
                near = [place[b] for a, b in edges if a == box] + [place[a] for a, b in edges if b == box]
                pull[box] = sum(near) / len(near) if near else place[box]
            row.sort(key=lambda box: (round(pull[box], 9), box))
    return rows


def draw(rows: list[list[str]], edges: Edges) -> str:
    """The picture as SVG text, the same for the same graph."""
    wide = max(len(row) for row in rows)
    width = 2 * MARGIN + wide * BOX_W + (wide - 1) * GAP_X
    height = 2 * MARGIN + len(rows) * BOX_H + (len(rows) - 1) * GAP_Y + 30
    corner = {}
    for r, row in enumerate(rows):
        left = (width - len(row) * BOX_W - (len(row) - 1) * GAP_X) / 2
        for i, box in enumerate(row):
            corner[box] = (left + i * (BOX_W + GAP_X), MARGIN + r * (BOX_H + GAP_Y))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="13">',
        "<title>Packages of trace-serve and eval-gate, and what they import</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#6b7684"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for (source, target), loading in sorted(edges.items()):
        parts.append(_arrow(corner[source], corner[target], loading))
    for box, (x, y) in sorted(corner.items()):
        distribution, _, name = box.partition(".")
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="5" fill="{FILL[distribution]}"'
            ' stroke="#44546a"/>'
            f'<text x="{x + BOX_W / 2:.1f}" y="{y + BOX_H / 2 + 4.5:.1f}" text-anchor="middle">{escape(name)}</text>'
        )
    x = float(MARGIN)
    for distribution, colour in FILL.items():
        parts.append(f'<rect x="{x}" y="{height - 34}" width="16" height="16" fill="{colour}" stroke="#44546a"/>')
        parts.append(f'<text x="{x + 24}" y="{height - 21}">{distribution}</text>')
        x += 140
    parts.append(f'<text x="{x}" y="{height - 21}">dashed: imported inside functions only</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _arrow(source: tuple[float, float], target: tuple[float, float], loading: bool) -> str:
    (x1, y1), (x2, y2) = source, target
    x1, x2 = x1 + BOX_W / 2, x2 + BOX_W / 2
    if y1 == y2:
        y1, y2 = y1 + BOX_H, y2 + BOX_H
        bend = y1 + GAP_Y / 2
        path = f"M{x1:.1f} {y1}C{x1:.1f} {bend} {x2:.1f} {bend} {x2:.1f} {y2}"
    else:
        y1 += BOX_H
        pull = (y2 - y1) / 2
        path = f"M{x1:.1f} {y1}C{x1:.1f} {y1 + pull} {x2:.1f} {y2 - pull} {x2:.1f} {y2}"
    dash = "" if loading else ' stroke-dasharray="4 4"'
    return f'<path d="{path}" fill="none" stroke="#6b7684" stroke-opacity="0.55"{dash} marker-end="url(#tip)"/>'


def main(arguments: list[str]) -> int:
    boxes, edges = graph()
    text = draw(layers(boxes, edges), edges)
    if arguments == ["--check"]:
        return 0 if OUT.is_file() and OUT.read_text("utf-8") == text else 1
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
