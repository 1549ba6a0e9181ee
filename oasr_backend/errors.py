"""Every error that this package raises on purpose.

OasrError                          a fault with a name; knows its Triton status code
├── ConfigError (ValueError)       a server-side setting or checkpoint cannot be honoured
│   ├── CheckpointError            the model directory is incomplete or asks for what is not built
│   └── SelfTestError              a loaded model cannot serve its first window
├── InvalidRequestError (ValueError)   one request is wrong; the stream it names is unharmed
│   └── UnknownStreamError (KeyError)  a continuation or END for a stream that is not open
├── StreamStateError (ValueError)  a cache call out of order: double allocation, wrong shape
│   └── StreamNotPreparedError (RuntimeError)  paged caches read before the first prepare
├── StreamLimitError               no room for another stream now
├── DecoderStateError (RuntimeError)   a decoder is used without a live state
├── PoolExhaustedError (RuntimeError)  a pool has too few free units for an all-or-nothing request
├── StreamCancelledError           the caller cancelled the request
├── StepFailedError (RuntimeError) the batched step failed; its streams are closed
├── DeviceLostError (RuntimeError) the device cannot be used any more
└── ServerError (RuntimeError)      a tritonserver process cannot be started or ended too early

`triton_code` is the name of the constant on `pb_utils.TritonError`.
"""

from __future__ import annotations

import reprlib
from numbers import Integral

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


def shown(value: object) -> str:
    """`repr` for a message, with the middle left out of what a client has made long."""
    return _SHORT.repr(value)


class OasrError(Exception):
    """Base of the tree. The message names the value, the limit and the remedy."""

    triton_code = "INTERNAL"

    def without_history(self) -> OasrError:
        """Itself, without the frames that it passed: they would keep a request's audio alive."""
        self.__context__ = self.__cause__ = None
        return self.with_traceback(None)


class ConfigError(OasrError, ValueError):
    triton_code = "INVALID_ARG"


def check_whole(owner: str, *, least: int, **values: object) -> None:
    """Raises ConfigError for the first value that is no whole number of `least` or more.

    `owner` says whose values they are; they are named by their keywords.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ConfigError(
                f"{owner}: {name}={shown(value)} is no whole number; give an int of {least} or more"
            )
        if value < least:
            raise ConfigError(f"{owner}: {name}={value} is below {least}; give {least} or more")


class CheckpointError(ConfigError):
    pass


class SelfTestError(ConfigError):
    pass


class InvalidRequestError(OasrError, ValueError):
    triton_code = "INVALID_ARG"


class UnknownStreamError(InvalidRequestError, KeyError):
    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class StreamStateError(OasrError, ValueError):
    pass


class StreamNotPreparedError(StreamStateError, RuntimeError):
    pass


class DecoderStateError(OasrError, RuntimeError):
    pass


class StreamLimitError(OasrError):
    triton_code = "UNAVAILABLE"


class PoolExhaustedError(OasrError, RuntimeError):
    triton_code = "UNAVAILABLE"

    def __init__(
        self, what: str, *, requested: int, free: int, total: int, remedy: str = ""
    ) -> None:
        text = f"{what} exhausted: requested {requested}, only {free} of {total} are free"
        super().__init__(f"{text}; {remedy}" if remedy else text)
        self.requested = requested
        self.free = free
        self.total = total


class StreamCancelledError(OasrError):
    triton_code = "CANCELLED"


class StepFailedError(OasrError, RuntimeError):
    pass


class DeviceLostError(OasrError, RuntimeError):
    triton_code = "UNAVAILABLE"


class ServerError(OasrError, RuntimeError):
    pass
