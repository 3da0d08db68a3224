"""Token ids <-> text: the checkpoint's tokenizer, and text that grows without splitting a character or a stop string."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

REPLACEMENT = "�"


class Text:
    """The tokenizer of a checkpoint. Nothing is added to a prompt but the one BOS that is asked for."""

    def __init__(self, directory: Path, bos_token_id: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._bos = bos_token_id

    def encode(self, text: str, add_bos: bool) -> list[int]:
        """Exactly one BOS in front, also when the text already begins with it; none without `add_bos`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and ids[:1] != [self._bos]:
            return [self._bos, *ids]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Special tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def piece(self, token_id: int) -> str:
        """One token for people, special ones included."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text or self._tokenizer.id_to_token(token_id) or f"<{token_id}>"


class GrowingText:
    """Text of the tokens so far, given out as soon as it is certain.

    Held back: an unfinished UTF-8 character, and an ending that may become a stop string. The pieces given out
    concatenate to `whole`.
    """

    def __init__(self, text: Text, stop: list[str]) -> None:
        self._text, self._stop = text, stop
        self._pending_ids: list[int] = []
        self._held = ""
        self.whole = ""
        """What was given out."""
        self.stopped_on: str | None = None
        """The stop string that ended the text."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._pending_ids.append(token_id)
        fresh = self._text.decode(self._pending_ids)
        if fresh.endswith(REPLACEMENT):
            return ""
        self._pending_ids.clear()
        return self._give(fresh, last=False)

    def finish(self) -> str:
        """What was still held back: the text ends here."""
        if self.stopped_on is not None:
            return ""
        fresh = self._text.decode(self._pending_ids)
        self._pending_ids.clear()
        return self._give(fresh, last=True)

    def _give(self, fresh: str, last: bool) -> str:
        candidate = self._held + fresh
        found = [(at, s) for s in self._stop if (at := candidate.find(s)) >= 0]
        if found:
            at, self.stopped_on = min(found, key=lambda f: (f[0], -len(f[1])))
            given, self._held = candidate[:at], ""
        else:
            hold = 0 if last else _may_become(candidate, self._stop)
            given, self._held = candidate[: len(candidate) - hold], candidate[len(candidate) - hold :]
        self.whole += given
        return given


def _may_become(text: str, stop: list[str]) -> int:
    """Length of the longest ending of text that begins a stop string."""
    return max((n for s in stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0)
