"""The journal: every event and command survives a line, and a replay gives the same commands."""

import io
import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evolving_infra.config import ControlConfig
from evolving_infra.control import commands as do
from evolving_infra.control import events as ev
from evolving_infra.control.journal import Entry, Journal, decode, encode, replay
from evolving_infra.control.plane import ControlPlane
from evolving_infra.errors import EvolvingInfraError, InputError, StateError
from evolving_infra.types import BranchKind, Phase, Role, Tier

PAGE = 16
NODES = st.sampled_from(["a", "b", "c"])
REQUESTS = st.sampled_from(["r1", "r2", "r3", "r4"])
BRANCHES = st.sampled_from(["x", "y", "z"])
SMALL = st.integers(0, 300)
CHAINS = st.lists(st.integers(0, 1), max_size=5).map(
    lambda path: tuple(bytes([255, *path[: i + 1]]) for i in range(len(path)))
)
KINDS = st.sampled_from([BranchKind.ROOT, BranchKind.ROOT, BranchKind.FORK])


def events() -> st.SearchStrategy[ev.Event]:
    """Any event over few names, so that many are legal."""
    by_field = {
        "node": NODES,
        "request": REQUESTS,
        "branch": BRANCHES,
        "parent": st.sampled_from([None, None, "x", "y"]),
        "kind": KINDS,
        "version": st.integers(0, 1),
        "phase": st.sampled_from(list(Phase)),
        "role": st.sampled_from(list(Role)),
        "tier": st.sampled_from(list(Tier)),
        "keys": CHAINS,
        "prompt_keys": CHAINS,
        "page_size": st.just(PAGE),
        "prompt_tokens": st.integers(80, 200),
        "seconds": st.floats(0, 1),
        **{name: st.integers(1, 40) for name in ("l1_blocks", "l2_blocks", "max_tokens")},
    }
    return st.one_of(
        [
            st.builds(
                kind,
                **{name: by_field.get(name, SMALL) for name in kind.__dataclass_fields__},
            )
            for kind in get_args(ev.Event)
        ]
    )


def record(sequence, config: ControlConfig) -> tuple[str, ControlPlane, int]:
    """Journal of the legal events of a sequence."""
    plane, file, accepted = ControlPlane(config), io.StringIO(), 0
    journal = Journal(file, config)
    for node, role in (("a", Role.PREFILL), ("b", Role.DECODE)):
        sequence = [
            (
                ev.NodeJoined(node=node, role=role, page_size=PAGE, l1_blocks=99, l2_blocks=99),
                0.0,
            ),
            *sequence,
        ]
    now = 0.0
    for event, passed in sequence:
        now += passed
        try:
            commands = plane.handle(event, now)
        except EvolvingInfraError:
            continue
        plane.check()
        journal.write(now, event, commands)
        accepted += 1
    return file.getvalue(), plane, accepted


@settings(deadline=None, max_examples=250)
@given(
    st.lists(st.tuples(events(), st.sampled_from([0.0, 0.1, 1.5, 7.0])), max_size=60),
    st.booleans(),
)
def test_a_replay_gives_the_same_commands_and_the_same_state(sequence, prefetch) -> None:
    config = ControlConfig(branch_lease_s=20.0, prefetch=prefetch)
    text, plane, accepted = record(sequence, config)
    lines = text.splitlines()
    assert len(lines) == accepted + 1
    again = replay(lines)
    assert again.nodes() == plane.nodes()
    assert again.next_timer() == plane.next_timer()
    for node in "abc":
        assert again.counted_at(node) == plane.counted_at(node)
        assert again.keys_at(node) == plane.keys_at(node)


@settings(deadline=None)
@given(events(), st.floats(0, 1e6))
def test_every_event_survives_a_line(event, now) -> None:
    line = encode(Entry(now=now, event=event, commands=()))
    assert "\n" not in line
    assert decode(line) == Entry(now=now, event=event, commands=())


def test_every_command_survives_a_line() -> None:
    key = bytes(range(32))
    commands: tuple[do.Command, ...] = (
        do.StartPrefill(
            request="r",
            node="n",
            fetches=(do.FetchSource(node="m", first=0, count=3),),
            predicted_seconds=0.1,
        ),
        do.StartDecode(request="r", node="n", source=None),
        do.StartDecode(request="r", node="n", source="m"),
        do.Withdraw(request="r", node="n", phase=Phase.DECODE),
        do.Cancel(request="r", node="n"),
        do.Prefetch(node="n", source="m", branch="b", keys=(key,)),
        do.SetCounted(node="n", counted=(key,), uncounted=()),
        do.RoleChanged(node="n", before=Role.BOTH, after=Role.PREFILL),
        do.BranchExpired(branch="ünïcode"),
    )
    assert {type(command) for command in commands} == set(get_args(do.Command))
    entry = Entry(now=1 / 3, event=ev.TimerDue(), commands=commands)
    assert decode(encode(entry)) == entry


def recorded() -> list[str]:
    arrival = ev.RequestArrived(
        request="r",
        branch="b",
        version=0,
        kind=BranchKind.ROOT,
        parent=None,
        prompt_keys=(b"k",),
        prompt_tokens=20,
        max_tokens=1,
    )
    return record([(arrival, 1.0)], ControlConfig())[0].splitlines()


def test_a_replay_names_the_line_of_the_first_difference() -> None:
    lines = recorded()
    entry = json.loads(lines[3])
    entry["commands"][1]["node"] = "b"
    with pytest.raises(StateError, match=r"line 4: expected .*node='b'.*, got .*node='a'"):
        replay([*lines[:3], json.dumps(entry), "never read"])


@pytest.mark.parametrize(
    ("number", "line", "text"),
    [
        (1, "", "line 1: expected a journal's config"),
        (1, '{"config": {"colour": 1}}', "line 1: expected a journal's config"),
        (4, '{"now": 1.0, "event": {"ty', "line 4: line: expected a journal entry"),
        (4, '{"now": 1.0, "event": {"type": "Party"}, "commands": []}', "'Party'"),
        (4, "[]", "line 4: line: expected a journal entry"),
        (4, '{"now": 1.0, "event": {"type": "NodeLost"}, "commands": []}', "line 4"),
        (4, '{"now": 1.0, "event": {"type": "NodeLost", "node": "q"}, "commands": []}', "'q'"),
    ],
)
def test_a_foreign_line_is_named(number, line, text) -> None:
    lines = recorded()
    lines[number - 1] = line
    with pytest.raises(InputError) as raised:
        replay(lines)
    assert text in str(raised.value)
