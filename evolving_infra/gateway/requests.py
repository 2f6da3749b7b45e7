"""Checked, frozen requests: what a body asks for, in the cluster's words.

``null`` counts as absent and unknown fields are ignored, as OpenAI does; a known field of the wrong
type, or one that the embedded model can't honour, is an ``InputError`` that names it.
"""

from dataclasses import dataclass

from evolving_infra.errors import wrong
from evolving_infra.gateway import fields
from evolving_infra.gateway.failures import ContextLengthError
from evolving_infra.gateway.fields import Body
from evolving_infra.gateway.messages import parse_messages
from evolving_infra.gateway.prompts import parse_prompts
from evolving_infra.gateway.settings import GatewaySettings
from evolving_infra.gateway.tokenizer import IM_END
from evolving_infra.types import VOCAB_USED, SamplingParams

COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions."""
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
SEEDS = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request of either route. ``seed`` None: the sampling seed is the gateway's choice."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids, one prompt a choice."""
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    ignore_eos: bool
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_timings: bool

    def sampling(self, seed: int) -> SamplingParams:
        """How tokens are picked; ``seed`` is used if the client gave none."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=seed if self.seed is None else self.seed,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


def parse_completion(body: Body, limits: GatewaySettings) -> GenerationRequest:
    """Body of POST /v1/completions.

    Raises:
        InputError: names the field, what was expected and what came.
    """
    fields.refuse(body, "echo", (False,))
    fields.refuse(body, "suffix", ("",))
    fields.refuse(body, "best_of", (1,))
    fields.refuse(body, "logprobs", (False,))
    prompts = parse_prompts(body, limits)
    context = limits.max_context_tokens
    asked = fields.integer(body, "max_tokens", 1, context)
    max_tokens = asked if asked is not None else COMPLETION_TOKENS
    return _parse(body, prompts, max_tokens, limits)


def parse_chat(body: Body, limits: GatewaySettings) -> GenerationRequest:
    """Body of POST /v1/chat/completions; the end of the assistant's turn is a stop token.

    Raises:
        InputError: names the field, what was expected and what came.
    """
    fields.refuse(body, "logprobs", (False,))
    fields.refuse(body, "top_logprobs", (0,))
    for name in ("tools", "functions"):
        fields.refuse(body, name, ([],))
    for name in ("tool_choice", "function_call"):
        fields.refuse(body, name, ("none",))
    fields.refuse(body, "response_format", ({"type": "text"},))
    fields.refuse(body, "modalities", (["text"],))
    fields.refuse(body, "audio", ())
    prompt = parse_messages(body)
    room = limits.max_context_tokens - len(prompt)
    max_tokens = _chat_limit(body, limits)
    if max_tokens is None:
        max_tokens = max(1, min(limits.chat_tokens, room))
    return _parse(body, (prompt,), max_tokens, limits, turn_end=(IM_END,))


def _chat_limit(body: Body, limits: GatewaySettings) -> int | None:
    """Either name of the output limit; both only if they agree."""
    old, new = (
        fields.integer(body, name, 1, limits.max_context_tokens)
        for name in ("max_tokens", "max_completion_tokens")
    )
    if old is not None and new is not None and old != new:
        raise wrong("max_tokens", f"the same as max_completion_tokens ({new})", old)
    return old if new is None else new


def _parse(
    body: Body,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int,
    limits: GatewaySettings,
    *,
    turn_end: tuple[int, ...] = (),
) -> GenerationRequest:
    """The options both routes share."""
    _refuse_sampling(body)
    _check_fits("messages" if turn_end else "prompt", prompts, max_tokens, limits)
    stream = fields.flag(body, "stream")
    ignore_eos = fields.flag(body, "ignore_eos")
    temperature = fields.number(body, "temperature", 0.0, 2.0)
    return_timings = fields.flag(body, "return_timings")
    if return_timings and len(prompts) > 1:
        raise wrong("return_timings", "one prompt", f"{len(prompts)} prompts")
    return GenerationRequest(
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=0.0 if temperature is None else temperature,
        top_p=_top_p(body),
        seed=_seed(body),
        ignore_eos=ignore_eos,
        stops=_stops(body),
        stop_token_ids=_stop_token_ids(body) + (() if ignore_eos else turn_end),
        stream=stream,
        include_usage=_include_usage(body, stream),
        return_token_ids=fields.flag(body, "return_token_ids"),
        return_timings=return_timings,
    )


def _refuse_sampling(body: Body) -> None:
    fields.refuse(body, "n", (1,))
    fields.refuse(body, "logit_bias", ({},))
    for name in ("presence_penalty", "frequency_penalty"):
        fields.refuse(body, name, (0, 0.0))


def _check_fits(
    field: str, prompts: tuple[tuple[int, ...], ...], max_tokens: int, limits: GatewaySettings
) -> None:
    context = limits.max_context_tokens
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_tokens > context:
        raise ContextLengthError(
            f"{field}: expected at most {context} tokens of context, "
            f"got {longest} of prompt and {max_tokens} of max_tokens"
        )


def _top_p(body: Body) -> float:
    top_p = fields.number(body, "top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise wrong("top_p", "a number above 0, at most 1", top_p)
    return 1.0 if top_p is None else top_p


def _seed(body: Body) -> int | None:
    seed = fields.integer(body, "seed", -SEEDS, SEEDS - 1)
    # The engine's seeds are not negative; -1 and its like stay legal and repeatable.
    return None if seed is None else seed % SEEDS


def _stops(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    expected = f"a string or up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise wrong("stop", expected, value)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise wrong("stop", expected, value)
    return tuple(stops)


def _stop_token_ids(body: Body) -> tuple[int, ...]:
    value = body.get("stop_token_ids")
    if value is None:
        return ()
    expected = f"a list of at most 64 token ids from 0 to {VOCAB_USED - 1}"
    if not isinstance(value, list) or len(value) > 64:
        raise wrong("stop_token_ids", expected, value)
    for token in value:
        if type(token) is not int or not 0 <= token < VOCAB_USED:
            raise wrong("stop_token_ids", expected, value)
    return tuple(value)


def _include_usage(body: Body, stream: bool) -> bool:
    options = fields.mapping(body, "stream_options")
    if options and not stream:
        raise wrong("stream_options", "only with stream: true", options)
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        raise wrong("stream_options.include_usage", "true or false", value)
    return value is True
