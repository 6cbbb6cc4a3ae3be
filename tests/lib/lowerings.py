"""Calls of ATen operators with which every lowering can be tried on its own: PyTorch's database's,
and a table for those it misses.

    python tests/lib/lowerings.py

writes lowerings.json: for each overload with a lowering, the first sample of the database
(operator, dtype, position) whose run in plain PyTorch, forward, backward or in inference mode,
calls it and gets more than zeros.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opinfo
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.lowering.registry import LOWERINGS, overload
from bridge.operators import mutation

PLACES = Path(__file__).with_suffix(".json")
Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Shows every call to a function before it happens, and what came out to the function that this
    one returned.
    """

    def __init__(self, see: Callable[[Any, Any, Any], Callable[[Any], None]]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = self.see(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        done(out)
        return out


def telling(out: Any) -> bool:
    """Whether a result has values that a wrong lowering would hardly give: not one number, all zero
    or all NaN.
    """
    found = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    # a zero tensor has no memory to read
    found = [
        t for t in found if t.layout is torch.strided and t.numel() > 1 and not t._is_zerotensor()
    ]
    return any(
        bool(t.any()) and not (t.is_floating_point() and bool(t.isnan().all())) for t in found
    )


def lowered(func: Any) -> Any:
    """The overload whose lowering runs for func: its own, or, where func writes, that of its
    functional form.
    """
    if func in LOWERINGS:
        return func
    if func._schema.is_mutable:
        with contextlib.suppress(Exception):
            functional = mutation.functional_form(func)
            return functional if functional in LOWERINGS else None
    return None


def run(
    op: Any,
    dtype: torch.dtype,
    position: int,
    see: Callable[[Any, Any, Any], Callable[[Any], None]],
) -> None:
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
    """The arguments with which a sample calls func (or the writing form of it): in its first
    telling call, or else in its first.
    """
    name, dtype, position = place
    first: list[Call] = []
    best: list[Call] = []

    def see(f: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
        if best or lowered(f) is not func:
            return lambda out: None
        names = {a.name for a in func._schema.arguments}
        call = _copy((args, {k: v for k, v in kwargs.items() if k in names}))
        first.append(call)
        return lambda out: best.append(call) if telling(out) else None

    run(opinfo.operators()[name], getattr(torch, dtype), position, see)
    return (best or first)[0]


def places() -> dict[str, list[Any]]:
    """Where in the whole database each overload is called first with a telling result, or, where it
    never is, called first.
    """
    first: dict[Any, list[Any]] = {}
    best: dict[Any, list[Any]] = {}
    for name, op in opinfo.operators().items():
        for dtype in ("float32", "int64", "complex64", "bool"):
            if getattr(torch, dtype) not in op.supported_dtypes("cpu"):
                continue
            try:
                count = len(opinfo.draw(op, getattr(torch, dtype), 0, 60))
            except Exception:
                continue
            positions = (
                opinfo.chosen([None] * count, 4)
                if dtype == "float32" and count
                else [0]
                if count
                else []
            )
            for position in positions:
                place = [name, dtype, position]

                def see(
                    f: Any, args: Any, kwargs: Any, place: list[Any] = place
                ) -> Callable[[Any], None]:
                    func = lowered(f)
                    if func is None or func in best:
                        return lambda out: None
                    first.setdefault(func, place)
                    return lambda out: (
                        best.setdefault(func, place) and None if telling(out) else None
                    )

                run(op, getattr(torch, dtype), position, see)
    return {str(func): place for func, place in (first | best).items()}


# -- what the database misses ----------------------------------------------------------------------
CASES: dict[Any, Callable[[], Call]] = {}


def case(name: str, *args: Any, **kwargs: Any) -> None:
    """Arguments for an overload; functions without arguments are called for theirs when the case
    runs.
    """
    with contextlib.suppress(ValueError):
        CASES[overload(name)] = lambda: pytree.tree_map(
            lambda a: a() if callable(a) else a, (args, kwargs)
        )


def floats(*shape: int, seed: int = 0) -> Callable[[], torch.Tensor]:
    """Numbers in (0, 1)."""
    return lambda: torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.9 + 0.05


def halves(*shape: int, seed: int = 0) -> Callable[[], torch.Tensor]:
    return lambda: floats(*shape, seed=seed)().to(torch.bfloat16)


def wholes(*shape: int, seed: int = 0) -> Callable[[], torch.Tensor]:
    return lambda: ints(*shape, seed=seed)().float()


def longs(*values: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(values, dtype=torch.int64)


def bools(*values: bool) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(values)


def complexes(*shape: int, seed: int = 0) -> Callable[[], torch.Tensor]:
    return lambda: torch.complex(floats(*shape, seed=seed)(), floats(*shape, seed=seed + 9)())


def wide(*shape: int, seed: int = 0) -> Callable[[], torch.Tensor]:
    """Numbers in (-4, 5)."""
    return lambda: floats(*shape, seed=seed)() * 9 - 4


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
                args.append(
                    [floats(3, 3, seed=i), floats(3, 3, seed=i + 1)]
                    if shared
                    else [_TWO, _OTHER, _TWO][i]
                )
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

case(
    "aten.scaled_dot_product_attention",
    floats(2, 2, 3, 4),
    floats(2, 2, 5, 4, seed=1),
    floats(2, 2, 5, 6, seed=2),
    is_causal=True,
)
case("aten.linalg_polar", floats(4, 3))  # since PyTorch 2.15
case("aten.linalg_matrix_sqrth", lambda: torch.eye(3) + floats(3, 1)() @ floats(3, 1)().mT)

for _kind in ("hann", "hamming", "blackman", "bartlett", "kaiser"):
    case(f"aten.{_kind}_window", 7)
    case(f"aten.{_kind}_window.periodic", 7, False)
case("aten.hamming_window.periodic_alpha", 7, True, 0.5)
case("aten.hamming_window.periodic_alpha_beta", 7, True, 0.5, 0.4)
case("aten.kaiser_window.beta", 7, True, 9.0)

for _family in (
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
    "chebyshev_polynomial_t",
    "chebyshev_polynomial_u",
    "chebyshev_polynomial_v",
    "chebyshev_polynomial_w",
    "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
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
case(
    "aten._int_mm",
    lambda: torch.randint(-9, 9, (17, 8), dtype=torch.int8),
    lambda: torch.randint(-9, 9, (8, 8), dtype=torch.int8),
)
case(
    "aten._grouped_mm",
    lambda: torch.randn(16, 16).to(torch.bfloat16),
    lambda: torch.randn(2, 16, 32).to(torch.bfloat16),
    lambda: torch.tensor([8, 16], dtype=torch.int32),
)
_SCALE, _ZERO = (lambda: torch.tensor([0.1])), (lambda: torch.tensor([3], dtype=torch.int32))
_SCALES, _ZEROS = (
    (lambda: torch.tensor([0.1, 0.2, 0.3])),
    (lambda: torch.tensor([3, 0, -2], dtype=torch.int32)),
)
_ZERO_FLOATS, _ON = (lambda: torch.tensor([3.0, 0.0, -2.0])), (lambda: torch.tensor([1]))
case("aten.fake_quantize_per_tensor_affine_cachemask", floats(3, 4), 0.1, 3, 0, 15)
case(
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    floats(3, 4),
    _SCALE,
    _ZERO,
    _ON,
    0,
    15,
)
case("aten.fake_quantize_per_channel_affine_cachemask", floats(3, 4), _SCALES, _ZEROS, 0, -8, 7)
case(
    "aten._fake_quantize_learnable_per_tensor_affine",
    floats(3, 4),
    _SCALE,
    lambda: torch.tensor([3.0]),
    0,
    15,
)
case(
    "aten._fake_quantize_learnable_per_channel_affine",
    floats(3, 4),
    _SCALES,
    _ZERO_FLOATS,
    0,
    -8,
    7,
)
case(
    "aten._fake_quantize_learnable_per_tensor_affine_backward",
    floats(3, 4),
    floats(3, 4, seed=1),
    _SCALE,
    lambda: torch.tensor([3.0]),
    0,
    15,
)
case(
    "aten._fake_quantize_learnable_per_channel_affine_backward",
    floats(3, 4),
    floats(3, 4, seed=1),
    _SCALES,
    _ZERO_FLOATS,
    0,
    -8,
    7,
)
case(
    "aten._fused_moving_avg_obs_fq_helper_functional",
    floats(3, 4),
    _ON,
    _ON,
    lambda: torch.tensor(-1.0),
    lambda: torch.tensor(1.0),
    _SCALE,
    _ZERO,
    0.01,
    0,
    15,
    -1,
)
case("aten.where.ScalarOther", bools(True, False), floats(2), 1.5)
case("aten.where.ScalarSelf", bools(True, False), 1.5, floats(2))
case("aten.where.Scalar", bools(True, False), 1.5, 2.5)
case("aten.where", bools(False, True))
case("aten.masked_fill.Tensor", floats(2), bools(True, False), floats())
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
_PARAMS = [[floats(2, 3, seed=k), floats(4, seed=k + 5)] for k in range(5)]
_STEPS = [lambda: torch.tensor(3.0), lambda: torch.tensor(3.0)]
_SCALED = {"grad_scale": lambda: torch.tensor([4.0]), "found_inf": lambda: torch.zeros(1)}
for _kind in ("", ".tensor_lr"):
    _rate = (lambda: torch.tensor(0.1)) if _kind else 0.1
    for _name in ("_fused_adam", "_fused_adamw"):
        case(
            f"aten.{_name}{_kind}",
            *_PARAMS,
            _STEPS,
            lr=_rate,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=True,
            maximize=False,
            **_SCALED,
        )
    case(
        f"aten._fused_sgd{_kind}",
        *_PARAMS[:3],
        weight_decay=0.1,
        momentum=0.9,
        lr=_rate,
        dampening=0.2,
        nesterov=False,
        maximize=True,
        is_first_step=False,
        **_SCALED,
    )
    case(
        f"aten._fused_adagrad{_kind}",
        *_PARAMS[:3],
        _STEPS,
        lr=_rate,
        lr_decay=0.1,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
        **_SCALED,
    )
case(
    "aten._amp_foreach_non_finite_check_and_unscale",
    _PARAMS[0],
    lambda: torch.zeros(1),
    lambda: torch.tensor(0.25),
)
case(
    "aten._amp_update_scale",
    lambda: torch.tensor([8.0]),
    lambda: torch.tensor([1], dtype=torch.int32),
    lambda: torch.zeros(1),
    2.0,
    0.5,
    2,
)
case("aten._is_any_true", bools(True, False))
case("aten.allclose", floats(3), floats(3))
case("aten._euclidean_dist", floats(4, 3), floats(2, 3, seed=1))
case("aten.native_channel_shuffle", floats(2, 6, 2, 2), 3)
case("aten.reflection_pad3d", floats(2, 3, 3, 3), [1, 1, 1, 1, 1, 1])
case("aten.replication_pad3d", floats(2, 3, 3, 3), [1, 1, 1, 1, 1, 1])
case("aten.concat", [floats(2, 3), floats(1, 3, seed=1)])
case("aten._stack", [floats(2, 3), floats(2, 3, seed=1)])
case("aten._logcumsumexp", floats(3, 4), 1)
for _name in ("lift_fresh_copy", "detach_copy", "_neg_view", "_neg_view_copy"):
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


case("aten._conj_copy", complexes(3))
case("aten._reshape_copy", floats(4, 3), [2, 6])
case("aten._reshape_alias", floats(4, 3), [2, 6], [6, 1])
case("aten._reshape_alias_copy", floats(4, 3), [2, 6], [6, 1])
case("aten._index_put_impl", floats(4, 3), [ints(2, high=4)], floats(3), True)
case(
    "aten.unique_dim_consecutive",
    lambda: torch.tensor([[1, 2], [1, 2], [3, 4], [1, 2]]),
    0,
    True,
    True,
)
for _kind in ("bmm", "mm"):
    _batch = (2,) if _kind == "bmm" else ()
    case(f"aten.{_kind}.dtype", halves(*_batch, 2, 3), halves(*_batch, 3, 4, seed=1), torch.float32)

case("aten._linalg_eigvals", floats(4, 4))
case("aten.orgqr", floats(4, 3), floats(3, seed=1))
case(
    "aten._convolution",
    floats(2, 4, 7),
    floats(4, 3, 3, seed=1),
    floats(6, seed=2),
    [2],
    [1],
    [2],
    True,
    [1],
    2,
    False,
    False,
    True,
    True,
)
case("aten.conv_tbc", floats(7, 2, 3), floats(3, 3, 4, seed=1), floats(4, seed=2), 1)
case("aten._fused_rms_norm", floats(2, 3, 4), [3, 4], floats(3, 4, seed=1), 1e-3)
case(
    "aten._native_batch_norm_legit_functional",
    floats(4, 3, 2),
    floats(3, seed=1),
    floats(3, seed=2),
    floats(3, seed=3),
    floats(3, seed=4),
    True,
    0.2,
    1e-3,
)
case(
    "aten._embedding_bag",
    floats(5, 3),
    longs(0, 2, 1, 4, 2, 0),
    longs(0, 3, 3),
    False,
    1,
    padding_idx=2,
)
case("aten._embedding_bag_forward_only", floats(5, 3), longs(0, 2, 1, 4), longs(0, 3, 3), False, 2)
case(  # every index as often as the others: the kernel mixes up whose frequency it divides by
    "aten._embedding_bag_dense_backward",
    floats(3, 3),
    longs(0, 2, 1, 1, 2, 0),
    longs(0, 0, 0, 2, 2, 2),
    longs(3, 0, 3),
    longs(),
    5,
    True,
    1,
    None,
)
# whole numbers, so that some margins are just met
case(
    "aten.multi_margin_loss_backward",
    floats(3),
    wholes(3, 4),
    longs(2, 0, 3),
    1,
    1,
    floats(4, seed=1),
    0,
)
case("aten.soft_margin_loss_backward", floats(2, 4), wide(2, 4, seed=1), wholes(2, 4), 0)
case(
    "aten.multilabel_margin_loss_backward",
    floats(2),
    wholes(2, 4),
    lambda: torch.tensor([[3, 0, -1, 1], [2, 2, 1, 0]]),
    0,
    lambda: torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 0]]),
)
case(
    "aten._weight_norm_interface_backward",
    floats(3, 4),
    floats(3, 4, seed=1),
    floats(3, 1, seed=2),
    floats(3, 1, seed=3),
    0,
)
for _kind in ("reflection", "replication"):
    case(
        f"aten.{_kind}_pad3d_backward",
        floats(2, 5, 6, 5),
        floats(2, 3, 4, 3, seed=1),
        [1, 1, 0, 2, 1, 1],
    )
for _kind in ("bicubic", "lanczos"):
    case(f"aten._upsample_{_kind}2d_aa", floats(1, 2, 5, 6), [3, 9], False)
    case(f"aten._upsample_{_kind}2d_aa_backward", floats(1, 2, 3, 9), [3, 9], [1, 2, 5, 6], False)


def _recurrent(kind: str, gates: int) -> None:
    """Two layers in both directions, over a padded and over a packed input."""
    states = floats(4, 3, 5, seed=1)
    hx = [states, floats(4, 3, 5, seed=2)] if kind == "lstm" else states
    shapes = [
        s
        for layer in (4, 10)
        for _ in range(2)
        for s in ((gates * 5, layer), (gates * 5, 5), (gates * 5,), (gates * 5,))
    ]
    params = [(lambda s=s, i=i: floats(*s, seed=i)() - 0.5) for i, s in enumerate(shapes)]
    case(f"aten.{kind}.input", floats(3, 6, 4), hx, params, True, 2, 0.0, False, True, True)
    case(
        f"aten.{kind}.data", floats(9, 4), longs(3, 3, 2, 1), hx, params, True, 2, 0.0, False, True
    )


for _kind, _gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
    _recurrent(_kind, _gates)
_LSTM = (
    floats(6, 3, 4),
    floats(20, 4, seed=1),
    floats(20, 5, seed=2),
    floats(20, seed=3),
    floats(20, seed=4),
    floats(1, 3, 5, seed=5),
    floats(1, 3, 5, seed=6),
)


def _of_its_forward(k: int) -> Callable[[], torch.Tensor]:
    """The output, the last states or the kernel's own memory of an LSTM's layer that is trained."""
    options = True, [], 2, 5, 1, True, False, False, True
    return lambda: torch.ops.aten.mkldnn_rnn_layer.default(*[make() for make in _LSTM], *options)[k]


case("aten.mkldnn_rnn_layer", *_LSTM, True, [], 2, 5, 1, True, False, False, False)
case(
    "aten.mkldnn_rnn_layer_backward",
    *_LSTM,
    *map(_of_its_forward, range(3)),
    floats(6, 3, 5, seed=7),
    floats(1, 3, 5, seed=8),
    floats(1, 3, 5, seed=9),
    True,
    2,
    5,
    1,
    True,
    True,
    False,
    [],
    False,
    _of_its_forward(3),
)


def _prims() -> None:
    """Element-wise prims, by their schemas: one, two or three tensors."""
    whole = {
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_not",
        "gcd",
        "shift_left",
        "shift_right_arithmetic",
    }
    of_complex = {"conj", "conj_physical", "real", "imag"}
    for func in LOWERINGS:
        name = str(func).removesuffix(".default")
        kinds = [str(a.type) for a in func._schema.arguments]
        if name.startswith("prims.") and set(kinds) == {"Tensor"} and len(kinds) <= 2:
            bare = name.removeprefix("prims.")
            make = ints if bare in whole else complexes if bare in of_complex else floats
            case(name, *[make(4, seed=i) for i in range(len(kinds))])


_prims()
_CPU = torch.device("cpu")
_NEW = {"dtype": torch.float32, "device": _CPU, "requires_grad": False}
for _name in ("amax", "amin", "prod", "sum"):
    case(f"prims.{_name}", floats(2, 3, 4), [0, 2])
case("prims.var", floats(2, 3, 4), [0, 2], 1.0)
case("prims.broadcast_in_dim", floats(3, 1), [2, 3, 4], [1, 2])
case("prims.cat", [floats(2, 3), floats(1, 3, seed=1)], 0)
case("prims.clone", floats(3))
for _name in ("collapse", "collapse_view"):
    case(f"prims.{_name}", floats(2, 3, 4), 1, 2)
case("prims.convert_element_type", lambda: floats(4)() * 9, torch.int32)
case("prims.copy_strided", floats(2, 3), [1, 2])
case("prims.device_put", floats(3), _CPU)
case("prims.empty_permuted", [2, 3], [1, 0], **_NEW)
case("prims.empty_strided", [2, 3], [1, 2], **_NEW)
case("prims.fill", floats(3), 2.5)
case("prims.full", [2, 3], 2.5, **_NEW)
case("prims.full_like", floats(2, 3), 2.5, **_NEW)
case("prims.iota", 5, start=3, step=2, dtype=torch.int32, device=_CPU, requires_grad=False)
case("prims.reshape", floats(2, 6), [3, 4])
case("prims.rev", floats(2, 3), [0, 1])
case("prims.scalar_tensor", 2.5, dtype=torch.float64, device=_CPU)
case("prims.split_dim", floats(2, 6), 1, 2)
case("prims.squeeze", floats(1, 3, 1), [0, 2])
case("prims.transpose", floats(2, 3, 4), [2, 0, 1])
case("prims.where", bools(True, False, True), floats(3), floats(3, seed=1))

# -- instead of samples whose results are all zero, NaN or empty -----------------------------------
for _name in ("isinf", "isposinf", "isneginf"):
    case(f"aten.{_name}", lambda: torch.tensor([1.0, math.inf, -math.inf, math.nan]))
for _name in ("_foreach_floor", "_foreach_trunc"):
    case(f"aten.{_name}", [wide(2, 3), wide(4, seed=1)])
for _name in ("floor", "trunc", "signbit"):
    case(f"prims.{_name}", wide(9))
case("prims.acosh", lambda: floats(4)() + 1)
case("prims.eq", longs(1, 2, 3), longs(1, 3, 3))
case("prims.zeta", lambda: floats(4)() + 1, floats(4, seed=1))
case("aten.special_zeta.other_scalar", lambda: floats(4)() + 1, 2.5)
case("aten.logical_xor", bools(True, False, True), bools(True, True, False))
case("aten.scalar_tensor", 2.5, dtype=torch.float64)
case("aten.prod", floats(3, 4))
case("aten.any.dim", lambda: torch.tensor([[True, False], [False, False]]), 1)
case("aten._unique2", ints(7), True, True, True)
case("aten.im2col", floats(2, 3, 6, 5), [2, 3], [1, 2], [1, 0], [2, 1])
case("aten.col2im", floats(2, 18, 20), [6, 5], [2, 3], [1, 1], [1, 1], [2, 1])
case(
    "aten._histogramdd_from_bin_tensors",
    floats(20, 2),
    [lambda: torch.linspace(0, 1, 4), lambda: torch.tensor([0.1, 0.5, 0.8])],
)
case("aten.multi_margin_loss", floats(3, 4), longs(2, 0, 3), 2, 1, floats(4, seed=1), 0)

# -- what cannot be compared value by value --------------------------------------------------------
#: Overloads whose values are drawn: as many as it takes to tell one distribution from another.
CHANCE: set[Any] = set()
_MANY = 4000


def chance(name: str, *args: Any, **kwargs: Any) -> None:
    """A case of an overload that draws its values."""
    case(name, *args, **kwargs)
    with contextlib.suppress(ValueError):
        CHANCE.add(overload(name))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(shape, dtype=dtype)


def _drawn() -> None:
    given = {"generator": lambda: torch.Generator().manual_seed(3)}
    many, whole = zeros(_MANY), zeros(_MANY, dtype=torch.int64)
    for name, args in {
        "rand": [[_MANY]],
        "randn": [[_MANY]],
        "rand_like": [many],
        "randn_like": [many],
        "randint": [50, [_MANY]],
        "randperm": [_MANY],
        "randint_like": [whole, 50],
    }.items():
        chance(f"aten.{name}", *args)
        chance(f"aten.{name}.generator", *args, **given)
    chance("aten.randint.low", -20, 30, [_MANY])
    chance("aten.randint.low_generator", -20, 30, [_MANY], **given)
    chance("aten.randint_like.low_dtype", whole, -20, 30)
    chance("aten.randint_like.low_generator_dtype", whole, -20, 30, **given)
    chance("aten.randint_like.Tensor", whole, lambda: torch.tensor(50))
    chance("aten.randint_like.Tensor_generator", whole, lambda: torch.tensor(50), **given)
    chance("aten.random", zeros(_MANY, dtype=torch.int16))
    chance("aten.random.to", many, 50)
    chance("aten.random.from", whole, -20, 30)
    chance("aten.uniform", many, -2.0, 3.0)
    chance("aten.normal.Tensor_float", floats(_MANY), 0.3)
    chance("aten.normal.float_Tensor", 1.5, floats(_MANY))
    chance("aten.normal.Tensor_Tensor", floats(_MANY), floats(_MANY, seed=1))
    chance("aten.normal.float_float", 1.5, 0.3, [_MANY])
    chance("aten.normal_functional", many, 1.5, 0.3)
    chance("aten.bernoulli", floats(_MANY))
    chance("aten.bernoulli.Tensor", many, floats(_MANY))
    chance("aten.bernoulli.p", many, 0.3)
    chance("aten.native_dropout", floats(_MANY), 0.3, True)
    chance("aten.rrelu_with_noise_functional", lambda: floats(_MANY)() - 0.5, many, 0.1, 0.4, True)
    chance("aten.exponential", many, 2.0)
    chance("aten.cauchy", many, 1.0, 2.0)
    chance("aten.geometric", many, 0.3)
    chance("aten.log_normal", many, 0.5, 0.7)
    chance("aten.poisson", lambda: floats(_MANY)() * 20)
    chance("aten.binomial", lambda: torch.full((_MANY,), 12.0), floats(_MANY))
    chance("aten.multinomial", floats(9), _MANY, True)
    chance("aten._standard_gamma", lambda: floats(_MANY)() * 3)
    chance("aten._sample_dirichlet", lambda: floats(_MANY, 3)() * 3)


_drawn()
case("aten._standard_gamma_grad", lambda: floats(9)() * 3, floats(9, seed=1))
case(
    "aten._dirichlet_grad",
    floats(9),
    lambda: floats(9, seed=1)() * 3,
    lambda: floats(9, seed=1)() * 3 + floats(9, seed=2)() * 3,
)
case("aten.polygamma_", floats(9), 2)
case("aten.addr", floats(2, 3), floats(2, seed=1), floats(3, seed=2), beta=2, alpha=3)
case("aten.empty_permuted", [2, 3], [1, 0])
case("aten.empty_strided", [2, 3], [1, 2])

#: Plain PyTorch that computes what an overload without a kernel for the CPU does.
TRUTH: dict[Any, Callable[..., Any]] = {
    overload(f"aten.{name}.dtype"): lambda a, b, dtype, name=name: getattr(torch, name)(
        a.to(dtype), b.to(dtype)
    )
    for name in ("mm", "bmm")
}


def main() -> int:
    torch.set_num_threads(1)
    found = places()
    PLACES.write_text(
        "{\n"
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items()))
        + "\n}\n"
    )
    missing = sorted(str(f) for f in LOWERINGS if str(f) not in found and f not in CASES)
    print(
        f"{len(found)} overloads in the database, {len(CASES)} in the table, {len(missing)} in "
        f"neither: {' '.join(missing)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
