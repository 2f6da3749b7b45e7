"""An engine with a host pool beside it, as a node has, that the engine's tests drive by hand."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from evolving_infra.config import EngineConfig
from evolving_infra.engine.engine import Engine
from evolving_infra.engine.request import (
    BlocksFilled,
    EngineEvent,
    EngineRequest,
    PrefillDone,
    TokensOut,
)
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import BlockKey, SamplingParams

torch.set_num_threads(1)

SMALL = EngineConfig(device_pages=128, max_context_tokens=512, chunk_tokens=64)
GQA = replace(SMALL, model="tiny-gqa")
HOST_SLOTS = 256

Event = TypeVar("Event")


class ChainHasher:
    """SHA-256 over the previous key and the tokens."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def chain(self, tokens: Sequence[int]) -> tuple[BlockKey, ...]:
        keys: list[BlockKey] = []
        for end in range(self._page_size, len(tokens) + 1, self._page_size):
            block = tokens[end - self._page_size : end]
            keys.append(self.extend(keys[-1] if keys else None, block))
        return tuple(keys)

    def extend(self, previous_key: BlockKey | None, block_tokens: Sequence[int]) -> BlockKey:
        text = (previous_key or b"") + repr(list(block_tokens)).encode()
        return hashlib.sha256(text).digest()

    def tail_key(self, previous_key: BlockKey | None, tail_tokens: Sequence[int]) -> BlockKey:
        return self.extend(previous_key, tail_tokens)


class Rig:
    """One engine. With ``copies`` filled pages are copied to host memory and released at once."""

    def __init__(
        self, config: EngineConfig = SMALL, fault: str | None = None, copies: bool = True
    ) -> None:
        self.config = config
        self.hasher = ChainHasher(config.page_size)
        self.engine = Engine(config, self.hasher, fault)
        self.events: list[EngineEvent] = []
        self.copies = copies
        layout = config.layout
        slot_bytes = WireLayout.of(layout).slot_bytes
        self.memory = np.zeros((HOST_SLOTS, slot_bytes), np.uint8)
        self._slots: dict[BlockKey, np.ndarray] = {}

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        now: float = 0.0,
        ready: bool = True,
        output: Sequence[int] = (),
        stop_after_first: bool = False,
        sampling: SamplingParams | None = None,
    ) -> None:
        if sampling is None:
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = EngineRequest(
            request=name,
            prompt=tuple(prompt),
            output=tuple(output),
            keys=self.hasher.chain((*prompt, *output)),
            sampling=sampling,
            stop_after_first=stop_after_first,
        )
        self.engine.submit(request, now, ready)

    def step(self, now: float = 0.0) -> tuple[EngineEvent, ...]:
        events = self.engine.step(now)
        for event in events:
            if isinstance(event, BlocksFilled) and self.copies:
                self._copy(event)
        self.events += events
        return events

    def run(self) -> None:
        """Step until the engine idles."""
        while self.engine.has_work:
            self.step()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def output(self, name: str) -> tuple[int, ...]:
        """Tokens the request has got so far."""
        tokens: list[int] = []
        for event in self.events:
            if isinstance(event, TokensOut) and event.request == name:
                tokens += event.tokens
        return tuple(tokens)

    def host_blocks(self, keys: Sequence[BlockKey]) -> HostBlocks:
        """The copied ones among the first of ``keys``, without a gap."""
        found = []
        for key in keys:
            if key not in self._slots:
                break
            found.append(key)
        shape = (len(found), self.config.layout.shards)
        slots = np.array([self._slots[key] for key in found], np.int64).reshape(shape)
        generations = np.full(shape, 1, np.uint64)
        return HostBlocks(
            memory=self.memory, keys=tuple(found), slots=slots, generations=generations
        )

    def prefill(self, prompt: Sequence[int], name: str = "p") -> int:
        """Prefill with hand-over; returns the first token."""
        self.submit(name, prompt, stop_after_first=True)
        self.run()
        (done,) = (e for e in self.events if isinstance(e, PrefillDone) and e.request == name)
        return done.token

    def hand_off_blocks(self, prompt: Sequence[int]) -> tuple[HostBlocks, int]:
        """All of a prefilled prompt's KV in host memory, and the tokens of its partial block."""
        keys = self.hasher.chain(prompt)
        tail_tokens = len(prompt) % self.config.page_size
        if tail_tokens:
            previous = keys[-1] if keys else None
            tail = self.hasher.tail_key(previous, prompt[len(prompt) - tail_tokens :])
            keys = (*keys, tail)
        return self.host_blocks(keys), tail_tokens

    def check_nothing_leaks(self) -> None:
        """All pages are free once nothing runs and the cache is flushed."""
        self.engine.flush()
        assert self.engine.counters.free_pages == self.config.device_pages
        assert self.engine.counters.cached_pages == 0

    def _copy(self, event: BlocksFilled) -> None:
        shards = self.config.layout.shards
        for key in event.keys:
            first = len(self._slots) * shards
            self._slots.setdefault(key, np.arange(first, first + shards))
        shape = (len(event.keys), shards)
        blocks = HostBlocks(
            memory=self.memory,
            keys=event.keys,
            slots=np.array([self._slots[key] for key in event.keys], np.int64).reshape(shape),
            generations=np.full(shape, 1, np.uint64),
        )
        kv_offload(self.engine.pools, event.pages, event.token_counts, self.config.layout, blocks)
        self.engine.release(event.pages)


def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    """Random bytes, repeatable."""
    return tuple(random.Random(seed).randbytes(tokens))


def alone(config: EngineConfig, prompt: Sequence[int], max_tokens: int = 8) -> tuple[int, ...]:
    """The truth: the request on a fresh engine, in chunks of the default size."""
    rig = Rig(config)
    rig.submit("alone", prompt, max_tokens)
    rig.run()
    return rig.output("alone")


def test_the_rig_copies_what_the_engine_filled() -> None:
    rig = Rig()
    prompt = prompt_of(1, 40)
    rig.prefill(prompt)
    blocks, tail_tokens = rig.hand_off_blocks(prompt)
    assert (len(blocks), tail_tokens) == (3, 8)
    rig.check_nothing_leaks()
