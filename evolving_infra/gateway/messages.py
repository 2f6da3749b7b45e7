"""The ``messages`` of a chat request, as one prompt."""

from evolving_infra.errors import wrong
from evolving_infra.gateway.fields import Body
from evolving_infra.gateway.tokenizer import chat_tokens

ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_messages(body: Body) -> tuple[int, ...]:
    """Token ids of the chat, up to where the assistant speaks.

    Raises:
        InputError: names the message and field.
    """
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    return tuple(chat_tokens([_message(one, f"messages[{i}]") for i, one in enumerate(value)]))


def _message(value: object, field: str) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise wrong(field, "an object with role and content", value)
    role = value.get("role")
    if role not in ROLES:
        raise wrong(f"{field}.role", f"one of {', '.join(ROLES)}", role)
    for name in ("tool_calls", "function_call"):
        if value.get(name):
            raise wrong(f"{field}.{name}", "nothing (not supported by the embedded model)", "some")
    return role, _content(value.get("content"), f"{field}.content")


def _content(value: object, field: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong(field, "a string or a list of text parts", value)
    return "".join(_part(one, f"{field}[{i}]") for i, one in enumerate(value))


def _part(value: object, field: str) -> str:
    if not isinstance(value, dict):
        raise wrong(field, "an object with type and text", value)
    if value.get("type") != "text":
        raise wrong(
            f"{field}.type", "text (the embedded model reads nothing else)", value.get("type")
        )
    text = value.get("text")
    if not isinstance(text, str):
        raise wrong(f"{field}.text", "a string", text)
    return text
