"""generate: decoding by a causal language model as one XLA program, with a static cache of keys and
values: the prompt, and a loop over tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import torch
import torch.nn.functional as F
from jax import lax
from torch import nn

import bridge
from bridge.errors import DataDependentError, public
from bridge.intercepted.control_flow import while_loop
from bridge.trace.torch_random import by_torch
from torchfunc_jax.functional_call import functional_call
from torchfunc_jax.jit import jit

_Ids = TypeVar("_Ids", torch.Tensor, jax.Array)

#: What transformers decodes with where neither the call nor the model's generation_config says it.
_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": None,
    "max_length": None,
    "min_new_tokens": None,
    "min_length": 0,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "eos_token_id": None,
    "pad_token_id": None,
}
#: Other options, and the values with which they change no token, besides None and False; the first
#: of them switches the option off.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "use_cache": (True,),
    "cache_implementation": (None, "dynamic", "static", "hybrid"),
}
#: Other options of samples alone.
_OF_SAMPLES = frozenset({"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"})
#: Options that change no token, or only together with others that are refused.
_PASSED_OVER = frozenset(
    {
        "_from_model_config",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bos_token_id",
        "compile_config",
        "disable_compile",
        "early_stopping",
        "length_penalty",
        "max_cache_len",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "target_lookbehind",
        "transformers_version",
    }
)
#: The tokens of a default length, as in transformers.
_NEW_TOKENS = 20
#: The steps of a program where a streamer waits for tokens.
_STREAMED = 8


class Cache:
    """The keys and values of all tokens so far, in memory of a fixed length: what a model gets in
    the place of one of transformers' caches.

    In the prompt the cache is empty, and a layer attends to the keys and values that it brings. In
    a step, each layer writes one place and attends to the whole memory; places that are not written
    yet are zeros, and are masked.

    Args:
        layers: index of a layer -> its keys and values, ``[batch, heads, length, width]`` each.
        seen: how many tokens are in it: 0, or a tensor without dimensions.
        length: of the memory.
    """

    is_compileable = True

    def __init__(
        self, layers: Mapping[int, list[torch.Tensor]], seen: int | torch.Tensor, length: int
    ) -> None:
        self.layers, self.seen, self.length = dict(layers), seen, length

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"cache: the model asks its cache for {name!r}; generate's has keys and values alone "
            "(update, get_seq_length, get_mask_sizes, get_query_offset). A model that keeps other "
            "states, such as those of a recurrent layer, is decoded by its own generate"
        )

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's keys and values, ``[batch, heads, tokens, width]`` each, and return those
        to which it attends.
        """
        if layer_idx not in self.layers:
            room = self.length - keys.shape[2]
            self.layers[layer_idx] = [F.pad(x, (0, 0, 0, room)) for x in (keys, values)]
            return keys, values
        self.layers[layer_idx] = [
            _written(x, new, self.seen)
            for x, new in zip(self.layers[layer_idx], (keys, values), strict=True)
        ]
        return self.layers[layer_idx][0], self.layers[layer_idx][1]

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """How many tokens are in it."""
        return self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """The place of the first token of a call."""
        return self.seen

    def get_mask_sizes(
        self, query_length: int | torch.Tensor, layer_idx: int = 0
    ) -> tuple[int, int]:
        """How many keys ``update`` returns for so many tokens, and the place of the first one."""
        if isinstance(query_length, torch.Tensor):  # the places, in the first releases of 5
            query_length = len(query_length)
        return self.length if self.layers else query_length, 0


#: written at a place, in memory that a loop carries: XLA does this without a copy
_written = bridge.from_jax(
    lambda whole, part, start: lax.dynamic_update_slice_in_dim(
        whole, part.astype(whole.dtype), start, 2
    )
)


class _Plan(NamedTuple):
    """What a program is compiled for.

    Attributes:
        steps: how many tokens a program finds at most.
        length: of the cache.
        least: before so many new tokens none ends a sequence.
        sampled: whether tokens are drawn; else they are the most probable ones.
        top_k: of so many tokens; 0: of all.
        tempered, top_p: whether the numbers of these names are used.
        eos: the tokens that end a sequence.
        pad: the token after them.
    """

    steps: int
    length: int
    least: int
    sampled: bool
    top_k: int
    tempered: bool
    top_p: bool
    eos: tuple[int, ...]
    pad: int


class _State(NamedTuple):
    """What a program leaves to the next one.

    Attributes:
        seen: how many tokens are in the cache, ``[]``.
        token: the last one of each sequence, ``[batch]``; it is not in the cache.
        unfinished: the sequences that go on, ``[batch]``.
        layers: of the cache.
    """

    seen: torch.Tensor
    token: torch.Tensor
    unfinished: torch.Tensor
    layers: dict[int, list[torch.Tensor]]


def _logits(
    model: nn.Module,
    params: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
) -> torch.Tensor:
    """The logits of the token after the last one, ``[batch, vocabulary]``, in float32."""
    names = inspect.signature(model.forward).parameters
    inputs = {
        "attention_mask": mask,
        "position_ids": positions,
        "cache_position": cache.seen + torch.arange(ids.shape[1], device=ids.device),
        "use_cache": True,
        "logits_to_keep": 1,
        _cache_name(model): cache,
    }
    inputs = {name: x for name, x in inputs.items() if name in names}
    out = model(ids, **inputs) if params is None else functional_call(model, params, (ids,), inputs)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return logits[:, -1].to(torch.float32)


def _cache_name(model: nn.Module) -> str:
    """The argument that takes the cache; transformers before 5.24 has another name for it."""
    names = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in names), None)
    if name is None:
        raise TypeError(
            f"model: expected a decoder whose forward takes cache or past_key_values, got "
            f"{type(model).__name__} with {', '.join(names)}"
        )
    return name


def _next(
    logits: torch.Tensor, noise: torch.Tensor | None, count: Any, plan: _Plan, numbers: Any
) -> torch.Tensor:
    """The next token of each sequence, ``[batch]``; count: how many new tokens there are."""
    if plan.least and plan.eos:
        ends = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        ends[[token for token in plan.eos if 0 <= token < len(ends)]] = True
        logits = logits.masked_fill(ends & (count < plan.least), -torch.inf)
    if not plan.sampled:
        return logits.argmax(-1)
    temperature, top_p = numbers
    if plan.tempered:
        logits = logits / temperature
    if plan.top_k:
        least = logits.topk(min(plan.top_k, logits.shape[1]))[0][:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if plan.top_p:
        logits = _nucleus(logits, top_p)
    probabilities = logits.softmax(-1)
    if noise is None:
        return torch.multinomial(probabilities, 1)[:, 0]
    return (probabilities / noise).argmax(-1)  # which is what torch.multinomial does


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The logits of the most probable tokens that have the probability top_p together; the others
    are -inf.
    """
    # One integer for a logit and its place, in their order: XLA sorts these several times faster
    # than pairs, and none are equal, so that the least of them decides as a stable sort would.
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    keys = keys + torch.arange(logits.shape[1], device=logits.device)
    ordered = keys.sort()[0]
    bits = ordered >> 32
    values = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int32).view(torch.float32)
    out = (values.softmax(-1).cumsum(-1) <= 1 - top_p).sum(1, keepdim=True)
    least = ordered.gather(1, out.clamp(max=logits.shape[1] - 1))
    return logits.masked_fill(keys < least, -torch.inf)


def _noise(plan: _Plan, logits: torch.Tensor, by_generator: bool) -> torch.Tensor | None:
    """The numbers of the exponential distribution that torch's generator gives torch.multinomial in
    the steps, ``[steps, batch, vocabulary]``; None: the steps draw their own.
    """
    if not by_generator:
        return None
    return torch.stack([torch.empty_like(logits).exponential_() for _ in range(plan.steps)])


def _prompt(
    model: nn.Module,
    params: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    numbers: Any,
    plan: _Plan,
    by_generator: bool,
) -> tuple[Any, ...]:
    """The first tokens: the prompt's, and those of a loop after it."""
    cache = Cache({}, 0, plan.length)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    logits = _logits(model, params, ids, mask, positions, cache)
    noise = _noise(plan, logits, by_generator)
    token = _next(logits, None if noise is None else noise[0], 0, plan, numbers)
    if not cache.layers:
        raise TypeError(
            f"model: expected a decoder whose layers call update of the cache that its forward is "
            f"given, got {type(model).__name__}, which did not"
        )
    state = _State(
        ids.new_full((), ids.shape[1]), token, _unfinished(token, plan.eos), cache.layers
    )
    tokens = ids.new_full((len(ids), plan.steps), plan.pad)
    tokens[:, 0] = token
    return *_loop(model, params, mask, tokens, 1, state, noise, numbers, plan), logits.shape[1]


def _more(
    model: nn.Module,
    params: Any,
    mask: torch.Tensor,
    state: _State,
    numbers: Any,
    plan: _Plan,
    by_generator: bool,
    vocabulary: int,
) -> tuple[Any, ...]:
    """The tokens after those of another program."""
    like = torch.empty(len(mask), vocabulary, device=mask.device)
    tokens = mask.new_full((len(mask), plan.steps), plan.pad)
    noise = _noise(plan, like, by_generator)
    return *_loop(model, params, mask, tokens, 0, state, noise, numbers, plan), vocabulary


def _loop(
    model: nn.Module,
    params: Any,
    mask: torch.Tensor,
    tokens: torch.Tensor,
    found: int,
    state: _State,
    noise: torch.Tensor | None,
    numbers: Any,
    plan: _Plan,
) -> tuple[torch.Tensor, torch.Tensor, _State]:
    """``(tokens, found, state)`` after the steps of a program; tokens: ``[batch, steps]``, of which
    so many are found.
    """
    prompt, room = mask.shape[1], plan.length - mask.shape[1]
    # a token's position counts the tokens before it, without the padding
    padding = prompt - mask.sum(1, keepdim=True)
    whole = torch.cat([mask, mask.new_ones(len(mask), room)], 1)
    places = torch.arange(plan.length, device=mask.device)

    def goes_on(tokens: Any, found: Any, state: _State) -> torch.Tensor:
        return (found < plan.steps) & (state.seen < plan.length) & state.unfinished.any()

    def step(tokens: Any, found: Any, state: _State) -> tuple[Any, ...]:
        cache = Cache(state.layers, state.seen, plan.length)
        logits = _logits(
            model,
            params,
            state.token[:, None],
            whole * (places <= state.seen),
            state.seen - padding,
            cache,
        )
        count = state.seen + 1 - prompt
        noisy = None if noise is None else noise.index_select(0, found[None])[0]
        token = _next(logits, noisy, count, plan, numbers)
        token = token.where(state.unfinished, plan.pad)
        tokens = tokens.index_copy(1, found[None], token[:, None])
        unfinished = state.unfinished & _unfinished(token, plan.eos)
        return tokens, found + 1, _State(state.seen + 1, token, unfinished, cache.layers)

    return while_loop(goes_on, step, (tokens, mask.new_full((), found), state))


def _unfinished(token: torch.Tensor, eos: tuple[int, ...]) -> torch.Tensor:
    """Whether a sequence goes on after a token."""
    return (token[:, None] != token.new_tensor(eos)).all(1)


_prompt_program = jit(_prompt, static_argnums=(5, 6))
_more_program = jit(_more, static_argnums=(5, 6, 7), donate=3)


@public
def generate(
    model: nn.Module,
    ids: _Ids,
    *,
    attention_mask: torch.Tensor | jax.Array | None = None,
    params: Mapping[str, Any] | None = None,
    generation_config: Any = None,
    streamer: Any = None,
    chunk_size: int | None = None,
    **options: Any,
) -> _Ids:
    """Decode tokens after a prompt, as ``model.generate`` of transformers does, in one XLA program:
    the prompt, and a loop over tokens with a static cache of keys and values.

    The tokens are those of ``model.generate``: the most probable ones, or with ``do_sample=True``
    samples. The numbers of a sample are those that torch's generator gives ``model.generate`` after
    the same ``torch.manual_seed``, and the generator is afterwards where that leaves it. Where JAX
    draws (``random_numbers("jax")``, an accelerator, jax.Arrays), a seed repeats a sample with
    other numbers.

    A program serves all prompts of one shape, all values of ``temperature`` and ``top_p``, and all
    values of the weights; another length of the prompt or another number of tokens compiles
    another. The model's parameters and buffers are read at each call. It may also be a module that
    is not from transformers: its ``forward`` takes ``[batch, tokens]`` ids and by keyword a
    ``cache`` (or ``past_key_values``), and, if it names them, ``attention_mask`` ``[batch, keys]``,
    1 for each key that there is, and ``position_ids`` ``[batch, tokens]``. Each attention layer
    calls ``keys, values = cache.update(keys, values, layer_index)``, each ``[batch, heads, tokens,
    width]``, and attends to what that returns. ``cache.get_seq_length()`` is how many tokens were
    in it before the call. The module returns logits ``[batch, tokens, vocabulary]``, or an object
    with ``logits``.

    Args:
        model: a decoder; its mode stays as it is, so call ``model.eval()`` first.
        ids: integers ``[batch, tokens]``, a torch.Tensor or a jax.Array.
        attention_mask: zeros and ones of the shape of ids, 0 for padding, which is on the left;
            None: ids that are ``pad_token_id`` are padding, if that ends no sequence.
        params: name -> array, for this call in the place of the model's parameters: jax.Arrays on
            an accelerator or a mesh, from ``bridge.params``, ``bridge.shard`` or
            ``bridge.load_sharded``.
        generation_config: options, as transformers' GenerationConfig or a dict; the call's own
            options come before it, the model's ``generation_config`` and transformers' defaults
            after it.
        streamer: an object with ``put(tokens)`` and ``end()``, such as transformers' TextStreamer:
            it gets the prompt, and then ``[batch]`` tokens for each step.
        chunk_size: how many tokens a program finds before the next one goes on; None: all of them,
            or 8 with a streamer. Where torch draws the numbers of a sample, they need memory for
            ``chunk_size`` times the logits.
        options: ``max_new_tokens``, ``max_length``, ``min_new_tokens``, ``min_length``,
            ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``eos_token_id`` (one or
            several), ``pad_token_id``, with transformers' meanings.

    Returns:
        torch.Tensor: ids and the new tokens after them, int64 ``[batch, tokens + new]``; after its
            end a sequence has ``pad_token_id``. A jax.Array for a jax.Array.

    Raises:
        TypeError: ids are no integers; the model is an encoder-decoder model, its forward takes no
            cache, or its layers do not use it.
        ValueError: ids do not have two dimensions; padding on the right; an option that is not
            supported, or a value that it cannot have; more tokens than the model has positions.
        AttributeError: the model keeps other states than keys and values.
        DataDependentError: its Python asks how many tokens are in the cache.

    Source: https://huggingface.co/docs/transformers/main_classes/text_generation

    Example:
        >>> import torch
        >>> from torchfunc_jax import generate
        >>> class Decoder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = torch.nn.Embedding(20, 8)
        ...         self.project, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 20)
        ...
        ...     def forward(self, ids, cache, attention_mask):
        ...         place = cache.get_seq_length() + torch.arange(ids.shape[1])
        ...         q, k, v = self.project(self.embed(ids))[:, None].chunk(3, -1)
        ...         k, v = cache.update(k, v, 0)
        ...         seen = torch.arange(k.shape[2]) <= place[:, None]
        ...         seen = seen & attention_mask[:, None, None].bool()
        ...         y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        ...         return self.head(y[:, 0])
        >>> generate(Decoder(), torch.tensor([[3, 1, 4], [1, 5, 9]]), max_new_tokens=8).shape
        torch.Size([2, 11])
    """
    _cache_name(model)
    prompt = _integers("ids", ids)
    chosen = _chosen(model, generation_config, options, prompt.shape[1])
    mask = _mask(prompt, attention_mask, chosen)
    plan = _plan(chosen, prompt.shape[1], _steps(chunk_size, streamer, chosen["max_new_tokens"]))
    numbers = torch.tensor(chosen["temperature"] or 1.0), torch.tensor(chosen["top_p"] or 1.0)
    inputs: Any = prompt, mask, numbers
    if params is not None or isinstance(ids, jax.Array):
        inputs = jax.tree.map(bridge.to_jax, inputs)
    if isinstance(ids, jax.Array):  # a batch that is spread over a mesh stays there
        inputs = *jax.device_put(inputs[:2], ids.sharding), inputs[2]
    found = [prompt]
    if streamer is not None:
        streamer.put(prompt.cpu())
    try:
        for block in _blocks(model, params, inputs, plan):
            found.append(_tensor(block))
            if streamer is not None:
                for tokens in found[-1].cpu().unbind(1):
                    streamer.put(tokens)
    except DataDependentError as error:
        error.add_note(
            f"generate: {type(model).__name__} asks for values, such as the number of tokens in "
            "the cache, and cannot be decoded in one program; call model.generate"
        )
        raise
    if streamer is not None:
        streamer.end()
    every = torch.cat(found, 1)
    return bridge.to_jax(every) if isinstance(ids, jax.Array) else every


def _blocks(model: nn.Module, params: Any, inputs: Any, plan: _Plan) -> Iterator[Any]:
    """The new tokens of each program, ``[batch, steps]``."""
    ids, mask, numbers = inputs
    by_generator = plan.sampled and isinstance(ids, torch.Tensor) and by_torch()
    generator = _generator(ids.device) if by_generator else torch.default_generator
    state = vocabulary = None
    while True:
        before = generator.get_state()
        with torch.no_grad():
            tokens, found, state, vocabulary = (
                _prompt_program(model, params, ids, mask, numbers, plan, by_generator)
                if state is None
                else _more_program(
                    model, params, mask, state, numbers, plan, by_generator, vocabulary
                )
            )
        count = int(found)
        if by_generator and count < plan.steps:
            # model.generate draws for no step that it does not take
            generator.set_state(before)
            for _ in range(count):
                torch.empty(len(ids), vocabulary, device=ids.device).exponential_()
        yield tokens[:, :count]
        if int(state.seen) == plan.length or not state.unfinished.any():
            return


def _steps(chunk_size: Any, streamer: Any, count: int) -> int:
    """How many tokens a program finds at most."""
    if chunk_size is None:
        return count if streamer is None else min(_STREAMED, count)
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(
            f"chunk_size: expected a positive integer, the tokens of a program, got {chunk_size!r}"
        )
    return min(chunk_size, count)


def _tensor(x: torch.Tensor | jax.Array) -> torch.Tensor:
    return bridge.to_torch(x) if isinstance(x, jax.Array) else x


def _generator(device: torch.device) -> torch.Generator:
    """torch's default generator of a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _integers(name: str, ids: Any) -> torch.Tensor:
    """Integers of two dimensions, as int64."""
    if not isinstance(ids, torch.Tensor | jax.Array):
        raise TypeError(
            f"{name}: expected a torch.Tensor or a jax.Array of integers, got {type(ids)}; a "
            'tokenizer gives one with return_tensors="pt"'
        )
    ids = _tensor(ids)
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{name}: expected integers, got {ids.dtype}; pass token ids as int64")
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(
            f"{name}: expected shape [batch, tokens] with at least one token, got "
            f"{list(ids.shape)}; ids[None] is a batch of one sequence"
        )
    return ids.to(torch.int64)


def _mask(ids: torch.Tensor, given: Any, chosen: Mapping[str, Any]) -> torch.Tensor:
    """1 for each token of the prompt, 0 for padding; found as transformers does it if not given."""
    pad = chosen["pad_token_id"]
    if given is None:
        known = pad is not None and pad not in chosen["eos_token_id"]
        mask = (ids != pad).to(torch.int64) if known else torch.ones_like(ids)
        where = "ids: pad_token_id is in them, and"
    else:
        mask, where = _integers("attention_mask", given).to(ids.device), "attention_mask:"
        if mask.shape != ids.shape or not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                f"attention_mask: expected zeros and ones of shape {list(ids.shape)}, as ids, got "
                f"values from {int(mask.min())} to {int(mask.max())} of shape {list(mask.shape)}"
            )
    if not mask[:, -1].all():
        raise ValueError(
            f"{where} expected padding on the left, got a sequence that ends with padding; "
            'tokenizer.padding_side = "left" puts it there'
        )
    return mask


def _chosen(
    model: nn.Module, generation_config: Any, options: Mapping[str, Any], prompt: int
) -> dict[str, Any]:
    """The options of _DEFAULTS, checked: those of the call, else of generation_config, else of the
    model's own, else transformers' defaults.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise TypeError(
            f"model: expected a decoder, got the encoder-decoder model {type(model).__name__}; "
            "call model.generate"
        )
    chosen = dict(_DEFAULTS)
    for each in (getattr(model, "generation_config", None), generation_config):
        chosen |= {name: value for name, value in _entries(each).items() if value is not None}
    chosen |= options
    _refuse_others(chosen, options)
    chosen["max_new_tokens"] = _new_tokens(chosen, prompt, config)
    if chosen["min_new_tokens"] is None:
        chosen["min_new_tokens"] = max((chosen["min_length"] or 0) - prompt, 0)
    eos = chosen["eos_token_id"]
    eos = [] if eos is None else torch.as_tensor(eos).reshape(-1).tolist()
    chosen["eos_token_id"] = eos
    if chosen["pad_token_id"] is None and eos:
        chosen["pad_token_id"] = eos[0]
    for name, kinds, low, high in (
        ("min_new_tokens", int, 0, float("inf")),
        ("pad_token_id", int, float("-inf"), float("inf")),
        ("top_k", int, 0, float("inf")),
        ("top_p", int | float, 0, 1),
        ("temperature", int | float, 0, float("inf")),
    ):
        value = chosen[name]
        if value is not None and not (isinstance(value, kinds) and low <= value <= high):
            kind = "an integer" if kinds is int else "a number"
            raise ValueError(f"{name}: expected {kind} from {low} to {high}, got {value!r}")
    if chosen["do_sample"] and chosen["temperature"] == 0:
        raise ValueError("temperature: expected more than 0, got 0; do_sample=False is its limit")
    return chosen


def _entries(config: Any) -> dict[str, Any]:
    """A GenerationConfig as a dict."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise TypeError(
            "generation_config: expected transformers' GenerationConfig or a dict, got "
            f"{type(config)}"
        )
    return dict(config if isinstance(config, Mapping) else config.to_dict())


def _refuse_others(chosen: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that would change the tokens and is not supported."""
    passed_over = _PASSED_OVER.union(_DEFAULTS, () if chosen["do_sample"] else _OF_SAMPLES)
    for name, value in chosen.items():
        without = _WITHOUT_EFFECT.get(name, (None,))
        if name in passed_over or value is None or value is False or value in without:
            continue
        whose = "" if name in options else " of the generation_config"
        raise ValueError(
            f"{name}: {value!r}{whose} is not supported; supported are {', '.join(_DEFAULTS)}. "
            f"Pass {name}={without[0]!r} to decode without it, or call model.generate"
        )


def _new_tokens(chosen: Mapping[str, Any], prompt: int, config: Any) -> int:
    """How many tokens are found at most."""
    most = getattr(config, "max_position_embeddings", None)
    count, length = chosen["max_new_tokens"], chosen["max_length"]
    if count is None:
        if length is not None:
            count = length - prompt
        else:
            count = _NEW_TOKENS if most is None else min(_NEW_TOKENS, most - prompt)
    if not isinstance(count, int) or count < 1:
        raise ValueError(
            f"max_new_tokens: expected a positive integer, got {count!r} for a prompt of {prompt} "
            f"tokens and max_length={length}"
        )
    if most is not None and prompt + count > most:
        raise ValueError(
            f"max_new_tokens: expected at most {most - prompt}, because the model has {most} "
            f"positions and the prompt {prompt} tokens, got {count}"
        )
    return count


def _plan(chosen: Mapping[str, Any], prompt: int, steps: int) -> _Plan:
    sampled = bool(chosen["do_sample"])
    return _Plan(
        steps,
        prompt + chosen["max_new_tokens"] - 1,
        chosen["min_new_tokens"],
        sampled,
        (chosen["top_k"] or 0) if sampled else 0,
        sampled and chosen["temperature"] not in (None, 1.0),
        sampled and chosen["top_p"] not in (None, 1.0),
        tuple(chosen["eos_token_id"]),
        0 if chosen["pad_token_id"] is None else chosen["pad_token_id"],
    )


__all__ = ["generate"]
