"""The only reader of the environment. A bad value raises ``InputError``.

EVOLVING_INFRA_FAULT    zero_restore: restores write zeros (the control that must fail)
EVOLVING_INFRA_SECRET   cluster secret; the launcher hands it to the processes it starts
EVOLVING_INFRA_PARENT   process id of the launcher; its children end with it
EVOLVING_INFRA_URL      gateway address for the command line
"""

import os

from evolving_infra.errors import wrong

FAULTS = ("zero_restore",)
DEFAULT_URL = "http://127.0.0.1:8000"


def fault() -> str | None:
    """Name of the injected fault, or None. Faults exist so that checks can be seen to fail."""
    value = os.environ.get("EVOLVING_INFRA_FAULT", "")
    if not value:
        return None
    if value not in FAULTS:
        raise wrong("EVOLVING_INFRA_FAULT", f"one of {', '.join(FAULTS)}", value)
    return value


def secret() -> str | None:
    """Cluster secret from the environment, or None."""
    return os.environ.get("EVOLVING_INFRA_SECRET") or None


def parent() -> int | None:
    """Process id of the launcher, or None for a process started by hand."""
    value = os.environ.get("EVOLVING_INFRA_PARENT", "")
    if not value:
        return None
    if not value.isdigit():
        raise wrong("EVOLVING_INFRA_PARENT", "a process id", value)
    return int(value)


def url() -> str:
    """Gateway address the command line talks to."""
    return os.environ.get("EVOLVING_INFRA_URL") or DEFAULT_URL
