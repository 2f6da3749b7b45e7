"""The mapped pool and how its fd is passed: who may write, who may not."""

import dataclasses
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evolving_infra.errors import InputError, PeerError
from evolving_infra.kv.channel import proof
from evolving_infra.kv.host_pool import HostPool
from evolving_infra.kv.pool_door import PoolDoor, door_path, open_pool
from evolving_infra.ops.wire_block import WireLayout
from tests.test_kv_samples import SECRET, address_in, silent_listener

WIRE = WireLayout(digest=bytes(range(16)), shards=1, num_layers=1, page_size=1, page_bytes=4)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool.create(5, WIRE.slot_bytes)
    yield made
    made.close()


@pytest.fixture
def address(tmp_path: Path, pool: HostPool) -> Iterator[str]:
    place = address_in(tmp_path, "s")
    door = PoolDoor(door_path(place), SECRET, pool, WIRE.digest)
    yield place
    door.close()
    assert not os.path.exists(door_path(place))


def test_all_pages_are_there_and_aligned(pool: HostPool) -> None:
    assert pool.memory.shape == (5, 192)
    assert pool.memory.ctypes.data % mmap.PAGESIZE == 0
    assert os.stat(pool.fd).st_blocks * 512 >= pool.memory.nbytes


def test_the_size_is_sealed_and_the_fd_not_inherited(pool: HostPool) -> None:
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)
    assert fcntl.fcntl(pool.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_both_see_the_same_memory(pool: HostPool, address: str) -> None:
    engine = open_pool(address, SECRET, wire=WIRE, writable=True)
    reader = open_pool(address, SECRET, wire=WIRE)
    engine.memory[3, :8] = 7
    assert (pool.memory[3, :8] == 7).all()
    assert (reader.memory[3, :8] == 7).all()
    for attached in (engine, reader):
        assert fcntl.fcntl(attached.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        attached.close()


def test_a_reader_cannot_write(address: str) -> None:
    reader = open_pool(address, SECRET)
    assert not reader.memory.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        reader.memory[0, 0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        reader.memory.flags.writeable = True
    with pytest.raises(PermissionError):
        mmap.mmap(reader.fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
        os.write(reader.fd, b"x")
    reader.close()


def test_the_mapping_outlives_the_fds(pool: HostPool, address: str) -> None:
    pool.memory[:] = 9
    reader = open_pool(address, SECRET)
    reader.close()
    pool.close()
    assert (reader.memory == 9).all()


def test_another_secret_is_refused(address: str) -> None:
    with pytest.raises(PeerError, match="passed no pool: is the secret right"):
        open_pool(address, "not it")


def test_another_layout_is_refused(address: str) -> None:
    for other in ({"digest": bytes(16)}, {"page_bytes": 400}):
        with pytest.raises(PeerError, match="its KV has another layout"):
            open_pool(address, SECRET, wire=dataclasses.replace(WIRE, **other))


def test_no_fd_without_a_proof(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(door_path(address))
        stranger.sendall(bytes(65))
        received = b""
        while part := stranger.recv(4096):
            received += part
    assert len(received) == 32, "the nonce and nothing else"


def test_a_proof_for_reading_does_not_give_writing(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(door_path(address))
        nonce = stranger.recv(32)
        stranger.sendall(bytes(32) + proof(SECRET, b"door-clientr", nonce) + b"w")
        assert socket.recv_fds(stranger, 4096, 1)[:2] == (b"", [])


def test_an_impostor_is_refused(tmp_path: Path) -> None:
    """A door that does not know the secret can't pass its own memory off as the pool."""
    place = address_in(tmp_path, "s")
    theirs = HostPool.create(1, 64)
    with silent_listener(place), pytest.raises(PeerError, match="did not pass its pool in time"):
        open_pool(place, SECRET, timeout=0.05)
    os.unlink(door_path(place))
    door = PoolDoor(door_path(place), SECRET + "!", theirs, WIRE.digest)
    with pytest.raises(PeerError):
        open_pool(place, SECRET)
    door.close()
    theirs.close()


def test_a_pool_of_another_size_is_refused() -> None:
    pool = HostPool.create(64, 192)
    with pytest.raises(PeerError, match="the pool has 12288 bytes, expected 20480"):
        HostPool.attach(pool.open_again(writable=False), 100, 192, writable=False)
    pool.close()


def test_an_unsealed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(mmap.PAGESIZE))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(PeerError, match="can't map the pool"):
        HostPool.attach(fd, 1, 64, writable=False)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(unsealed, mmap.PAGESIZE)
    with pytest.raises(PeerError, match="not sealed"):
        HostPool.attach(unsealed, 1, 64, writable=False)


def test_nobody_there_is_a_peer_error(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="can't get the pool"):
        open_pool(address_in(tmp_path, "nobody"), SECRET)


def test_only_stores_on_this_host_have_a_door() -> None:
    with pytest.raises(InputError, match="unix:PATH, a store on this host"):
        door_path("tcp:127.0.0.1:1")


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="positive numbers"):
        HostPool.create(0, 64)
    assert HostPool.create(1, 64).memory.dtype == np.uint8
