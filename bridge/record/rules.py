"""Torch functions that are not recorded as operators, and what happens instead: they run, are
refused, or need values first.

A rule takes the ``recorder.Recorder``, the torch function and its arguments, and gives the
function's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from bridge import private
from bridge.convert.arguments import mapped, tensors_in, with_values
from bridge.convert.strides import contiguous
from bridge.record.entries import Out, functions_of
from bridge.record.tensor import Recorded, aval, aval_of, avals_of
from bridge.trace.levels import Unrecordable
from bridge.trace.tracing import exchanged, refuse_format
from bridge.transform_kinds import JVP

#: What a rule gives for a call that is recorded as an operator all the same.
OPERATOR = object()


def _refused(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    raise Unrecordable(str(func))


def _hooked(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    """register_hook. What captured tensors make require grad does not require it in a vmap of
    PyTorch's: there, that starts again.
    """
    if recorder.level.kind.maps or recorder.level.kind is JVP:
        recorder.resumable = False
    raise Unrecordable(str(func))


def _graph_node(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    """grad_fn. Modules ask a new parameter for it; one that is made in the record would be no
    Parameter any more: that starts again.
    """
    if type(args[0]) is not Recorded or isinstance(args[0], torch.nn.Parameter):
        recorder.resumable = False
    raise Unrecordable(str(func))


def _resized(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    """resize_ and resize_as_: in a vmap PyTorch would read beyond a lane."""
    if type(args[0]) is Recorded and args[0].aval.lanes:
        raise RuntimeError(
            f"{func.__name__}: it cannot be called inside vmap, where PyTorch gives wrong numbers; "
            "jit the call or use view"
        )
    raise Unrecordable(str(func))


def _exchanged(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Functions that set a tensor's memory or grad: not even a trace can do that to a tensor from
    outside, unless the memory is the tensor's own: Module.to, where nothing changes.
    """
    if args[-1] is args[0]:
        return
    if type(args[0]) is not Recorded and type(args[-1]) is not type(None):
        raise exchanged("grad" if func == torch.Tensor.grad.__set__ else "data")  # type: ignore[attr-defined]
    raise Unrecordable(str(func))


def _new_tensor(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Tensor.new_tensor: torch.tensor with the tensor's dtype and device in the place of the
    defaults.
    """
    t, *data = args
    given = {"dtype": t.dtype, "device": t.device} | {
        name: x for name, x in kwargs.items() if x is not None
    }
    return _scalar(recorder, torch.tensor, tuple(data), given)


def _array(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A tensor from outside as a read-only numpy array: the record reads the tensor's values only
    at its end.
    """
    if type(args[0]) is Recorded or recorder.writes:
        raise Unrecordable(str(func))
    found = func(*args, **kwargs).view()
    found.flags.writeable = False
    return found


def _iterated(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    t = args[0]
    if t.dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(recorder.record(torch.Tensor.unbind, (t, 0)))


def _shown(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """The text of a tensor of the record, or of one from outside, to which the record may have
    written.
    """
    if type(args[0]) is Recorded:
        return repr(args[0])
    return (
        recorder.shown(args[0])
        if recorder.writes and recorder.known.writes_outside(recorder)
        else func(*args, **kwargs)
    )


def _formatted(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    t, spec = args
    refuse_format(t, spec)
    if t.dim() or (not spec and type(t) is Recorded and t.aval.lanes):
        return _shown(recorder, torch.Tensor.__repr__, (t,), {})
    return format(recorder.by_value(torch.Tensor.item, (t,), {}), spec)


def _scalar(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """torch.tensor and torch.as_tensor: a float becomes an input of the program, other data a
    tensor from outside.
    """
    data = args[0] if args else kwargs.get("data")
    if type(data) is float and not args[1:] and not kwargs:
        return recorder.record(torch.full, ((), data), {"dtype": torch.get_default_dtype()})
    if isinstance(data, torch.Tensor) and func is torch.as_tensor:
        return (
            data
            if len(args) == 1 and not kwargs
            else recorder.record(torch.Tensor.to, (data, *args[1:]), kwargs)
        )
    if found := tensors_in(data):
        args, kwargs = with_values((args, kwargs), recorder.now(found))
    return func(*args, **kwargs)


def _is_conj(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if args and type(args[0]) is Recorded and args[0].is_complex():
        raise Unrecordable("is_conj of a complex tensor")
    return func(*args, **kwargs)


def _type(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Tensor.type: the name of the tensor's type, or a cast to a type that is given."""
    like = func(torch.empty(0, device=args[0].device), *args[1:], **kwargs)
    if isinstance(like, str):
        return func(*args, **kwargs)
    return recorder.record(torch.Tensor.to, (args[0], like.device, like.dtype))


def _sparse(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A sparse tensor that is made of tensors from outside is one too."""
    if any(type(t) is Recorded or t.requires_grad for t in tensors_in((args, kwargs))):
        raise Unrecordable(str(func))
    return func(*args, **kwargs)


def _requires_grad(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """requires_grad_, and requires_grad that is set: a tensor from outside changes at once, before
    the record has it as an input.
    """
    t = args[0]
    if type(t) is Recorded:
        return OPERATOR
    if id(t) in recorder.by_id and not t.requires_grad:
        raise Unrecordable(str(func))
    return func(*args, **kwargs)


def _gradients(
    recorder: Any,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad: gradients of the record's own values, which a trace computes through the
    graph of its tensors.
    """
    outs, wanted, cotangents = (
        (x,) if isinstance(x, torch.Tensor) else None if x is None else tuple(x)
        for x in (outputs, inputs, grad_outputs)
    )
    given = [*outs, *wanted, *[c for c in cotangents or () if c is not None]]
    if is_grads_batched or not all(isinstance(t, torch.Tensor) for t in given):
        raise Unrecordable("torch.autograd.grad with is_grads_batched or GradientEdges")
    if not all(type(t) is Recorded for t in outs):
        raise Unrecordable("torch.autograd.grad of a graph from outside")
    avals = avals_of(given)
    n = len(outs)
    if any(size for a in avals for _, size, _ in a.lanes) or not all(
        a.requires_grad for a in avals[: n + len(wanted)]
    ):
        # PyTorch raises its error
        raise Unrecordable("torch.autograd.grad of what requires no grad")
    if any(not (a.shape == () or cotangents is not None) for a in avals[:n]):
        raise Unrecordable("torch.autograd.grad of what is no scalar")
    lanes = tuple(
        [(depth, 0, 0) for depth in sorted({depth for a in avals for depth, _, _ in a.lanes})]
    )
    used = recorder.reached(outs, wanted)
    if not (all(used) or allow_unused or (materialize_grads and allow_unused is None)):
        raise Unrecordable("torch.autograd.grad of what is not used")
    results = tuple(
        [
            Out(aval(a.shape, contiguous(a.shape), 0, a.dtype, a.device, create_graph and u, lanes))
            if u or materialize_grads
            else None
            for a, u in zip(avals[n:], used, strict=False)
        ]
    )
    options = {
        "retain_graph": retain_graph,
        "create_graph": create_graph,
        "allow_unused": allow_unused,
        "materialize_grads": materialize_grads,
    }
    return recorder.noted(torch.autograd.grad, (outs, wanted, cotangents), options, results)


# -- functions whose results' shapes depend on values, outside of vmap: the values are computed
# first
def _indices_of(recorder: Any, index: Any) -> tuple[Any, ...]:
    """An index in which each mask is replaced by the places where it is True, and one without
    dimensions by a bool.
    """
    if type(index) is not tuple and type(index) is not list:
        index = (index,)
    masks = [
        x for x in index if isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)
    ]
    if not masks:
        raise Unrecordable("an index")
    places = dict(zip(map(id, masks), recorder.now(masks), strict=True))
    found: list[Any] = []
    for x in index:
        mask = places.get(id(x)) if isinstance(x, torch.Tensor) else None
        found += (
            [x] if mask is None else mask.nonzero(as_tuple=True) if mask.dim() else [bool(mask)]
        )
    return tuple(found)


def _masked_select(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = dict(zip(("input", "mask"), args, strict=False)) | kwargs
    if set(given) != {"input", "mask"}:
        raise Unrecordable(str(func))
    t, mask = recorder.record(torch.broadcast_tensors, (given["input"], given["mask"]))
    return recorder.record(torch.Tensor.__getitem__, (t, _indices_of(recorder, mask)))


def _repeated(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    t, repeats, dim = given.get("input"), given.get("repeats"), given.get("dim")
    if (
        not isinstance(repeats, torch.Tensor)
        or not isinstance(t, torch.Tensor)
        or repeats.dim() != 1
        or "output_size" in given
    ):
        raise Unrecordable(str(func))
    if dim is None:
        t, dim = recorder.record(torch.flatten, (t,)), 0
    (times,) = recorder.now([repeats])
    places = torch.repeat_interleave(
        torch.arange(t.shape[dim]),
        times if len(times) == t.shape[dim] else times.expand(t.shape[dim]),
    )
    return recorder.record(torch.index_select, (t, dim, places))


def _counted(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function on its operands' values; its result has no derivative and is a tensor from
    outside.
    """
    tensors = tensors_in((args, kwargs))
    if "out" in kwargs or (func not in _PLACES and any(aval_of(t).requires_grad for t in tensors)):
        raise Unrecordable(str(func))
    args, kwargs = with_values((args, kwargs), recorder.now(tensors))
    return func(*args, **kwargs)


def _packed(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """_pack_padded_sequence: its lengths, whose values are computed first, tell which rows are
    taken.
    """
    t, lengths, batch_first = args
    steps = recorder.record(torch.Tensor.transpose, (t, 0, 1)) if batch_first else t
    (known,) = recorder.now([lengths])
    shape = tuple(steps.shape)
    rows = (
        torch.arange(shape[0] * shape[1]).reshape(shape[:2])
        if steps.numel()
        else torch.empty(shape)
    )
    places, sizes = func(rows, known.cpu(), False)
    return recorder.record(
        torch.index_select, (recorder.record(torch.flatten, (steps, 0, 1)), 0, places.to(t.device))
    ), sizes


def _padded(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """_pad_packed_sequence, from the rows of the packed data."""
    data, batch_sizes, batch_first, padding_value, total_length = args
    (known,) = recorder.now([batch_sizes])
    places, lengths = func(torch.arange(data.shape[0]), known, batch_first, -1, total_length)
    kept = (places >= 0).reshape(*places.shape, *[1] * (data.dim() - 1)).to(data.device)
    rows = recorder.record(
        torch.index_select, (data, 0, places.clamp(min=0).reshape(-1).to(data.device))
    )
    rows = recorder.record(torch.Tensor.reshape, (rows, (*places.shape, *data.shape[1:])))
    padding = torch.full((), padding_value, dtype=data.dtype, device=data.device)
    return recorder.record(torch.where, (kept, rows, padding)), lengths


def _of_packed(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer of a packed sequence, whose batch sizes are a tuple of ints."""

    def run(data: torch.Tensor, batch_sizes: tuple[int, ...], *rest: Any) -> Any:
        return layer(data, torch.tensor(batch_sizes), *rest)

    return run


def _recurrent(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if len(args) != 9 or not isinstance(args[1], torch.Tensor) or isinstance(args[3], bool):
        return OPERATOR
    (known,) = recorder.now([args[1]])
    return recorder.record(_OF_PACKED[func], (args[0], tuple(known.tolist()), *args[2:]))


_OF_PACKED = {
    layer: _of_packed(layer) for layer in functions_of(torch._VF, "lstm gru rnn_tanh rnn_relu")
}


def _sized(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A new tensor whose sizes are tensors."""
    tensors = tensors_in((args, kwargs))
    args, kwargs = with_values((args, kwargs), recorder.now(tensors))
    return recorder.record(
        func, mapped(lambda x: int(x) if isinstance(x, torch.Tensor) else x, args), kwargs
    )


def _is_leaf(
    recorder: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    (t,) = args
    if type(t) is not Recorded or not t.aval.requires_grad:
        return func(*args, **kwargs)
    return t.ref in t.level.arguments and t.ref not in recorder.written


TO_PYTHON = frozenset(
    [
        *functions_of(
            torch.Tensor,
            "item __bool__ __float__ __int__ __index__ __complex__ tolist "
            "__contains__ equal allclose",
        ),
        *functions_of(torch, "equal allclose is_nonzero"),
    ]
)
_PASSED = [
    *functions_of(
        torch.Tensor,
        "size dim stride numel storage_offset is_contiguous is_floating_point is_complex "
        "element_size nelement ndimension get_device is_signed is_inference is_same_size is_neg "
        "is_shared is_pinned has_names __len__ __hash__ __dir__",
    ),
    *functions_of(
        torch,
        "is_floating_point is_complex numel is_tensor is_same_size promote_types result_type "
        "is_neg is_inference broadcast_shapes can_cast get_default_dtype",
    ),
    *[
        attribute.__get__
        for attribute in functions_of(
            torch.Tensor,
            "shape dtype device ndim requires_grad layout itemsize nbytes names name grad "
            "output_nr retains_grad is_cuda is_cpu is_sparse is_meta is_quantized is_nested "
            "is_mkldnn is_xpu is_mps is_sparse_csr is_vulkan is_mtia is_xla is_ipu is_maia _base "
            "_version _backward_hooks _cdata",
        )
    ],
    torch._C._set_grad_enabled,
    torch.manual_seed,
    *private.profiler_marks,
]
_REFUSED = [
    *functions_of(
        torch.Tensor,
        "backward register_post_accumulate_grad_hook retain_grad data_ptr untyped_storage storage "
        "storage_type share_memory_ __deepcopy__ __reduce_ex__ __dlpack__ __setstate__ as_strided "
        "as_strided_ to_mkldnn unsafe_chunk apply_ map_ new detach_ is_set_to",
    ),
    *functions_of(
        torch, "set_default_device as_strided frombuffer from_numpy _make_dual _unpack_dual"
    ),
    *[attribute.__set__ for attribute in functions_of(torch.Tensor, "names")],
    torch.autograd.backward,
]
_SPARSE = (
    "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor "
    "sparse_compressed_tensor to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr "
    "to_sparse_bsc sparse_mask"
)
#: By a torch function, what happens instead of recording it as an operator.
RULES: dict[Any, Any] = {
    **dict.fromkeys(_PASSED, lambda recorder, func, args, kwargs: func(*args, **kwargs)),
    **dict.fromkeys(_REFUSED, _refused),
    **dict.fromkeys(
        [
            torch.Tensor.set_,
            *[attribute.__set__ for attribute in functions_of(torch.Tensor, "data grad")],
        ],
        _exchanged,
    ),
    **dict.fromkeys(
        TO_PYTHON, lambda recorder, func, args, kwargs: recorder.by_value(func, args, kwargs)
    ),
    **dict.fromkeys(functions_of(torch, _SPARSE), _sparse),
    **dict.fromkeys(functions_of(torch.Tensor, _SPARSE), _sparse),
    torch.Tensor.numpy: _array,
    torch.Tensor.__array__: _array,
    torch.tensor: _scalar,
    torch.as_tensor: _scalar,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.grad_fn.__get__: _graph_node,  # type: ignore[attr-defined]
    torch.Tensor.__iter__: _iterated,
    torch.Tensor.__format__: _formatted,
    torch.Tensor.__repr__: _shown,
    torch.Tensor.type: _type,
    torch.Tensor.register_hook: _hooked,
    torch.Tensor.resize_: _resized,
    torch.Tensor.resize_as_: _resized,
    torch.Tensor.requires_grad_: _requires_grad,
    torch.Tensor.requires_grad.__set__: _requires_grad,  # type: ignore[attr-defined]
    torch.autograd.grad: lambda recorder, func, args, kwargs: _gradients(recorder, *args, **kwargs),
    torch.Tensor.is_leaf.__get__: _is_leaf,  # type: ignore[attr-defined]
    torch.Tensor.is_conj: _is_conj,
    torch.is_conj: _is_conj,
    **dict.fromkeys(_OF_PACKED, _recurrent),
    torch._VF._pack_padded_sequence: _packed,
    torch._VF._pad_packed_sequence: _padded,
    torch.Tensor.data.__get__:  # type: ignore[attr-defined]
    lambda recorder, func, args, kwargs: recorder.record(torch.Tensor.detach, args),
}
_PLACES = frozenset(
    [
        *functions_of(torch.Tensor, "nonzero argwhere"),
        *functions_of(torch, "nonzero argwhere where"),
    ]
)
#: By a torch function that needs values for its results' shapes, how it is recorded outside of
#: vmap.
BY_VALUE = {
    **dict.fromkeys(
        [
            f
            for owner in (torch.Tensor, torch)
            for f in functions_of(owner, "unique unique_consecutive bincount")
        ],
        _counted,
    ),
    **dict.fromkeys(_PLACES, _counted),
    **dict.fromkeys(functions_of(torch, "zeros ones empty full rand randn"), _sized),
    **dict.fromkeys(
        functions_of(torch.Tensor, "__getitem__ __setitem__"),
        lambda recorder, func, args, _: recorder.record(
            func, (args[0], _indices_of(recorder, args[1]), *args[2:])
        ),
    ),
    **dict.fromkeys([torch.Tensor.masked_select, torch.masked_select], _masked_select),
    **dict.fromkeys([torch.Tensor.repeat_interleave, torch.repeat_interleave], _repeated),
}
