"""Attention by blocks of queries: the numbers of PyTorch's formula in float64, in every transform,
and memory that grows linearly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from agreement import floats, same
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import bridge
import torchfunc_jax
from bridge.process import process
from bridge.trace.attention_scores import of_environment
from bridge.xla.tiers import _gains
from torchfunc_jax import attention_scores, grad, hessian, hvp, jit, jvp, random_numbers, vmap

attention = F.scaled_dot_product_attention
L, S, E = 37, 11, 8  # 37 queries are no multiple of a block's
AT_ONCE = 200  # blocks of 18 or 19 queries
Q, K, V = floats(2, 4, L, E), floats(2, 4, S, E), floats(2, 4, S, 5)
SEEN = floats(L, S) > -0.3
SEEN[5] = False  # a row that sees nothing
WINDOW = (torch.arange(L)[:, None] - 3 * torch.arange(S)).abs() < 6
HIDDEN = torch.where(SEEN, 0.0, -math.inf).double()

Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
CASES: dict[str, Case] = {
    "without a mask": (attention, (Q, K, V)),
    "causal": (lambda q, k, v: attention(q, k, v, is_causal=True), (Q, K, V)),
    "causal, more keys": (
        lambda q, k, v: attention(q, k, v, is_causal=True, scale=-0.5),
        (floats(1, 2, 33, E), *[floats(1, 2, 45, E)] * 2),
    ),
    "boolean, a row hidden": (lambda q, k, v: attention(q, k, v, SEEN), (Q, K, V)),
    "additive, a row hidden": (lambda q, k, v: attention(q, k, v, HIDDEN), (Q, K, V)),
    "a sliding window": (lambda q, k, v: attention(q, k, v, WINDOW), (Q, K, V)),
    "additive, of each head": (lambda *xs: attention(*xs, scale=0.3), (Q, K, V, floats(4, L, S))),
    "additive, of each batch's keys": (attention, (Q, K, V, floats(2, 1, 1, S))),
    "additive, of each query": (attention, (Q, K, V, floats(L, 1))),
    "grouped queries": (
        lambda q, k, v: attention(q, k, v, enable_gqa=True),
        (Q, K[:, :2], V[:, :1]),
    ),
    "three dimensions": (attention, (Q[0], K[0], V[0])),
    "two dimensions": (attention, (Q[0, 0], K[0, 0], V[0, 0])),
    "five dimensions, broadcast": (attention, (Q[:, None], K[:1, None], V[None, :, None])),
    "the operator itself": (
        torch.ops.aten.scaled_dot_product_attention.default,
        (Q[0], K[0], V[0]),
    ),
    "one key": (attention, (floats(1, 1, 300, 2), floats(1, 1, 1, 2), floats(1, 1, 1, 3))),
}


@pytest.fixture(autouse=True)
def _blocks() -> Iterator[None]:
    with attention_scores(AT_ONCE):
        yield


def looped(fn: Callable[..., Any], *args: Any) -> bool:
    """Whether the program of a function has a loop."""
    return "stablehlo.while" in jit(fn).lower(*args).as_text()


def _all_of(T: Any, fn: Callable[..., torch.Tensor], places: tuple[int, ...]) -> Callable[..., Any]:
    """fn's value, its gradient, and the derivatives of both in a direction."""

    def run(args: tuple[torch.Tensor, ...], along: tuple[torch.Tensor, ...]) -> Any:
        loss = lambda *xs: (out := fn(*xs)).square().sum() + out.sin().sum()
        return T.jvp(fn, args, along), T.jvp(T.grad(loss, places), args, along)

    return run


def _truth(
    fn: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...], along: tuple[torch.Tensor, ...]
) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return _all_of(torch.func, fn, tuple(range(len(args))))(args, along)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_both_orders_and_modes(name: str) -> None:
    fn, args = CASES[name]
    along = tuple(x.roll(1, -1) for x in args)
    assert looped(fn, *args)
    same(
        jit(_all_of(torchfunc_jax, fn, tuple(range(len(args)))))(args, along),
        _truth(fn, args, along),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("name", ["causal", "additive, of each head", "two dimensions"])
def test_calls_that_are_not_jitted(name: str) -> None:
    fn, args = CASES[name]
    along = tuple(x.roll(1, -1) for x in args)
    same(
        _all_of(torchfunc_jax, fn, tuple(range(len(args))))(args, along),
        _truth(fn, args, along),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize(
    "mapped",
    [(0, None, None, None), (None, 0, 0, None), (None, None, None, 0), (0, 1, 0, 1)],
    ids=str,
)
def test_vmap_of_some(mapped: tuple[int | None, ...]) -> None:
    args = [
        x if d is None else torch.stack([x, x.sin(), x * 2], d)
        for x, d in zip((Q, K, V, floats(L, S)), mapped, strict=True)
    ]
    slopes = lambda T: T.vmap(
        T.grad(lambda *xs: attention(*xs).square().sum(), (0, 1, 2, 3)), mapped
    )
    with sdpa_kernel(SDPBackend.MATH):
        expected = slopes(torch.func)(*args)
    same(jit(slopes(torchfunc_jax))(*args), expected, rtol=1e-9, atol=1e-9)


def test_hessian() -> None:
    q, k, v = floats(1, 33, 2), floats(1, 9, 2), floats(1, 9, 1)
    f = lambda k: attention(q, k, v, is_causal=True).square().sum()
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.hessian(f)(k)
    same(jit(hessian(f))(k), expected, rtol=1e-9, atol=1e-9)
    assert looped(hessian(f), k)


def test_backward() -> None:
    """torch's own, through a program and through an un-jitted call."""
    truth = torch.func.grad(lambda *xs: attention(*xs, is_causal=True).square().sum(), (0, 1, 2))(
        Q, K, K
    )
    f = lambda q, k, v: attention(q, k, v, is_causal=True).square().sum(-1)
    for run in (jit(f), vmap(f)):
        leaves = [x.clone().requires_grad_() for x in (Q, K, K)]
        run(*leaves).sum().backward()
        same([x.grad for x in leaves], list(truth), rtol=1e-9, atol=1e-9)


def test_backward_inside_of_a_jitted_function() -> None:
    """As in a training step that is jitted as a whole; also twice."""
    leaves = [x.clone().requires_grad_() for x in (Q, K, K)]

    def loss(*xs: torch.Tensor) -> torch.Tensor:
        return attention(*xs, is_causal=True).square().sum()

    def twice(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(loss(*xs), xs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), xs)

    truth = torch.func.grad(loss, (0, 1, 2))(Q, K, K)
    found = jit(lambda *xs: torch.autograd.grad(loss(*xs), xs))(*leaves)
    same(list(found), list(truth), rtol=1e-9, atol=1e-9)
    with sdpa_kernel(SDPBackend.MATH):
        expected = twice(*leaves)
    same(list(jit(twice)(*leaves)), list(expected), rtol=1e-8, atol=1e-8)


def test_the_fused_operator_and_its_backward() -> None:
    """PyTorch's C++ may call them too."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def run(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> Any:
        out, logsumexp = fused(q, k, k, is_causal=True)
        return out, logsumexp, back(g, q, k, k, out, logsumexp, 0.0, True)

    args = Q, K, floats(2, 4, L, E)
    assert looped(run, *args)
    same(jit(run)(*args), run(*args), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": HIDDEN}], ids=["", "causal", "additive"]
)
def test_half_types_are_as_near_to_float64_as_at_once(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    wide = [x.bfloat16().double() for x in (Q * 3, K * 3, V + 5)]
    seed = floats(2, 4, L, 5).bfloat16()

    def answers(namespace: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        named = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        run = lambda g, *xs: (lambda out, pull: (out, *pull(g)))(
            *namespace.vjp(lambda *xs: attention(*xs, **named), *xs)
        )
        return list(
            (run if namespace is torch.func else jit(run))(
                seed.to(dtype), *(x.to(dtype) for x in wide)
            )
        )

    exact, by_blocks = answers(torch.func, torch.float64), answers(torchfunc_jax, dtype)
    with attention_scores(math.inf):
        at_once = answers(torchfunc_jax, dtype)
    for b, a, e in zip(by_blocks, at_once, exact, strict=True):
        assert b.dtype == dtype
        error, allowed = (b.double() - e).abs(), (a.double() - e).abs()
        assert error.mean() <= 1.2 * allowed.mean() and error.max() <= 2 * allowed.max(), (
            error.mean() / allowed.mean()
        )


def test_autocast() -> None:
    q, k, v = (x.float() for x in (Q[0], K[0], V[0]))  # three dimensions

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q, k, v)

    found = jit(run)(q, k, v)
    assert found.dtype == torch.bfloat16 and looped(run, q, k, v)
    same(found, run(q, k, v), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention(causal: bool) -> None:
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).double(), floats(3, L, 8)
    padded = torch.arange(L) > torch.tensor([[L], [20], [30]])
    mask = (
        nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64) if causal else None
    )
    options = {
        "need_weights": False,
        "key_padding_mask": torch.where(padded, -math.inf, 0.0).double(),
        "attn_mask": mask,
    }
    params = {name: p.detach() for name, p in layer.named_parameters()}
    loss = lambda params, x: (
        torch.func.functional_call(layer, params, (x, x, x), options)[0].square().sum()
    )
    assert looped(loss, params, x)
    same(
        jit(grad(loss, (0, 1)))(params, x),
        torch.func.grad(loss, (0, 1))(params, x),
        rtol=1e-9,
        atol=1e-9,
    )


def test_what_torch_refuses_is_refused() -> None:
    wrong: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda q, k: attention(q, k[..., :3], k),
        lambda q, k: attention(q, k.float(), k),
        lambda q, k: attention(q, k[:, :3], k[:, :3]),
        lambda q, k: attention(q, k[:, :3], k[:, :3], enable_gqa=True),
        lambda q, k: attention(q, k, k, torch.zeros(L, 3).double()),
        lambda q, k: attention(q, k, k, torch.zeros(L, S).half()),
        lambda q, k: attention(q, k, k, torch.zeros(L, S).long()),
        lambda q, k: attention(q, k, k, dropout_p=1.5),
        lambda q, k: attention(q, k),
    ]
    for run in wrong:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
            run(Q, K)
        with pytest.raises(type(expected.value)):
            jit(run)(Q, K)


def test_nothing_to_attend_to() -> None:
    """Without batches, keys or numbers there is nothing to compute by blocks."""
    for q, k in ((Q[:0], K[:0]), (Q, K[:, :, :0]), (Q[..., :0], K[..., :0]), (Q[:, :, :0], K)):
        same(jit(attention)(q, k, k), attention(q, k, k))


# -- memory ----------------------------------------------------------------------------------------
def test_memory_grows_with_the_length() -> None:
    loss = lambda q, k, v: attention(q, k, v, is_causal=True).square().sum()
    ways: dict[str, Callable[..., Any]] = {
        "gradient": grad(loss, (0, 1, 2)),
        "hvp": lambda *xs: hvp(loss, xs, xs)[1],
    }
    for name, fn in ways.items():
        sizes = []
        for length in (512, 4096):
            args = [torch.zeros(1, 1, length, 16)] * 3
            with attention_scores(2**14):
                sizes.append(jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes)
        assert sizes[1] <= 8.5 * sizes[0], (name, sizes)
        assert sizes[1] < 4096 * 4096, (name, sizes)  # a quarter of the scores


def test_short_sequences_are_computed_at_once() -> None:
    with attention_scores(process.attention_scores):
        assert not looped(attention, *[torch.zeros(1, 1, 512, 2)] * 3)
        assert looped(attention, *[torch.zeros(1, 1, 513, 2)] * 3)
        # a step of decoding
        assert not looped(attention, torch.zeros(1, 1, 16, 2), *[torch.zeros(1, 1, 2**15, 2)] * 2)


def test_loops_of_many_scores_are_vectorized_from_the_first_run_on() -> None:
    loop = lambda n: (
        jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, x: (c, x * 2), 0, x))(
            jnp.zeros((3, n))
        ).jaxpr
    )
    assert not _gains(loop(2**16)) and _gains(loop(2**18))


# -- the switch ------------------------------------------------------------------------------------
def test_a_program_belongs_to_its_number_of_scores() -> None:
    f = jit(attention)
    truth = f(Q, K, V)
    for at_once in (math.inf, AT_ONCE, 10**6):
        with attention_scores(at_once):
            same(f(Q, K, V), truth)
    assert len(f.programs()) == 3
    before = set(process.programs.records)
    for at_once in (300, 310, 300):
        with attention_scores(at_once):
            same(vmap(attention)(Q, K, V), truth)
    assert len(set(process.programs.records) - before) == 2


@pytest.mark.parametrize("wrong", [0, -1, math.nan, "all", True, None])
def test_numbers_that_make_no_sense(wrong: Any) -> None:
    with (
        pytest.raises(ValueError, match="at_once: expected a number of scores"),
        attention_scores(wrong),
    ):
        pass


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, found in (("inf", math.inf), ("64", 64), ("1e6", 10**6)):
        monkeypatch.setenv("TORCHFUNC_JAX_ATTENTION_SCORES", text)
        assert of_environment() == found
    for text in ("many", "0", ""):
        monkeypatch.setenv("TORCHFUNC_JAX_ATTENTION_SCORES", text)
        with pytest.raises(
            ValueError, match="TORCHFUNC_JAX_ATTENTION_SCORES: expected a number of scores"
        ):
            of_environment()


# -- dropout ---------------------------------------------------------------------------------------
def test_torch_draws_the_numbers_of_all_scores() -> None:
    f = lambda q: attention(q, K, V, dropout_p=0.5)
    torch.manual_seed(0)
    expected = f(Q)
    torch.manual_seed(0)
    same(jit(f)(Q), expected)


def test_dropout_that_jax_draws() -> None:
    """Uniform weights and unit vectors as values show each weight: it is 0 or 1 / (1 - p) times as
    large.
    """
    q, k, v, p = torch.zeros(3, 64, 4), torch.zeros(3, 50, 4), torch.eye(50).expand(3, 50, 50), 0.25

    def run(q: torch.Tensor, v: torch.Tensor) -> Any:
        out, pull = torchfunc_jax.vjp(lambda q, v: attention(q, k, v, dropout_p=p), q, v)
        return out, pull(torch.ones_like(out))

    with random_numbers("jax"), attention_scores(16 * 50):
        torch.manual_seed(0)
        out, (dq, dv) = jit(run)(q, v)
        assert looped(run, q, v)
        torch.manual_seed(0)
        same(jit(run)(q, v), (out, (dq, dv)))
        lanes = {
            r: jit(vmap(lambda q: run(q, v)[0], randomness=r))(torch.stack([q, q]))
            for r in ("same", "different")
        }
        with pytest.raises(RuntimeError, match="randomness"):
            jit(vmap(lambda q: run(q, v)[0]))(torch.stack([q, q]))
    kept = (out > 0).double()
    same(out, (kept / (50 * (1 - p))).float())
    assert abs(kept.mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / kept.numel())
    rows = kept.flatten(0, 1)
    assert len(torch.unique(rows, dim=0)) == len(rows)  # blocks and rows have numbers of their own
    # the backward pass has the forward pass's numbers
    same(dv.sum(-1), out.sum(-2) * 50, rtol=1e-5, atol=1e-5)
    assert torch.equal(lanes["same"][0], lanes["same"][1]) and not torch.equal(
        lanes["different"][0], lanes["different"][1]
    )


# -- a lowering of the user's ----------------------------------------------------------------------
@pytest.mark.usefixtures("lowerings_as_before")
def test_a_kernel_of_the_users() -> None:
    """JAX's own, as in docs/performance.md."""
    calls: list[str] = []

    @bridge.register_lowering("aten.scaled_dot_product_attention")
    def attend(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        *,
        scale=None,
        enable_gqa=False,
    ):  # type: ignore[no-untyped-def]
        calls.append("attend")
        if dropout_p:
            raise NotImplementedError("dropout_p: this kernel has no dropout")
        masks = (
            {} if attn_mask is None else {"mask" if attn_mask.dtype == bool else "bias": attn_mask}
        )
        q, k, v = (jnp.swapaxes(t, -2, -3) for t in (query, key, value))
        return jnp.swapaxes(
            jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, **masks), -2, -3
        )

    q, k, v = Q[:, :, 6:].float(), K.float(), floats(2, 4, S, E).float()
    for options in ({}, {"is_causal": True, "scale": 0.3}, {"attn_mask": SEEN[None, None, 6:]}):
        loss = lambda q, k, v, options=options: attention(q, k, v, **options).square().sum()
        truth = torch.func.grad(loss, (0, 1, 2))(q, k, v)
        for run in (jit(grad(loss, (0, 1, 2))), grad(loss, (0, 1, 2))):
            calls.clear()
            same(run(q, k, v), truth, rtol=1e-4, atol=1e-4)
            assert calls
    layer, x = (
        nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False),
        floats(1, 5, 8).float(),
    )
    calls.clear()
    same(
        jit(lambda x: layer(x, x, x, need_weights=False)[0])(x),
        layer(x, x, x, need_weights=False)[0],
        rtol=1e-4,
        atol=1e-5,
    )
    assert calls
    with pytest.raises(NotImplementedError, match="this kernel has no dropout"):
        jit(lambda q: attention(q, k, v, dropout_p=0.5))(q)


# -- flex_attention --------------------------------------------------------------------------------
def _shown(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (m - 3 * n).abs() <= 5


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, slope: torch.Tensor
) -> torch.Tensor:
    block_mask = create_block_mask(_shown, None, None, L, S, device="cpu")
    change = lambda score, b, h, m, n: score * slope + bias[h, m, n]
    out, aux = flex_attention(q, k, v, change, block_mask, return_aux=AuxRequest(lse=True))
    return out.square().sum() + aux.lse[..., 3:6].sum()


def _formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, slope: torch.Tensor
) -> torch.Tensor:
    m, n = torch.arange(L)[:, None], torch.arange(S)
    scores = (q @ k.mT / math.sqrt(E) * slope + bias).masked_fill(~_shown(0, 0, m, n), -math.inf)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, 0)
    return (scores.softmax(-1).masked_fill(hidden, 0) @ v).square().sum() + scores.logsumexp(-1)[
        ..., 3:6
    ].sum()


def test_flex_attention() -> None:
    """A window, a row that sees nothing, and what score_mod captures, as arguments and as leaves of
    torch's graph.
    """
    args = Q, K, V, floats(4, L, S), torch.tensor(0.7).double()
    along, places = tuple(x.cos() for x in args), tuple(range(5))
    assert looped(_flex, *args)
    found = jit(lambda args, along: jvp(grad(_flex, places), args, along))(args, along)
    truth = torch.func.jvp(torch.func.grad(_formula, places), args, along)
    same(found, truth, rtol=1e-9, atol=1e-9)
    lanes = torch.stack([Q, Q.sin()])
    mapped = jit(vmap(grad(_flex, places), (0, None, None, None, None)))(lanes, *args[1:])
    same(
        mapped,
        torch.func.vmap(torch.func.grad(_formula, places), (0, None, None, None, None))(
            lanes, *args[1:]
        ),
        rtol=1e-9,
        atol=1e-9,
    )
    leaves = [x.clone().requires_grad_() for x in args]
    same(torch.autograd.grad(jit(lambda: _flex(*leaves))(), leaves), truth[0], rtol=1e-9, atol=1e-9)


def test_flex_attention_without_a_gradient() -> None:
    def run(q: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = flex_attention(q, K, V).sum()
        return (q * factor).sum()

    same(jit(grad(run))(Q), attention(Q, K, V).sum().expand(Q.shape).clone(), rtol=1e-9, atol=1e-9)
