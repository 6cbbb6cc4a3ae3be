"""The names that the bytecode of a function uses: what it reads, what it sets, and what it only
adds to.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import NamedTuple

_SETTING, _STORING = frozenset({"setattr", "delattr"}), ("STORE_", "DELETE_")
#: Names by which code reads, or sets, an attribute that it names as a string.
_BY_STRING = _SETTING | {"getattr", "hasattr"}
#: Replaces "grad" if the attribute is read, as a tensor's is, and not called, as torch.func.grad
#: is.
GRAD = ".grad"
#: What adds to a list, deque or set, and reads nothing.
_ADDING = frozenset({"append", "appendleft", "extend", "extendleft", "add"})


class Read(NamedTuple):
    """Names in the code of a function and of those inside it.

    Attributes:
        names: all.
        globals: those of global variables that it reads.
        optional: those that it passes to getattr and hasattr.
        imports: those of the Python modules that it imports.
        loaded: those of ``names`` that it does not only set or delete.
        stored: those of attributes and global variables that it sets or deletes; "__dict__" if it
            may set any.
        used: those of variables, attributes and entries that it reads, and not only to add to a
            container there, or to read its entries.
        opened, added: those that it reads to read or set an entry of the container there, and to
            add to it; ``entry_of`` stands for entries at keys that are variables.
        set_globals: those of global variables that it sets or deletes.
    """

    names: tuple[str, ...]
    globals: tuple[str, ...]
    optional: tuple[str, ...]
    imports: tuple[str, ...]
    loaded: tuple[str, ...]
    stored: tuple[str, ...]
    used: tuple[str, ...]
    opened: tuple[str, ...]
    added: tuple[str, ...]
    set_globals: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def read_by(code: types.CodeType) -> Read:
    steps = list(dis.get_instructions(code))
    names, optional = list(code.co_names), []
    globals_read = [s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    imports = [s.argval for s in steps if s.opname == "IMPORT_NAME"]
    named = [s for s in steps if s.opcode in dis.hasname]
    stored = [s.argval for s in named if s.opname.startswith(_STORING)]
    only_stored = {*stored}.difference(
        [s.argval for s in named if not s.opname.startswith(_STORING)]
    )
    set_globals = [s.argval for s in named if s.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")]
    steps = [s for s in steps if s.opname not in ("CACHE", "PUSH_NULL", "NOP")]
    reads = [(s.argval, steps[i + 1 : i + 5]) for i, s in enumerate(steps) if _reads(s)]
    for i, s in enumerate(steps):
        opens = _opens(steps[i : i + 4])
        if opens and not opens.opname.startswith(_STORING):
            # what follows reads the entry, but after h["n"] += 1, which puts another one there
            reads.append((s.argval, steps[i + 2 : i + 6] if opens is steps[i + 1] else []))
    anywhere = [name for name, then in reads if _adds_somewhere(then)]
    opened = [*[name for name, then in reads if _opens(then)], *anywhere]
    added = [*[name for name, then in reads if _adds(then)], *map(entry_of, anywhere)]
    used = [n for n, then in reads if not (_opens(then) or _adds(then) or _adds_somewhere(then))]
    for i, step in enumerate(steps):
        if step.opname == "LOAD_ATTR" and step.argval == "grad" and _reads(step):
            names.append(GRAD)
        if step.argval in _BY_STRING and step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            name = _second_argument(steps[i + 1 :])
            if step.argval in _SETTING:
                stored.append(name or "__dict__")
                if name is not None and name not in names:  # a property, say
                    names.append(name)
                    only_stored.add(name)
            elif name is not None:
                optional.append(name)
            elif code.co_name != "__getattr__":  # which passes on a name that other code contains
                names.append("__dict__")
    loaded: list[str] = []
    every = [names, globals_read, optional, imports, loaded]
    every += [stored, used, opened, added, set_globals]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            for mine, inner in zip(every, read_by(const), strict=True):
                mine.extend(inner)
    names += optional
    used += optional
    loaded += [n for n in names if n not in only_stored]
    return Read(*[tuple(dict.fromkeys(x)) for x in every])


def _reads(step: dis.Instruction) -> bool:
    """Whether a step reads a variable, a global variable or an attribute that is no method."""
    if step.opname == "LOAD_ATTR":
        return not (sys.version_info >= (3, 12) and (step.arg or 0) & 1)
    return step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")


def _opens(steps: list[dis.Instruction]) -> dis.Instruction | None:
    """The step that reads, sets or deletes the entry of a container at a key that is a string, if
    these steps do that first.
    """
    if not (steps and steps[0].opname.startswith("LOAD_CONST") and type(steps[0].argval) is str):
        return None
    step = next((s for s in steps[1:] if s.opname != "COPY"), None)
    sets = step is not None and step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
    return step if sets or (step is not None and _subscribes(step)) else None


def _subscribes(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (
        step.opname == "BINARY_OP" and "[]" in (step.argrepr or "")
    )


def _adds(steps: list[dis.Instruction]) -> bool:
    """Whether the next step calls a method that adds to the object that has just been read."""
    return (
        bool(steps)
        and steps[0].opname in ("LOAD_METHOD", "LOAD_ATTR")
        and steps[0].argval in _ADDING
    )


def _adds_somewhere(steps: list[dis.Instruction]) -> bool:
    """Whether the next steps add to an entry of the container that has just been read, at a key
    that is a local variable.
    """
    return (
        len(steps) > 2
        and steps[0].opname.startswith("LOAD_FAST")
        and _subscribes(steps[1])
        and _adds(steps[2:])
    )


def entry_of(name: str) -> str:
    """What stands among ``Read.added`` for any entry of the containers of that name."""
    return f"{name}[]"


def _second_argument(steps: list[dis.Instruction]) -> str | None:
    """The second argument of the call whose function was just put on the stack, if it is a string
    constant.
    """
    depth, second = 0, None
    for step in steps:
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return None
        before, depth = (
            depth,
            depth
            + dis.stack_effect(
                step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None, jump=False
            ),
        )
        if depth >= 2 > before:
            second = step
        if second is not None and depth < 2:
            if "CALL" in step.opname:
                return (
                    second.argval
                    if second.opname.startswith("LOAD_CONST") and isinstance(second.argval, str)
                    else None
                )
            second = None
        elif second is not None and before > depth == 2:  # it was computed
            second = step
    return None
