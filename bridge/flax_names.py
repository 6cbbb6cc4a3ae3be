"""Which tensor of a torch module is which array of its twin in Flax: found from shapes, names and
order, and by a user's rules.

Users import it from ``bridge.flax``. ``flax_layouts.py`` brings torch's tensors into Flax's layouts
first, so two arrays can be the same if the one's dimensions are the other's, split or put together.
Both models are trees of names. Nodes with the same shapes under them are paired from the top down;
a node that has no counterpart (a ``ModuleList``, a stage of a ResNet) is replaced by its children.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx, traverse_util
from torch import nn

from bridge.flax_layouts import Leaf, Path, arrays, flat, leaves, shapes, write

_KINDS = dict.fromkeys(("params", "frozen", "Param", "Frozen"), "params") | dict.fromkeys(
    ("batch_stats", "BatchStat"), "batch_stats"
)
# layers that are several, one after the other or stacked along a dimension of their own
_FUSED = {
    ("query", "key", "value"): re.compile(r"(c_attn|w?qkv(_proj|_einsum)?|to_qkv)", re.IGNORECASE),
    ("key", "value"): re.compile(r"w?kv(_proj|_einsum)?|to_kv", re.IGNORECASE),
    ("gate", "up"): re.compile(r"gating_einsum|gate_up(_proj)?", re.IGNORECASE),
}
# words for the same layer; words that say nothing; words that exclude each other
_WORDS = {
    word: meaning
    for meaning, words in {
        "norm": "bn ln layernorm batchnorm groupnorm rmsnorm norm1 norm2",
        "dense": "fc linear lin",
        "query": "q wq",
        "key": "k wk",
        "value": "v wv",
        "embed": "wte emb embedding embeddings tok token",
        "position": "wpe pos posembed",
        "pre": "input",
        "head": "logit logits logitdense classifier",
        "proj": "o wo out downsample shortcut skip",
        "attention": "attn",
        "mlp": "ffn ffw ff feedforward",
    }.items()
    for word in words.split()
}
_EMPTY, _OPPOSITE = {"layer", "batch", "group", "rms"}, {"pre", "post"}
_WHOLE = operator.itemgetter(...)


class Match(NamedTuple):
    """A tensor, the array that it is in the twin, and why: "rule", "shape" (nothing else fits),
    "name" or "order".
    """

    torch: str
    flax: str
    why: str


class _Array(NamedTuple):
    """An array of one of the models; of one that has queries, keys and values, one of these."""

    kind: str  # "params" or "batch_stats"
    path: Path  # the names of the submodules, and its own
    shape: tuple[int, ...]
    label: str  # its name in the report
    source: Path  # its place among the model's arrays
    part: Callable[[np.ndarray], np.ndarray]  # gives a view of its part of the array at its source
    order: int


class _Node(NamedTuple):
    """What is below a path in a tree of names."""

    path: Path
    arrays: list[_Array]

    @property
    def divisible(self) -> bool:
        return any(len(a.path) > len(self.path) + 1 for a in self.arrays)

    def children(self) -> list[_Node]:
        found: dict[Path, list[_Array]] = {}
        for a in self.arrays:
            found.setdefault(a.path[: len(self.path) + 1], []).append(a)
        return [_Node(path, below) for path, below in found.items()]


def name_map(
    module: nn.Module,
    twin: nnx.Module | Mapping[str, Any],
    rules: Mapping[str, str] | None = None,
    *,
    flattened: Mapping[str, int] | None = None,
) -> NameMap:
    """Find which tensor of a torch module is which array of a twin: the same model, written in Flax
    with other names and another nesting.

    Arrays are compared in Flax's layouts, so the twin may be made of ``flax.linen`` or ``flax.nnx``
    layers or of parameters of its own. Where several fit, names decide (``downsample.0`` is
    ``conv_proj``, ``wte`` an ``Embed``), then the order: torch's is that of definition, the twin's
    that of its numbers (``Dense_0``, ``Dense_1``), or else that of definition if it is known: an
    nnx module's is, that of variables is not if ``jax.jit`` or ``jax.eval_shape`` has sorted them.
    What fits in several ways is left to a rule. Queries, keys and values in one Linear (``c_attn``,
    ``qkv``) and in three are the same, and so are keys and values in one, or the two layers of a
    gated MLP (``kv_einsum`` and ``gating_einsum`` of Gemma).

    Args:
        module: as in ``to_variables``; it may have parameters of its own besides.
        twin: an nnx module, or the variables of a linen module, {"params": ..., "batch_stats":
            ...}; ``jax.eval_shape`` of ``init`` is enough.
        rules: torch's name -> the name in the twin, of a tensor or of any module, such as
            {"encoder.*.attn.q": "layers/*/query"}. A star is one part of a name, and the stars of
            the second name are what those of the first one are. Below the modules that a rule
            names, shapes, names and order decide.
        flattened: as in ``to_variables``.

    Returns:
        NameMap: what matched and what did not; it converts the weights both ways.

    Raises:
        TypeError: the twin is neither; or as in ``to_variables``.
        ValueError: a rule fits no tensor of the module; or as in ``to_variables``.

    Source: https://flax.readthedocs.io/en/latest/guides/converting_and_upgrading/convert_pytorch_to_flax.html

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> from bridge.flax import name_map
        >>> class Twin(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.hidden, self.readout = (
        ...             nnx.Linear(3, 4, rngs=rngs),
        ...             nnx.Linear(4, 2, rngs=rngs),
        ...         )
        >>> module, twin = (
        ...     torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)),
        ...     Twin(nnx.Rngs(0)),
        ... )
        >>> names = name_map(module, twin)
        >>> print(names)
        Sequential -> Twin: 4 matched, 0 of the module and 0 of the twin are not
        0.weight  params/hidden/kernel   shape
        0.bias    params/hidden/bias     shape
        2.weight  params/readout/kernel  shape
        2.bias    params/readout/bias    shape
        >>> bool((names.to_flax().readout.bias[...] == module[2].bias.detach().numpy()).all())
        True
    """
    known = list(leaves(module, flattened, own=True))
    ours, theirs, in_order = _of_torch(known), *_of_flax(twin)
    for names, fused in _FUSED.items():
        if all(
            any(fused.fullmatch(step) or names[0] in _words(step) for a in side for step in a.path)
            for side in (ours, theirs)
        ):
            ours, theirs = (
                [part for a in side for part in _parts(a, names, fused)] for side in (ours, theirs)
            )
    search = _Search(in_order)
    for pattern, target in (rules or {}).items():
        ours = search.follow(pattern, target, ours, theirs)
    taken = {b for _, b, _ in search.found}
    search.match(
        *(
            [_Node((), left)] if left else []
            for left in (ours, [b for b in theirs if b not in taken])
        )
    )
    return search.result(module, twin, known, search.ruled + ours, theirs)


def _of_torch(known: Sequence[Leaf]) -> list[_Array]:
    found: list[_Array] = []
    for leaf in known:
        for where, shape in zip(leaf.where, shapes(leaf), strict=True):
            if where[0] in _KINDS:
                label = leaf.names[0] + (
                    ""
                    if len(leaf.where) == 1
                    else f"[{'/'.join(where[len(leaf.names[0].split('.')) : -1])}]"
                )
                found.append(_Array(where[0], where[1:], shape, label, where, _WHOLE, len(found)))
    return found


def _of_flax(twin: nnx.Module | Mapping[str, Any]) -> tuple[list[_Array], bool]:
    """The twin's arrays, and whether they are in the order in which the twin defines them."""
    known, in_order = _values(twin), isinstance(twin, nnx.Module)
    by_number = lambda path: [
        [(int(x), "") if x.isdigit() else (-1, x) for x in re.split(r"(\d+)", step)]
        for step in path
    ]
    if isinstance(twin, nnx.Module):
        places = sorted(known, key=lambda path: _defined(twin, path[1:]))
    elif all(
        sorted(some) == some
        for some in ([path for path in known if path[0] == kind] for kind in _KINDS)
    ):
        places = sorted(known, key=by_number)
    else:
        in_order, places = True, list(known)
    found = [
        _Array(
            _KINDS[path[0]],
            path[1:],
            tuple(known[path].shape),
            "/".join((_KINDS[path[0]], *path[1:])),
            path,
            _WHOLE,
            i,
        )
        for i, path in enumerate(path for path in places if path[0] in _KINDS)
    ]
    return found, in_order


def _values(twin: Any) -> dict[Path, Any]:
    """The arrays of a twin, by their kind (or collection) and path."""
    if isinstance(twin, nnx.Module):
        return {
            (type(v).__name__, *map(str, path)): v.get_value()
            for path, v in nnx.to_flat_state(nnx.state(twin))
        }
    if not isinstance(twin, Mapping) or not all(isinstance(v, Mapping) for v in twin.values()):
        raise TypeError(
            "twin: expected an nnx.Module or the variables of a linen module, a dict of "
            f"collections, got {type(twin)}"
        )
    return flat(twin)


def _defined(node: Any, path: Path) -> list[int]:
    """Where the path comes in the order of the attributes."""
    place = []
    for step in path:
        names = list(
            map(
                str,
                node
                if isinstance(node, Mapping)
                else vars(node)
                if hasattr(node, "__dict__")
                else range(len(node)),
            )
        )
        place.append(names.index(step))
        node = (
            node[step]
            if isinstance(node, Mapping)
            else getattr(node, step)
            if hasattr(node, step)
            else node[int(step)]
        )
    return place


def _parts(a: _Array, names: Sequence[str], fused: re.Pattern[str]) -> Iterator[_Array]:
    """The arrays that a is made of: along the dimension of their number, or else along the last
    one.
    """
    *above, name = a.path
    count = len(names)
    stacked = len(a.shape) > 2 and count in a.shape
    if (
        not above
        or not fused.fullmatch(above[-1])
        or (stacked and a.shape[0] != count and a.shape.count(count) > 1)
    ):
        yield a
        return
    axis, size = (a.shape.index(count), 1) if stacked else (len(a.shape) - 1, a.shape[-1] // count)
    shape = (*a.shape[:axis], *a.shape[axis + 1 :]) if stacked else (*a.shape[:axis], size)
    for k, each in enumerate(names):
        part = operator.itemgetter(
            (*[slice(None)] * axis, k if stacked else slice(k * size, (k + 1) * size))
        )
        yield a._replace(
            path=(*above, each, name), shape=shape, label=f"{a.label}[{each}]", part=part
        )


# -- what fits -------------------------------------------------------------------------------------
def _regrouped(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """Whether the dimensions of the one are products of neighbouring dimensions of the other."""
    ends = lambda shape: {math.prod(shape[:i]) for i in range(len(shape) + 1)}
    return math.prod(fine) == math.prod(coarse) and ends(coarse) <= ends(fine)


def _fits(ours: _Array, theirs: _Array) -> bool:
    a, b = ours.shape, theirs.shape
    attention = any(_words(step) & {"query", "key", "value"} for step in ours.path)
    return ours.kind == theirs.kind and (
        _regrouped(b, a) or _regrouped(a, b) or (attention and _heads_first(a, b))
    )


def _heads_first(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether b is [heads, in, size], as for ``nnx.Einsum``, where a is [in, heads * size] or [in,
    heads, size].
    """
    return len(b) == 3 and _regrouped((b[1], b[0], b[2]), a) and not _regrouped(b, a)


def _as_theirs(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if _heads_first(x.shape, shape):
        return x.reshape(shape[1], shape[0], shape[2]).swapaxes(0, 1)
    return x.reshape(shape)


def _as_ours(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return (x.swapaxes(0, 1) if _heads_first(shape, x.shape) else x).reshape(shape)


def _pairs(t: _Node, f: _Node) -> list[tuple[_Array, _Array]]:
    """The arrays of two layers that fit, first those of the same name."""
    left = list(f.arrays)
    found: list[tuple[_Array, _Array]] = []
    for same in (True, False):
        for a in t.arrays:
            fitting = [b for b in left if _fits(a, b) and (a.path[-1] == b.path[-1] or not same)]
            if len(fitting) == 1 and a not in (x for x, _ in found):
                found.append((a, fitting[0]))
                left.remove(fitting[0])
    return found


def _modules_alike(t: _Node, f: _Node) -> bool:
    """Whether two modules have mostly the same sizes below them."""
    a, b = (Counter((x.kind, math.prod(x.shape)) for x in node.arrays) for node in (t, f))
    return t.divisible and f.divisible and (a & b).total() >= 0.6 * max(a.total(), b.total())


def _layers_alike(t: _Node, f: _Node) -> bool:
    return len(t.arrays) == len(f.arrays) == len(_pairs(t, f))


def _partly_alike(t: _Node, f: _Node) -> bool:
    """Whether the weights of two layers fit, whatever their biases are."""
    weight = lambda node: max(node.arrays, key=lambda a: len(a.shape))
    return len(weight(t).shape) > 1 and (weight(t), weight(f)) in _pairs(t, f)


def _words(name: str) -> set[str]:
    found = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    meanings = {_WORDS.get(word, word) for word in found} - _EMPTY
    return meanings - {"proj"} if meanings & {"query", "key", "value"} else meanings


def _similar(t: _Node, f: _Node) -> float:
    """How much the names of two nodes agree, from 0 to 1."""
    a, b = (
        _words(next((step for step in reversed(node.path) if re.search("[a-zA-Z]", step)), ""))
        for node in (t, f)
    )
    return 0.0 if not a & b or (a ^ b) >= _OPPOSITE else len(a & b) / len(a | b)


class _Search:
    """A search that is going on.

    Attributes:
        found: the arrays that are the same, and why.
        reasons: label -> why an array has no counterpart yet.
        paired: nodes that are the same, for the reasons.
        ruled: arrays of the module that a rule has led somewhere.
    """

    def __init__(self, in_order: bool) -> None:
        self.in_order = in_order
        self.found: list[tuple[_Array, _Array, str]] = []
        self.reasons: dict[str, str] = {}
        self.paired: list[tuple[_Node, _Node]] = []
        self.ruled: list[_Array] = []

    def match(self, ts: list[_Node], fs: list[_Node]) -> tuple[list[_Node], list[_Node]]:
        """Pair the nodes; returns the layers that are left."""
        while largest := max(
            (len(node.arrays) for node in (*ts, *fs) if node.divisible), default=0
        ):
            ts, fs = (
                [
                    x
                    for node in side
                    for x in (
                        node.children()
                        if node.divisible and len(node.arrays) >= largest
                        else [node]
                    )
                ]
                for side in self._pair(ts, fs, _modules_alike, largest)
            )
        return self._pair(*self._pair(ts, fs, _layers_alike), _partly_alike)

    def _pair(
        self,
        ts: list[_Node],
        fs: list[_Node],
        alike: Callable[[_Node, _Node], bool],
        largest: int = 0,
    ) -> tuple[list[_Node], list[_Node]]:
        """Pair nodes of one kind; returns the others, and what is left of those below."""
        ts, fs = (sorted(side, key=lambda node: node.arrays[0].order) for side in (ts, fs))
        edges = {(i, j) for i, t in enumerate(ts) for j, f in enumerate(fs) if alike(t, f)}
        left: tuple[list[_Node], list[_Node]] = [], []
        done_t: set[int | None] = set()
        done_f: set[int | None] = set()
        for some_t, some_f in _groups(edges):
            for i, j, why in self._chosen(ts, fs, some_t, some_f, edges, largest):
                done_t.add(i)
                done_f.add(j)
                if i is not None and j is not None:
                    for side, more in zip(left, self._accept(ts[i], fs[j], why), strict=True):
                        side.extend(more)
        return [x for i, x in enumerate(ts) if i not in done_t] + left[0], [
            x for j, x in enumerate(fs) if j not in done_f
        ] + left[1]

    def _chosen(
        self,
        ts: list[_Node],
        fs: list[_Node],
        some_t: list[int],
        some_f: list[int],
        edges: set[tuple[int, int]],
        largest: int,
    ) -> Iterator[tuple[int | None, int | None, str]]:
        """Which of the nodes that are alike are the same; without the one or the other, a block
        that the other model has not.
        """
        why = "shape"
        while len(some_t) + len(some_f) > 2:
            score = {
                (i, j): _similar(ts[i], fs[j]) if (i, j) in edges else 0.0
                for i in some_t
                for j in some_f
            }
            best = next(
                (
                    (i, j)
                    for (i, j), s in score.items()
                    if s
                    and all(
                        s > other
                        for at, other in score.items()
                        if at != (i, j) and (at[0] == i or at[1] == j)
                    )
                ),
                None,
            )
            if best is None:
                break
            why = "name"
            yield *best, why
            some_t, some_f = (
                [i for i in some_t if i != best[0]],
                [j for j in some_f if j != best[1]],
            )
        if not some_t or not some_f:
            return
        numbered = lambda nodes: (
            len({re.sub(r"\d+", "", "/".join(node.path[-1:])) for node in nodes}) == 1
        )
        left_t, left_f = [ts[i] for i in some_t], [fs[j] for j in some_f]
        if len(some_t) == len(some_f) == 1:
            yield some_t[0], some_f[0], why
        elif len(some_t) == len(some_f) and (self.in_order or numbered(left_f)):
            yield from (
                (i, j, "order") for i, j in zip(some_t, some_f, strict=True) if (i, j) in edges
            )
        elif (
            numbered(left_t)
            and numbered(left_f)
            and any(len(node.arrays) == largest for node in (*left_t, *left_f))
        ):
            # equal blocks, of which one model has more
            for i, j in itertools.zip_longest(some_t, some_f):
                yield i, j, "order"
                for a in (fs[j] if i is None else ts[i]).arrays if i is None or j is None else ():
                    self.reasons[a.label] = (
                        f"{('the module', 'the twin')[j is None]} has "
                        f"{min(len(left_t), len(left_f))} such blocks"
                    )
        else:
            for nodes, others in ((left_t, left_f), (left_f, left_t)):
                names = " and ".join(sorted("/".join(node.path) for node in others))
                for a in (a for node in nodes if not node.divisible for a in node.arrays):
                    self.reasons.setdefault(
                        a.label,
                        f"it could be {names}"
                        if len(nodes) == 1
                        else f"any of {len(nodes)} could be {names}",
                    )

    def _accept(self, t: _Node, f: _Node, why: str) -> tuple[list[_Node], list[_Node]]:
        self.paired.append((t, f))
        if t.divisible or f.divisible:
            return self.match(t.children(), f.children())
        self.found += [(a, b, why) for a, b in _pairs(t, f)]
        return [], []

    # -- rules -------------------------------------------------------------------------------------
    def follow(
        self, pattern: str, target: str, ours: list[_Array], theirs: list[_Array]
    ) -> list[_Array]:
        """Match what a rule speaks of; returns the arrays of which it does not."""
        regex = re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))
        below: dict[tuple[Path, Path], list[_Array]] = {}
        for a in ours:
            for path in (
                *(a.path[:n] for n in range(1, len(a.path) + 1)),
                a.path if a.label == pattern else (),
            ):
                said = regex.fullmatch(".".join(path)) or (
                    path == a.path and regex.fullmatch(a.label.partition("[")[0])
                )
                if path and said:
                    parts = target.split("*")
                    end = tuple(
                        "".join(
                            x + y
                            for x, y in itertools.zip_longest(parts, said.groups(), fillvalue="")
                        ).split("/")
                    )
                    below.setdefault((path, end), []).append(a)
                    break
        if not below:
            raise ValueError(f"rules: {pattern!r} fits no tensor of the module")
        for (path, end), some in below.items():
            taken = {b for _, b, _ in self.found}
            there = [
                b
                for b in theirs
                if end in (b.path[: len(end)], (b.kind, *b.path)[: len(end)]) and b not in taken
            ]
            before = len(self.found)
            if there:
                end = there[0].path[: len(end)] if end == there[0].path[: len(end)] else end[1:]
                self.match([_Node(path, some)], [_Node(end, there)])
                self.found[before:] = [(a, b, "rule") for a, b, _ in self.found[before:]]
                self.paired.append((_Node(path, some), _Node(end, there)))
            for a in some:
                if not there:
                    self.reasons[a.label] = (
                        f"the rule {pattern!r} says {'/'.join(end)}, which the twin does not have"
                    )
            self.ruled += some
        return [a for a in ours if a not in self.ruled]

    # -- the report --------------------------------------------------------------------------------
    def result(
        self,
        module: nn.Module,
        twin: Any,
        known: list[Leaf],
        ours: list[_Array],
        theirs: list[_Array],
    ) -> NameMap:
        self.found.sort(key=lambda found: found[0].order)
        taken = {x for a, b, _ in self.found for x in (a, b)}
        tensors = {where: {id(t) for t in leaf.tensors} for leaf in known for where in leaf.where}
        tied = {t for a, _, _ in self.found for t in tensors[a.source]}
        left = (
            [a for a in ours if a not in taken and not tensors[a.source] & tied],
            [b for b in theirs if b not in taken],
        )
        return NameMap(
            module,
            twin,
            [Match(a.label, b.label, why) for a, b, why in self.found],
            {a.label: self._reason(a, *left, 0) for a in left[0]},
            {b.label: self._reason(b, left[1], left[0], 1) for b in left[1]},
            known,
            [(a, b) for a, b, _ in self.found],
        )

    def _reason(self, a: _Array, beside: list[_Array], others: list[_Array], side: int) -> str:
        """Why an array of the module (side 0) or of the twin (1) has no counterpart."""
        if a.label in self.reasons:
            return self.reasons[a.label]
        name = model = ("the twin", "the module")[side]
        pair = min(
            (p for p in self.paired if a in p[side].arrays),
            key=lambda p: len(p[side].arrays),
            default=None,
        )
        if pair is not None:
            peers, near = (
                [
                    x
                    for x in some
                    if x in pair[k].arrays and (x.kind, x.path[-1]) == (a.kind, a.path[-1])
                ]
                for k, some in ((side, beside), (1 - side, others))
            )
            if near:
                b = near[min(peers.index(a), len(near) - 1)]
                ours, theirs = (b, a) if side else (a, b)
                if _fits(ours, theirs):
                    return f"its layer does not fit that of {b.label} in {model}"
                return (
                    f"has shape {a.shape} in Flax's layout, and {b.label} in {model} has {b.shape}"
                )
            name = (".".join(pair[0].path) if side else "/".join(pair[1].path)) or model
        return f"{name} has no {a.path[-1]} of shape {a.shape} left"


def _groups(edges: set[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    """The connected parts of a graph between two sets."""
    groups: list[tuple[set[int], set[int]]] = []
    for i, j in edges:
        joined = [g for g in groups if i in g[0] or j in g[1]]
        groups = [g for g in groups if g not in joined]
        groups.append(({i}.union(*(g[0] for g in joined)), {j}.union(*(g[1] for g in joined))))
    return sorted((sorted(a), sorted(b)) for a, b in groups)


@dataclasses.dataclass(repr=False)
class NameMap:
    """Which tensor of a torch module is which array of its twin in Flax; ``name_map`` makes it,
    ``print`` shows it.

    Attributes:
        matched: a list of (torch, flax, why); why is "rule", "shape" (nothing else fits), "name" or
            "order".
        unmatched: name of a tensor of the module -> why it has no counterpart. A tensor that is
            matched under another name is not in it.
        unmatched_twin: name of an array of the twin -> why it has no counterpart.

    Source: ``torch.nn.Module.load_state_dict``, which returns missing and unexpected names.

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> from bridge.flax import name_map
        >>> names = name_map(
        ...     torch.nn.Linear(3, 4), nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0))
        ... )
        >>> names.unmatched
        {'bias': 'the twin has no bias of shape (4,) left'}
        >>> names.to_flax()
        Traceback (most recent call last):
        RuntimeError: Linear -> Linear: 1 matched, 1 of the module and 0 of the twin are not
        weight  params/kernel  shape
        bias    -              the twin has no bias of shape (4,) left
        Give rules for what is not matched, or strict=False to leave it as it is.
    """

    module: nn.Module
    twin: Any
    matched: list[Match]
    unmatched: dict[str, str]
    unmatched_twin: dict[str, str]
    _leaves: list[Leaf]
    _pairs: list[tuple[_Array, _Array]]

    def __str__(self) -> str:
        left = (
            *((name, "-", why) for name, why in self.unmatched.items()),
            *(("-", *x) for x in self.unmatched_twin.items()),
        )
        rows = [*self.matched, *left]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        twin = type(self.twin).__name__ if isinstance(self.twin, nnx.Module) else "linen"
        first = (
            f"{type(self.module).__name__} -> {twin}: {len(self.matched)} matched, "
            f"{len(self.unmatched)} of the module and {len(self.unmatched_twin)} of the twin are "
            "not"
        )
        return "\n".join(
            [first, *(f"{a:{widths[0]}}  {b:{widths[1]}}  {why}" for a, b, why in rows)]
        )

    __repr__ = __str__

    def json(self) -> str:
        """The report as JSON: {"matched": [{"torch": ..., "flax": ..., "why": ...}], "unmatched":
        {...}, "unmatched_twin": {...}}.
        """
        return json.dumps(
            {
                "matched": [match._asdict() for match in self.matched],
                "unmatched": self.unmatched,
                "unmatched_twin": self.unmatched_twin,
            },
            indent=1,
        )

    def to_flax(self, *, strict: bool = True) -> Any:
        """The module's weights in the twin: variables for linen; an nnx twin itself, in which they
        are written.

        Args:
            strict: everything must be matched; False: the twin's own values are kept for the rest.

        Raises:
            RuntimeError: something is not matched, and strict is True.
        """
        self._check(strict)
        ours = {
            where: x
            for leaf in self._leaves
            for where, x in zip(leaf.where, arrays(leaf), strict=True)
        }
        new: dict[Path, np.ndarray] = {}
        values = _values(self.twin)
        for a, b in self._pairs:
            if b.source not in new:
                old = values[b.source]
                start = np.zeros(old.shape) if isinstance(old, jax.ShapeDtypeStruct) else old
                new[b.source] = np.array(start, ours[a.source].dtype)
            b.part(new[b.source])[...] = _as_theirs(a.part(ours[a.source]), b.shape)
        if not isinstance(self.twin, nnx.Module):
            return traverse_util.unflatten_dict(
                {
                    path: jax.numpy.asarray(new[path]) if path in new else v
                    for path, v in values.items()
                }
            )
        for path, variable in nnx.to_flat_state(nnx.state(self.twin)):
            place = (type(variable).__name__, *map(str, path))
            if place in new:
                variable.set_value(jax.numpy.asarray(new[place]))
        return self.twin

    def to_torch(self, twin: Any = None, *, strict: bool = True) -> nn.Module:
        """Write the twin's weights into the torch module, and return it.

        Args:
            twin: variables or an nnx module with the names and shapes of the twin; None: the twin
                itself.
            strict: everything must be matched; False: the module's own values are kept for the
                rest.

        Raises:
            RuntimeError: something is not matched, and strict is True; or as in ``from_variables``.
        """
        self._check(strict)
        values = _values(self.twin if twin is None else twin)
        given: dict[str, np.ndarray] = {}
        for leaf in self._leaves:
            places = [(a, b) for a, b in self._pairs if a.source in leaf.where]
            if not places:
                continue
            own = dict(zip(leaf.where, (x.copy() for x in arrays(leaf)), strict=True))
            for a, b in places:
                value = _as_ours(b.part(np.asarray(values[b.source])), a.shape)
                if a.part is _WHOLE:
                    own[a.source] = value
                else:
                    a.part(own[a.source])[...] = value
            given |= {"/".join(where): x for where, x in own.items()}
        write([leaf for leaf in self._leaves if "/".join(leaf.where[0]) in given], given)
        return self.module

    def _check(self, strict: bool) -> None:
        if strict and (self.unmatched or self.unmatched_twin):
            raise RuntimeError(
                f"{self}\nGive rules for what is not matched, or strict=False to leave it as it is."
            )
