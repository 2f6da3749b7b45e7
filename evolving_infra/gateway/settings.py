"""Settings of the front door: where it listens, what it serves, what it refuses."""

from dataclasses import dataclass

from evolving_infra.errors import wrong

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """One gateway. ``port`` 0 takes a free port; the server tells which."""

    model: str
    """Name the model is served under; requests name it, ``default``, or nothing."""
    max_context_tokens: int
    """Prompt and output of one request together at most."""
    host: str = "127.0.0.1"
    port: int = 8000
    chat_tokens: int = 256
    """Output limit of a chat request that names none (less if the context has less left)."""
    max_prompts: int = 128
    """Prompts in one completion request at most."""
    max_body_bytes: int = 32 * MIB
    shutdown_s: float = 30.0
    """Running requests have this long to finish after the server stops accepting."""
    state_s: float = 3.0
    """Metrics and readiness wait this long for the cluster's state, which itself waits 2 s for a
    node that is silent."""
    retry_after_s: int = 1
    """What a refused client is told to wait."""

    def __post_init__(self) -> None:
        if not self.model:
            raise wrong("model", "a name", self.model)
        if not 0 <= self.port < 65536:
            raise wrong("port", "a port number, 0 for a free one", self.port)
        positive = ("max_context_tokens", "chat_tokens", "max_prompts", "max_body_bytes")
        for name in (*positive, "state_s", "retry_after_s"):
            if getattr(self, name) <= 0:
                raise wrong(name, "a positive number", getattr(self, name))
        if self.shutdown_s < 0:
            raise wrong("shutdown_s", "zero or more seconds", self.shutdown_s)
