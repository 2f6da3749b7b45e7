"""One node's L2 in memory: a memfd that the store owns and other processes map."""

import contextlib
import errno
import fcntl
import mmap
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evolving_infra.errors import CapacityError, PeerError, wrong

MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in the mmap module
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostPool:
    """A mapping of ``num_slots`` records. Unmapped when the last view of ``memory`` is gone.

    Attributes:
        memory: ``[num_slots, slot_bytes]`` uint8; not writable if mapped read-only.
    """

    def __init__(self, fd: int, memory: NDArray[np.uint8]) -> None:
        self.fd = fd
        self.memory = memory

    @staticmethod
    def create(num_slots: int, slot_bytes: int) -> "HostPool":
        """A new pool, every page present, so that no later write can fail or be slow.

        The size is sealed: no process that maps it can be hit by a truncation.

        Raises:
            CapacityError: the machine has not that much memory.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise wrong("num_slots x slot_bytes", "positive numbers", (num_slots, slot_bytes))
        size = _file_bytes(num_slots, slot_bytes)
        fd = os.memfd_create("evolving-infra-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            mapping = mmap.mmap(fd, size)
            _populate(mapping)
        except OSError as error:
            os.close(fd)
            text = f"no memory for a host pool of {size} bytes: {error.strerror}"
            raise CapacityError(text, asked=size) from None
        return HostPool(fd, _view(mapping, num_slots, slot_bytes))

    @staticmethod
    def attach(fd: int, num_slots: int, slot_bytes: int, *, writable: bool) -> "HostPool":
        """Map a pool that another process owns; takes ``fd`` over.

        Raises:
            PeerError: the file is not a sealed pool of that size, or not open for writing.
        """
        size = _file_bytes(num_slots, slot_bytes)
        try:
            if os.fstat(fd).st_size != size:
                raise PeerError(f"the pool has {os.fstat(fd).st_size} bytes, expected {size}")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise PeerError("the pool's size is not sealed")
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapping = mmap.mmap(fd, size, flags=flags, prot=access)
        except PeerError:
            os.close(fd)
            raise
        except OSError as error:
            os.close(fd)
            raise PeerError(f"can't map the pool: {error.strerror}") from None
        return HostPool(fd, _view(mapping, num_slots, slot_bytes))

    def open_again(self, *, writable: bool) -> int:
        """A new fd of the pool for another process.

        A read-only fd guards against mistakes, not against malice: nothing can be written through
        it, but a process of the same user could open the memory for writing by ``/proc/*/fd``.
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR if writable else os.O_RDONLY)

    def close(self) -> None:
        """Close the fd. Mappings live on until their last view is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _file_bytes(num_slots: int, slot_bytes: int) -> int:
    return -(-num_slots * slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _populate(mapping: mmap.mmap) -> None:
    """Make all pages present, huge ones where the kernel lets shared memory have them."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel: touch the pages instead
            raise
        np.frombuffer(mapping, dtype=np.uint8)[:: mmap.PAGESIZE] = 0


def _view(mapping: mmap.mmap, num_slots: int, slot_bytes: int) -> NDArray[np.uint8]:
    flat = np.frombuffer(mapping, dtype=np.uint8, count=num_slots * slot_bytes)
    return flat.reshape(num_slots, slot_bytes)
