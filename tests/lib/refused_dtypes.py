"""Which dtypes PyTorch's own kernels refuse, found by asking them.
``python tests/lib/refused_dtypes.py`` writes the table: bridge/operators/dtype_refusals_table.py.

Every operator of PyTorch's database runs on its samples while the kernels that it calls are noted;
each kernel is then asked again with its tensors in every other dtype. A dtype is refused where
PyTorch says "not implemented for" and no call of that kernel went through.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import pathlib
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from rich.progress import track
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.operators.dtype_refusals import is_pointwise, mode

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)
# of an operator, spread evenly; of a kernel by it, and as many with a scalar
SAMPLES, CALLS = 20, 12
TABLE = (
    pathlib.Path(__file__).parent.parent.parent / "bridge" / "operators" / "dtype_refusals_table.py"
)
_HEAD = '''"""The dtypes that PyTorch refuses on the CPU, by overload (torch {version}).

``python tests/lib/refused_dtypes.py`` writes this file. A group has the overloads of aten in which
PyTorch refuses the same; those called "default" have only the operator's name.

REFUSED    (the place of the argument whose dtype is looked at, or -1 for dtype=, the modes as
           bridge.operators.dtype_refusals.mode says them, with " | " between them and "" for every
           mode, the dtypes): the overloads
TOGETHER   (the place of an argument, the places of those that must have its dtype): the overloads
INDICES    (the place of an index, the dtypes): the overloads
"""
'''
TABLES = {
    "REFUSED": "dict[tuple[int, str, str], str]",
    "TOGETHER": "dict[tuple[int, ...], str]",
    "INDICES": "dict[tuple[int, str], str]",
}
#: int32 is no bad index, whatever PyTorch says of some: whole numbers of JAX have it unless told
#: otherwise
_INDICES = (torch.int16, torch.uint8, torch.bool, torch.float32)
_ABOUT_DTYPES = re.compile("implemented for|support|type|xpected|may not be")
_ABOUT_OTHERS = re.compile(r"\[|rtol tensor")  # shapes, another argument
Call = tuple[tuple[Any, ...], dict[str, Any], torch.dtype]


aten = torch.ops.aten
#: what writes some of its arguments beside what it computes
_WRITERS = frozenset(
    {
        aten._native_batch_norm_legit.default,
        aten._batch_norm_with_update.default,
        aten.embedding_renorm_.default,
    }
)


class _Noting(TorchDispatchMode):
    """Keeps the first calls of each overload that only computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.calls: dict[Any, list[Call]] = collections.defaultdict(list)
        self.counts: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        kind = func, bool(given) and not given[0].ndim
        computes = (
            not func.is_view
            and (not func._schema.is_mutable or func in _WRITERS)
            and kwargs.get("dtype") is None
        )
        if (
            computes
            and self.counts[kind] < CALLS
            and all(t.layout is torch.strided and t.numel() for t in given)
        ):
            self.counts[kind] += 1
            self.calls[func].append(
                (
                    *pytree.tree_map_only(
                        torch.Tensor, lambda t: t.detach().clone(), (args, kwargs)
                    ),
                    self.dtype,
                )
            )
        return func(*args, **kwargs)


#: What makes a tensor of the dtype that it is asked for, by nothing but numbers.
_FACTORIES: dict[Any, tuple[Any, ...]] = {
    aten.arange.default: (2,),
    aten.arange.start: (0, 2),
    aten.arange.start_step: (0, 2, 1),
    aten.range.default: (0, 1),
    aten.range.step: (0, 1),
    aten.linspace.default: (0, 1, 3),
    aten.logspace.default: (0, 1, 3),
    aten.randperm.default: (3,),
    aten.rand.default: ([3],),
    aten.randn.default: ([3],),
    aten.randint.default: (2, [3]),
    aten.randint.low: (0, 2, [3]),
    aten.eye.default: (2,),
    aten.eye.m: (2, 3),
    aten.full.default: ([2], 1),
    aten.ones.default: ([2],),
    aten.zeros.default: ([2],),
}
#: What writes its first argument, and is refused where the operator that does not write is not;
#: with its other arguments.
_IN_PLACE: dict[Any, tuple[Any, ...]] = {
    aten.abs_.default: (),
    aten.bernoulli_.float: (),
    aten.cauchy_.default: (),
    aten.exponential_.default: (),
    aten.geometric_.default: (0.5,),
    aten.log_normal_.default: (),
    aten.normal_.default: (),
    aten.random_.default: (),
    aten.uniform_.default: (),
}


def noted(ops: Iterable[Any]) -> dict[Any, list[Call]]:
    """The kernels that these operators call, with arguments they were called with."""
    found: dict[Any, list[Call]] = collections.defaultdict(list)
    for op in ops:
        dtype = next((d for d in DTYPES if d in op.dtypes), None)
        if dtype is None:
            continue
        with contextlib.suppress(Exception), _Noting(dtype) as noting:
            samples = [
                s
                for s in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 400)
                if _full(s.input)
            ]
            for sample in samples[:: -(-len(samples) // SAMPLES) or 1]:
                op(sample.input, *sample.args, **sample.kwargs)
        for func, calls in noting.calls.items():
            found[func] += calls
    return found


def _full(x: Any) -> bool:
    """A tensor with elements, or several tensors."""
    return x.numel() > 0 if isinstance(x, torch.Tensor) else isinstance(x, list | tuple)


def _place(call: Call, scalars: bool = False) -> int | None:
    """The place of the first argument that is a tensor of the dtype that was asked for; None where
    it is a scalar, -1 for dtype=.
    """
    if not pytree.tree_any(lambda x: isinstance(x, torch.Tensor), call[0]):
        return -1
    for i, x in enumerate(call[0]):
        if isinstance(x, torch.Tensor) and x.dtype is call[2]:
            return i if x.ndim or scalars else None
    return None


def _uniform(func: Any, call: Call) -> bool:
    """Whether there is nothing to promote."""
    given = [x for x in pytree.tree_leaves(call[:2]) if isinstance(x, torch.Tensor)]
    return not is_pointwise(func) or all(
        t.dtype is call[2] for t in given[_place(call, scalars=True) :]
    )


def _variants(call: Call, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
    args, kwargs, have = call
    recast = lambda x: (
        dtype
        if x is have
        else x.to(dtype)
        if isinstance(x, torch.Tensor) and x.dtype is have
        else x
    )
    args, kwargs = pytree.tree_map(recast, (args, kwargs))
    yield args, kwargs
    yield pytree.tree_map(
        lambda x: int(x) if type(x) is float and abs(x) < 1e9 else x, (args, kwargs)
    )


def _answer(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Whether PyTorch refuses a call because of its dtypes;
    None for an error about something else.
    """
    try:
        func(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        message = str(error).partition("\n")[0].partition("; but got")[0].strip()
        return True if _ABOUT_DTYPES.search(message) and not _ABOUT_OTHERS.search(message) else None
    except Exception:
        return None
    return False


Asked = Iterable[tuple[torch.dtype, Iterable[tuple[Any, Any]]]]


def _always(func: Any, asked: Asked) -> str:
    """The names of the dtypes that PyTorch refuses every time; of dtypes and calls with them."""
    found = []
    for dtype, calls in asked:
        answers = {_answer(func, *call) for call in calls}
        if True in answers and False not in answers:
            found.append(str(dtype).removeprefix("torch."))
    return " ".join(found)


Group = tuple[Any, ...]


def refused(func: Any, calls: list[Call]) -> Iterator[Group]:
    """An overload's groups in REFUSED."""
    uniform = [call for call in calls if _uniform(func, call)]
    calls = [call for call in uniform if _place(call) is not None]
    known = _refused_in(func, calls, DTYPES)
    modes: dict[tuple[int, str], list[str]] = collections.defaultdict(list)
    if known:
        modes[_first(calls), known].append("")
    calls = [call for call in uniform if (_place(call, scalars=True) or 0) >= 0]
    place, found = _first(calls) if calls else 0, collections.defaultdict(list)
    for call in calls:
        if _place(call, scalars=True) == place:
            found[mode(func, call[0], call[1], place)].append(call)
    for name, some in sorted(found.items()):
        asked = [
            d
            for d in DTYPES
            if "scalar" in name or str(d).removeprefix("torch.") not in known.split()
        ]
        if refused_here := _refused_in(func, some, asked):
            modes[place, refused_here].append(name)
    for (place, dtypes), names in modes.items():
        yield place, " | ".join(names), dtypes


def _refused_in(func: Any, calls: list[Call], dtypes: Iterable[torch.dtype]) -> str:
    return _always(func, ((d, [v for call in calls for v in _variants(call, d)]) for d in dtypes))


def _first(calls: list[Call]) -> int:
    return collections.Counter(_place(call, scalars=True) or 0 for call in calls).most_common(1)[0][
        0
    ]


def _with(call: Call, place: int, dtype: torch.dtype) -> tuple[Any, Any]:
    args = list(call[0])
    args[place] = args[place].to(dtype)
    return args, call[1]


def _places(calls: list[Call], first: int, dtype: torch.dtype) -> dict[int, list[Call]]:
    """Calls by the places, after the first, where they have a tensor of that dtype."""
    found: dict[int, list[Call]] = collections.defaultdict(list)
    for call in calls:
        for i, x in enumerate(call[0]):
            if i > first and isinstance(x, torch.Tensor) and x.ndim and x.dtype is dtype:
                found[i].append(call)
    return found


def together(func: Any, calls: list[Call]) -> Iterator[Group]:
    """An overload's group in TOGETHER."""
    calls = [call for call in calls if _place(call) is not None and call[2] is torch.float32]
    if not calls or is_pointwise(func):
        return
    first, others = _first(calls), (torch.float64, torch.int64)
    places = _places(calls, first, torch.float32)
    apart = [
        p
        for p, some in sorted(places.items())
        if len(_always(func, ((d, [_with(call, p, d) for call in some]) for d in others)).split())
        == len(others)
    ]
    if apart:
        yield first, *apart


def indices(func: Any, calls: list[Call]) -> Iterator[Group]:
    """An overload's groups in INDICES."""
    if is_pointwise(func):
        return
    for place, some in sorted(
        _places([call for call in calls if call[2] is torch.float32], 0, torch.int64).items()
    ):
        if refused_here := _always(
            func, ((d, [_with(call, place, d) for call in some]) for d in _INDICES)
        ):
            yield place, refused_here


def tables(ops: Iterable[Any] = op_db) -> dict[str, dict[str, Any]]:
    """The tables, for all kernels that these operators call."""
    found = noted(track(list(ops), "noting"))
    found[aten.div.Tensor_mode].append(
        ((torch.ones(2), torch.ones(2)), {"rounding_mode": None}, torch.float32)
    )
    for factory, args in _FACTORIES.items():
        found[factory] = [(args, {"dtype": torch.float32}, torch.float32)]
    for func, args in _IN_PLACE.items():
        found[func] = [((torch.ones(2), *args), {}, torch.float32)]
    out: dict[str, dict[Group, list[str]]] = {
        name: collections.defaultdict(list) for name in TABLES
    }
    for func, calls in track(sorted(found.items(), key=str), "asking"):
        for name, groups in zip(TABLES, (refused, together, indices), strict=True):
            if func.namespace == "aten":
                for group in groups(func, calls):
                    out[name][group].append(
                        str(func).removeprefix("aten.").removesuffix(".default")
                    )
    return {
        name: {group: " ".join(names) for group, names in sorted(groups.items())}
        for name, groups in out.items()
    }


def _text(group: Group, names: str) -> str:
    key, *more = f"({', '.join(map(json.dumps, group))})", *textwrap.wrap(names, 126)
    if not more[1:] and len(key) + len(names) < 130:
        return f"    {key}: {json.dumps(names)},\n"
    lines = [*(f"{line} " for line in more[:-1]), more[-1]]
    return (
        f"    {key}: (\n" + "".join(f"        {json.dumps(line)}\n" for line in lines) + "    ),\n"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    warnings.simplefilter("ignore")
    TABLE.write_text(text(tables()))


def text(found: dict[str, dict[Group, str]]) -> str:
    """The file with these tables."""
    body = _HEAD.format(version=torch.__version__.split("+")[0])
    for name, groups in found.items():
        body += (
            f"\n{name}: {TABLES[name]} = {{\n{''.join(_text(*row) for row in groups.items())}}}\n"
        )
    return body


if __name__ == "__main__":
    main()
