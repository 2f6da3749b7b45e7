"""From a checked request and its branch headers to what the cluster is given."""

import zlib

from multidict import CIMultiDictProxy

from evolving_infra.cluster.client import Submission
from evolving_infra.errors import wrong
from evolving_infra.gateway.requests import GenerationRequest
from evolving_infra.gateway.signals import BRANCH, BranchSignal, read_signal


def submissions(
    asked: GenerationRequest, request_id: str, headers: CIMultiDictProxy[str]
) -> tuple[Submission, ...]:
    """One submission a prompt, named ``request_id``, ``request_id-1``, ...

    Raises:
        InputError: a branch header is wrong, or several prompts name one branch.
    """
    signal = read_signal(headers)
    if signal is not None and len(asked.prompts) > 1:
        raise wrong("prompt", f"one prompt with {BRANCH}", f"{len(asked.prompts)} prompts")
    names = [request_id, *(f"{request_id}-{i}" for i in range(1, len(asked.prompts)))]
    return tuple(
        _submission(asked, name, prompt, signal)
        for name, prompt in zip(names, asked.prompts, strict=True)
    )


def _submission(
    asked: GenerationRequest, name: str, prompt: tuple[int, ...], signal: BranchSignal | None
) -> Submission:
    branch = BranchSignal(branch=f"anon-{name}") if signal is None else signal
    return Submission(
        request=name,
        branch=branch.branch,
        version=branch.version,
        kind=branch.kind,
        parent=branch.parent,
        anonymous=signal is None,
        tokens=prompt,
        # Ids are random, so requests without a seed differ from each other.
        sampling=asked.sampling(zlib.crc32(name.encode())),
    )
