"""Runs Python with a CUDA device that is simulated on the CPU, to test what transforms do with CUDA
tensors where there is no GPU.

    python tools/simulated_cuda/run.py -m pytest tests/tensors/test_cuda_tensors.py
    python tools/simulated_cuda/run.py script.py

It needs PyTorch's CUDA build, whose C++ then believes in a device of which the memory is the
host's, and a C compiler. PyTorch's operators on CUDA tensors, and JAX, compute on the CPU. What
PyTorch does with a CUDA tensor is thus what it does on a GPU: its choice of kernels, its autograd
in a thread of the device, its random numbers on a generator of its own. Not simulated are streams,
the exchange of memory with JAX, and kernels that the CPU lacks: a test that compares with one of
these is skipped when it comes to that.
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "simulated_cuda"
# in the environment of the process that runs with the library
SIMULATED = "TORCHFUNC_JAX_SIMULATED_CUDA"
#: Operators that move data, or look at it, without a kernel.
_WITHOUT_KERNEL = frozenset(
    [
        "empty",
        "empty_strided",
        "set_",
        "resize_",
        "resize_as_",
        "_resize_output_",
        "_local_scalar_dense",
        "_to_copy",
        "is_set_to",
        "is_pinned",
        "_pin_memory",
        "record_stream",
        "view",
        "as_strided",
        "_reshape_alias",
        "unfold",
        "view_as_real",
        "view_as_complex",
        "alias",
        "detach",
        "_fused_sdp_choice",
        "cudnn_is_acceptable",
        "_cudnn_rnn_flatten_weight",
    ]
)


def package(name: str) -> Path:
    spec = util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed; this needs PyTorch's CUDA build")
    return Path(spec.origin).parent


def build() -> Path:
    """Compile the simulated runtime and driver; the folder with both."""
    libraries = list((package("torch") / "lib").glob("lib*cuda*.so"))
    include = package("triton") / "backends" / "nvidia" / "include"
    if not libraries or not include.exists():
        raise SystemExit("this PyTorch has no CUDA; install the build that PyPI has")
    needed = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True
    ).stdout
    source = (HERE / "cudart.c").read_text()
    rest = sorted(
        {
            name
            for name in re.findall(r" (cuda[A-Z]\w*)", needed)
            if f" {name}(" not in source and f"*{name}(" not in source
        }
    )
    driver = {
        name
        for p in libraries
        for name in re.findall(rb"\0(cu[A-Z][A-Za-z0-9]+(?:_v\d)?)(?=\0)", p.read_bytes())
    }
    BUILD.mkdir(parents=True, exist_ok=True)
    capture = "void *stream, int *status) { *status = 0; return 0; }"
    count = "int *blocks) { *blocks = 1; return 0; }"
    bodies = [
        capture if "CaptureInfo" in n else count if "Occupancy" in n else ") { return 0; }"
        for n in rest
    ]
    (BUILD / "rest.c").write_text(
        "\n".join(f"int {n}({body}" for n, body in zip(rest, bodies, strict=True))
    )
    (BUILD / "driver.c").write_text(
        "\n".join(f"int {n.decode()}() {{ return 0; }}" for n in sorted(driver | {b"cuInit"}))
    )
    cc = [os.environ.get("CC", "cc"), "-w", "-fPIC", "-shared"]
    subprocess.run(
        [*cc, f"-I{include}", HERE / "cudart.c", BUILD / "rest.c", "-o", BUILD / "libsimulated.so"],
        check=True,
    )
    subprocess.run([*cc, BUILD / "driver.c", "-o", BUILD / "libcuda.so.1"], check=True)
    return BUILD


def on_cpu(t: Any) -> Any:
    """A CPU tensor with the memory of a simulated CUDA tensor; anything else as it is."""
    import torch

    if not (isinstance(t, torch.Tensor) and t.device.type == "cuda"):
        return t
    storage = t.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    memory = torch.frombuffer(
        (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8
    )
    memory.owner = t  # type: ignore[attr-defined]
    whole = memory[: storage.nbytes() // t.element_size() * t.element_size()].view(t.dtype)
    found = whole.as_strided(t.shape, t.stride(), t.storage_offset())
    return found.conj() if t.is_conj() else found


def computed_on_cpu(operator: Any) -> Callable[..., Any]:
    """The operator for simulated CUDA tensors: the CPU's, on the same memory."""
    import torch
    from torch.utils import _pytree as pytree

    def given(x: Any) -> Any:
        return (
            torch.device("cpu")
            if isinstance(x, torch.device)
            else None
            if isinstance(x, torch.Generator)
            else on_cpu(x)
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = [str(a.type) for a in operator._schema.arguments]
        pairs = zip(args, wanted, strict=False)
        number = {float: torch.float64, int: torch.int64, bool: torch.bool}
        args = tuple(
            torch.tensor(x, dtype=number[type(x)]) if kind == "Tensor" and type(x) in number else x
            for x, kind in pairs
        )
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = [given(x) for x in leaves]
        args, kwargs = pytree.tree_unflatten(values, spec)
        try:
            out = operator(*args, **kwargs)
        except NotImplementedError as error:  # a test whose truth it would be cannot be carried out
            if "pytest" in sys.modules:
                sys.modules["pytest"].skip(f"{operator}: the CPU has no such kernel")
            raise error
        back = {
            id(v): x for v, x in zip(values, leaves, strict=True) if isinstance(v, torch.Tensor)
        }
        for v, x in zip(values, leaves, strict=True):
            # an out= of another size
            if isinstance(v, torch.Tensor) and v is not x and v.shape != x.shape:
                x.resize_(v.shape).copy_(v)

        def on_device(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            return (
                back[id(t)]
                if id(t) in back
                else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t)
            )

        return pytree.tree_map(on_device, out)

    return run


def simulate() -> Any:
    """Let PyTorch's operators on CUDA tensors, and JAX, compute on the CPU; what it returns must be
    kept.
    """
    import jax
    import torch

    torch.zeros(1).cuda()
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        has_kernel = name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CUDA"
        )
        if has_kernel and base not in _WITHOUT_KERNEL:
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name.removeprefix("aten::"), computed_on_cpu(operator), "CUDA")
    for operator in (
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
        torch.ops.aten.copy_.default,
    ):
        library.impl(
            operator._schema.name.removeprefix("aten::"), computed_on_cpu(operator), "CUDA"
        )
    torch.backends.cudnn.enabled = False

    from bridge import devices
    from bridge.convert import tensors
    from bridge.trace import torch_random

    cross = tensors._cross

    def crossing(t: torch.Tensor, waited: Any) -> jax.Array:
        return (
            cross(t, waited)
            if t.device.type != "cuda"
            else jax.numpy.array(tensors.as_numpy(tensors.plain(on_cpu(t))))
        )

    tensors._cross, tensors._is_plain = crossing, lambda t: False
    devices.of = lambda device: jax.local_devices(backend="cpu")[0]
    torch_random.default_generator = lambda device: torch.default_generator
    jax.default_backend = lambda: "gpu"  # tests ask for it
    return library


def main() -> None:
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    if SIMULATED not in os.environ:
        folder = build()
        found = {
            "LD_LIBRARY_PATH": str(folder),
            "LD_PRELOAD": str(folder / "libsimulated.so"),
            "JAX_PLATFORMS": "cpu",
            SIMULATED: "1",
        }
        os.execve(sys.executable, [sys.executable, __file__, *args], {**os.environ, **found})
    sys.path[0] = os.getcwd()
    library = simulate()
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")
    del library


if __name__ == "__main__":
    main()
