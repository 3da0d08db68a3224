"""Errors as OpenAI's clients expect them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from evrun.expert_worker.wire.errors import DEVICE, USAGE
from evrun.expert_worker.wire.requests import Finished, Refused

RETRY_AFTER_S = 2


class ApiError(Exception):
    """What a client is told. `retry_after_s` becomes the header Retry-After."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}}


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 that names its field."""
    return ApiError(400, f"{param}: {message}", param, code)


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, None, code, RETRY_AFTER_S)


def queue_full(limit: int) -> ApiError:
    return ApiError(429, f"{limit} requests are waiting already, which is the limit; try again later", None, "queue_full", RETRY_AFTER_S)


def of_refusal(refused: Refused) -> ApiError:
    """The coordinator did not start a request."""
    if refused.queue_full:
        return ApiError(429, refused.error, None, "queue_full", RETRY_AFTER_S)
    if refused.exit_code == USAGE:
        return ApiError(400, refused.error)
    return unavailable(refused.error, "not_serving")


def of_failure(finished: Finished) -> ApiError:
    """A request that was started and did not come to its end."""
    if finished.exit_code == DEVICE:
        return unavailable(str(finished.error), "device")
    return ApiError(500, str(finished.error), None, "request_failed")


def _type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
