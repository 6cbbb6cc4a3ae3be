"""generate: tokens beside those of PyTorch without a cache, of a decoder written here, and beside
those of model.generate, of transformers' models if that is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from networks import Decoder
from torch import nn

import bridge
from bridge.errors import DataDependentError
from torchfunc_jax import explain, generate, random_numbers

V, B, T, N = 40, 3, 6, 12
#: as if there were padding on the left of the first and the last sequence
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0, 1, 1, 1, 1, 1]])


class NoCache:
    """The model sees the whole sequence at each step."""

    def get_seq_length(self) -> int:
        return 0

    def update(self, keys: Any, values: Any, layer: int) -> tuple[Any, Any]:
        return keys, values


def step_by_step(
    model: nn.Module, ids: Any, mask: Any, count: int, choose: Any, eos: Any = (), pad: int = 0
) -> torch.Tensor:
    """The definition: the whole sequence through PyTorch for each token."""
    going = torch.ones(len(ids), dtype=torch.bool)
    for _ in range(count):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, NoCache(), mask, positions)[:, -1]
        token = torch.where(going, choose(logits), pad)
        ids = torch.cat([ids, token[:, None]], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        going = going & ~torch.isin(token, torch.tensor(eos, dtype=torch.int64))
        if not going.any():
            break
    return ids


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def sampled(temperature: float = 1.0, top_k: int = V, top_p: float = 1.0) -> Any:
    """Of the top_k most probable tokens, and those as probable as the last of them, the fewest with
    at least top_p; the first ones of equals go first.
    """

    def choose(logits: torch.Tensor) -> torch.Tensor:
        probabilities = (logits / temperature).softmax(-1)
        least = probabilities.sort(descending=True)[0][:, top_k - 1 : top_k]
        probabilities = torch.where(probabilities < least, 0.0, probabilities)
        ordered, order = (probabilities / probabilities.sum(1, keepdim=True)).sort(stable=True)
        gone = ordered.cumsum(-1) <= 1 - top_p
        probabilities = torch.zeros_like(ordered).scatter(1, order, ordered * ~gone)
        return torch.multinomial(probabilities, 1)[:, 0]

    return choose


def made() -> tuple[Decoder, torch.Tensor]:
    torch.manual_seed(0)
    return Decoder().eval(), torch.randint(3, V, (B, T))


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_greedy_tokens_are_those_without_a_cache(mask: Any) -> None:
    model, ids = made()
    expected = step_by_step(model, ids, torch.ones_like(ids) if mask is None else mask, N, greedy)
    found = generate(model, ids, attention_mask=mask, max_new_tokens=N)
    assert found.dtype == torch.int64 and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("options", "choose", "chunk_size"),
    [
        ({"top_k": 0}, sampled(), None),
        ({"top_k": None, "temperature": 0.6}, sampled(0.6), 1),
        ({"top_k": 4}, sampled(top_k=4), 100),
        ({"top_k": None, "top_p": 0.7}, sampled(top_p=0.7), None),
        ({"top_k": 10, "top_p": 0.8, "temperature": 1.5}, sampled(1.5, 10, 0.8), 5),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_samples_have_the_numbers_of_torchs_generator(
    options: Any, choose: Any, chunk_size: Any
) -> None:
    model, ids = made()
    torch.manual_seed(3)
    expected, then = step_by_step(model, ids, MASK, N, choose), torch.rand(4)
    torch.manual_seed(3)
    found = generate(
        model,
        ids,
        attention_mask=MASK,
        max_new_tokens=N,
        do_sample=True,
        chunk_size=chunk_size,
        **options,
    )
    assert torch.equal(found, expected)
    assert torch.equal(torch.rand(4), then)


def test_samples_of_tokens_that_are_equally_probable() -> None:
    torch.manual_seed(0)
    model, ids = Decoder(rounded=True), torch.randint(3, V, (64, T))
    mask = torch.ones_like(ids)
    assert len(model(ids, NoCache(), mask, mask.cumsum(1))[0, -1].unique()) < V / 2
    torch.manual_seed(3)
    expected = step_by_step(model, ids, mask, 4, sampled(2.0, 20, 0.9))
    torch.manual_seed(3)
    options = {"top_k": 20, "top_p": 0.9, "temperature": 2.0}
    found = generate(model, ids, max_new_tokens=4, do_sample=True, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("choose", "chunk_size"), [(greedy, None), (sampled(), 4)], ids=["greedy", "sampled"]
)
def test_sequences_end_and_the_call_ends_with_the_last(choose: Any, chunk_size: Any) -> None:
    """Also the generator has given no more numbers than were needed."""
    model, ids = made()
    torch.manual_seed(3)
    free = step_by_step(model, ids, MASK, N, choose)[:, T:]
    ends = [int(free[0, 2]), int(free[1, 5]), int(free[2, 4])]
    for eos in (ends[:1], ends):
        torch.manual_seed(3)
        expected, then = step_by_step(model, ids, MASK, N, choose, eos, pad=1), torch.rand(4)
        torch.manual_seed(3)
        found = generate(
            model,
            ids,
            attention_mask=MASK,
            max_new_tokens=N,
            do_sample=choose is not greedy,
            top_k=0,
            eos_token_id=eos,
            pad_token_id=1,
            chunk_size=chunk_size,
        )
        assert torch.equal(found, expected)
        assert torch.equal(torch.rand(4), then)
    assert expected.shape[1] <= T + 6


def test_no_sequence_ends_before_the_least_number_of_tokens() -> None:
    model, ids = made()
    first = int(generate(model, ids[:1], max_new_tokens=1)[0, -1])
    ended = generate(model, ids[:1], max_new_tokens=5, eos_token_id=first)
    longer = generate(model, ids[:1], max_new_tokens=5, eos_token_id=first, min_new_tokens=3)
    same = generate(model, ids[:1], max_length=T + 5, eos_token_id=first, min_length=T + 3)
    assert ended.shape == (1, T + 1) and torch.equal(longer, same)
    assert longer.shape[1] >= T + 4 and first not in longer[0, T : T + 3]


def test_padding_is_found_by_its_token() -> None:
    model, ids = made()
    ids = torch.where(MASK.bool(), ids, 2)
    expected = generate(model, ids, attention_mask=MASK, max_new_tokens=N)
    assert torch.equal(generate(model, ids, pad_token_id=2, max_new_tokens=N), expected)
    plain = generate(model, ids, pad_token_id=2, eos_token_id=2, max_new_tokens=N)
    assert not torch.equal(plain, expected)  # a token that ends a sequence is none of padding


def test_samples_by_jax_have_the_distribution() -> None:
    """Each step has other numbers, and a seed repeats them."""
    model, ids = made()
    many = ids[:1].expand(2000, T)
    with random_numbers("jax"):
        found = generate(model, many, max_new_tokens=2, do_sample=True, top_k=8)[:, T:]
        torch.manual_seed(7)
        once = generate(model, many[:3], max_new_tokens=9, do_sample=True)
        torch.manual_seed(7)
        assert torch.equal(once, generate(model, many[:3], max_new_tokens=9, do_sample=True))
    assert len({tuple(row) for row in found.tolist()}) > 20
    assert (found[:, 0] != found[:, 1]).any() and len(set(once[0, T:].tolist())) > 2
    with torch.no_grad():
        logits = model(ids[:1], NoCache(), torch.ones(1, T), torch.arange(T)[None])[0, -1]
    top, tokens = logits.topk(8)
    wanted = torch.zeros(V).index_copy(0, tokens, top.softmax(0))
    rates = torch.bincount(found[:, 0], minlength=V) / len(found)
    deviation = (wanted * (1 - wanted) / len(found)).sqrt()
    assert ((rates - wanted).abs() <= 4.5 * deviation).all()


class Heard:
    """A streamer as those of transformers."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []
        self.ended = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens.append(tokens)

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_a_streamer_gets_the_prompt_and_each_step(chunk_size: Any) -> None:
    model, ids = made()
    heard = Heard()
    found = generate(model, ids, max_new_tokens=N, streamer=heard, chunk_size=chunk_size)
    assert torch.equal(found, generate(model, ids, max_new_tokens=N))
    assert torch.equal(heard.tokens[0], ids) and heard.ended == 1
    assert torch.equal(torch.stack(heard.tokens[1:], 1), found[:, T:])


def test_a_streamers_error_ends_the_call() -> None:
    model, ids = made()
    heard, puts = Heard(), []

    def put(tokens: Any) -> None:
        puts.append(tokens)
        if len(puts) == 3:
            raise KeyboardInterrupt

    heard.put = put  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, max_new_tokens=N, streamer=heard, chunk_size=1)
    assert len(puts) == 3 and not heard.ended
    assert generate(model, ids, max_new_tokens=2).shape == (B, T + 2)


def test_programs_serve_other_numbers_and_new_weights() -> None:
    model, ids = made()
    options = {"max_new_tokens": N, "do_sample": True, "top_k": 5}
    with explain() as log:
        generate(model, ids, temperature=0.5, top_p=0.9, **options)
        first = len(log)
        torch.manual_seed(1)
        generate(model, ids.flip(0), temperature=0.7, top_p=0.8, attention_mask=MASK, **options)
        with torch.no_grad():
            model.head.weight.mul_(-1)
        torch.manual_seed(1)
        found = generate(model, ids, temperature=0.6, top_p=0.5, **options)
        assert len(log) == first
        shorter = generate(model, ids[:2, 1:], max_new_tokens=3)
        assert len(log) > first
    torch.manual_seed(1)
    mask = torch.ones_like(ids)
    assert torch.equal(found, step_by_step(model, ids, mask, N, sampled(0.6, 5, 0.5)))
    assert torch.equal(shorter, step_by_step(model, ids[:2, 1:], mask[:2, 1:], 3, greedy))


def test_the_model_is_as_before() -> None:
    model, ids = made()
    model.train()
    model.register_buffer("calls", torch.tensor(3))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    with torch.enable_grad():
        found = generate(model, ids, max_new_tokens=N)
        assert torch.is_grad_enabled()
    assert all(m.training for m in model.modules()) and not found.requires_grad
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_arrays_and_weights_on_a_mesh() -> None:
    model, ids = made()
    expected = generate(model, ids, max_new_tokens=N)
    array = generate(model, bridge.to_jax(ids), max_new_tokens=N)
    assert isinstance(array, jax.Array) and torch.equal(bridge.to_torch(array).long(), expected)
    mesh = jax.make_mesh((1,), ("model",))
    params = bridge.shard(bridge.params(model), mesh, {"project.*": P("model")})
    with torch.device("meta"):
        empty = Decoder().eval()
    for given in (ids, jax.device_put(jnp.asarray(ids.numpy()), jax.NamedSharding(mesh, P()))):
        found = generate(empty, given, params=params, max_new_tokens=N)
        found = found if isinstance(found, torch.Tensor) else bridge.to_torch(found).long()
        assert torch.equal(found, expected)
    drawn = generate(empty, ids, params=params, max_new_tokens=3, do_sample=True, chunk_size=2)
    assert drawn.shape == (B, T + 3)


class WithoutCache(nn.Module):
    def forward(self, ids: Any) -> Any:
        return ids


class Unused(nn.Module):
    def forward(self, ids: Any, past_key_values: Any) -> Any:
        return F.one_hot(ids, V).float()


class Recurrent(nn.Module):
    def forward(self, ids: Any, cache: Any) -> Any:
        return cache.recurrent_states[0]


class Counting(Decoder):
    def forward(self, ids: Any, cache: Any, attention_mask: Any, position_ids: Any) -> Any:
        int(cache.get_seq_length())
        return super().forward(ids, cache, attention_mask, position_ids)


def with_config(**config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = made()[0]
        model.config = SimpleNamespace(**config)
        return model

    return build


def with_defaults(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = made()[0]
        model.generation_config = options
        return model

    return build


IDS = torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("model", "ids", "options", "error", "message"),
    [
        (Decoder, [[1, 2]], {}, TypeError, "^ids: .*torch.Tensor.*list"),
        (Decoder, torch.ones(2, 4), {}, TypeError, "^ids: expected integers, got torch.float32"),
        (Decoder, IDS[0], {}, ValueError, r"^ids: .*\[batch, tokens\].*got \[4\].*ids\[None\]"),
        (Decoder, IDS[:, :0], {}, ValueError, r"^ids: .*at least one token, got \[2, 0\]"),
        (Decoder, IDS, {"attention_mask": IDS[:, :2]}, ValueError, "^attention_mask: .*shape"),
        (Decoder, IDS, {"attention_mask": 2 * IDS}, ValueError, "^attention_mask: .* from 2 to 2"),
        (
            Decoder,
            IDS,
            {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])},
            ValueError,
            "^attention_mask: expected padding on the left",
        ),
        (Decoder, IDS, {"pad_token_id": 1}, ValueError, "^ids: .*padding on the left"),
        (Decoder, IDS, {"max_new_tokens": -1}, ValueError, "^max_new_tokens: .*got -1"),
        (Decoder, IDS, {"max_new_tokens": 2.0}, ValueError, "^max_new_tokens: .*got 2.0"),
        (Decoder, IDS, {"max_length": 4}, ValueError, "^max_new_tokens: .*got 0 .*max_length=4"),
        (
            with_config(max_position_embeddings=9),
            IDS,
            {"max_new_tokens": 6},
            ValueError,
            "^max_new_tokens: expected at most 5, .* 9 positions",
        ),
        (
            with_config(is_encoder_decoder=True),
            IDS,
            {},
            TypeError,
            "^model: .*encoder-decoder model Decoder; call model.generate",
        ),
        (WithoutCache, IDS, {}, TypeError, "^model: .*cache or past_key_values, got WithoutCache"),
        (Unused, IDS, {}, TypeError, "^model: .*call update .*got Unused"),
        (Counting, IDS, {}, DataDependentError, "under jit only its shape"),
        (Recurrent, IDS, {}, AttributeError, "^cache: .*'recurrent_states'"),
        (Decoder, IDS, {"temperature": 0.0, "do_sample": True}, ValueError, "^temperature: .*0"),
        (Decoder, IDS, {"temperature": "hot"}, ValueError, "^temperature: .*'hot'"),
        (Decoder, IDS, {"top_k": -1}, ValueError, "^top_k: expected an integer from 0"),
        (Decoder, IDS, {"top_p": 1.5}, ValueError, "^top_p: expected a number from 0 to 1"),
        (Decoder, IDS, {"chunk_size": 0}, ValueError, "^chunk_size: .*got 0"),
        (Decoder, IDS, {"generation_config": 3}, TypeError, "^generation_config: .*int"),
        (
            Decoder,
            IDS,
            {"num_beams": 4},
            ValueError,
            "^num_beams: 4 is not supported; supported are max_new_tokens.*num_beams=1 .*model.gen",
        ),
        (Decoder, IDS, {"max_tokens": 4}, ValueError, "^max_tokens: 4 is not supported"),
        (Decoder, IDS, {"stop_strings": ["a"]}, ValueError, "^stop_strings: .*stop_strings=None"),
        (
            with_defaults(repetition_penalty=1.1),
            IDS,
            {},
            ValueError,
            "^repetition_penalty: 1.1 of the generation_config .*repetition_penalty=1.0",
        ),
        (Decoder, IDS, {"min_p": 0.1, "do_sample": True}, ValueError, "^min_p: 0.1 is not"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_wrong_input(model: Any, ids: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        generate(model(), ids, **options)
    if error is DataDependentError:
        assert any("Counting asks for values" in note for note in raised.value.__notes__)


def test_ids_that_the_model_does_not_have() -> None:
    with pytest.raises(IndexError):
        generate(made()[0], IDS * V, max_new_tokens=2)


def test_options_come_from_the_call_the_config_the_model_and_transformers() -> None:
    model, ids = made()
    model.generation_config = {"max_new_tokens": 3, "num_beams": 1, "min_p": 0.1, "top_p": None}
    assert generate(model, ids).shape == (B, T + 3)  # min_p is of samples alone
    assert generate(model, ids, generation_config={"max_new_tokens": 4}).shape == (B, T + 4)
    five = generate(model, ids, generation_config={"max_new_tokens": 4}, max_new_tokens=5)
    assert five.shape == (B, T + 5)
    del model.generation_config
    assert generate(model, ids).shape == (B, T + 20)
    model.config = SimpleNamespace(max_position_embeddings=T + 7)
    assert generate(model, ids).shape == (B, T + 7)


FAMILIES = ("llama", "gpt2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi", "gpt_neox")
MORE = ("opt", "falcon", "bloom", "mixtral", "cohere", "gptj")


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """docs/hugging_face.py, which makes small models."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
    import hugging_face

    return hugging_face


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(f, marks=() if f in FAMILIES[:2] else pytest.mark.slow) for f in FAMILIES),
        *(pytest.param(f, marks=pytest.mark.slow) for f in MORE),
    ],
)
def test_models_of_transformers(table: Any, family: str) -> None:
    """Past the window of those that have one, too."""
    model, torch_random = table.model_of(family), torch.get_rng_state
    ids = torch.randint(3, 99, (B, 10))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    free: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": None, "do_sample": False}
    padded = {**free, "attention_mask": mask, "pad_token_id": 0}
    tokens = model.generate(ids, **padded)
    ends = [int(tokens[0, 14]), int(tokens[1, 17]), int(tokens[2, 15])]
    for options in (
        free,
        padded,
        {**padded, "eos_token_id": ends[0]},
        {**padded, "eos_token_id": ends},
        {**padded, "do_sample": True},
        {**padded, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    ):
        torch.manual_seed(5)
        expected, state = model.generate(ids, **options), torch_random()
        torch.manual_seed(5)
        assert torch.equal(generate(model, ids, **options), expected), options
        assert torch.equal(torch_random(), state)
