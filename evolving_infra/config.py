"""Configuration: one frozen dataclass per layer, composed. Checks raise ``InputError``."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from evolving_infra.errors import wrong
from evolving_infra.types import Attention, KvLayout, Role

PAGE_SIZES = (16, 32, 64)
DEVICES = ("cpu", "cuda")
KV_DTYPES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the embedded model. Weights are random, from ``seed``."""

    attention: Attention = Attention.MLA
    vocab: int = 320
    """256 bytes, then special tokens, padded."""
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    latent: int = 64
    """MLA: elements of the compressed KV row."""
    rope: int = 16
    """MLA: elements of the shared rotary key row."""
    experts: int = 8
    """Routed experts; 0 makes the layer a dense MLP."""
    top_k: int = 2
    expert_hidden: int = 64
    seed: int = 20


MODELS: dict[str, ModelConfig] = {
    "tiny-mla-moe": ModelConfig(attention=Attention.MLA),
    "tiny-gqa": ModelConfig(attention=Attention.GQA, experts=0),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine: a model, its TP ranks and its device pools."""

    model: str = "tiny-mla-moe"
    page_size: int = 16
    tp_size: int = 2
    device_pages: int = 4096
    """Pages per rank in device memory (L1)."""
    chunk_tokens: int = 256
    """Prefill tokens per iteration at most."""
    max_running: int = 16
    """Requests in one iteration at most."""
    max_context_tokens: int = 8192
    kv_dtype: str = "bfloat16"
    device: str = "cpu"
    verify: str = "pool"
    """pool: check every block read from host memory. device: also read the pages back and check."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise wrong("model", f"one of {', '.join(MODELS)}", self.model)
        if self.page_size not in PAGE_SIZES:
            raise wrong("page_size", f"one of {PAGE_SIZES}", self.page_size)
        if self.kv_dtype not in KV_DTYPES:
            raise wrong("kv_dtype", f"one of {', '.join(KV_DTYPES)}", self.kv_dtype)
        if self.device not in DEVICES:
            raise wrong("device", f"one of {', '.join(DEVICES)}", self.device)
        if self.verify not in ("pool", "device"):
            raise wrong("verify", "pool or device", self.verify)
        shape = self.model_config
        heads = shape.heads if shape.attention is Attention.MLA else shape.kv_heads
        if self.tp_size < 1 or heads % self.tp_size:
            raise wrong("tp_size", f"a divisor of {heads} heads", self.tp_size)
        for name in ("device_pages", "chunk_tokens", "max_running", "max_context_tokens"):
            if getattr(self, name) < 1:
                raise wrong(name, "a positive number", getattr(self, name))
        if self.device_pages * self.page_size < self.max_context_tokens:
            raise wrong(
                "device_pages",
                f"at least max_context_tokens / page_size = "
                f"{self.max_context_tokens // self.page_size}",
                self.device_pages,
            )

    @property
    def model_config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def layout(self) -> KvLayout:
        """KV layout of the device pools and of the host blocks."""
        shape = self.model_config
        mla = shape.attention is Attention.MLA
        row = shape.latent + shape.rope
        if not mla:
            row = 2 * (shape.kv_heads // self.tp_size) * shape.head_dim
        return KvLayout(
            attention=shape.attention,
            num_layers=shape.layers,
            page_size=self.page_size,
            row=row,
            dtype=self.kv_dtype,
            dtype_bytes=KV_DTYPES[self.kv_dtype],
            tp_size=self.tp_size,
        )


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """One node's host pool (L2)."""

    blocks: int = 16384
    """Capacity in blocks; a sharded layout takes ``shards`` slots per block."""
    lease_s: float = 30.0
    """A read lease is void after this time, so a dead reader pins nothing."""
    eviction: str = "counted"
    """counted: unreferenced blocks first, then least recently used. lru: plain LRU."""
    fetch_deadline_s: float = 5.0
    write_queue_blocks: int = 4096
    """Blocks waiting to be written at most; beyond, a block is skipped and counted."""

    def __post_init__(self) -> None:
        if self.eviction not in ("counted", "lru"):
            raise wrong("eviction", "counted or lru", self.eviction)
        if self.blocks < 1:
            raise wrong("blocks", "a positive number", self.blocks)
        for name in ("lease_s", "fetch_deadline_s"):
            if getattr(self, name) <= 0:
                raise wrong(name, "a positive number of seconds", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """Choices of the control plane."""

    branch_lease_s: float = 6 * 3600.0
    """A branch idle for longer counts as ended."""
    prefetch: bool = True
    """Copy what a decode node produced to the branch's prefill node while its tools run."""
    expert_share: float = 0.0
    """Routed experts a token uses over all of them (k/E), for the decode time model; 0: dense."""

    def __post_init__(self) -> None:
        if self.branch_lease_s <= 0:
            raise wrong("branch_lease_s", "a positive number of seconds", self.branch_lease_s)
        if not 0 <= self.expert_share <= 1:
            raise wrong("expert_share", "a number from 0 to 1", self.expert_share)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A whole cluster on this machine."""

    split: str = "1P2D"
    """Roles in node order: ``1P2D`` is one prefill and two decode nodes; ``2B`` two of both."""
    host: str = "127.0.0.1"
    port: int = 8000
    instance: str = ""
    """Tells this cluster from any other; the launcher sets it."""
    journal: bool = False
    """Write every event and command to ``logs/journal-N.jsonl`` of the run directory."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    control: ControlConfig = field(default_factory=ControlConfig)

    def __post_init__(self) -> None:
        parse_split(self.split)

    @property
    def roles(self) -> dict[str, Role]:
        """Role of every node, by name ``node0``, ``node1``, ..."""
        return {f"node{i}": role for i, role in enumerate(parse_split(self.split))}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "ClusterConfig":
        fields: dict[str, Any] = json.loads(text)
        parts = {"engine": EngineConfig, "store": StoreConfig, "control": ControlConfig}
        for name, kind in parts.items():
            fields[name] = kind(**fields[name])
        return ClusterConfig(**fields)


def parse_split(split: str) -> tuple[Role, ...]:
    """Roles in node order of a split such as ``4P5D`` or ``1B``."""
    expected = "a split such as 1P2D, 3B or 1P1D1B"
    letters = {"P": Role.PREFILL, "D": Role.DECODE, "B": Role.BOTH}
    if not re.fullmatch(r"(\d{1,2}[PDB]){1,8}", split):
        raise wrong("split", expected, split)
    roles: list[Role] = []
    for count, letter in re.findall(r"(\d+)([PDB])", split):
        roles += [letters[letter]] * int(count)
    if not roles:
        raise wrong("split", expected, split)
    if len(roles) > 64:
        raise wrong("split", "at most 64 nodes", split)
    return tuple(roles)
