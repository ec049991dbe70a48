"""The rules of the house that ruff does not check, held on every module of the package.

Each rule is a function from the folder of a package to its violations, as lines for a reader. Each
is run on functree, and on small packages that break it.
"""

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "functree"

# From the ground up. A module imports from its own floor and from those before it;
# functree/__init__.py and functree/__main__.py stand on top and import from all.
FLOORS = (
    "errors", "argument_checks", "tree", "labels", "surgery", "devices", "report", "layout", "processes", "compiled",
    "placing", "calls", "transforms", "explorer", "optimizers", "state", "nn", "io", "testing", "cli",
)  # fmt: skip
ROOF = ("__init__", "__main__")

MAX_MODULE_LINES = 700
VAGUE_NAMES = {"util", "utils", "helper", "helpers"}
# Public, for all their underscore: `collections.namedtuple` documents them.
NAMEDTUPLE_API = {"_asdict", "_fields", "_field_defaults", "_make", "_replace"}


# Reading a package


def modules(root: Path) -> dict[str, Path]:
    """The modules of the package at `root`, by dotted name; a package's own is that of its
    `__init__.py`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a module. Nearly every rule reads all modules."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


def at(root: Path, path: Path, line: int) -> str:
    return f"{path.relative_to(root.parent)}:{line}"


def _from_base(node: ast.ImportFrom, name: str, path: Path) -> str:
    """The absolute module that `from ... import` reads from, in the module `name`."""
    if not node.level:
        return node.module or ""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    above = package[: len(package) - (node.level - 1)]
    return ".".join([*above, *([node.module] if node.module else [])])


def imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Each import of a module, those inside functions and under TYPE_CHECKING too: (line, dotted
    name).

    `from a import b` gives `a.b`: whether that is a module or a name in one is for `target` to say.
    """
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _from_base(node, name, path)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def target(dotted: str, known: Mapping[str, Path]) -> str | None:
    """The module of the package that an import reaches: the longest beginning of `dotted` that is
    one."""
    parts = dotted.split(".")
    beginnings = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((beginning for beginning in beginnings if beginning in known), None)


def graph(root: Path) -> dict[str, dict[str, str]]:
    """Which module imports which: importer ─► {imported: where it is written}."""
    known = modules(root)
    edges: dict[str, dict[str, str]] = {name: {} for name in known}
    for name, path in known.items():
        for line, dotted in imports(name, path):
            reached = target(dotted, known)
            # A package's `__init__` names its own submodules; `from . import x` does not lead back
            # to it.
            if reached is not None and reached != name:
                edges[name].setdefault(reached, at(root, path, line))
    return edges


# The rules


def floors(root: Path) -> list[str]:
    """Imports that go up, and modules that stand on no floor."""

    def floor(name: str) -> int | None:
        parts = name.split(".")[1:] or ["__init__"]
        if parts[0] in ROOF:
            return len(FLOORS)
        return FLOORS.index(parts[0]) if parts[0] in FLOORS else None

    out = []
    for name, reached in graph(root).items():
        here = floor(name)
        if here is None:
            out.append(f"{name} stands on no floor; the floors are {', '.join(FLOORS)}")
            continue
        for other, where in reached.items():
            there = floor(other)
            if there is not None and there > here:
                out.append(f"{where}: {name} imports {other}, which is above it")
    return out


def cycles(root: Path) -> list[str]:
    """Modules that import one another in a circle, one line for each circle found."""
    edges = graph(root)
    out, done = [], set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            circle = [*trail[trail.index(name) :], name]
            out.append("a circle of imports: " + " → ".join(circle))
        elif name not in done:
            for other in edges[name]:
                visit(other, [*trail, name])
            done.add(name)

    for name in edges:
        visit(name, [])
    return out


def _private(dotted: str) -> bool:
    """Whether a part of `dotted` begins with an underscore and is no `__name__`."""
    parts = dotted.split(".")
    return any(
        part.startswith("_") and not (part.startswith("__") and part.endswith("__"))
        for part in parts
    )


def private_imports(root: Path) -> list[str]:
    """Imports of what another package keeps private, and attributes of its modules that are."""
    known, out = modules(root), []
    for name, path in known.items():
        for line, dotted in imports(name, path):
            if dotted.split(".")[0] != root.name and _private(dotted):
                out.append(f"{at(root, path, line)}: {dotted} is private")
        out.extend(_private_attributes(root, name, path))
    return out


def _private_attributes(root: Path, name: str, path: Path) -> Iterator[str]:
    foreign = _foreign_names(root, name, path)
    for node in nodes(path):
        if (
            not isinstance(node, ast.Attribute)
            or not _private(node.attr)
            or node.attr in NAMEDTUPLE_API
        ):
            continue
        base = node.value
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id in foreign:
            yield f"{at(root, path, node.lineno)}: {ast.unparse(node)} is private"


def _foreign_names(root: Path, name: str, path: Path) -> set[str]:
    """The names that a module binds by importing from other packages."""
    out = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            aliases = [a for a in node.names if a.name.split(".")[0] != root.name]
        elif (
            isinstance(node, ast.ImportFrom)
            and _from_base(node, name, path).split(".")[0] != root.name
        ):
            aliases = node.names
        else:
            continue
        out.update(alias.asname or alias.name.split(".")[0] for alias in aliases)
    return out


# What ruff does not check


def long_modules(root: Path) -> list[str]:
    """Modules over the limit: such a one becomes a folder of the same name."""
    sizes = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules(root).values()
    }
    return [
        f"{path.relative_to(root.parent)} has {lines} lines, {MAX_MODULE_LINES} at most"
        for path, lines in sizes.items()
        if lines > MAX_MODULE_LINES
    ]


def vague_names(root: Path) -> list[str]:
    """Files and folders called after nothing in particular."""
    return [
        f"{path.relative_to(root.parent)}: name it after what is in it"
        for path in sorted(root.rglob("*"))
        if (path.suffix == ".py" or path.is_dir()) and path.stem.strip("_") in VAGUE_NAMES
    ]


def suppressions(root: Path) -> list[str]:
    """Everything is suppressed, which ruff allows."""
    out = []
    for path in modules(root).values():
        for node in nodes(path):
            if (
                not isinstance(node, ast.Call)
                or ast.unparse(node.func).split(".")[-1] != "suppress"
            ):
                continue
            if {"Exception", "BaseException"} & set(map(ast.unparse, node.args)):
                out.append(f"{at(root, path, node.lineno)}: {ast.unparse(node)}")
    return out


def recursive_closures(root: Path) -> list[str]:
    """Functions inside of functions that call themselves: such a cycle keeps all that they see
    until a collection."""
    out = []
    for path in modules(root).values():
        for outer in nodes(path):
            if not isinstance(outer, ast.FunctionDef):
                continue
            for inner in ast.walk(outer):
                if inner is outer or not isinstance(inner, ast.FunctionDef):
                    continue
                names = [
                    node.id
                    for one in inner.body
                    for node in ast.walk(one)
                    if isinstance(node, ast.Name)
                ]
                if inner.name in names:
                    out.append(
                        f"{at(root, path, inner.lineno)}: {inner.name} in {outer.name} calls itself"
                    )
    return out


# Attributes that hold the text of a message, or what its text is made of.
TOLD = {"reason", "reasons", "source", "why", "remedy", "what", "problems", "notes"}
# Methods that ask what a text says.
READING = {
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split",
    "find", "index", "replace", "match", "fullmatch", "search",
}  # fmt: skip


def text_read_back(root: Path) -> list[str]:
    """Messages that are read: rewording one must not change what a program does."""
    out = []
    for path in modules(root).values():
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                asked = [node.func.value] if node.func.attr in READING else []
                asked += node.args if node.func.attr in {"match", "fullmatch", "search"} else []
            elif isinstance(node, ast.Compare) and any(
                isinstance(op, ast.In | ast.NotIn) for op in node.ops
            ):
                # `"text" in row.reason`, and not `leaf in problems`.
                is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
                asked = node.comparators if is_text else []
            else:
                continue
            if any(isinstance(one, ast.Attribute) and one.attr in TOLD for one in asked):
                out.append(f"{at(root, path, node.lineno)}: {ast.unparse(node)}")
    return out


# Held on functree

RULES: tuple[Callable[[Path], list[str]], ...] = (
    floors,
    cycles,
    private_imports,
    long_modules,
    vague_names,
    suppressions,
    recursive_closures,
    text_read_back,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_functree_keeps(rule: Callable[[Path], list[str]]) -> None:
    assert modules(PACKAGE), f"no module under {PACKAGE}"
    violations = rule(PACKAGE)
    assert not violations, "\n".join([rule.__doc__ or "", *violations])


# And on packages that break it: the files of one, and what the rule says of each violation. A file
# that breaks nothing stands beside those that do, so that a rule that reports everything fails too.

BROKEN: dict[str, tuple[Callable[[Path], list[str]], dict[str, str], list[str]]] = {
    "a lower floor imports a higher one": (
        floors,
        {"tree/paths.py": "from pkg.layout.axes import Axes\n", "layout/axes.py": "import pkg.tree.filters\n",
         "tree/filters.py": ""},
        ["pkg/tree/paths.py:1: pkg.tree.paths imports pkg.layout.axes, which is above it"],
    ),
    "inside a function, and by a relative import": (
        floors,
        {"tree/split.py": "def f():\n    from ..layout import axes\nfrom . import paths\n",
         "layout/axes.py": "", "tree/paths.py": ""},
        ["pkg/tree/split.py:2: pkg.tree.split imports pkg.layout.axes, which is above it"],
    ),
    "on no floor": (
        floors,
        {"attic.py": "", "tree/attic.py": ""},
        ["pkg.attic stands on no floor; the floors are " + ", ".join(FLOORS)],
    ),
    "two modules in a circle": (
        cycles,
        {"tree/a.py": "from pkg.tree.b import y\n", "tree/b.py": "def f():\n    from pkg.tree import a\n",
         "tree/c.py": "import pkg.tree.a\n", "tree/__init__.py": "from pkg.tree.c import z\n"},
        ["a circle of imports: pkg.tree.a → pkg.tree.b → pkg.tree.a"],
    ),
    "private modules and names": (
        private_imports,
        {"errors.py": "import jax._src.core\nfrom equinox._module import Module\nfrom optax import _src\n"
                      "def f():\n    import jaxtyping._array_types\n",
         "tree/a.py": "from pkg.tree._b import _c\nfrom . import _b\nfrom jax import __version__\n"
                      "from __future__ import generator_stop\n",
         "tree/_b.py": "_c = 1\n"},
        ["pkg/errors.py:1: jax._src.core is private", "pkg/errors.py:2: equinox._module.Module is private",
         "pkg/errors.py:3: optax._src is private", "pkg/errors.py:5: jaxtyping._array_types is private"],
    ),
    "private attributes": (
        private_imports,
        {"errors.py": "import equinox as eqx\nfrom jax import core\n"
                      "from optax import State\nimport pkg.tree\n"
                      "a = eqx._module.Module\nb = core._thing\nc = State._fields\nd = pkg.tree._mine\n"
                      "e = a._own\nf = core.__name__\n"},
        ["pkg/errors.py:5: eqx._module is private", "pkg/errors.py:6: core._thing is private"],
    ),
    "a long module": (
        long_modules,
        {"errors.py": "#\n" * (MAX_MODULE_LINES + 1), "testing.py": "#\n" * MAX_MODULE_LINES},
        [f"pkg/errors.py has {MAX_MODULE_LINES + 1} lines, {MAX_MODULE_LINES} at most"],
    ),
    "a name that says nothing": (
        vague_names,
        {"tree/_utils.py": "", "helpers/__init__.py": "", "tree/paths.py": "", "tree/util_of_use.py": ""},
        ["pkg/helpers: name it after what is in it", "pkg/tree/_utils.py: name it after what is in it"],
    ),
    "a closure that calls itself": (
        recursive_closures,
        {"errors.py": "def f(x):\n    def g(y):\n        return g(y - 1) if y else x\n    return g(3)\n",
         "cli.py": "def f(x):\n    def g(y):\n        return f(y)\n    return g(x)\n"},
        ["pkg/errors.py:2: g in f calls itself"],
    ),
    "a message that is read": (
        text_read_back,
        {"errors.py": "a = row.reason.startswith('rule ')\nb = problem.remedy.removesuffix(more)\n"
                      "c = 'no name' in decision.source\nd = re.match('rule', fault.why)\n",
         "tree/a.py": "a = name.startswith('x')\nb = problem in plan.problems\nc = row.reason == other.reason\n"},
        ["pkg/errors.py:1: row.reason.startswith('rule ')", "pkg/errors.py:2: problem.remedy.removesuffix(more)",
         "pkg/errors.py:3: 'no name' in decision.source", "pkg/errors.py:4: re.match('rule', fault.why)"],
    ),
    "everything is suppressed": (
        suppressions,
        {"errors.py": "import contextlib\nwith contextlib.suppress(Exception):\n    pass\n"
                      "with contextlib.suppress(KeyError, BaseException):\n    pass\n"
                      "with contextlib.suppress(KeyError):\n    pass\n"},
        ["pkg/errors.py:2: contextlib.suppress(Exception)",
         "pkg/errors.py:4: contextlib.suppress(KeyError, BaseException)"],
    ),
}  # fmt: skip


def package(folder: Path, files: Mapping[str, str]) -> Path:
    root = folder / "pkg"
    for name, text in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("case", BROKEN)
def test_a_rule_reports(case: str, tmp_path: Path) -> None:
    rule, files, expected = BROKEN[case]
    assert sorted(rule(package(tmp_path, files))) == sorted(expected)
