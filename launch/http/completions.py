"""`POST /v1/completions`: raw text or token ids are continued as they are, with exactly one BOS before text."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evrun.expert_worker.wire.requests import Finished, Generate, Started, Token
from evrun.launch.http import fields
from evrun.launch.http.answer import usage
from evrun.launch.http.errors import bad
from evrun.launch.http.vocabulary import Vocabulary

KNOWN = fields.COMMON | {"prompt"}
DEFAULT_MAX_TOKENS = 16
"""As OpenAI's."""
MAX_LOGPROBS = 20


@dataclass
class LogprobsSoFar:
    """Entries of tokens whose text is out, and those that a stop string may still take back."""

    given: int = 0
    """Characters of text that are out."""
    offset: int = 0
    """Where the next token's text begins."""
    waiting: list[tuple[int, list[list[Any]]]] | None = None

    def take(self, token: Token) -> list[tuple[int, list[list[Any]]]]:
        """(offset, entries) of every token whose text is out by now."""
        self.waiting = [*(self.waiting or []), (self.offset, token.logprobs)]
        self.offset += len(str(token.logprobs[0][1]))
        self.given += len(token.text)
        ready = [w for w in self.waiting if w[0] + len(str(w[1][0][1])) <= self.given]
        self.waiting = self.waiting[len(ready) :]
        return ready

    def rest(self) -> list[tuple[int, list[list[Any]]]]:
        ready, self.waiting = self.waiting or [], []
        return ready


class Completion:
    """answer.Answer of this endpoint."""

    complete = False

    def __init__(self, body: Mapping[str, Any], model: str, vocabulary: Vocabulary, max_context: int) -> None:
        """Raises ApiError 400 or 404 with the field's name."""
        fields.check_names(body, KNOWN)
        fields.model(body, model)
        asked = fields.sampling(body)
        limit = fields.integer(body, "max_tokens", 1, 2**31)
        logprobs = fields.integer(body, "logprobs", 0, MAX_LOGPROBS)
        ids = _prompt(body, vocabulary)
        new_tokens = DEFAULT_MAX_TOKENS if limit is None else limit
        fields.check_context(len(ids), new_tokens, max_context, "prompt")
        self.stream = asked.stream
        self.prompt_tokens = len(ids)
        self.message = Generate(
            prompt=None, prompt_ids=ids, add_bos=False, max_new_tokens=new_tokens, temperature=asked.temperature, seed=asked.seed,
            stop=asked.stop, ignore_eos=asked.ignore_eos, top_logits=0, dump_logits=None, dump_routes=None, dump_activations=None,
            top_p=asked.top_p, logprobs=-1 if logprobs is None else logprobs,
        )  # fmt: skip
        self._asked = asked
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": model}
        self._text: list[str] = []
        self._entries: list[tuple[int, list[list[Any]]]] = []
        self._logprobs = LogprobsSoFar() if logprobs is not None else None
        self._finished: Finished | None = None

    def start(self, started: Started) -> list[str]:
        return []

    def take(self, token: Token) -> list[str]:
        entries = self._logprobs.take(token) if self._logprobs else []
        self._text.append(token.text)
        self._entries += entries
        if not self.stream or not (token.text or entries or self._asked.return_token_ids):
            return []
        return [json.dumps(self._object(self._choice(token.text, None, entries, [token.token_id])), ensure_ascii=False)]

    def finish(self, finished: Finished | None) -> list[str]:
        assert finished is not None
        self._finished = finished
        entries = self._logprobs.rest() if self._logprobs and finished.stopped_on in ("eos", "length") else []
        self._entries += entries
        if not self.stream:
            return []
        chunks = [self._object(self._choice("", finished.finish_reason, entries, []))]
        if self._asked.include_usage:
            chunks.append({**self._head, "choices": [], "usage": usage(self.prompt_tokens, len(finished.token_ids))})
        return [json.dumps(chunk, ensure_ascii=False) for chunk in chunks]

    def whole(self) -> dict[str, Any]:
        finished = self._finished
        assert finished is not None
        choice = self._choice("".join(self._text), finished.finish_reason, self._entries, finished.token_ids)
        return {**self._head, "choices": [choice], "usage": usage(self.prompt_tokens, len(finished.token_ids))}

    def _object(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [choice], "usage": None} if self._asked.include_usage else {**self._head, "choices": [choice]}

    def _choice(self, text: str, reason: str | None, entries: list[tuple[int, list[list[Any]]]], ids: list[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        if self._logprobs is not None:
            choice["logprobs"] = {
                "tokens": [entry[0][1] for _, entry in entries],
                "token_logprobs": [entry[0][2] for _, entry in entries],
                "top_logprobs": [{piece: value for _, piece, value in entry[1:]} for _, entry in entries],
                "text_offset": [offset for offset, _ in entries],
            }
        if self._asked.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": self.message.prompt_ids}
        return choice


def _prompt(body: Mapping[str, Any], vocabulary: Vocabulary) -> list[int]:
    """The ids of the one prompt. Raises ApiError 400."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise bad("prompt", f"expected one prompt, found {len(prompt)}; send one request for each")
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = vocabulary.encode(prompt) if prompt else []
    elif isinstance(prompt, list):
        outside = [i for i in prompt if type(i) is not int or not 0 <= i < vocabulary.size]
        if outside:
            raise bad("prompt", f"expected token ids from 0 to {vocabulary.size - 1}, found {str(outside[0])[:40]!r}")
        ids = prompt
    else:
        raise bad("prompt", f"expected a text or a list of token ids, found {type(prompt).__name__}")
    if not ids:
        raise bad("prompt", "expected at least one token, found an empty prompt")
    return ids
