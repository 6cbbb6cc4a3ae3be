"""Which dtypes PyTorch's own kernels refuse, found by asking them.  ``python tests/refused_dtypes.py`` writes the table:
bridge/operators/dtype_refusals_table.py.

Every operator of PyTorch's database runs on its samples while the kernels that it calls are noted; each kernel is then asked again with
its tensors in every other dtype.  A dtype is refused where PyTorch says "not implemented for" and no call of that kernel went through.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import pathlib
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from rich.progress import track
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.operators.dtype_refusals import NAMES, is_pointwise, mode

DTYPES = tuple(NAMES)
SAMPLES, CALLS = 20, 12  # of an operator, spread evenly; of a kernel by it, and as many with a scalar
TABLE = pathlib.Path(__file__).parent.parent / "bridge" / "operators" / "dtype_refusals_table.py"
_HEAD = '''"""The dtypes that PyTorch refuses on the CPU, written by ``python tests/refused_dtypes.py`` (torch {version}); not by hand.

REFUSED    overload: (the place of the argument whose dtype is looked at, a line for each error: its class, its message, the dtypes);
           place -1 is dtype=
MODES      overload: (the same place, for each mode as bridge.operators.dtype_refusals.mode says it the lines that REFUSED does not have)
TOGETHER   overload: (the place of an argument, the places of those that must have its dtype)
INDICES    overload: for the place of an index, a line for each error
"""
from __future__ import annotations

Refusals = tuple[tuple[str, str, tuple[str, ...]], ...]

'''
TABLES = {
    "REFUSED": "dict[str, tuple[int, Refusals]]",
    "MODES": "dict[str, tuple[int, dict[str, Refusals]]]",
    "TOGETHER": "dict[str, tuple[int, tuple[int, ...]]]",
    "INDICES": "dict[str, dict[int, Refusals]]",
}
#: int32 is no bad index, whatever PyTorch says of some: whole numbers of JAX have it unless told otherwise
_INDICES = (torch.int16, torch.uint8, torch.bool, torch.float32)
_ABOUT_DTYPES = re.compile("implemented for|support|type|xpected|may not be")
_ABOUT_OTHERS = re.compile(r"\[|rtol tensor")  # shapes, another argument
Call = tuple[tuple[Any, ...], dict[str, Any], torch.dtype]


aten = torch.ops.aten
#: what writes some of its arguments beside what it computes
_WRITERS = frozenset({aten._native_batch_norm_legit.default, aten._batch_norm_with_update.default, aten.embedding_renorm_.default})


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
        computes = not func.is_view and (not func._schema.is_mutable or func in _WRITERS) and kwargs.get("dtype") is None
        if computes and self.counts[kind] < CALLS and all(t.layout is torch.strided and t.numel() for t in given):
            self.counts[kind] += 1
            self.calls[func].append((*pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs)), self.dtype))
        return func(*args, **kwargs)


#: What makes a tensor of the dtype that it is asked for, by nothing but numbers.
_FACTORIES: dict[Any, tuple[Any, ...]] = {
    aten.arange.default: (2,), aten.arange.start: (0, 2), aten.arange.start_step: (0, 2, 1), aten.range.default: (0, 1),
    aten.range.step: (0, 1), aten.linspace.default: (0, 1, 3), aten.logspace.default: (0, 1, 3), aten.randperm.default: (3,),
    aten.rand.default: ([3],), aten.randn.default: ([3],), aten.randint.default: (2, [3]), aten.randint.low: (0, 2, [3]),
    aten.eye.default: (2,), aten.eye.m: (2, 3), aten.full.default: ([2], 1), aten.ones.default: ([2],), aten.zeros.default: ([2],),
}  # fmt: skip
#: What writes its first argument, and is refused where the operator that does not write is not; with its other arguments.
_IN_PLACE: dict[Any, tuple[Any, ...]] = {
    aten.abs_.default: (), aten.bernoulli_.float: (), aten.cauchy_.default: (), aten.exponential_.default: (),
    aten.geometric_.default: (0.5,), aten.log_normal_.default: (), aten.normal_.default: (), aten.random_.default: (),
    aten.uniform_.default: (),
}  # fmt: skip


def noted(ops: Iterable[Any]) -> dict[Any, list[Call]]:
    """The kernels that these operators call, with arguments they were called with."""
    found: dict[Any, list[Call]] = collections.defaultdict(list)
    for op in ops:
        dtype = next((d for d in DTYPES if d in op.dtypes), None)
        if dtype is None:
            continue
        with contextlib.suppress(Exception), _Noting(dtype) as noting:
            samples = [s for s in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 400) if _full(s.input)]
            for sample in samples[:: -(-len(samples) // SAMPLES) or 1]:
                op(sample.input, *sample.args, **sample.kwargs)
        for func, calls in noting.calls.items():
            found[func] += calls
    return found


def _full(x: Any) -> bool:
    """A tensor with elements, or several tensors."""
    return x.numel() > 0 if isinstance(x, torch.Tensor) else isinstance(x, list | tuple)


def _place(call: Call, scalars: bool = False) -> int | None:
    """The place of the first argument that is a tensor of the dtype that was asked for; None where it is a scalar, -1 for dtype=."""
    if not pytree.tree_any(lambda x: isinstance(x, torch.Tensor), call[0]):
        return -1
    for i, x in enumerate(call[0]):
        if isinstance(x, torch.Tensor) and x.dtype is call[2]:
            return i if x.ndim or scalars else None
    return None


def _uniform(func: Any, call: Call) -> bool:
    """Whether there is nothing to promote."""
    given = [x for x in pytree.tree_leaves(call[:2]) if isinstance(x, torch.Tensor)]
    return not is_pointwise(func) or all(t.dtype is call[2] for t in given[_place(call, scalars=True) :])


def _variants(call: Call, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
    args, kwargs, have = call
    recast = lambda x: dtype if x is have else x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype is have else x
    args, kwargs = pytree.tree_map(recast, (args, kwargs))
    yield args, kwargs
    yield pytree.tree_map(lambda x: int(x) if type(x) is float and abs(x) < 1e9 else x, (args, kwargs))


def _answer(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[str, str]:
    """The class and message of PyTorch's refusal; ("", "") for an error about something else, ("value", "") for none."""
    try:
        func(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        message = re.sub(rf"\b{NAMES[dtype]}\b", "{}", str(error).partition("\n")[0].partition("; but got")[0].strip())
        return (type(error).__name__, message) if _ABOUT_DTYPES.search(message) and not _ABOUT_OTHERS.search(message) else ("", "")
    except Exception:
        return "", ""
    return "value", ""


Asked = Iterable[tuple[torch.dtype, Iterable[tuple[Any, Any]]]]


def _lines(func: Any, asked: Asked) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """For each error its class, its message and the dtypes for which PyTorch has it every time; of dtypes and calls with them."""
    lines: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for dtype, calls in asked:
        answers = collections.Counter(_answer(func, *call, dtype) for call in calls)
        del answers["", ""]
        if answers and ("value", "") not in answers:
            lines[answers.most_common(1)[0][0]].append(str(dtype).removeprefix("torch."))
    return tuple((*key, tuple(dtypes)) for key, dtypes in lines.items())


def refused(func: Any, calls: list[Call]) -> tuple[int, Any] | None:
    """An overload's line of REFUSED; None where there is nothing to say."""
    calls = [call for call in calls if _place(call) is not None and _uniform(func, call)]
    lines = _refused_in(func, calls, DTYPES)
    return (_first(calls), lines) if lines else None


def _refused_in(func: Any, calls: list[Call], dtypes: Iterable[torch.dtype]) -> Any:
    return _lines(func, ((d, [v for call in calls for v in _variants(call, d)]) for d in dtypes))


def modes(func: Any, calls: list[Call]) -> tuple[int, Any] | None:
    """An overload's line of MODES."""
    known = {name for _, _, names in (refused(func, calls) or (0, ()))[1] for name in names}
    calls = [call for call in calls if (_place(call, scalars=True) or 0) >= 0 and _uniform(func, call)]
    if not calls:
        return None
    place, found = _first(calls), collections.defaultdict(list)
    for call in calls:
        if _place(call, scalars=True) == place:
            found[mode(func, call[0], call[1], place)].append(call)
    asked = {name: [d for d in DTYPES if "scalar" in name or str(d).removeprefix("torch.") not in known] for name in found}
    lines = {name: _refused_in(func, some, asked[name]) for name, some in sorted(found.items())}
    return (place, kept) if (kept := {name: some for name, some in lines.items() if some}) else None


def _first(calls: list[Call]) -> int:
    return collections.Counter(_place(call, scalars=True) or 0 for call in calls).most_common(1)[0][0]


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


def together(func: Any, calls: list[Call]) -> tuple[int, tuple[int, ...]] | None:
    """An overload's line of TOGETHER."""
    calls = [call for call in calls if _place(call) is not None and call[2] is torch.float32]
    if not calls or is_pointwise(func):
        return None
    first, others = _first(calls), (torch.float64, torch.int64)
    ask = lambda place, calls: _lines(func, ((d, [_with(call, place, d) for call in calls]) for d in others))
    places = _places(calls, first, torch.float32)
    apart = tuple(p for p, some in sorted(places.items()) if sum(len(dtypes) for _, _, dtypes in ask(p, some)) == len(others))
    return (first, apart) if apart else None


def indices(func: Any, calls: list[Call]) -> dict[int, Any] | None:
    """An overload's line of INDICES."""
    places = _places([call for call in calls if call[2] is torch.float32], 0, torch.int64)
    if is_pointwise(func):
        return None
    lines = {p: _lines(func, ((d, [_with(call, p, d) for call in some]) for d in _INDICES)) for p, some in sorted(places.items())}
    return {p: line for p, line in lines.items() if line} or None


def tables(ops: Iterable[Any] = op_db) -> dict[str, dict[str, Any]]:
    """The tables, for all kernels that these operators call."""
    found = noted(track(list(ops), "noting"))
    found[aten.div.Tensor_mode].append(((torch.ones(2), torch.ones(2)), {"rounding_mode": None}, torch.float32))
    for factory, args in _FACTORIES.items():
        found[factory] = [(args, {"dtype": torch.float32}, torch.float32)]
    for func, args in _IN_PLACE.items():
        found[func] = [((torch.ones(2), *args), {}, torch.float32)]
    out: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    for func, calls in track(sorted(found.items(), key=str), "asking"):
        for name, ask in zip(TABLES, (refused, modes, together, indices), strict=True):
            if func.namespace == "aten" and (line := ask(func, calls)):
                out[name][str(func)] = line
    return out


def _literal(x: Any) -> str:
    if isinstance(x, tuple):
        return "(" + ", ".join(map(_literal, x)) + ("," if len(x) == 1 else "") + ")"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in x.items()) + "}"
    return json.dumps(x)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    text = _HEAD.format(version=torch.__version__.split("+")[0])
    for name, lines in tables().items():
        body = "".join(f"    {json.dumps(func)}: {_literal(line)},\n" for func, line in lines.items())
        text += f"\n{name}: {TABLES[name]} = {{\n{body}}}\n"
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
