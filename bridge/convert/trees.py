"""Flattens nested Python data to leaves and back; torch's and JAX's pytrees are treated as one.

Dicts keep their insertion order, and None is a leaf, as in torch. Namedtuples, dataclasses and
types that are registered with torch or JAX are nodes. Specs are hashable, and cheap enough to be
the key of a compilation cache.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import jax
import torch

from bridge import private
from bridge.cache_keys import identical
from bridge.process import process

#: The spec of a leaf.
LEAF = None


class Spec:
    """A tree without its leaves: the node's type, its context and its children's specs.

    Two specs are equal only if no key of a dict differs in type or sign: ``{1: x}`` and
    ``{True: x}`` have different specs.
    """

    __slots__ = ("_hash", "_key", "children", "context", "count", "kind", "starts")

    def __init__(self, context: Any, key: tuple[Any, ...], hashed: int) -> None:
        self.context, self._key, self._hash = context, key, hashed
        self.kind, _, self.children = key
        # of each child among the leaves, and their number
        self.starts = (0, *itertools.accumulate(map(count, self.children)))
        self.count: int = self.starts[-1]

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Spec) and self._hash == other._hash and self._key == other._key
        )

    def __repr__(self) -> str:
        name = getattr(self.kind, "__name__", str(self.kind))
        children = ", ".join("*" if c is LEAF else repr(c) for c in self.children)
        context = "" if self.context is None else f", {self.context!r}"
        return f"{name}([{children}]{context})"


_DICTS, _STRINGS = frozenset({dict, OrderedDict}), frozenset({str})


def _make(kind: Any, context: Any, children: tuple[Spec | None, ...]) -> Spec:
    exact = (
        identical(context)
        if kind in _DICTS and not _STRINGS.issuperset(map(type, context))
        else context
    )
    key = (kind, exact, children)
    try:
        spec = process.treedefs.get(key)
    except TypeError:
        # a registered node's context may be unhashable; equality still tells specs apart
        return Spec(context, key, hash((kind, children)))
    if spec is None:
        spec = Spec(context, key, hash(key))
        if len(process.treedefs) < 4096:
            process.treedefs[key] = spec
    return spec


class Opened:
    """Stands for an object in a tree: a node, whose children are the values of the object's
    attributes.

    What is built from its spec is another object of the class.
    """

    __slots__ = ("names", "of", "values")

    def __init__(self, of: Any, values: Sequence[Any]) -> None:
        self.of, self.names, self.values = of, tuple(vars(of)), values


_MANY = 8  # children that are looked at together
#: Types whose objects are leaves; a file with another one adds it here.
ATOMS = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), complex}


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Spec | None]:
    """The leaves of a tree, in order, and its spec (None: the tree is itself a leaf).

    Args:
        tree: nested dicts, lists, tuples, namedtuples, dataclasses, registered nodes; anything else
            is a leaf.
        is_leaf: a node for which it returns True is a leaf.

    Example:
        >>> leaves, spec = flatten({"b": 1, "a": (2, None)})
        >>> leaves
        [1, 2, None]
        >>> unflatten(spec, [10, 20, 30])
        {'b': 10, 'a': (20, 30)}
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, is_leaf)


def _flatten(tree: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> Spec | None:
    kind = type(tree)
    if kind in ATOMS or (is_leaf is not None and is_leaf(tree)):
        leaves.append(tree)
        return LEAF
    if kind is tuple or kind is list:
        items, context = tree, None
    elif kind is dict or kind is OrderedDict:
        items, context = tree.values(), tuple(tree)
    else:
        found = _open(tree)
        if found is None:
            leaves.append(tree)
            return LEAF
        items, context = found
    if is_leaf is None and len(items) > _MANY and ATOMS.issuperset(map(type, items)):
        leaves += items
        return _make(kind, context, (LEAF,) * len(items))
    specs: list[Spec | None] = []
    for item in items:
        if is_leaf is None and type(item) in ATOMS:
            leaves.append(item)
            specs.append(LEAF)
        else:
            specs.append(_flatten(item, leaves, is_leaf))
    return _make(kind, context, tuple(specs))


def _open(tree: Any) -> tuple[Any, Any] | None:
    """The children and the context of a node that is not a list, tuple or dict; None if it is a
    leaf.

    The context of a node that only JAX knows is its treedef, one level deep.
    """
    if isinstance(tree, torch.Tensor | jax.Array | str | bytes):
        return None
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tree, None
    if type(tree) is Opened:
        return tree.values, (type(tree.of), tree.names)
    opened = private.torch_node(tree)
    if opened is not None:
        return opened
    if not jax.tree_util.all_leaves([tree]):
        return jax.tree_util.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    return None


def children(tree: Any) -> Sequence[Any] | None:
    """The children of a node, in the order of its leaves; None for a leaf.

    Example:
        >>> children({"b": 1, "a": (2, 3)})
        [1, (2, 3)]
    """
    kind = type(tree)
    if kind in ATOMS:
        return None
    if kind is tuple or kind is list:
        return tree
    if kind is dict or kind is OrderedDict:
        return list(tree.values())
    found = _open(tree)
    return None if found is None else list(found[0])


def joined(*specs: Spec | None) -> Spec:
    """The spec of a tuple of trees with these specs."""
    return _make(tuple, None, specs)


def unflatten(spec: Spec | None, leaves: Iterable[Any]) -> Any:
    """The tree with this spec and these leaves, the inverse of ``flatten``; raises ValueError if
    their number differs from the spec's.
    """
    found = list(leaves)
    places = 1 if spec is LEAF else spec.count
    if len(found) != places:
        raise ValueError(
            f"leaves: {'more' if len(found) > places else 'fewer'} than the spec has places for"
        )
    return _build(spec, iter(found))


def _build(spec: Spec | None, source: Iterator[Any]) -> Any:
    if spec is LEAF:
        return next(source)
    children = spec.children
    if not any(children):
        items = [*itertools.islice(source, spec.count)]
    else:
        items = [_build(c, source) for c in children]
    kind, context = spec.kind, spec.context
    if kind is tuple:
        return tuple(items)
    if kind is list:
        return items
    if kind is dict or kind is OrderedDict:
        return kind(zip(context, items, strict=True))
    if isinstance(context, jax.tree_util.PyTreeDef):
        return jax.tree_util.tree_unflatten(context, items)
    if kind is Opened:
        cls, names = context
        made = cls.__new__(cls)
        vars(made).update(zip(names, items, strict=True))
        return made
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*items)
    return private.torch_node_build(items, context)


def count(spec: Spec | None) -> int:
    """The number of leaves of a tree with this spec."""
    return 1 if spec is LEAF else spec.count


class Field(str):
    """A field of a namedtuple as a step of a path; the key of a dict is not a Field."""


def paths(spec: Spec | None) -> list[tuple[Any, ...]]:
    """The path to each leaf, made of keys, fields and positions.

    Example:
        >>> paths(flatten({"w": [1, 2], "b": 3})[1])
        [('w', 0), ('w', 1), ('b',)]
    """
    if spec is LEAF:
        return [()]
    children = spec.children
    steps: Any = range(len(children))
    if spec.kind in _DICTS:
        steps = spec.context
    elif spec.kind is Opened:
        steps = map(Field, spec.context[1])
    elif children and len(getattr(spec.kind, "_fields", ())) == len(children):
        steps = map(Field, spec.kind._fields)
    return [
        (step, *below)
        for step, child in zip(steps, children, strict=True)
        for below in paths(child)
    ]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with fn applied to each leaf.

    Example:
        >>> map_leaves(lambda n: n + 1, [1, {"a": 2}])
        [2, {'a': 3}]
    """
    leaves, spec = flatten(tree)
    return unflatten(spec, [fn(x) for x in leaves])


def broadcast(
    prefix: Any, spec: Spec | None, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any] | None:
    """A prefix tree (for example in_dims) spread over the leaves of a spec; None if it does not
    fit; is_leaf: as for ``flatten``.

    Example:
        >>> _, spec = flatten((1, [2, 3]))
        >>> broadcast((0, None), spec)
        [0, None, None]
    """
    found, prefix_spec = flatten(prefix, is_leaf)
    return _spread(prefix_spec, iter(found), spec)


def _spread(prefix: Spec | None, source: Iterator[Any], spec: Spec | None) -> list[Any] | None:
    if prefix is LEAF:
        return [next(source)] * count(spec)
    if spec is LEAF or len(prefix.children) != len(spec.children):
        return None
    order = list(range(len(spec.children)))
    if prefix.kind is not spec.kind or prefix.context != spec.context:
        keys, others = _keys(prefix), _keys(spec)
        if keys is None or others is None or set(keys) != set(others):
            return None
        order = [others.index(key) for key in keys]
    parts = [
        _spread(mine, source, spec.children[i])
        for mine, i in zip(prefix.children, order, strict=True)
    ]
    if None in parts:
        return None
    found = [x for part in parts for x in part]
    # torch.func takes the entries of a dict whose keys are in another order by position, not by
    # key; it is refused if that matters
    by_key = [
        x for _, part in sorted(zip(order, parts, strict=True), key=itemgetter(0)) for x in part
    ]
    return found if by_key == found else None


def _keys(spec: Spec) -> Sequence[Any] | None:
    """The keys of a dict; None for other nodes."""
    if spec.kind is defaultdict:
        return spec.context[1][1]  # torch's context, which has the factory first
    return spec.context if spec.kind in _DICTS else None
