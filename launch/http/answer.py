"""What an endpoint makes of one request: the message for the coordinator, and JSON from what comes back."""

from __future__ import annotations

from typing import Any, Protocol

from evrun.expert_worker.wire.requests import Finished, Generate, Started, Token


class Answer(Protocol):
    """One request in the words of one endpoint. Pure: no sockets, no clocks but its creation time."""

    stream: bool
    message: Generate
    prompt_tokens: int

    @property
    def complete(self) -> bool:
        """Nothing more is wanted: the rest may be cancelled."""
        ...

    def start(self, started: Started) -> list[str]:
        """Chunks (JSON) to stream before the first token."""
        ...

    def take(self, token: Token) -> list[str]: ...

    def finish(self, finished: Finished | None) -> list[str]:
        """The last chunks. `finished` is None when `complete` ended it first."""
        ...

    def whole(self) -> dict[str, Any]:
        """The response of a request without `stream`, after `finish`."""
        ...


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
