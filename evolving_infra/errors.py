"""The error tree, split by whose fault it is.

EvolvingInfraError
  InputError (ValueError)      the caller is wrong: name, expected, got
  StateError (RuntimeError)    the event is not legal now; nothing changed
    CapacityError              nothing left to give; .asked, .free
  PeerError                    another process broke the protocol or went away
  BackendError
    BackendMissing             a named backend can't run here; says what would help
"""


class EvolvingInfraError(Exception):
    """Any error raised on purpose by this package."""


class InputError(EvolvingInfraError, ValueError):
    """The caller passed something wrong. The text names field, expected and got."""


class StateError(EvolvingInfraError, RuntimeError):
    """The event or call is not legal now. Nothing was changed."""


class CapacityError(StateError):
    """Nothing is left to give. ``asked`` and ``free`` are in the unit the text names."""

    def __init__(self, text: str, *, asked: int = 0, free: int = 0) -> None:
        super().__init__(text)
        self.asked = asked
        self.free = free


class PeerError(EvolvingInfraError):
    """Another process (store, engine, controller, client) broke the protocol or went away."""


class BackendError(EvolvingInfraError):
    """A backend failed."""


class BackendMissing(BackendError):  # noqa: N818  the name says what is wrong
    """A named backend can't run on this machine. The text says what would help."""


def wrong(field: str, expected: str, got: object) -> InputError:
    """The one sentence for bad input: ``field: expected ..., got ...``."""
    shown = repr(got)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return InputError(f"{field}: expected {expected}, got {shown}")
