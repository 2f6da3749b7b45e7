"""What the command line asks a running gateway to do, over plain HTTP."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from evolving_infra.errors import InputError, PeerError, wrong

CALL_S = 30.0


def change_role(url: str, node: str, role: str) -> dict[str, Any]:
    """Change a node's role. Returns ``{node, from, to, control_s, ...}``.

    Raises ``PeerError`` if no gateway answers, ``InputError`` with its sentence if it refuses.
    """
    path = f"/v1/cluster/nodes/{urllib.parse.quote(node, safe='')}/role"
    change = _ask(url, path, {"role": role})
    if not {"node", "from", "to", "control_s"} <= change.keys():
        raise PeerError(f"what answers at {url} is no gateway of this kind")
    return change


def cluster_state(url: str) -> dict[str, Any]:
    """What a gateway's cluster says about itself. Raises as ``change_role`` does."""
    return _ask(url, "/v1/cluster/state", None)


def _ask(url: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise wrong("url", "http://HOST:PORT", url)
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            fields = json.load(answer)
    except urllib.error.HTTPError as error:
        raise InputError(_sentence(error)) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise PeerError(f"no gateway answers at {url}: {error}") from None
    if not isinstance(fields, dict):
        raise PeerError(f"no gateway answers at {url}: it sends {type(fields).__name__}")
    return fields


def _sentence(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"the gateway answered {error.code} {error.reason}"
