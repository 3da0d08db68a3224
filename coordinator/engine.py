"""The narrow door to the model: takes a request, gives tokens. One request at a time."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from evrun.coordinator.dumps import Dumps
from evrun.coordinator.expert_client import CancelledError, ExpertClient
from evrun.coordinator.models.registry import Model
from evrun.coordinator.request_server import Job
from evrun.coordinator.sampler import Sampler, best, log_probabilities
from evrun.coordinator.spec import CoordinatorSpec
from evrun.coordinator.status import StatusMaker
from evrun.coordinator.text import GrowingText, Text
from evrun.expert_worker.wire.errors import USAGE, EvrunError
from evrun.expert_worker.wire.requests import Finished, Generate, Prefill, Refused, Started, Token

log = logging.getLogger("engine")
MAX_TOP_LOGITS = 1000


@dataclass
class Progress:
    """What a request has come to; `Finished` is made from it whatever ends the request."""

    prompt_ids: list[int]
    text: GrowingText
    token_ids: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    reason: str = "length"
    stopped_on: str = "length"
    error: str | None = None
    exit_code: int = 0


class Engine:
    """Model, workers and tokenizer of a run."""

    def __init__(self, spec: CoordinatorSpec, model: Model, text: Text, experts: ExpertClient, status: StatusMaker) -> None:
        self._spec, self._model, self._text, self._experts, self._status = spec, model, text, experts, status

    def serve(self, job: Job) -> None:
        """Run a job to its end and say everything there is to say. Raises only what ends the coordinator."""
        request = job.request
        try:
            prompt_ids = self._prompt(request)
        except ValueError as error:
            job.say(Refused(USAGE, str(error)))
            return
        progress = Progress(prompt_ids, GrowingText(self._text, request.stop))
        pieces = [self._text.piece(i) for i in prompt_ids]
        log.info("request: prompt %d tokens %s, at most %d new", len(prompt_ids), prompt_ids[:32], request.max_new_tokens)
        job.say(Started(prompt_ids, pieces, self._status.experts_line()))
        resends = self._experts.resends
        self._experts.cancelled = job.cancelled
        try:
            with torch.inference_mode():
                self._generate(job, progress)
        except CancelledError:
            self._fail(progress, f"cancelled: {job.cancel_reason}", EvrunError.exit_code)
        except EvrunError as error:
            self._fail(progress, str(error), error.exit_code)
        except (MemoryError, torch.OutOfMemoryError):
            self._fail(progress, "out of memory in the coordinator; a smaller --prefill-chunk or --max-context needs less", 4)
        self._experts.abandon()
        self._experts.cancelled = lambda: False
        job.say(self._finished(progress, self._experts.resends - resends))
        log.info("request ended: %d tokens, %s", len(progress.token_ids), progress.error or progress.stopped_on)

    def _generate(self, job: Job, progress: Progress) -> None:
        request, prompt = job.request, progress.prompt_ids
        dumps = Dumps(request)
        sampler = Sampler(request.temperature, request.seed, request.top_p)
        state = self._model.new_state(len(prompt) + request.max_new_tokens)
        wanted: Any = "all" if dumps.wants_all_logits else "last"
        observer = dumps if dumps.observes else None
        started = time.monotonic()
        chunk = self._spec.prefill_chunk
        for start in range(0, len(prompt), chunk):
            fed = prompt[start : start + chunk]
            logits = self._model.forward(fed, state, self._experts, logits=wanted, observer=observer)
            dumps.logits(logits)
            job.say(Prefill(start + len(fed), len(prompt)))
        progress.prefill_s = time.monotonic() - started
        started = time.monotonic()
        while True:
            token = sampler.pick(logits[-1])
            if self._take(job, progress, token, logits[-1]):
                break
            logits = self._model.forward([token], state, self._experts, logits="last", observer=observer)
            dumps.logits(logits)
            progress.decode_s = time.monotonic() - started
        dumps.write()

    def _take(self, job: Job, progress: Progress, token: int, logits: torch.Tensor) -> bool:
        """Note a new token; whether the request is done with it."""
        request = job.request
        progress.token_ids.append(token)
        candidates: list[list[int | str | float]] = []
        if request.top_logits:
            candidates = [[i, self._text.piece(i), value] for i, value in best(logits, request.top_logits)]
        logprobs: list[list[int | str | float]] = []
        if request.logprobs >= 0:
            logprobs = [[i, self._text.piece(i), value] for i, value in log_probabilities(logits, token, request.logprobs)]
        ended = token == self._model.config.eos_token_id and not request.ignore_eos
        text = "" if ended else progress.text.add(token)
        full = len(progress.token_ids) >= request.max_new_tokens
        if ended or full:
            text += progress.text.finish()
        if ended:
            progress.reason, progress.stopped_on = "stop", "eos"
        elif progress.text.stopped_on is not None:
            progress.reason, progress.stopped_on = "stop", progress.text.stopped_on
        job.say(Token(token, text, candidates, logprobs))
        return ended or full or progress.text.stopped_on is not None

    def _prompt(self, request: Generate) -> list[int]:
        """The ids of a request that can be run. Raises ValueError: what, expected, found."""
        config = self._model.config
        if request.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens: at least 1 expected, found {request.max_new_tokens}")
        if not request.temperature >= 0 or request.temperature == float("inf"):
            raise ValueError(f"--temperature: a number of at least 0 expected, found {request.temperature}")
        if not 0 <= request.top_logits <= min(MAX_TOP_LOGITS, config.vocab_size):
            raise ValueError(f"--top-logits: 0 to {min(MAX_TOP_LOGITS, config.vocab_size)} expected, found {request.top_logits}")
        if not 0 < request.top_p <= 1:
            raise ValueError(f"top_p: a number above 0 and at most 1 expected, found {request.top_p}")
        if not -1 <= request.logprobs <= min(MAX_TOP_LOGITS, config.vocab_size):
            raise ValueError(f"logprobs: -1 to {min(MAX_TOP_LOGITS, config.vocab_size)} expected, found {request.logprobs}")
        if any(not s for s in request.stop):
            raise ValueError("--stop: a text of at least one character expected, found an empty one")
        if request.prompt_ids is not None:
            ids = list(request.prompt_ids)
        elif request.prompt:
            ids = self._text.encode(request.prompt, request.add_bos)
        else:
            ids = []
        if not ids:
            raise ValueError("the prompt is empty: at least one token expected")
        outside = [i for i in ids if not 0 <= i < config.vocab_size]
        if outside:
            raise ValueError(f"prompt ids: 0 to {config.vocab_size - 1} expected (the vocabulary), found {outside[0]}")
        if len(ids) + request.max_new_tokens > self._spec.max_context:
            raise ValueError(
                f"context: prompt {len(ids)} tokens + {request.max_new_tokens} new = {len(ids) + request.max_new_tokens}, "
                f"at most {self._spec.max_context} (--max-context); nothing was computed"
            )
        return ids

    def _fail(self, progress: Progress, error: str, exit_code: int) -> None:
        log.error("request failed: %s", error)
        progress.reason, progress.stopped_on, progress.error, progress.exit_code = "error", error, error, exit_code

    def _finished(self, progress: Progress, resends: int) -> Finished:
        decode_tokens = max(0, len(progress.token_ids) - 1)
        return Finished(
            progress.token_ids, progress.text.whole, progress.reason, progress.stopped_on, progress.error, progress.exit_code,
            self._status.load_s, progress.prefill_s, progress.decode_s, len(progress.prompt_ids), decode_tokens, resends,
        )  # fmt: skip
