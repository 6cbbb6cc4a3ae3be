"""Checks how the files of this project hang together, from their syntax alone: nothing of the
project is imported.

    python tools/structure.py          a list of what breaks the contract, and exit code 1 if there
                                       is something
    python tools/structure.py --json   the same for a program
    python tools/structure.py --imports   circles and imports inside functions alone

The contract has four parts:

* No import circle among the files of bridge and torchfunc_jax. An import inside a function counts,
  one for type checkers too. Importing a file is not importing the package around it, although
  Python runs that package's ``__init__.py`` first.
* No import inside a function of bridge, unless what it imports is in OPTIONAL: a package that users
  can do without.
* No mutable state at module level, unless it is in STATE. State is a name at module level that some
  function rebinds by ``global``, or whose value some function changes: a container by its methods,
  an object by its attributes, in its own file or in another one. What exists only to be changed, a
  ``threading.local`` or a ``ContextVar``, counts at once. A table that nobody changes after the
  import is a constant; a lock guards state and is none; ``functools.cache`` on a pure function is
  no state that a reader has to know.
* Private names of PyTorch and JAX, those with a part that begins with one underscore, are in
  bridge/private*.py alone, but for PRIVATE. Operators (``torch.ops.aten._softmax``) are known by
  their schemas and count as public.

Which package may import which is the business of import-linter: see ``[tool.importlinter]`` in
pyproject.toml.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("bridge", "torchfunc_jax")

#: What a function of bridge may import: package, or "file -> package" -> why not at the top of the
#: file.
OPTIONAL = {
    "flax": "importing it takes a second, and who converts no Flax module needs none of it",
    "functorch": "not in every version of PyTorch",
    "orbax": "an extra, torchfunc-jax[checkpoints]; importing it takes seconds",
    "safetensors": "an extra, torchfunc-jax[checkpoints]",
    "scipy": "importing it takes a tenth of a second, and only two operators need it",
    "bridge.private -> a computed name": "functions of PyTorch's that not every version has",
    "bridge.private_meta -> a computed name": (
        "it is there to spare an import of sympy, which takes half a second"
    ),
    "bridge.private_calls -> a computed name": (
        "functions of PyTorch's that not every version has; flex_attention's module takes seconds"
    ),
}

#: Mutable state at module level: name -> why it is there.  At most LIMIT of them.
LIMIT = 8
STATE: dict[str, str] = {
    "bridge.trace.levels.state": (
        "what each thread is at: the levels of its open trace, and its recorder"
    ),
    "bridge.process.process": "what bridge remembers between calls, for all threads",
    "bridge.lowering.registry.LOWERINGS": (
        "the registry of lowerings, filled at import and by users"
    ),
    "bridge.lowering.registry.OVERRIDDEN": "the operators that users have registered again",
    "bridge.trace.tracing.OWN_RULES": (
        "the registry of operators that need more than arrays, filled at import"
    ),
    "bridge.programs.guards._usual": (
        "the answer to the question for ambient state that is asked at each call"
    ),
    "bridge.private_calls._applied": "the autograd.Function that is being applied, for each thread",
}

#: Private names of PyTorch and JAX outside of bridge/private*.py: dotted name, or "file -> dotted
#: name" -> why.
PRIVATE: dict[str, str] = {
    "torch._ops": "the class of operators, OpOverload, in annotations",
    "torch.utils._pytree": "PyTorch's pytrees, which its own documentation of torch.export names",
    "torch.nn.modules.batchnorm._BatchNorm": "the class of all of PyTorch's batch norms",
    "torch.nn.modules.conv._ConvNd": "the class of all of PyTorch's convolutions",
    "torch.nn.modules.conv._ConvTransposeNd": "the class of all that are transposed",
    "torch.nn.modules.instancenorm._InstanceNorm": "the class of all of PyTorch's instance norms",
    "torch._VF": "what recurrent layers and packed sequences call: keys of tables of functions",
    "torch._assert": "a function that torch.fx and torch.export write into programs",
    "bridge.intercepted.torch_functions -> torch.nn._reduction": (
        "how losses read their old arguments"
    ),
    "bridge.intercepted.autograd_function -> torch.nn.modules._functions.BackwardHookFunction": (
        "of modules' backward hooks"
    ),
    "bridge.record.rules -> torch._C._set_grad_enabled": (
        "a key of a table: what torch.set_grad_enabled calls"
    ),
    "bridge.record.tensor -> torch._C._disabled_torch_function_impl": (
        "a subclass without __torch_function__"
    ),
}

_CHANGING = frozenset(
    {
        "__delitem__",
        "__setattr__",
        "__setitem__",
        "add",
        "append",
        "appendleft",
        "clear",
        "difference_update",
        "discard",
        "extend",
        "extendleft",
        "get_nowait",
        "insert",
        "intersection_update",
        "move_to_end",
        "pop",
        "popitem",
        "popleft",
        "put",
        "put_nowait",
        "remove",
        "reverse",
        "setdefault",
        "sort",
        "symmetric_difference_update",
        "update",
    }
)
_CONTAINERS = frozenset(
    {
        "ChainMap",
        "Counter",
        "LifoQueue",
        "OrderedDict",
        "PriorityQueue",
        "Queue",
        "SimpleNamespace",
        "SimpleQueue",
        "WeakKeyDictionary",
        "WeakSet",
        "WeakValueDictionary",
        "bytearray",
        "count",
        "cycle",
        "defaultdict",
        "deque",
        "dict",
        "list",
        "set",
    }
)
_ONLY_TO_CHANGE = frozenset({"local", "ContextVar"})  # of threading and contextvars
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclasses.dataclass(frozen=True, order=True)
class Import:
    """One imported module, and where it says so."""

    target: str
    line: int
    lazy: bool


@dataclasses.dataclass
class Module:
    """One file: its imports, what its names mean at module level, and which state its functions
    change.
    """

    name: str
    path: Path
    tree: ast.Module
    imports: list[Import] = dataclasses.field(default_factory=list)
    # name at module level -> dotted name it was imported from
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    # name at module level -> what it is first assigned
    values: dict[str, ast.expr | None] = dataclasses.field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = dataclasses.field(default_factory=dict)
    lines: dict[str, int] = dataclasses.field(default_factory=dict)


# -- reading ---------------------------------------------------------------------------------------
def modules_of(root: Path) -> dict[str, Module]:
    """The files of the packages under root, by their dotted names."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    for module in found.values():
        _read(module, found)
    return found


def _read(module: Module, modules: dict[str, Module]) -> None:
    """Fill in a module's imports and names."""
    for node, functions in _walk(module.tree):
        for target, name, full in _imported(node, module, modules):
            module.imports.append(Import(target, getattr(node, "lineno", 0), bool(functions)))
            if not functions and name:
                module.aliases[name] = full
    for node in _at_module_level(module.tree.body):
        prefix, statements = "", [node]
        if isinstance(node, ast.ClassDef):
            module.classes[node.name] = node
            prefix, statements = f"{node.name}.", node.body
        for statement in statements:
            for assigned, value in _assigned(statement):
                module.values.setdefault(prefix + assigned.id, value)
                module.lines.setdefault(prefix + assigned.id, assigned.lineno)


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Every node below this one with the functions around it, the outermost first."""
    waiting: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while waiting:
        around, functions = waiting.pop()
        for node in ast.iter_child_nodes(around):
            yield node, functions
            waiting.append(
                (node, (*functions, node) if isinstance(node, _FUNCTIONS) else functions)
            )


def _at_module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import outside of classes: those in branches, loops and
    with-blocks too.
    """
    for node in body:
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _at_module_level(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _at_module_level(handler.body)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.Name, ast.expr | None]]:
    """Names that a statement assigns, with the value where it is one name's alone."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target, value
                else:
                    yield from (
                        (name, None)
                        for name in ast.walk(target)
                        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                    )
        case ast.AnnAssign(target=ast.Name() as target, value=value):
            yield target, value


def _imported(
    node: ast.AST, module: Module, modules: dict[str, Module]
) -> Iterator[tuple[str, str, str]]:
    """(module, the name it is bound to, the dotted name that this is) of each module that a node
    imports.
    """
    match node:
        case ast.Import(names=names):
            for alias in names:
                first = alias.name.partition(".")[0]
                yield alias.name, alias.asname or first, alias.name if alias.asname else first
        case ast.ImportFrom(module=source, names=names, level=level):
            if level:
                package = module.name.split(".")[
                    : None if module.path.name == "__init__.py" else -1
                ]
                source = ".".join(
                    package[: len(package) - level + 1] + ([source] if source else [])
                )
            for alias in names:
                full = f"{source}.{alias.name}"
                yield (full if full in modules else str(source)), alias.asname or alias.name, full
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[argument, *_],
        ):
            yield (
                (str(argument.value) if isinstance(argument, ast.Constant) else "a computed name"),
                "",
                "",
            )


# -- imports ---------------------------------------------------------------------------------------
def circles(modules: dict[str, Module]) -> list[list[str]]:
    """The sets of files that import each other, by whatever way round (the strongly connected
    components, found as Tarjan does).
    """
    edges = {
        name: sorted({i.target for i in module.imports} & modules.keys())
        for name, module in modules.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1 or name in edges[name]:
                found.append(sorted(members))

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10 * len(modules) + 1000))
    for name in modules:
        if name not in index:
            visit(name)
    return sorted(found, key=lambda members: (-len(members), members))


def edges_within(members: list[str], modules: dict[str, Module]) -> list[str]:
    """The imports that tie the files of a circle, one line each."""
    return [
        (
            f"{modules[name].path.name}:{i.line} {name} -> "
            f"{i.target}{' (inside a function)' if i.lazy else ''}"
        )
        for name in members
        for i in sorted(set(modules[name].imports))
        if i.target in members
    ]


def lazy_imports(modules: dict[str, Module]) -> list[tuple[str, int, str]]:
    """(file, line, target) of each import inside a function of bridge that
    OPTIONAL does not allow.
    """
    return sorted(
        {
            (module.name, i.line, i.target)
            for module in modules.values()
            if module.name.partition(".")[0] == "bridge"
            for i in module.imports
            if i.lazy
            and i.target.partition(".")[0] not in OPTIONAL
            and f"{module.name} -> {i.target}" not in OPTIONAL
        }
    )


# -- private names ---------------------------------------------------------------------------------
def private_names(modules: dict[str, Module]) -> list[tuple[str, int, str]]:
    """(file, line, dotted name) of each private name of PyTorch or JAX outside of
    bridge/private*.py.
    """
    found = set()
    for module in modules.values():
        if module.name.startswith("bridge.private"):
            continue
        for node, _ in _walk(module.tree):
            names = (
                [full for _, _, full in _imported(node, module, modules)]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            if isinstance(node, ast.Attribute):
                names = [_dotted(node, module)]
            for name in names:
                first, *parts = name.split(".")
                if (
                    first in ("torch", "jax", "jaxlib")
                    and parts[:1] != ["ops"]
                    and parts
                    and _private(parts[-1])
                ):
                    found.add((module.name, getattr(node, "lineno", 0), name))
                elif (
                    first in ("torch", "jax", "jaxlib")
                    and isinstance(node, ast.ImportFrom)
                    and any(map(_private, parts))
                ):
                    found.add((module.name, node.lineno, name))
    return sorted(found)


def _covers(listed: str, file: str, name: str) -> bool:
    """Whether an entry of PRIVATE allows a name in a file; it allows what lies below it and above
    it, too.
    """
    where, _, allowed = listed.rpartition(" -> ")
    return where in ("", file) and (
        f"{name}.".startswith(f"{allowed}.") or f"{allowed}.".startswith(f"{name}.")
    )


def _private(part: str) -> bool:
    return part.startswith("_") and not part.endswith("__")


# -- state -----------------------------------------------------------------------------------------
def state(modules: dict[str, Module]) -> dict[str, tuple[int, str]]:
    """Mutable state at module level: dotted name -> (line, by what it is known)."""
    found: dict[str, tuple[int, str]] = {}
    for module in modules.values():
        for name, value in module.values.items():
            kind = _kind(value, module, modules)
            if kind == "only to change":
                found[f"{module.name}.{name}"] = (module.lines[name], "is made to be changed")
            elif isinstance(kind, tuple) and (method := _changes_itself(kind[0], kind[1], modules)):
                found[f"{module.name}.{name}"] = (
                    module.lines[name],
                    f"{method} of its class changes it",
                )
    for module in modules.values():
        for node, functions in _walk(module.tree):
            if not functions:
                continue
            for owner, name, how in _changed(node, functions, module, modules):
                if name in owner.values and (
                    how == "rebinds it" or _kind(owner.values[name], owner, modules) is not None
                ):
                    line = getattr(node, "lineno", 0)
                    where = (
                        f"{getattr(functions[0], 'name', 'a lambda')} in {module.path.name}:{line} "
                        f"{how}"
                    )
                    found.setdefault(f"{owner.name}.{name}", (owner.lines[name], where))
    return dict(sorted(found.items()))


def _kind(value: ast.expr | None, module: Module, modules: dict[str, Module]) -> Any:
    """What a value at module level is: "container", "only to change", (class, its module) of an
    object of ours, or None.
    """
    match value:
        case (
            ast.Dict()
            | ast.List()
            | ast.Set()
            | ast.ListComp()
            | ast.SetComp()
            | ast.DictComp()
            | ast.BinOp(op=ast.BitOr())
        ):
            return "container"
        case ast.Call(
            func=ast.Name(id=name)
            | ast.Attribute(attr=name)
            | ast.Subscript(value=ast.Name(id=name))
        ):
            if name in _ONLY_TO_CHANGE:
                return "only to change"
            if name in _CONTAINERS:
                return "container"
            found = _class(value.func, module, modules)
            if found is None:
                return None
            bases = _bases(*found, modules)
            return (
                "only to change"
                if bases & _ONLY_TO_CHANGE
                else "container"
                if bases & _CONTAINERS
                else found
            )
    return None


def _class(
    named: ast.expr, module: Module, modules: dict[str, Module]
) -> tuple[ast.ClassDef, Module] | None:
    """The class of ours that an expression names."""
    if isinstance(named, ast.Subscript):
        named = named.value
    if isinstance(named, ast.Name) and named.id in module.classes:
        return module.classes[named.id], module
    owner, _, name = _dotted(named, module).rpartition(".")
    return (
        (modules[owner].classes[name], modules[owner])
        if owner in modules and name in modules[owner].classes
        else None
    )


def _dotted(named: ast.expr, module: Module) -> str:
    """What a name or a chain of attributes stands for, by the module's imports."""
    match named:
        case ast.Name(id=name):
            return module.aliases.get(name, name)
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value, module)}.{attr}"
    return ""


def _bases(cls: ast.ClassDef, module: Module, modules: dict[str, Module]) -> set[str]:
    """The last part of the name of each class that this one is made from."""
    found = set()
    for base in cls.bases:
        ours = _class(base, module, modules)
        generic = base.value if isinstance(base, ast.Subscript) else base
        found |= _bases(*ours, modules) if ours else {_dotted(generic, module).rpartition(".")[2]}
    return found


def _changes_itself(cls: ast.ClassDef, module: Module, modules: dict[str, Module]) -> str:
    """The first method of a class, beside the one that makes an object, that changes its object."""
    for method in (
        m
        for m in cls.body
        if isinstance(m, ast.FunctionDef) and m.name not in ("__init__", "__new__") and m.args.args
    ):
        for node, _ in _walk(method):
            if any(_root(target) == (method.args.args[0].arg, True) for target in _targets(node)):
                return method.name
    for base in cls.bases:
        if (ours := _class(base, module, modules)) and (name := _changes_itself(*ours, modules)):
            return name
    return ""


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a node changes: targets of assignments and del,
    and what a changing method is called on.
    """
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            for target in targets:
                yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
            yield target
        case ast.With(items=items):
            yield from (item.optional_vars for item in items if item.optional_vars is not None)
        case ast.Call(func=ast.Attribute(attr=attr) as method) if attr in _CHANGING:
            yield method
        case ast.Call(func=ast.Name(id="next"), args=[ast.Name() as argument]):
            yield ast.Attribute(argument, "__next__")
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[target, *_]):
            yield ast.Attribute(target, "")


def _chain(target: ast.expr) -> list[Any]:
    """The expressions of a chain of attributes, items and calls, the whole one first; the last one
    is a name if it begins with one.
    """
    chain: list[Any] = [target]
    while isinstance(chain[-1], ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        chain.append(chain[-1].func if isinstance(chain[-1], ast.Call) else chain[-1].value)
    return chain


def _root(target: ast.expr) -> tuple[str, bool]:
    """The name that a chain begins with, and whether there is more to it than the name."""
    chain = _chain(target)
    return (chain[-1].id, len(chain) > 1) if isinstance(chain[-1], ast.Name) else ("", False)


def _changed(
    node: ast.AST, functions: tuple[ast.AST, ...], module: Module, modules: dict[str, Module]
) -> Iterator[tuple[Module, str, str]]:
    """(module, name at its level, how) of what a node inside functions changes."""
    for target in _targets(node):
        name, chain = _root(target)
        rebound = name in _globals(functions[-1])
        if not name or (not rebound and any(name in _bound(function) for function in functions)):
            continue
        if not chain:
            if rebound:
                yield module, name, "rebinds it"
            continue
        if name in module.values:
            yield module, name, "changes it"
        elif owner := modules.get(module.aliases.get(name, "").rpartition(".")[0]):
            yield owner, module.aliases[name].rpartition(".")[2], "changes it"
        attribute = _chain(target)[-2]
        if not isinstance(attribute, ast.Attribute):
            continue
        how = (
            "rebinds it" if attribute is target and not isinstance(node, ast.Call) else "changes it"
        )
        # a module's name: what is changed is an attribute of it
        if other := modules.get(module.aliases.get(name, "")):
            yield other, attribute.attr, how
        elif found := _class(ast.Name(name), module, modules):  # so for a class
            yield found[1], f"{found[0].name}.{attribute.attr}", how


@functools.cache
def _globals(function: ast.AST) -> frozenset[str]:
    """Names that a function declares global."""
    return frozenset(
        name
        for node, inner in _walk(function)
        if isinstance(node, ast.Global) and not inner
        for name in node.names
    )


@functools.cache
def _bound(function: Any) -> frozenset[str]:
    """Names that a function binds: parameters and what is assigned in its body, functions inside
    left out.
    """
    args = function.args
    names = {
        a.arg
        for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
        if a is not None
    }
    for node, inner in _walk(function):
        if inner:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names.add(node.id)
        elif (
            isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler
            )
            and node.name
        ):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {a.asname or a.name.partition(".")[0] for a in node.names}
    return frozenset(names) - _globals(function)


# -- the report ------------------------------------------------------------------------------------
def lines_outside_lowering(modules: dict[str, Module]) -> int:
    """Lines of bridge that are in no file of bridge.lowering."""
    return sum(
        len(module.path.read_text().splitlines())
        for name, module in modules.items()
        if name.partition(".")[0] == "bridge" and not f"{name}.".startswith("bridge.lowering.")
    )


def report(root: Path, judge_state: bool = True) -> dict[str, Any]:
    """Everything that is known of the tree under root, and under "broken" one sentence for each
    breach of the contract.
    """
    modules = modules_of(root)
    round_about, lazy, changing = circles(modules), lazy_imports(modules), state(modules)
    broken = [
        "\n    ".join(
            [
                f"{len(members)} files import each other: {', '.join(members)}",
                *edges_within(members, modules),
            ]
        )
        for members in round_about
    ]
    broken += [
        (
            f"{modules[name].path.relative_to(root)}:{line}: {target} is imported inside a "
            "function; import it at the top, or hand it in"
        )
        for name, line, target in lazy
    ]
    secrets = private_names(modules)
    broken += [
        (
            f"{modules[file].path.relative_to(root)}:{line}: {name} is a private name; take it "
            "from bridge/private.py or private_jax.py"
        )
        for file, line, name in secrets
        if not any(_covers(listed, file, name) for listed in PRIVATE)
    ]
    if judge_state:
        broken += [
            f"PRIVATE lists {name}, which nothing uses any more: take it out"
            for name in PRIVATE
            if not any(_covers(name, file, used) for file, _, used in secrets)
        ]
        broken += [
            (
                f"{name} (line {line}) is mutable state at module level: {why}. Pass it along, or "
                "list it in STATE with a reason"
            )
            for name, (line, why) in changing.items()
            if name not in STATE
        ]
        broken += [
            f"STATE lists {name}, which is no mutable state any more: take it out"
            for name in STATE
            if name not in changing
        ]
        if len(STATE) > LIMIT:
            broken.append(f"STATE has {len(STATE)} entries, and {LIMIT} are the limit")
    return {
        "broken": broken,
        "circles": round_about,
        "lazy imports": [
            {"file": name, "line": line, "imports": target} for name, line, target in lazy
        ],
        "private names": [
            {"file": name, "line": line, "name": private} for name, line, private in secrets
        ],
        "state": {
            name: {"line": line, "known by": why, "reason": STATE.get(name)}
            for name, (line, why) in changing.items()
        },
        "lines of bridge outside lowering": lines_outside_lowering(modules),
    }


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code is 1 if the contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print everything that was found as JSON"
    )
    parser.add_argument("--imports", action="store_true", help="judge imports alone, and not state")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="the folder that holds the packages",
    )
    options = parser.parse_args(arguments)
    found = report(options.root, judge_state=not options.imports)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("".join(f"{sentence}\n" for sentence in found["broken"]), end="")
        print(f"breaches of the contract: {len(found['broken'])}")
        print(f"lines of bridge outside lowering: {found['lines of bridge outside lowering']}")
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
