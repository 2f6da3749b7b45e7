"""What the command line asks a running gateway to do, over plain HTTP."""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from evolving_infra.errors import InputError, PeerError

CALL_S = 30.0


def change_role(url: str, node: str, role: str) -> dict[str, Any]:
    """Change a node's role. Returns ``{node, from, to, control_s, ...}``.

    Raises ``PeerError`` if no gateway answers, ``InputError`` with its sentence if it refuses.
    """
    target = f"{url}/v1/cluster/nodes/{urllib.parse.quote(node, safe='')}/role"
    request = urllib.request.Request(
        target,
        data=json.dumps({"role": role}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            change: dict[str, Any] = json.load(answer)
            return change
    except urllib.error.HTTPError as error:
        raise InputError(_sentence(error)) from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise PeerError(f"no gateway answers at {url}: {error}") from None


def _sentence(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"the gateway answered {error.code} {error.reason}"
