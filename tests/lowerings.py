"""Calls of ATen operators with which every lowering can be tried on its own: PyTorch's database's, and a table for those it misses.

    python tests/lowerings.py

writes lowerings.json: for each overload with a lowering, the first sample of the database (operator, dtype, position) whose run in plain
PyTorch, forward, backward or in inference mode, calls it.
"""
from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opinfo
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bridge import operators
from bridge.lowering.registry import LOWERINGS, overload

PLACES = Path(__file__).with_suffix(".json")
Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Shows every call to a function before it happens."""

    def __init__(self, see: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def lowered(func: Any) -> Any:
    """The overload whose lowering runs for func: its own, or, where func writes, that of its functional form."""
    if func in LOWERINGS:
        return func
    if func._schema.is_mutable:
        with contextlib.suppress(Exception):
            functional = operators._functional(func)
            return functional if functional in LOWERINGS else None
    return None


def run(op: Any, dtype: torch.dtype, position: int, see: Callable[[Any, Any, Any], None]) -> None:
    """Run a sample in plain PyTorch in all the ways that reach different operators."""
    samples = opinfo.draw(op, dtype, 0, position + 1)
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = opinfo.Problem(op, samples[position], samples[position])
        with _Recorder(see):
            problem(*[t.clone() for t in problem.values])
            with contextlib.suppress(opinfo.NoTruth):
                opinfo.question(problem, "vjp")
    with contextlib.suppress(Exception), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = opinfo.Problem(op, samples[position], samples[position])
        with _Recorder(see):
            problem(*[t.clone() for t in problem.values])


def _copy(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)


def call_of(func: Any, place: list[Any]) -> Call:
    """The arguments with which a sample calls func (or the writing form of it)."""
    name, dtype, position = place
    found: list[Call] = []

    def see(f: Any, args: Any, kwargs: Any) -> None:
        if not found and lowered(f) is func:
            names = {a.name for a in func._schema.arguments}
            found.append(_copy((args, {k: v for k, v in kwargs.items() if k in names})))

    run(opinfo.operators()[name], getattr(torch, dtype), position, see)
    return found[0]


def places() -> Iterator[tuple[str, list[Any]]]:
    """(overload, place), looked for in the whole database."""
    seen: set[Any] = set()
    for name, op in opinfo.operators().items():
        for dtype in ("float32", "int64", "complex64", "bool"):
            if getattr(torch, dtype) not in op.supported_dtypes("cpu"):
                continue
            try:
                count = len(opinfo.draw(op, getattr(torch, dtype), 0, 60))
            except Exception:
                continue
            positions = opinfo.chosen([None] * count, 4) if dtype == "float32" and count else [0] if count else []
            for position in positions:
                found: list[Any] = []
                run(op, getattr(torch, dtype), position, lambda f, args, kwargs, found=found: found.append(f))  # type: ignore[misc]
                for func in found:
                    func = lowered(func)
                    if func is not None and func not in seen:
                        seen.add(func)
                        yield str(func), [name, dtype, position]


# -- what the database misses -------------------------------------------------------------------------------------------------------
CASES: dict[Any, Callable[[], Call]] = {}


def case(name: str, *args: Any, **kwargs: Any) -> None:
    """Arguments for an overload; functions without arguments are called for theirs when the case runs."""
    with contextlib.suppress(ValueError):
        CASES[overload(name)] = lambda: pytree.tree_map(lambda a: a() if callable(a) else a, (args, kwargs))


def floats(*shape: int, seed: int = 0) -> Callable[[], torch.Tensor]:
    """Numbers in (0, 1)."""
    return lambda: torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.9 + 0.05


def ints(*shape: int, high: int = 5, seed: int = 0) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


_TWO = [floats(2, 3), floats(4, seed=1)]
_OTHER = [floats(2, 3, seed=2), floats(4, seed=3)]


def _foreach() -> None:
    """All overloads of torch._foreach_*, by their schemas."""
    for func in LOWERINGS:
        if not str(func).startswith("aten._foreach_"):
            continue
        args: list[Any] = []
        for i, a in enumerate(func._schema.arguments):
            if str(a.type) == "List[Tensor]":
                shared = str(func).startswith("aten._foreach_mm")
                args.append([floats(3, 3, seed=i), floats(3, 3, seed=i + 1)] if shared else [_TWO, _OTHER, _TWO][i])
            elif a.has_default_value():
                break
            elif "List" in str(a.type):
                args.append([2.0, 3.0])
            elif str(a.type) == "Tensor":
                packed = str(func).startswith(("aten._foreach_addc",))
                args.append(floats(2) if packed else floats())
            else:
                args.append(2.0)
        case(str(func), *args)


_foreach()

for _kind in ("hann", "hamming", "blackman", "bartlett", "kaiser"):
    case(f"aten.{_kind}_window", 7)
    case(f"aten.{_kind}_window.periodic", 7, False)
case("aten.hamming_window.periodic_alpha", 7, True, 0.5)
case("aten.hamming_window.periodic_alpha_beta", 7, True, 0.5, 0.4)
case("aten.kaiser_window.beta", 7, True, 9.0)

for _family in (
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p", "chebyshev_polynomial_t",
    "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w", "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v", "shifted_chebyshev_polynomial_w",
):
    case(f"aten.special_{_family}.x_scalar", 0.3, ints(4))
    case(f"aten.special_{_family}.n_scalar", floats(4), 3)
for _name in ("aten.special_xlog1py", "aten.special_zeta"):
    case(f"{_name}.other_scalar", floats(4), 2.5)
    case(f"{_name}.self_scalar", 2.5, floats(4))
case("aten.xlogy.Scalar_Other", floats(4), 2.5)
case("aten.xlogy.Scalar_Self", 2.5, floats(4))

for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    case(f"aten.{_name}.Scalar", ints(4), 3)
    case(f"aten.{_name}.Scalar_Tensor", 3, ints(4))
for _name in ("bitwise_left_shift", "bitwise_right_shift"):
    case(f"aten.{_name}.Tensor_Scalar", ints(4), 2)
    case(f"aten.{_name}.Scalar_Tensor", 2, ints(4))
for _name in ("__lshift__", "__rshift__"):
    case(f"aten.{_name}.Tensor", ints(4), ints(4, seed=1))
    case(f"aten.{_name}.Scalar", ints(4), 2)
case("aten.div.Scalar_mode", floats(4), 0.3, rounding_mode="floor")
case("aten.floor_divide.Scalar", floats(4), 0.3)
case("aten.remainder.Scalar_Tensor", 2.5, floats(4))
case("aten.fmod.Scalar", floats(4), 0.3)
case("aten.clip", floats(4), 0.2, 0.7)
case("aten.clip.Tensor", floats(4), floats(4, seed=1))
case("aten.clamp_max", floats(4), 0.5)
case("aten.mm.dtype", floats(2, 3), floats(3, 4), torch.float32)
case("aten._int_mm", lambda: torch.randint(-9, 9, (17, 8), dtype=torch.int8), lambda: torch.randint(-9, 9, (8, 8), dtype=torch.int8))
case("aten.where.ScalarOther", lambda: torch.tensor([True, False]), floats(2), 1.5)
case("aten.where.ScalarSelf", lambda: torch.tensor([True, False]), 1.5, floats(2))
case("aten.where.Scalar", lambda: torch.tensor([True, False]), 1.5, 2.5)
case("aten.where", lambda: torch.tensor([True, False]))
case("aten.masked_fill.Tensor", floats(2), lambda: torch.tensor([True, False]), floats())
case("aten.fill.Tensor", floats(3), floats())
case("aten.range", 1, 5)
case("aten.range.step", 1, 5)
case("aten.linspace", 0.0, 1.0, 5)
case("aten.logspace", 0.0, 1.0, 5)
case("aten.eye.m", 3, 4)
case("aten.tril_indices", 3, 4)
case("aten.triu_indices", 3, 4)
case("aten.fft_fftfreq", 7)
case("aten.fft_rfftfreq", 7)
case("aten.searchsorted.Scalar", lambda: torch.arange(5.0), 2.5)
case("aten.bucketize.Scalar", 2.5, lambda: torch.arange(5.0))
case("aten._is_all_true", lambda: torch.tensor([True, False]))
case("aten._is_any_true", lambda: torch.tensor([True, False]))
case("aten.allclose", floats(3), floats(3))
case("aten._euclidean_dist", floats(4, 3), floats(2, 3, seed=1))
case("aten.native_channel_shuffle", floats(2, 6, 2, 2), 3)
case("aten.reflection_pad3d", floats(2, 3, 3, 3), [1, 1, 1, 1, 1, 1])
case("aten.replication_pad3d", floats(2, 3, 3, 3), [1, 1, 1, 1, 1, 1])
case("aten.concat", [floats(2, 3), floats(1, 3, seed=1)])
case("aten._stack", [floats(2, 3), floats(2, 3, seed=1)])
case("aten._logcumsumexp", floats(3, 4), 1)
for _name in ("lift", "lift_fresh_copy", "detach_copy", "_neg_view", "_neg_view_copy"):
    case(f"aten.{_name}", floats(3))
case("aten.slice_copy.Tensor", floats(4, 3), 0, 1, 3)
case("aten.select_copy.int", floats(4, 3), 0, 1)
case("aten.split_copy.Tensor", floats(4, 3), 2)
case("aten.split.sizes", floats(4, 3), [1, 3])
case("aten.unsafe_split_with_sizes", floats(4, 3), [1, 3])
case("aten.squeeze_copy.dims", floats(4, 1, 3), [1])
case("aten._unsafe_index.Tensor", floats(4, 3), [ints(2, high=4)])
case("aten._unsafe_index_put", floats(4, 3), [ints(2, high=4)], floats(3), True)
case("aten.view.dtype", floats(4), torch.int32)
case("aten.view_copy.dtype", floats(4), torch.int32)
case("aten.view_as_real_copy", lambda: torch.complex(floats(3)(), floats(3, seed=1)()))
case("aten.view_as_complex_copy", floats(3, 2))


def _prims() -> None:
    """Element-wise prims, by their schemas: one, two or three tensors."""
    whole = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "gcd", "shift_left", "shift_right_arithmetic"}
    for func in LOWERINGS:
        name = str(func).removesuffix(".default")
        kinds = [str(a.type) for a in func._schema.arguments]
        if name.startswith("prims.") and set(kinds) == {"Tensor"} and len(kinds) <= 2:
            make = ints if name.removeprefix("prims.") in whole else floats
            case(name, *[make(4, seed=i) for i in range(len(kinds))])


_prims()


def main() -> int:
    torch.set_num_threads(1)
    found = dict(places())
    PLACES.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items())) + "\n}\n")
    missing = sorted(str(f) for f in LOWERINGS if str(f) not in found and f not in CASES)
    print(f"{len(found)} overloads in the database, {len(CASES)} in the table, {len(missing)} in neither: {' '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
