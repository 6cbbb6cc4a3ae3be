"""FlexAttention inside transforms, beside a dense attention written with a loop-free mask and
autograd of plain PyTorch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import torchfunc_jax
from torchfunc_jax import grad, jit, vmap

B, H, L, S, E = 2, 4, 6, 8, 4
_bias, _tokens = (
    torch.randn(H, L, S),
    torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 2, 2, 3, 3]]),
)
_slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def _dense(q, k, v, change=None, shown=None, scale=None):
    """Attention on all scores at once: change and shown get indices that broadcast."""
    k, v = (
        t.repeat_interleave(q.shape[1] // k.shape[1], 1).expand(q.shape[0], -1, -1, -1)
        for t in (k, v)
    )
    b, h, m, n = torch.meshgrid(
        *[torch.arange(size) for size in (*q.shape[:3], k.shape[2])], indexing="ij"
    )
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if change is not None:
        scores = change(scores, b, h, m, n)
    if shown is not None:
        scores = scores.masked_fill(~shown(b, h, m, n), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


MODS: dict[str, Callable[..., Any]] = {
    "relative": lambda score, b, h, m, n: score + (m - n) * 0.1,
    "slopes": lambda score, b, h, m, n: score + _slopes[h] * (n - m),
    "bias": lambda score, b, h, m, n: score + _bias[h, m, n],
    "soft cap": lambda score, b, h, m, n: 2 * torch.tanh(score / 2),
    "by condition": lambda score, b, h, m, n: torch.where(
        (h % 2 == 0) & (m >= n), score * 2, -score
    ),
}
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, m, n: m >= n - 2,
    "window": lambda b, h, m, n: (m - n).abs() <= 2,
    "documents": lambda b, h, m, n: _tokens[b, m] == _tokens[b, n],
}


def _inputs(kv_heads=H, kv_batch=B):
    return (
        torch.randn(B, H, L, E),
        torch.randn(kv_batch, kv_heads, S, E),
        torch.randn(kv_batch, kv_heads, S, E),
    )


def _compare(run, expected, *args, **options):
    """run's values and gradients beside those of the dense formula, jitted and mapped.

    PyTorch, which runs what is not jitted, has no derivative of FlexAttention on CPUs, and does not
    map it.
    """
    weights = lambda out: sum(
        (x * torch.cos(torch.arange(x.numel())).reshape(x.shape)).sum() for x in out
    )
    loss = lambda fn: lambda *xs: (weights(out := fn(*xs)), out)
    places = tuple(range(len(args)))
    truth = torch.func.grad(loss(expected), places, has_aux=True)(*args)
    mine = grad(loss(run), places, has_aux=True)
    same(jit(mine)(*args), truth, **options)
    stacked = [torch.stack([x, x * 0.5]) for x in args]
    lanes = torch.func.vmap(torch.func.grad(loss(expected), places, has_aux=True))(*stacked)
    same(jit(vmap(mine))(*stacked), lanes, **options)
    _refused_as_by_torch(lambda T: T.grad(loss(run), places, has_aux=True)(*args))
    _refused_as_by_torch(lambda T: T.vmap(T.grad(loss(run), places, has_aux=True))(*stacked))
    leaves = [x.clone().requires_grad_() for x in args]
    same(torch.autograd.grad(jit(lambda: weights(run(*leaves)))(), leaves), truth[0], **options)


def _refused_as_by_torch(call):
    """call(torch.func) raises, and un-jitted call(torchfunc_jax) raises the same."""
    torch._dynamo.reset()
    refused = (RuntimeError, AssertionError)  # the latter by PyTorch 2.15, of captured tensors
    with pytest.raises(refused) as expected:
        call(torch.func)
    with pytest.raises(refused) as found:
        call(torchfunc_jax)
    assert found.type is expected.type and str(found.value)[:60] == str(expected.value)[:60]
    assert "flex_attention" in found.value.__notes__[0] and "jit" in found.value.__notes__[0]
    assert torch._C._functorch.peek_interpreter_stack() is None


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", [*MODS, *MASKS, "both", "neither"])
def test_values_and_gradients(name):
    change = MODS.get(name, MODS["soft cap"] if name == "both" else None)
    shown = MASKS.get(name, MASKS["window"] if name == "both" else None)
    block_mask = None if shown is None else create_block_mask(shown, B, H, L, S, device="cpu")
    run = lambda q, k, v: (flex_attention(q, k, v, score_mod=change, block_mask=block_mask),)
    _compare(
        run, lambda q, k, v: _dense(q, k, v, change, shown)[:1], *_inputs(), rtol=1e-4, atol=1e-5
    )


def test_gradients_of_what_score_mod_captures():
    q, k, v = _inputs()

    def attend(attention):
        def run(bias, slope):
            change = lambda score, b, h, m, n: score * slope + bias[h, m, n]
            return (attention(q, k, v, change),)

        return run

    _compare(
        attend(flex_attention),
        attend(lambda *args: _dense(*args)[0]),
        _bias,
        torch.tensor(0.7),
        rtol=1e-4,
        atol=1e-5,
    )


def test_grouped_queries_and_one_batch_of_keys():
    shown = MASKS["causal"]
    block_mask = create_block_mask(shown, B, H, L, S, device="cpu")
    run = lambda q, k, v: (
        flex_attention(q, k, v, block_mask=block_mask, scale=0.3, enable_gqa=True),
    )
    _compare(
        run,
        lambda q, k, v: _dense(q, k, v, None, shown, 0.3)[:1],
        *_inputs(2, 1),
        rtol=1e-4,
        atol=1e-5,
    )


def test_further_outputs():
    shown = MASKS["window"]
    block_mask = create_block_mask(shown, None, None, L, S, device="cpu")

    def run(q, k, v):
        out, aux = flex_attention(q, k, v, block_mask=block_mask, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    args = _inputs()
    _compare(run, lambda q, k, v: _dense(q, k, v, None, shown)[:2], *args, rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch prefers return_aux
        out, lse = jit(
            lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
        )(*args)
    same((out, lse), run(*args), rtol=1e-4, atol=1e-5)


def test_rows_that_see_nothing():
    shown = lambda b, h, m, n: (m > 2) & (n < 4)
    block_mask = create_block_mask(shown, None, None, L, S, device="cpu")
    args = _inputs()

    def run(q, k, v):
        return flex_attention(q, k, v, block_mask=block_mask, return_aux=AuxRequest(lse=True))

    out, aux = jit(run)(*args)
    plain, plain_aux = run(*args)
    same((out, aux.lse), (plain, plain_aux.lse), rtol=1e-4, atol=1e-5)
    found = jit(grad(lambda *xs: run(*xs)[0].sum() + run(*xs)[1].lse[..., 3:].sum(), (0, 1, 2)))(
        *args
    )
    seen = lambda q, k, v: _dense(q[:, :, 3:], k[:, :, :4], v[:, :, :4])
    expected = torch.func.grad(lambda *xs: seen(*xs)[0].sum() + seen(*xs)[1].sum(), (0, 1, 2))(
        *args
    )
    same(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = (t.to(dtype) for t in _inputs())
    seen = []

    def noted(score, b, h, m, n):
        seen.append((score.dtype, m.dtype))
        return score + b

    run = lambda q, k, v: flex_attention(q, k, v, score_mod=lambda score, b, h, m, n: score + b)
    tolerance = {} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    same(jit(run)(q, k, v), run(q, k, v), **tolerance)
    jit(lambda q: flex_attention(q, k, v, score_mod=noted))(q)
    assert seen[0] == (torch.float64 if dtype is torch.float64 else torch.float32, torch.int64)
    slope = jit(grad(lambda q: run(q, k, v).float().sum()))(q)
    expected = torch.func.grad(
        lambda q: _dense(q, k.double(), v.double(), lambda s, b, h, m, n: s + b)[0].sum()
    )(q.double())
    same(slope, expected.to(dtype), **tolerance)


def test_autocast():
    q, k, v = _inputs()

    def run(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, k, v)

    same(jit(run)(q, k, v), run(q, k, v), rtol=2e-2, atol=2e-2)


def test_second_derivatives_and_forward_mode():
    q, k, v = _inputs()
    mine = lambda q: flex_attention(q, k, v, score_mod=MODS["soft cap"]).square().sum()
    truth = lambda q: _dense(q, k, v, MODS["soft cap"])[0].square().sum()
    pushed = lambda func, fn: func.jvp(func.grad(fn), (q,), (k[:, :, :L],))
    same(
        jit(lambda: pushed(torchfunc_jax, mine))(), pushed(torch.func, truth), rtol=1e-3, atol=1e-4
    )


def test_all_tensors_captured():
    q, k, v = _inputs()
    run = lambda s: flex_attention(q, k, v) * s
    _compare(
        lambda s: (run(s),),
        lambda s: (_dense(q, k, v)[0] * s,),
        torch.tensor(2.0),
        rtol=1e-4,
        atol=1e-5,
    )
    _refused_as_by_torch(lambda T: T.vmap(run)(torch.tensor([2.0, 3.0])))


REFUSED = {
    "heads": lambda t: flex_attention(t, t[:, :2], t[:, :2]),
    "three dimensions": lambda t: flex_attention(t[0], t[0], t[0]),
    "batches": lambda t: flex_attention(t, t[:1], t[:1]),
    "a mask of another length": lambda t: flex_attention(
        t, t, t, block_mask=create_block_mask(MASKS["causal"], 1, 1, 256, 256, "cpu")
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses(name):
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)) as expected:
        REFUSED[name](torch.randn(B, H, L, E))
    with pytest.raises(type(expected.value)) as found:
        jit(REFUSED[name])(torch.randn(B, H, L, E))
    assert str(expected.value)[:40] in str(found.value)


def test_plain_pytorch_is_as_before():
    q, k, v = _inputs()
    before = flex_attention(q, k, v)
    jit(flex_attention)(q, k, v)
    same(flex_attention(q, k, v), before)
