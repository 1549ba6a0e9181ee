"""The checked settings of a client, and the transport that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from oasr_client.errors import ClientError
from oasr_client.retry import RetryPolicy
from oasr_client.session import Session
from oasr_client.wire import ChunkRequest, Endpoint, OptionValue, Reply, SequenceId

MAX_TIMEOUT_S = 86400
_DEFAULT_URLS = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}


@dataclass(frozen=True)
class ClientSettings:
    """The settings of both clients.

    `url` is host:port without a scheme; None means this machine and the protocol's usual port.
    `dtype` is the wire's: pcm16 has half the bytes of fp32. `timeout_s` is the deadline of one
    request. `options` are request parameters of every stream's START. `want_result` puts the
    RESULT document into each update. Raises ClientError for a setting that cannot work.
    """

    url: str | None = None
    protocol: Literal["grpc", "http"] = "grpc"
    model_name: str = "oasr_streaming"
    dtype: Literal["pcm16", "fp32"] = "pcm16"
    timeout_s: float = 30.0
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    want_result: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    tls: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("protocol", self.protocol, ("grpc", "http"))
        _check_choice("dtype", self.dtype, ("pcm16", "fp32"))
        if self.url is not None and "://" in self.url:
            raise ClientError(
                f"url {self.url!r} has a scheme; write host:port, and protocol= for the scheme"
            )
        if self.url == "":
            raise ClientError("url is empty; write host:port, or leave it out for this machine")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ClientError(
                f"timeout_s is {self.timeout_s}, it must be above 0 and at most {MAX_TIMEOUT_S} "
                "(a day); 30 is usual"
            )

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            url=self.url or _DEFAULT_URLS[self.protocol],
            model_name=self.model_name,
            dtype=self.dtype,
            tls=self.tls,
            headers=self.headers,
        )

    def session(
        self, sequence_id: SequenceId | None, options: Mapping[str, OptionValue] | None
    ) -> Session:
        merged = {**self.options, **(options or {})}
        return Session(
            sequence_id,
            dtype=self.dtype,
            options=merged,
            policy=self.retry,
            want_result=self.want_result,
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ClientError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


class Transport(Protocol):
    """Carries one request. `infer` raises nothing but ClientError and cancellation."""

    def infer(self, request: ChunkRequest, timeout_s: float) -> Reply: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    async def infer(self, request: ChunkRequest, timeout_s: float) -> Reply: ...

    async def close(self) -> None: ...


def make_transport(settings: ClientSettings) -> Transport:
    # Each protocol's libraries take their time to import, and a client needs one of them.
    if settings.protocol == "grpc":
        from oasr_client.grpc_transport import GrpcTransport

        return GrpcTransport(settings.endpoint)
    from oasr_client.http_transport import HttpTransport

    return HttpTransport(settings.endpoint)


def make_async_transport(settings: ClientSettings) -> AsyncTransport:
    if settings.protocol == "grpc":
        from oasr_client.grpc_transport import AsyncGrpcTransport

        return AsyncGrpcTransport(settings.endpoint)
    from oasr_client.http_transport import AsyncHttpTransport

    return AsyncHttpTransport(settings.endpoint)
