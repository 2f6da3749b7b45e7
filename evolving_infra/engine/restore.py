"""Host blocks -> device pages at admission, as far as they are valid without a gap."""

from dataclasses import dataclass

from evolving_infra.config import EngineConfig
from evolving_infra.engine.model import Pools
from evolving_infra.engine.sequence import Sequence
from evolving_infra.ops.kv_restore import kv_restore


@dataclass(frozen=True, slots=True)
class Restored:
    """``tokens`` now have KV; ``missed_blocks`` were read but were not what they should be."""

    tokens: int
    missed_blocks: int


def restore(sequence: Sequence, pools: Pools, config: EngineConfig, fault: str | None) -> Restored:
    """Continue an admitted sequence's KV from its host blocks, partial last block included.

    The prefix cache comes first: blocks it had are not read again. Advances ``computed``.
    """
    blocks, size = sequence.restorable, sequence.page_size
    if blocks is None:
        return Restored(0, 0)
    first = sequence.computed // size
    complete = sequence.host_end(first)
    wanted = [size] * (complete - first)
    if sequence.tail_tokens and complete == len(blocks) - 1:
        wanted.append(sequence.tail_tokens)
    if not wanted:
        return Restored(0, 0)
    last = first + len(wanted)
    found = kv_restore(
        blocks.part(first, last),
        pools,
        sequence.pages[first:last],
        config.layout,
        verify=config.verify,
        fault=fault,
    )
    good = 0
    while good < len(wanted) and found[good] == wanted[good]:
        good += 1
    # The last token is always computed, for its logits.
    tokens = min(sum(wanted[:good]), len(sequence.tokens) - 1 - sequence.computed)
    sequence.computed += tokens
    return Restored(tokens, len(wanted) - good)
