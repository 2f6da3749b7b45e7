"""The ``prompt`` of a completion: text or token ids, one or many."""

from evolving_infra.errors import wrong
from evolving_infra.gateway.fields import Body
from evolving_infra.gateway.settings import GatewaySettings
from evolving_infra.gateway.tokenizer import encode
from evolving_infra.types import VOCAB_USED

FORMS = "a string, a list of token ids, or a list of either"


def parse_prompts(body: Body, limits: GatewaySettings) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt in the body. O(tokens).

    Raises:
        InputError: missing, empty, mixed, too many, or a token id outside the vocabulary.
    """
    value = body.get("prompt")
    if isinstance(value, str) or _is_tokens(value):
        return (_parse_one(value, "prompt", limits),)
    if not isinstance(value, list) or not value:
        raise wrong("prompt", FORMS, value)
    if len(value) > limits.max_prompts:
        raise wrong("prompt", f"at most {limits.max_prompts} prompts", f"{len(value)} prompts")
    if not isinstance(value[0], str | list):
        raise wrong("prompt[0]", "a token id, a string or a list of token ids", value[0])
    first = type(value[0])
    prompts = []
    for index, one in enumerate(value):
        if type(one) is not first:
            expected = "a string" if first is str else "a list of token ids"
            raise wrong(f"prompt[{index}]", f"{expected}, as before it", one)
        prompts.append(_parse_one(one, f"prompt[{index}]", limits))
    return tuple(prompts)


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def _parse_one(value: object, field: str, limits: GatewaySettings) -> tuple[int, ...]:
    if isinstance(value, str):
        tokens = tuple(encode(value, field))
    else:
        assert isinstance(value, list), "the caller passes text or a list"
        if len(value) > limits.max_context_tokens:  # before looking at every one of them
            expected = f"at most {limits.max_context_tokens} tokens"
            raise wrong(field, expected, f"{len(value)} tokens")
        for index, token in enumerate(value):
            if type(token) is not int or not 0 <= token < VOCAB_USED:
                raise wrong(f"{field}[{index}]", f"a token id from 0 to {VOCAB_USED - 1}", token)
        tokens = tuple(value)
    if not tokens:
        raise wrong(field, "at least one token", value)
    return tokens
