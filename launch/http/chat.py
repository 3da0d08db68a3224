"""`POST /v1/chat/completions`: conversations, thinking and tool calls in DeepSeek's own encoding (`deepseek_recipe`)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from deepseek_recipe import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    InferenceChunk,
    InferenceFinishReason,
    ModelVersion,
    PromptUsage,
    StreamProcessor,
)

from evrun.expert_worker.wire.requests import Finished, Generate, Started, Token
from evrun.launch.http import fields
from evrun.launch.http.errors import ApiError, bad
from evrun.launch.http.vocabulary import Vocabulary

KNOWN = fields.COMMON | {
    "messages", "max_completion_tokens", "top_logprobs", "reasoning_effort", "thinking", "tools", "tool_choice", "response_format",
    "metadata",
}  # fmt: skip
MAX_LIMIT = 393_216
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
PARTS = ("text",)


class Chat:
    """answer.Answer of this endpoint."""

    def __init__(self, body: Mapping[str, Any], model: str, vocabulary: Vocabulary, max_context: int, eos_token_id: int) -> None:
        """Raises ApiError 400 or 404 with the field's name."""
        fields.check_names(body, KNOWN)
        fields.model(body, model)
        asked = fields.sampling(body)
        limit = _limit(body)
        logprobs = _logprobs(body)
        effort = _check(body)
        vocabulary.check_chat(bool(body.get("tools")))
        request = _convert(body, model, limit, effort)
        ids = vocabulary.encoding.encode(request.conversation)
        if isinstance(effort, int):
            ids = vocabulary.with_effort(ids, effort)
        # Without a limit there must be room for one token at least.
        fields.check_context(len(ids), limit or 1, max_context, "messages")
        self.stream = asked.stream
        self.prompt_tokens = len(ids)
        # The parser stops on the answer's text, which the coordinator cannot tell from markup: `stop` is not passed on.
        self.message = Generate(
            prompt=None, prompt_ids=ids, add_bos=False, max_new_tokens=request.resolve_max_tokens(len(ids), max_context),
            temperature=asked.temperature, seed=asked.seed, stop=[], ignore_eos=asked.ignore_eos, top_logits=0, dump_logits=None,
            dump_routes=None, dump_activations=None, top_p=asked.top_p, logprobs=-1 if logprobs is None else logprobs,
        )  # fmt: skip
        self._asked, self._eos = asked, eos_token_id
        self._think_end = vocabulary.think_end if request.conversation.thinking_mode else None
        answer_id = f"chatcmpl-{secrets.token_hex(12)}"
        self._parser = StreamProcessor(
            ChatCompletionRequest.chunk_generator(request, answer_id, model), request.parsing_options, vocabulary.tokenizer
        )
        self._whole = ChatCompletionResponse(answer_id, model, 0, len(ids), 0)
        self._created = 0
        self._last: dict[str, Any] = {}
        self._token_ids: list[int] = []

    @property
    def complete(self) -> bool:
        return self._parser.finished

    def start(self, started: Started) -> list[str]:
        return self._out(self._parser.push(InferenceChunk.ready(prompt_usage=PromptUsage(prompt_tokens=self.prompt_tokens))))

    def take(self, token: Token) -> list[str]:
        self._token_ids.append(token.token_id)
        if token.token_id == self._eos:
            return []  # an end is no text; with ignore_eos neither
        logprobs = None
        if token.logprobs:
            own, *best = [(int(i), float(value)) for i, _, value in token.logprobs]
            logprobs = [(own[1], best)]
        return self._out(self._parser.push(InferenceChunk.tokens([token.token_id], logprobs)))

    def finish(self, finished: Finished | None) -> list[str]:
        chunks = []
        if not self._parser.finished:
            full = finished is not None and finished.finish_reason == "length"
            reason = InferenceFinishReason.Length if full else InferenceFinishReason.Stop
            chunks = self._out(self._parser.push(InferenceChunk.finish(reason)) + self._parser.finish())
        if self.stream and self._asked.include_usage:
            chunks.append(json.dumps({**self._last, "choices": []}, ensure_ascii=False))
        return chunks

    def whole(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self._whole.to_json())
        body["created"] = self._created
        self._correct(body["usage"])
        if self._asked.return_token_ids:
            body["choices"][0] |= {"token_ids": self._token_ids, "prompt_token_ids": self.message.prompt_ids}
        return body

    def _out(self, chunks: list[Any]) -> list[str]:
        """Chunks as JSON to stream, or into the whole answer."""
        texts = []
        for chunk in chunks:
            text = self._streamed(chunk)
            if self.stream:
                texts.append(text)
            else:
                self._whole.accumulate(chunk)
        return texts

    def _streamed(self, chunk: ChatCompletionChunk) -> str:
        """The chunk's JSON; usage goes into a chunk of its own after the last, as OpenAI has it."""
        text = chunk.to_json()
        if text.endswith(',"usage":null}') and self._created:
            return text if self._asked.include_usage else text[: -len(',"usage":null}')] + "}"
        found = json.loads(text)
        self._created = found["created"]
        usage = found.pop("usage", None)
        if usage is not None:
            self._correct(usage)
            self._last = {**found, "usage": usage}
        if self._asked.include_usage:
            found["usage"] = None
        if self._asked.return_token_ids and usage is not None:
            found["choices"][0] |= {"token_ids": self._token_ids, "prompt_token_ids": self.message.prompt_ids}
        return json.dumps(found, ensure_ascii=False)

    def _correct(self, usage: dict[str, Any]) -> None:
        """Count every token that was generated, as `evrun generate` does."""
        ids = self._token_ids
        usage["completion_tokens"] = len(ids)
        if self._think_end is not None:
            thought = ids.index(self._think_end) + 1 if self._think_end in ids else len(ids)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        usage["total_tokens"] = usage["prompt_tokens"] + len(ids)


def _limit(body: Mapping[str, Any]) -> int | None:
    old = fields.integer(body, "max_tokens", 1, MAX_LIMIT)
    new = fields.integer(body, "max_completion_tokens", 1, MAX_LIMIT)
    if old is not None and new is not None and old != new:
        raise bad("max_tokens", f"{old} differs from max_completion_tokens {new}; give one of them")
    return new if new is not None else old


def _logprobs(body: Mapping[str, Any]) -> int | None:
    wanted = fields.boolean(body, "logprobs")
    best = fields.integer(body, "top_logprobs", 0, fields.MAX_TOP_LOGPROBS)
    if best is not None and not wanted:
        raise bad("top_logprobs", "only with logprobs: true")
    return (best or 0) if wanted else None


def _check(body: Mapping[str, Any]) -> int | str | None:
    """What the encoder would not say by name, or would let pass; the reasoning effort. Raises ApiError 400."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "expected a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bad(f"messages[{i}]", f"expected an object, found {type(message).__name__}")
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else []):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in PARTS:
                said = f"expected a part of type text, found {str(kind)[:40]!r}; images, audio and files are not supported"
                raise bad(f"messages[{i}].content[{j}]", said, "unsupported_content")
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise bad("response_format", "only {'type': 'text'}: the sampler follows no grammar", "unsupported_parameter")
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise bad("tools", f"expected a list, found {type(tools).__name__}")
    for i, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise bad(f"tools[{i}]", "expected an object of type function")
        if function.get("strict"):
            raise bad(f"tools[{i}].function.strict", "not supported: the sampler follows no grammar", "unsupported_parameter")
    effort = body.get("reasoning_effort")
    if effort is None:
        return None
    if isinstance(effort, str) and effort in EFFORTS:
        return effort
    if type(effort) is int and 1 <= effort <= 100:
        return effort
    raise bad("reasoning_effort", f"expected an integer from 1 to 100, or one of {', '.join(EFFORTS)}, found {str(effort)[:40]!r}")


def _convert(body: Mapping[str, Any], model: str, limit: int | None, effort: int | str | None) -> ConversationRequest:
    """The conversation. Raises ApiError 400 with the encoder's own words."""
    passed_on = {name: body[name] for name in ("messages", "tools", "tool_choice", "thinking", "stop") if body.get(name) is not None}
    passed_on["model"] = model
    if limit is not None:
        passed_on["max_tokens"] = limit
    if body.get("logprobs"):
        passed_on["logprobs"] = True
        passed_on["top_logprobs"] = body.get("top_logprobs") or 0
    if effort is not None:
        passed_on["reasoning_effort"] = "high" if isinstance(effort, int) else effort
    options = ConversionOptions().with_model_versions_by_name({model: ModelVersion.DeepseekV41Flash})
    try:
        request = ChatCompletionRequest(passed_on).convert(options)
    except ConversionError as error:
        said = str(json.loads(error.body)["error"]["message"])
        raise ApiError(400, said, _param(said)) from None
    except (ValueError, TypeError) as error:
        said = str(error)
        raise ApiError(400, said, _param(said)) from None
    if any(message.image_sources for message in request.conversation.messages):
        raise bad("messages", "images are not supported", "unsupported_content")
    if isinstance(effort, int) and not request.conversation.thinking_mode:
        raise bad("reasoning_effort", f"{effort} asks for thinking, which `thinking` turns off; leave one out")
    return request


def _param(said: str) -> str:
    """The field that the encoder's words are about."""
    found = re.search(r"\b(tool_choice|tools|thinking|stop|reasoning_effort)\b", said)
    return found[1] if found else "messages"
