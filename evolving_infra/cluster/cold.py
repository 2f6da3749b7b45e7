"""Process: recompute requests cold, on a fresh engine that has never seen another token.

``python -m evolving_infra.cluster.cold --config FILE`` reads JSON lines ``{"tokens", "sampling"}``
and answers each with ``{"tokens"}``: the truth that reused, fetched and handed-over KV must match.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from evolving_infra.cluster.hasher import block_hasher
from evolving_infra.cluster.messages import sampling_from_map
from evolving_infra.config import ClusterConfig, EngineConfig
from evolving_infra.engine.engine import Engine
from evolving_infra.engine.request import EngineRequest, TokensOut
from evolving_infra.types import SamplingParams


def recompute(config: EngineConfig, tokens: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """Output tokens of one request, with nothing cached and no batch mate."""
    hasher = block_hasher(config)
    engine = Engine(config, hasher)
    engine.submit(
        EngineRequest(
            request="cold",
            prompt=tokens,
            output=(),
            keys=hasher.chain(tokens),
            sampling=sampling,
            stop_after_first=False,
        ),
        now=0.0,
    )
    output: list[int] = []
    while engine.has_work:
        for event in engine.step(0.0):
            if isinstance(event, TokensOut):
                output += event.tokens
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="cluster configuration, JSON")
    config = ClusterConfig.from_json(parser.parse_args().config.read_text())
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = sampling_from_map(asked["sampling"])
        output = recompute(config.engine, tuple(asked["tokens"]), sampling)
        print(json.dumps({"tokens": output}), flush=True)


if __name__ == "__main__":
    main()
