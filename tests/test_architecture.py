"""Architecture rules, kept by reading the source: nothing of the project is imported here.

A rule takes a tree, `{path: text}`, and yields one `path:line: what` for each breach. So it can be
tried on a snippet as well as on the checkout: its examples show what it catches and lets pass.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[1]
TORCH_FREE_RUNS = ("folders", "locks", "results", "signals")
# What each package may import of the project's own.
MAY_IMPORT = {
    "instdisc": ("instdisc",),
    "pretrain": ("pretrain", "instdisc"),
    "transfer": ("transfer", "instdisc", "detection_configs"),
    "detection_configs": ("detection_configs",),
    "slurm": (
        "slurm",
        "instdisc.cli",
        "instdisc.errors",
        "instdisc.names",
        *(f"instdisc.runs.{name}" for name in TORCH_FREE_RUNS),
    ),
}
OURS = {*MAY_IMPORT, "tests", "benchmarks"}
TORCH_FREE = re.compile(
    r"instdisc/(untrusted/\w+|cli|errors|names|images/(locations|demo))\.py"
    rf"|instdisc/runs/({'|'.join(TORCH_FREE_RUNS)})\.py"
    r"|(pretrain|transfer)/config\.py|slurm/.*\.py|(instdisc|transfer)/\w+/settings\.py"
    r"|transfer/(reporting|suites)/\w+\.py|instdisc/importers/(?!inputs)\w+\.py"
)
COMMAND = re.compile(r'^main = command\((\w+), "([\w.]+):(\w+)"\)$', re.MULTILINE)
TORCH = {"torch", "torchvision", "timm", "detectron2", "fvcore"}

Tree = dict[str, str]
Rule = Callable[[Tree], Iterator[str]]
RULES: list[Rule] = []
EXAMPLES: list[tuple[Rule, str, str, str | None]] = []
LAZY = "def f():\n    "


def rule(*examples: tuple[str, str, str | None]) -> Callable[[Rule], Rule]:
    """Registers a rule with (path, text that breaks it, text that keeps it or None)."""
    assert examples, "a rule that nothing breaks is no rule"

    def register(function: Rule) -> Rule:
        RULES.append(function)
        EXAMPLES.extend((function, *example) for example in examples)
        return function

    return register


class Import(NamedTuple):
    name: str  # `from instdisc.cli import a` is "instdisc.cli.a", `from . import b` is ".b"
    line: int
    lazy: bool  # inside a function, or for the type checker only


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def imports(text: str) -> tuple[Import, ...]:
    """Every import statement, and every `import_module("a literal")`."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (Import(prefix + alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
                yield Import(str(node.args[0].value), node.lineno, lazy)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy = True
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, lazy or (for_types and field == "body"))

    return tuple(visit(parse(text), False))


@cache
def aliases(text: str) -> dict[str, str]:
    """What imported names stand for: after `from torch import load as f`, f is `torch.load`."""
    known: dict[str, str] = {}
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return known


def full_name(node: ast.expr, known: dict[str, str]) -> str:
    head, dot, rest = ast.unparse(node).partition(".")
    return known.get(head, head) + dot + rest


def calls(text: str) -> Iterator[tuple[str, ast.Call, dict[str | None, str]]]:
    """Each call, its keywords, and its full name."""
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Call):
            keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
            yield full_name(node.func, aliases(text)), node, keywords


def python_files(tree: Tree, *roots: str) -> Iterator[tuple[str, str]]:
    for path, text in tree.items():
        if not roots or path.split("/")[0] in roots:
            yield path, text


def within(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


@rule(
    ("instdisc/a.py", "import pretrain", "import instdisc.cli"),
    ("instdisc/a.py", LAZY + "from transfer import knn", "import transferable"),
    ("pretrain/a.py", "from transfer.knn import main", "from instdisc.runs import log"),
    ("transfer/a.py", "import_module('pretrain.run')", "import detection_configs"),
    ("slurm/a.py", "from instdisc.images import sets", "from instdisc.runs import folders"),
    ("slurm/a.py", "from instdisc.runs import log", "from instdisc import cli, errors, names"),
    ("slurm/a.py", "import instdisc.runs.folders_old", "from instdisc.runs.folders import x"),
)
def packages_import_only_downwards(tree: Tree) -> Iterator[str]:
    """pretrain -> instdisc <- transfer -> detection_configs; slurm knows commands by name only."""
    for path, text in python_files(tree, *MAY_IMPORT):
        allowed = MAY_IMPORT[path.split("/")[0]]
        for each in imports(text):
            if within(each.name, *OURS) and not within(each.name, *allowed):
                yield f"{path}:{each.line}: imports {each.name}; may import {', '.join(allowed)}"


@rule(
    ("transfer/detect.py", LAZY + "import detectron2", "import detectron2_like"),
    ("instdisc/export/a.py", LAZY + "import detectron2", "import detectron"),
    (
        "instdisc/export/a.py",
        "from instdisc.export import detectron2_check",
        LAZY + "from instdisc.export import detectron2_check",
    ),
    ("pretrain/a.py", "from submitit import helpers", "import submit"),
    ("slurm/a.py", LAZY + "from submitit import helpers", None),
)
def detectron2_and_submitit_stay_in_their_rooms(tree: Tree) -> Iterator[str]:
    """One place each knows what to say when the package is missing.

    instdisc/export/detectron2_*.py are the exception: the verifier must load its file through
    Detectron2 itself. They are imported inside functions, so that other targets do without it.
    """
    export = "instdisc/export/detectron2_"
    places = {"detectron2": ("transfer/detection/", export), "submitit": ("slurm/cluster.py",)}
    for path, text in python_files(tree, *MAY_IMPORT):
        for each in imports(text):
            place = places.get(each.name.split(".")[0])
            if each.name.startswith(export.replace("/", ".")) and not each.lazy:
                place = places["detectron2"]
            if place and not path.startswith(place):
                yield f"{path}:{each.line}: {each.name} may be imported in {place[0]} only"


@cache
def foreign_names() -> dict[str, str]:
    """Import names of the standard library and of every locked package that is installed."""
    lock = (REPO / "requirements.lock").read_text("utf-8") + "sal-detectron2=="
    locked = {name.lower() for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}
    names = dict.fromkeys(sys.stdlib_module_names, "the standard library")
    for name, owners in packages_distributions().items():
        if owned := [o for o in owners if re.sub(r"[-_.]+", "-", o).lower() in locked]:
            names[name] = owned[0]
    return names


@rule(("pretrain/logging.py", "", None), ("transfer/yaml/__init__.py", "", None))
def module_names_shadow_nothing(tree: Tree) -> Iterator[str]:
    """A script's folder is first on sys.path: pretrain/logging.py would break `import logging`."""
    for path, _ in python_files(tree, *MAY_IMPORT, "benchmarks"):
        *folders, name = Path(path).with_suffix("").parts
        for each in folders if name == "__init__" else [name]:
            if each in foreign_names():
                yield f"{path}:1: the name {each} belongs to {foreign_names()[each]}"


@rule(
    ("pretrain/a.py", "from . import b", "from pretrain import b"),
    ("tests/a.py", "from pretrain.b import *", "import pretrain.b"),
)
def imports_are_absolute_and_named(tree: Tree) -> Iterator[str]:
    """A relative import fails when the file is run as a script; a star hides a name's origin."""
    for path, text in python_files(tree):
        for each in imports(text):
            if each.name.startswith(".") or each.name.endswith(".*"):
                yield f"{path}:{each.line}: relative or star import of {each.name}"


@rule(
    ("instdisc/cli.py", "import torch.nn", LAZY + "import torch"),
    ("slurm/a.py", "try:\n    import timm\nexcept ImportError:\n    pass", "import json"),
    ("pretrain/config.py", "class A:\n    import torchvision", "import torchlike"),
    ("pretrain/a.py", 'import torch\nmain = command(A, "b:c")', "import torch"),
)
def light_modules_do_not_load_torch(tree: Tree) -> Iterator[str]:
    """`--help`, submitting a job and reading results do not wait for torch to load."""

    def chain(path: str, seen: set[str]) -> list[str]:  # the imports that lead to torch, if any
        seen.add(path)
        for each in imports(tree[path]):
            parts = each.name.split(".")
            if each.lazy:
                continue
            if parts[0] in TORCH:
                return [f"{path}:{each.line}", parts[0]]
            for end in range(1, len(parts) + 1):  # importing a.b runs a/__init__.py too
                stem = "/".join(parts[:end])
                for file in {f"{stem}.py", f"{stem}/__init__.py"} & tree.keys() - seen:
                    if rest := chain(file, seen):
                        return [f"{path}:{each.line}", *rest]
        return []

    for path, _ in python_files(tree, *MAY_IMPORT):
        light = TORCH_FREE.fullmatch(path) or COMMAND.search(tree[path])
        if light and (found := chain(path, set())):
            yield f"{found[0]}: loads {' -> '.join(found[1:])}"


@rule(
    ("transfer/a.py", 'main = command(A, "transfer.b:run_b")', None),
    ("transfer/a.py", 'main = command(A, "transfer.a:run_a")\ndef run_a(config): pass', None),
    ("pretrain/a.py", "def main(argv=None): return 0", "def mains(): return 0"),
)
def a_command_is_its_flags_and_the_name_of_a_function(tree: Tree) -> Iterator[str]:
    """A script holds nothing else: run as `__main__` and imported, it would exist twice.

    The function is named by text, which no type checker follows. slurm/attempt.py is no command:
    the batch script calls it.
    """
    for path, text in python_files(tree, *MAY_IMPORT):
        mains = [n for n in parse(text).body if getattr(n, "name", "") == "main"]
        if mains and path != "slurm/attempt.py":
            yield f"{path}:{mains[0].lineno}: make main with instdisc.cli.command"
        if (found := COMMAND.search(text)) is None:
            continue
        others = [n for n in parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        if others:
            yield f"{path}:{others[0].lineno}: {others[0].name} belongs beside the work"
        module, function = found[2].replace(".", "/") + ".py", found[3]
        if function not in [getattr(n, "name", "") for n in parse(tree.get(module, "")).body]:
            yield f"{path}:1: {module} has no {function}"


@rule(
    ("tests/a.py", "import sys\nsys.path.insert(0, '.')", "import sys\nsys.path.index('')"),
    ("pretrain/a.py", "import sys\nsys.path[:0] = ['.']", "import sys\nx = sys.path[0]"),
    ("pretrain/a.py", "from sys import path\npath.append('.')", "path.append('.')"),
)
def nobody_edits_sys_path(tree: Tree) -> Iterator[str]:
    """The editable install makes every import work; an edit hides that it is missing."""
    edits = re.compile(r"sys\.path\.(append|insert|extend|remove|pop|clear)|site\.addsitedir")
    for path, text in python_files(tree):
        for name, call, _ in calls(text):
            if edits.fullmatch(name):
                yield f"{path}:{call.lineno}: {name}"
        for node in ast.walk(parse(text)):
            stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            if stored and ast.unparse(node).startswith("sys.path"):
                yield f"{path}:{getattr(node, 'lineno', 1)}: assigns to sys.path"


@rule(
    ("tests/a.py", "import torch\ntorch.load(f)", "torch.load(f, weights_only=True)"),
    ("a.py", "from torch import load as g\ng(f, weights_only=False)", "load(f)"),
)
def torch_load_takes_weights_only(tree: Tree) -> Iterator[str]:
    """Loading a downloaded checkpoint must not run code."""
    for path, text in python_files(tree):
        for name, call, keywords in calls(text):
            if name == "torch.load" and keywords.get("weights_only") != "True":
                yield f"{path}:{call.lineno}: torch.load without weights_only=True"


@rule(
    ("slurm/a.py", "import pickle as p\np.load(f)", "import pickle\npickle.dump(x, f)"),
    ("transfer/a.py", "np.load(f, allow_pickle=True)", "np.load(f)"),
    ("transfer/a.py", "import pickle\nclass A(pickle.Unpickler): pass", "class A(Unpickler): pass"),
    (
        "instdisc/a.py",
        "from pickle import _Unpickler as U\nclass A(B, U): pass",
        "class A(B): pass",
    ),
    ("slurm/a.py", LAZY + "import cloudpickle as c\n    class A(c.Unpickler): pass", None),
    ("pretrain/a.py", "import pickle as p\nA = type('A', (p.Unpickler,), {})", "A = type(p)"),
)
def nothing_is_unpickled(tree: Tree) -> Iterator[str]:
    """Nor must loading any other file. Tests may read back the pickles that they wrote.

    An Unpickler may not be named either, be it to derive from it: pickles are interpreted by
    instdisc/untrusted/pickles.py, which has no base class that could run anything.
    """
    unsafe = re.compile(r"(_?pickle|cloudpickle|dill|joblib)\.(loads?|_?Unpickler)")
    for path, text in python_files(tree, *MAY_IMPORT, "benchmarks"):
        for name, call, keywords in calls(text):
            if unsafe.fullmatch(name) or keywords.get("allow_pickle", "False") != "False":
                yield f"{path}:{call.lineno}: {name} can run code from the file"
        known = aliases(text)
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.Name | ast.Attribute):
                name = full_name(node, known)
                if unsafe.fullmatch(name):
                    yield f"{path}:{node.lineno}: {name} can run code from the file"


@pytest.fixture(scope="module")
def tree() -> Tree:
    """The Python files that are tracked, or would be if added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    files = {path for path in listed.split("\0") if path.endswith(".py")}
    return {path: (REPO / path).read_text("utf-8") for path in files if (REPO / path).exists()}


@pytest.mark.parametrize("house_rule", RULES, ids=lambda each: each.__name__)
def test_checkout_keeps(house_rule: Rule, tree: Tree) -> None:
    breaches = sorted(set(house_rule(tree)))
    assert not breaches, "\n".join([str(house_rule.__doc__), *breaches])


@pytest.mark.parametrize(("house_rule", "path", "bad", "good"), EXAMPLES)
def test_rule_catches(house_rule: Rule, path: str, bad: str, good: str | None) -> None:
    found = list(house_rule({path: bad}))
    assert found
    assert re.match(rf"{re.escape(path)}:\d+: ", found[0])
    if good is not None:
        assert list(house_rule({path: good})) == []


def test_torch_is_found_through_other_modules() -> None:
    tree = {
        "slurm/jobs.py": "from instdisc.cli import f",
        "instdisc/cli.py": "import json",
        "instdisc/__init__.py": "import torch",
    }
    chain = "slurm/jobs.py:1: loads instdisc/__init__.py:1 -> torch"
    assert chain in list(light_modules_do_not_load_torch(tree))
