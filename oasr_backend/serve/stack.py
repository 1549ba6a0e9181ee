"""The stack of tritonserver's threads, of which its HTTP parser takes more the more is sent to it.

Triton 24.10 puts form-typed bodies, one entry a chunk and one call a level of JSON on the stack of
a thread. Such a stack has the size of the soft limit at the start of the process, 8 MiB as a rule.
"""

from __future__ import annotations

import resource
from pathlib import Path

#: Enough for a form-typed body of 63 MB or four million chunks; only what is touched costs memory.
STACK_BYTES = 1 << 30
_UNLIMITED = resource.RLIM_INFINITY
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_STRICT = "2"


def is_reserved_whole(overcommit: Path = _OVERCOMMIT) -> bool:
    """Whether the kernel counts untouched stack as memory: then no thread can have so much."""
    return overcommit.is_file() and overcommit.read_text().strip() == _STRICT


def hard_limit_bytes() -> int | None:
    """The largest stack that a process may ask for; None: any."""
    return _finite(resource.getrlimit(resource.RLIMIT_STACK)[1])


def address_space_bytes() -> int | None:
    """The address space that all stacks together may take; None: any."""
    return _finite(resource.getrlimit(resource.RLIMIT_AS)[0])


def stack_bytes() -> int | None:
    """The soft limit that a server starts with; None: the caller's own.

    More than STACK_BYTES where the caller has that, less where the hard limit is lower.
    """
    if is_reserved_whole() or address_space_bytes() is not None:
        return None
    # The limit is not "unlimited", with which glibc gives threads 2 MiB.
    soft = _finite(resource.getrlimit(resource.RLIMIT_STACK)[0]) or 0
    wanted, hard = max(STACK_BYTES, soft), hard_limit_bytes()
    return wanted if hard is None else min(wanted, hard)


def with_deep_stacks() -> list[str]:
    """A command's first words: it runs, as the same process, with `stack_bytes` of stack."""
    size = stack_bytes()
    if size is None:
        return []
    return ["/bin/sh", "-c", 'ulimit -S -s "$0" && exec "$@"', str(size >> 10)]


def _finite(limit: int) -> int | None:
    return None if limit == _UNLIMITED else limit
