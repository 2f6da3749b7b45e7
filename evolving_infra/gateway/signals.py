"""Branch signals: what a harness says in headers about the context a request belongs to.

    X-Branch-Id         id of the branch, 1..256 characters of A-Z a-z 0-9 . _ : / # -
    X-Context-Version   rises when the harness rewrote the branch's context; default 0
    X-Parent-Branch-Id  branch that this one came from, with
    X-Branch-Kind       fork (starts from the parent's context) or subagent (from a fresh one)

A request without them is its own branch, released when it finishes (design section 9).
"""

import re
from dataclasses import dataclass

from multidict import CIMultiDictProxy

from evolving_infra.errors import InputError, wrong
from evolving_infra.types import BranchKind

BRANCH = "X-Branch-Id"
VERSION = "X-Context-Version"
PARENT = "X-Parent-Branch-Id"
KIND = "X-Branch-Kind"

BRANCH_ID = re.compile(r"[A-Za-z0-9._:/#-]{1,256}")
BRANCH_RULE = "1 to 256 characters of A-Z a-z 0-9 . _ : / # -"
VERSION_DIGITS = re.compile(r"[0-9]{1,9}")
KINDS = {kind.value: kind for kind in (BranchKind.FORK, BranchKind.SUBAGENT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSignal:
    """Which branch a request belongs to."""

    branch: str
    version: int = 0
    kind: BranchKind = BranchKind.ROOT
    parent: str | None = None


def read_signal(headers: CIMultiDictProxy[str]) -> BranchSignal | None:
    """The branch signal of a request, None without one.

    Raises:
        InputError: a header has an unknown value, comes twice, or lacks the one it needs.
    """
    branch = _branch(headers, BRANCH)
    version = _single(headers, VERSION)
    parent = _branch(headers, PARENT)
    kind = _single(headers, KIND)
    if branch is None:
        for name in (VERSION, PARENT, KIND):
            if name in headers:
                raise _missing(BRANCH, name)
        return None
    if version is not None and not VERSION_DIGITS.fullmatch(version):
        raise wrong(VERSION, "an integer from 0 to 999999999", version)
    if kind is not None and kind not in KINDS:
        raise wrong(KIND, "fork or subagent", kind)
    if kind is None and parent is not None:
        raise _missing(KIND, PARENT)
    if kind is not None and parent is None:
        raise _missing(PARENT, KIND)
    if parent == branch:
        raise wrong(PARENT, f"a branch other than {BRANCH}", parent)
    return BranchSignal(
        branch=branch,
        version=int(version) if version is not None else 0,
        kind=KINDS[kind] if kind is not None else BranchKind.ROOT,
        parent=parent,
    )


def _missing(needed: str, present: str) -> InputError:
    return InputError(f"{needed}: expected with {present}, got no such header")


def _single(headers: CIMultiDictProxy[str], name: str) -> str | None:
    values = headers.getall(name, [])
    if len(values) > 1:
        raise wrong(name, "one value", values)
    return values[0] if values else None


def _branch(headers: CIMultiDictProxy[str], name: str) -> str | None:
    value = _single(headers, name)
    if value is not None and not BRANCH_ID.fullmatch(value):
        raise wrong(name, BRANCH_RULE, value)
    return value
