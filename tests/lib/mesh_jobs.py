"""What the process of tests/distributed/test_sharded_modules.py runs on eight simulated devices:
``python mesh_jobs.py``; it prints one line of JSON.

A job is a way to differentiate times a model times a mesh; its result is the largest difference
from one device, relative to 1 + |value|.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from networks import Decoder
from torch import nn
from torch._higher_order_ops import scan, while_loop

import bridge
from bridge import checkpoints
from torchfunc_jax import (
    functional_call,
    generate,
    grad,
    grad_and_value,
    hessian,
    jacrev,
    jit,
    jvp,
    vjp,
    vmap,
)


class Block(nn.Module):
    """A block of a transformer, its attention written out as in GPTs.

    parts, total: it has only one of so many parts of the heads and of the inner units, and total
    adds up what the parts give.
    """

    def __init__(
        self,
        width: int = 16,
        heads: int = 4,
        parts: int = 1,
        total: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> None:
        super().__init__()
        self.size, self.total = width // heads, total
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width // parts) for _ in range(3))
        self.o_proj = nn.Linear(width // parts, width)
        self.up_proj, self.down_proj = (
            nn.Linear(width, 4 * width // parts),
            nn.Linear(4 * width // parts, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        y = self.before(x)
        q, k, v = (
            p(y).view(b, t, -1, self.size).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(b, t, -1)
        )
        x = x + self.total(F.linear(y, self.o_proj.weight)) + self.o_proj.bias
        y = F.gelu(self.up_proj(self.between(x)))
        return x + self.total(F.linear(y, self.down_proj.weight)) + self.down_proj.bias


class Of(nn.Module):
    """A function of a weight and the input as a module."""

    def __init__(self, fn: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.randn(shape) * 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(self.weight, x)


class First(nn.Sequential):
    """The outputs of a recurrent layer, without its states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


def scanned(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.tanh(state @ w + row)
        return state, state * 2

    last, every = scan(step, torch.zeros(len(x), 3), x, dim=1)
    return last + every.sum(1)


def looped(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), dtype=torch.int64), x
    return while_loop(
        lambda i, y: (i < 3) & (y.abs().sum() < 1e6), lambda i, y: (i + 1, torch.tanh(y @ w)), start
    )[1]


def branched(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: torch.zeros(len(x), 3), (x,))


def in_place(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(len(x), 5)
    y[:, 1:4] = x[:, :3]
    y += torch.arange(5.0)
    z = (y * w).cumsum(1).sort(1)[0]
    return torch.cat([z, torch.ones(len(x), 2)], 1)[:, [0, 3, 6]]


class Clipped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0].clamp(-1, 1)


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    cnn = [
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
    ]
    return {
        "mlp": (
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.LogSoftmax(-1)),
            (4,),
        ),
        "cnn": (nn.Sequential(*cnn, nn.Linear(16, 3)), (1, 8, 8)),
        "block": (Block(), (5, 16)),
        "lstm": (First(nn.LSTM(4, 6, batch_first=True)), (5, 4)),
        "gru": (First(nn.GRU(4, 6, batch_first=True)), (5, 4)),
        "embedding": (
            Of(lambda w, x: F.embedding((x * 5).abs().long() % 11, w) * x.mean(), 11, 4),
            (6,),
        ),
        "dropout": (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), (4,)),
        "einsum": (
            Of(lambda w, x: torch.einsum("bi,ijk->bjk", x, w).tanh().reshape(len(x), -1), 4, 3, 2),
            (4,),
        ),
        "erf": (
            Of(
                lambda w, x: torch.erf(x @ w) * torch.erfc(x @ w) * torch.special.log_ndtr(x @ w),
                4,
                3,
            ),
            (4,),
        ),
        "scan": (Of(scanned, 3, 3), (5, 3)),
        "while": (Of(looped, 3, 3), (3,)),
        "cond": (Of(branched, 3, 3), (3,)),
        "in place": (Of(in_place, 5), (4,)),
        "autograd.Function": (Of(lambda w, x: Clipped.apply(x @ w), 4, 3), (4,)),
        "torch.autograd.grad": (Of(lambda w, x: pulled(w, x.clone()), 4, 3), (4,)),
    }


def pulled(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = (x @ w).tanh()
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def ways(name: str, model: nn.Module) -> dict[str, Callable[..., Any]]:
    """Functions of (parameters, input); JAX's own transforms around ``bridge.call``, and this
    library's.
    """
    buffers, training = bridge.buffers(model), name in ("cnn", "dropout")
    held = {k: bridge.to_torch(v) for k, v in buffers.items()}

    def out(p: Any, x: Any) -> Any:
        return bridge.call(model, p, buffers, (x,), training=training, rng=jax.random.key(3))[0]

    def loss(p: Any, x: Any) -> Any:
        return (out(p, x) ** 2).mean()

    def torch_out(p: Any, x: Any) -> Any:
        return functional_call(model, (p, {k: v.clone() for k, v in held.items()}), (x,))

    def torch_loss(p: Any, x: Any) -> Any:
        return (torch_out(p, x) ** 2).mean()

    def both(p: Any, x: Any) -> Any:
        value, pull = vjp(torch_loss, p, x)
        return value, pull(jnp.ones(()))

    first = next(iter(dict(model.named_parameters())))
    found = {
        "call": out,
        "jax.grad": jax.grad(loss),
        "jax.jvp": lambda p, x: jax.jvp(lambda x: out(p, x), (x,), (jnp.ones_like(x),)),
        "jax.vmap(grad)": lambda p, x: jax.vmap(jax.grad(lambda p, x: loss(p, x[None])), (None, 0))(
            p, x
        ),
        "grad": grad(torch_loss),
        "vjp": both,
        "jit": jit(torch_loss),
        "jvp": lambda p, x: jvp(
            torch_out, (p, x), ({k: jnp.ones(v.shape) for k, v in p.items()}, jnp.ones(x.shape))
        ),
        "vmap(grad)": vmap(grad(lambda p, x: torch_loss(p, x[None])), in_dims=(None, 0)),
        "vmap(jacrev)": vmap(
            jacrev(lambda p, x: torch_out(p, x[None])[0], argnums=1), in_dims=(None, 0)
        ),
        "hessian": lambda p, x: hessian(lambda q, p, x: torch_loss({**p, first: q}, x))(
            p[first], p, x
        ),
    }
    if name == "cnn":  # BatchNorm in training mode
        del found["vmap(grad)"], found["jax.vmap(grad)"]
    if name == "dropout":  # keys
        found = {
            way: f
            for way, f in found.items()
            if way in ("call", "jax.grad", "jax.jvp", "jax.vmap(grad)")
        }
    if name == "while":  # it has no reverse mode
        found = {way: f for way, f in found.items() if way in ("call", "jax.jvp", "jvp")}
    # a zero that reads no argument, which jax.jit refuses where axes are Explicit
    if name == "torch.autograd.grad":
        del found["vmap(jacrev)"]
    if name == "autograd.Function":  # one without jvp has no forward mode, as in PyTorch
        found = {way: f for way, f in found.items() if way not in ("jax.jvp", "jvp", "hessian")}
    return found


def difference(found: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True)
    return max(
        float(np.abs(np.asarray(b) - np.asarray(a)).max() / (1 + np.abs(np.asarray(a)).max()))
        for a, b in pairs
    )


def on_mesh(
    f: Callable[..., Any], params: Any, x: Any, kind: AxisType, jitted: bool = True
) -> float:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    rules = {name: P("model") for name, p in params.items() if p.shape[0] % 2 == 0}
    given = bridge.shard(params, mesh, rules), jax.device_put(x, NamedSharding(mesh, P("data")))
    return difference((jax.jit(f) if jitted else f)(*given), jax.jit(f)(params, x))


def in_shard_map(
    f: Callable[..., Any], params: Any, x: Any, manual: Sequence[str] = ("data", "model")
) -> float:
    """Each device has its part of x and the same parameters, without a sum over devices; an axis
    that is not manual is Explicit.
    """
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def varying(v: Any) -> Any:
        return (
            v
            if "data" in jax.typeof(v).manual_axis_type.varying
            else jax.lax.pcast(v, "data", to="varying")
        )

    def local(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda v: varying(v)[None], f(jax.tree.map(varying, params), x))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names=set(manual)
    )
    rules = {
        name: P("model")
        for name, p in params.items()
        if p.shape[0] % 2 == 0 and "model" not in manual
    }
    found = jax.jit(mapped)(
        bridge.shard(params, mesh, rules), jax.device_put(x, NamedSharding(mesh, P("data")))
    )
    once = jax.jit(f)
    parts = [once(params, part) for part in np.split(x, 4)]
    return difference(found, jax.tree.map(lambda *p: jnp.stack(p), *parts))


RULES = {
    "[qkv]_proj.*": P("model"),
    "up_proj.*": P("model"),
    "o_proj.weight": P(None, "model"),
    "down_proj.weight": P(None, "model"),
}


def steps(model: nn.Module, mean: Callable[[Any], Any]) -> dict[str, Callable[..., Any]]:
    """(output, loss, gradients) of (parameters, input), by JAX's transforms and by this library's;
    mean: of a loss over devices.
    """
    torch_mean = bridge.from_jax(mean)

    def by_jax(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out = bridge.call(model, params, {}, (x,))[0]
            return mean((out**2).mean()), out

        (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return out, value, gradients

    def by_torch(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            out = functional_call(model, params, (x,))
            return torch_mean((out**2).mean()), out

        gradients, (value, out) = grad_and_value(loss, has_aux=True)(params, x)
        return out, value, gradients

    return {"jax": by_jax, "torch": by_torch}


def relative(found: Any, wanted: Any) -> float:
    """The largest difference in an array, relative to the largest number in it; the gradient of
    k_proj.bias is zero but for rounding.
    """
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True)
    return max(
        float(np.abs(np.asarray(b) - np.asarray(a)).max() / max(1e-4, np.abs(np.asarray(a)).max()))
        for a, b in pairs
    )


def block(kind: AxisType, shape: tuple[int, int], way: str, manual: bool) -> dict[str, Any]:
    """Outputs and gradients of a block in float64, by data and by tensors, beside those of one
    device; and what the program has in it.

    manual: in jax.shard_map, where the code adds up what the devices have itself.
    """
    with jax.enable_x64(True):
        model = Block(32, 8).double()
        params, x = bridge.params(model), np.random.RandomState(0).randn(8, 5, 32)
        wanted = jax.jit(steps(model, lambda loss: loss)["jax"])(params, x)
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)
        given = bridge.shard(params, mesh, RULES), jax.device_put(x, NamedSharding(mesh, P("data")))
        step = steps(model, lambda loss: loss)[way]
        if manual:
            part = Block(
                32, 8, shape[1], bridge.from_jax(lambda y: jax.lax.psum(y, "model"))
            ).double()
            step = steps(part, lambda loss: jax.lax.pmean(loss, "data"))[way]
            specs = {name: p.sharding.spec for name, p in given[0].items()}
            step = jax.shard_map(
                step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P("data"), P(), specs)
            )
        compiled = jax.jit(step).lower(*given).compile()
        found = compiled(*given)
        return {
            "difference": relative(found, wanted),
            "shape": found[0].shape,
            "gathers": sum(compiled.as_text().count(name) for name in ("all-gather", "all-to-all")),
            "sums": compiled.as_text().count("all-reduce"),
            "sharded": all(
                found[2][k].sharding.is_equivalent_to(p.sharding, p.ndim)
                for k, p in given[0].items()
            ),
            "output": found[0].sharding.is_equivalent_to(given[1].sharding, 3),
        }


KINDS, SHAPES, WAYS = (AxisType.Explicit, AxisType.Auto), ((1, 8), (8, 1), (2, 4)), ("jax", "torch")
BLOCKS = [
    case
    for case in itertools.product(KINDS, SHAPES, WAYS, (False, True))
    if not case[3] or case[1] == (2, 4)
]


def title(case: tuple[AxisType, tuple[int, int], str, bool]) -> str:
    kind, shape, way, manual = case
    return f"block, {way}, {kind.name} {shape[0]}x{shape[1]}{', shard_map' * manual}"


def files() -> Iterator[dict[str, Any]]:
    """Weights read onto Explicit and Auto meshes: whether each device has its part, and no more."""
    model = Block()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(f"{folder}/model.safetensors", model.state_dict())
        for kind in (AxisType.Explicit, AxisType.Auto):
            mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
            placed = bridge.shard(bridge.params(model), mesh, RULES)
            read = bridge.load_sharded(folder, mesh, RULES, like=model)
            yield {
                "names": list(read) == list(placed) or sorted(read) == sorted(placed),
                "sharded": all(read[name].sharding == p.sharding for name, p in placed.items()),
                "equal": all(
                    (a.device, a.data.tolist()) == (b.device, b.data.tolist())
                    for name, p in placed.items()
                    for a, b in zip(
                        read[name].addressable_shards, p.addressable_shards, strict=True
                    )
                ),
                "rows of a device": read["q_proj.weight"].addressable_shards[0].data.shape,
            }


def decoded(kind: AxisType) -> float:
    """The share of tokens that are others than on one device; heads and sequences are spread over a
    mesh.
    """
    torch.manual_seed(0)
    model, ids = Decoder().eval(), torch.randint(40, (8, 5))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    params = bridge.shard(bridge.params(model), mesh, {"project.*": P("model"), "head.*": P()})
    given = jax.device_put(bridge.to_jax(ids), NamedSharding(mesh, P("data")))
    found = bridge.to_torch(generate(model, given, params=params, max_new_tokens=9))
    return float((found != generate(model, ids, max_new_tokens=9)).double().mean())


def jobs() -> Iterator[tuple[str, Callable[[], Any]]]:
    thin = sys.argv[1] == "fast"
    for name, (model, shape) in models().items():
        params, x = (
            bridge.params(model),
            np.random.RandomState(1).randn(8, *shape).astype("float32"),
        )
        for way, f in ways(name, model).items():
            if thin and (name, way) not in FAST:
                continue
            yield (
                f"{name}, {way}, shard_map",
                lambda f=f, params=params, x=x: in_shard_map(f, params, x),
            )
            yield (
                f"{name}, {way}, Explicit",
                lambda f=f, params=params, x=x: on_mesh(f, params, x, AxisType.Explicit),
            )
            if not thin:
                yield (
                    f"{name}, {way}, Auto",
                    lambda f=f, params=params, x=x: on_mesh(f, params, x, AxisType.Auto),
                )
            # un-jitted, jax 0.10 itself cannot differentiate on Explicit axes
            if name == "mlp" and "jax" not in way:
                yield (
                    f"{name}, {way}, un-jitted",
                    lambda f=f, params=params, x=x: on_mesh(f, params, x, AxisType.Explicit, False),
                )
                yield (
                    f"{name}, {way}, partly manual",
                    lambda f=f, params=params, x=x: in_shard_map(f, params, x, ("data",)),
                )
    if thin:
        for case in BLOCKS:
            yield title(case), functools.partial(block, *case)
        yield "files", lambda: list(files())
    for kind in (AxisType.Explicit, AxisType.Auto):
        yield f"decoding, {kind.name}", functools.partial(decoded, kind)


FAST = {
    ("mlp", "vmap(grad)"),
    ("mlp", "jit"),
    ("mlp", "vjp"),
    ("cnn", "jax.grad"),
    ("lstm", "grad"),
    ("erf", "vjp"),
    ("cond", "jvp"),
    ("scan", "vjp"),
    ("while", "call"),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    jax.config.update("jax_num_cpu_devices", 8)
    results: dict[str, Any] = {}
    for label, job in jobs():
        try:
            results[label] = job()
        except Exception:
            results[label] = traceback.format_exc(limit=-3)
        print(label, results[label], file=sys.stderr, flush=True)
    print(json.dumps(results))
