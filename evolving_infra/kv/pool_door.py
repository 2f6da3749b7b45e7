"""How processes get a host pool's fd: a small blocking exchange over a Unix socket.

Both ends prove that they know the cluster secret, then the fd goes over by SCM_RIGHTS:

    server -> nonce (32)
    client -> nonce (32) | proof of the server's nonce and the wanted access (32) | access (1)
    server -> proof of the client's nonce (32) | num_slots u64 | slot_bytes u64 | layout (16)  + fd

It has its own socket (the store's path + ``.fd``) and threads, because asyncio passes no fds.
"""

import contextlib
import hmac
import os
import secrets as random_secrets
import socket
import struct
import threading

from evolving_infra.errors import PeerError, wrong
from evolving_infra.kv.channel import NONCE_BYTES, proof, split_address
from evolving_infra.kv.host_pool import HostPool
from evolving_infra.ops.wire_block import WireLayout

EXCHANGE_S = 5.0
SIZES = struct.Struct("<QQ16s")
PROOF_BYTES = 32
READ_ONLY, WRITABLE = b"r", b"w"


def door_path(address: str) -> str:
    """Path of the fd socket of the store at ``address`` (``unix:PATH``)."""
    kind, path = split_address(address)
    if kind != "unix":
        raise wrong("address", "unix:PATH, a store on this host", address)
    return path + ".fd"


class PoolDoor:
    """Serves a pool's fd until closed."""

    def __init__(self, path: str, secret: str, pool: HostPool, layout_digest: bytes) -> None:
        self._path = path
        self._secret = secret
        self._pool = pool
        self._digest = layout_digest
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._accept, name="pool-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Exchanges in progress end by their own time-out."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, PeerError):
            connection.settimeout(EXCHANGE_S)
            nonce = random_secrets.token_bytes(NONCE_BYTES)
            connection.sendall(nonce)
            request = _receive(connection, NONCE_BYTES + PROOF_BYTES + 1)
            theirs, shown = request[:NONCE_BYTES], request[NONCE_BYTES:-1]
            access = request[-1:]
            if not hmac.compare_digest(shown, proof(self._secret, b"door-client" + access, nonce)):
                return
            num_slots, slot_bytes = self._pool.memory.shape
            answer = proof(self._secret, b"door-server", theirs)
            answer += SIZES.pack(num_slots, slot_bytes, self._digest)
            fd = self._pool.open_again(writable=access == WRITABLE)
            try:
                socket.send_fds(connection, [answer], [fd])
            finally:
                os.close(fd)


def open_pool(
    address: str,
    secret: str,
    *,
    wire: WireLayout | None = None,
    writable: bool = False,
    timeout: float = EXCHANGE_S,
) -> HostPool:
    """Map the pool of the store at ``address``. Blocks up to about ``timeout`` seconds.

    Raises:
        PeerError: nobody answers, the secret differs, or the records are not those of ``wire``.
    """
    path = door_path(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(path)
            return _ask(connection, secret, wire, writable)
        except TimeoutError:
            raise PeerError(f"the store at {address} did not pass its pool in time") from None
        except OSError as error:
            raise PeerError(f"can't get the pool of {address}: {error.strerror}") from None


def _ask(
    connection: socket.socket, secret: str, wire: WireLayout | None, writable: bool
) -> HostPool:
    access = WRITABLE if writable else READ_ONLY
    nonce = random_secrets.token_bytes(NONCE_BYTES)
    theirs = _receive(connection, NONCE_BYTES)
    connection.sendall(nonce + proof(secret, b"door-client" + access, theirs) + access)
    size = PROOF_BYTES + SIZES.size
    answer, fds, _, _ = socket.recv_fds(connection, size, 1)
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(answer) != size or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise PeerError("the store passed no pool: is the secret right?")
    num_slots, slot_bytes, digest = SIZES.unpack(answer[PROOF_BYTES:])
    trusted = hmac.compare_digest(answer[:PROOF_BYTES], proof(secret, b"door-server", nonce))
    if not trusted or (wire is not None and (digest, slot_bytes) != (wire.digest, wire.slot_bytes)):
        os.close(fds[0])
        what = "its KV has another layout" if trusted else "it does not know the cluster's secret"
        raise PeerError(f"the store's pool is refused: {what}")
    return HostPool.attach(fds[0], num_slots, slot_bytes, writable=writable)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise PeerError("the other end closed the connection: is the secret right?")
        data += part
    return data
