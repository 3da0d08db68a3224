"""The checkpoint's tokenizer as the front end needs it: ids of a text, and DeepSeek's own prompt encoding of a conversation."""

from __future__ import annotations

from pathlib import Path

from deepseek_recipe import DeepseekV41Encoding, SpecialToken, SpecialTokens, Tokenizer

from evrun.launch.http.errors import ApiError, bad

NEEDED = (
    SpecialToken.Bos,
    SpecialToken.Eos,
    SpecialToken.System,
    SpecialToken.User,
    SpecialToken.Assistant,
    SpecialToken.ThinkingStart,
    SpecialToken.ThinkingEnd,
)
"""Without these as tokens of their own there is no conversation."""
EFFORT_WORDS = "Reasoning Effort: "
EFFORT_HIGH = "75"


class Vocabulary:
    """Thread-safe after construction."""

    def __init__(self, directory: Path, size: int, bos_token_id: int) -> None:
        """Raises RuntimeError or OSError when there is no usable tokenizer.json in `directory`."""
        self.size = size
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.encoding = DeepseekV41Encoding().with_tokenizer(self.tokenizer)
        self._bos = bos_token_id
        spelling = SpecialTokens()
        self.missing = [text for text in map(spelling.token, NEEDED) if len(self.tokenizer.encode(text)) != 1]
        """Special tokens of a conversation that this checkpoint lacks."""
        self.think_end = self.tokenizer.encode(spelling.token(SpecialToken.ThinkingEnd))[-1]
        self._system = spelling.token(SpecialToken.System)
        self.can_call_tools = len(self.tokenizer.encode(spelling.token(SpecialToken.Dsml))) == 1

    def encode(self, text: str) -> list[int]:
        """Exactly one BOS in front, also when the text already begins with it; nothing else is added."""
        ids = self.tokenizer.encode(text)
        return ids if ids[:1] == [self._bos] else [self._bos, *ids]

    def check_chat(self, tools: bool) -> None:
        """Raises ApiError 400 when the checkpoint's tokenizer has no special tokens for a conversation."""
        if self.missing:
            said = f"this checkpoint's tokenizer lacks {', '.join(self.missing)}, so it has no chat; use /v1/completions"
            raise ApiError(400, said, "messages", "chat_not_supported")
        if tools and not self.can_call_tools:
            raise ApiError(400, "tools: this checkpoint's tokenizer has no token for tool calls", "tools", "tools_not_supported")

    def with_effort(self, ids: list[int], effort: int) -> list[int]:
        """The ids of a prompt of high effort with another number from 1 to 100 in its place.

        Raises ApiError 400 where this tokenizer joins the number with what is around it.
        """
        begin = [self._bos, *self.tokenizer.encode(self._system), *self.tokenizer.encode(EFFORT_WORDS)]
        high = self.tokenizer.encode(EFFORT_HIGH)
        if ids[: len(begin) + len(high)] != begin + high:
            raise bad("reasoning_effort", "this checkpoint's tokenizer takes no numbers here; give low, high, xhigh, max or none")
        return [*begin, *self.tokenizer.encode(str(effort)), *ids[len(begin) + len(high) :]]
