"""The demo checkpoint that comes with the package: a small trained model, and the questions that it can answer."""

from __future__ import annotations

from pathlib import Path

from evrun.expert_worker.wire.errors import UsageError

_ROOM = Path(__file__).parents[1] / "demo"


def folder() -> Path:
    """Raises UsageError when this installation came without it."""
    found = _ROOM / "checkpoint"
    if not (found / "config.json").is_file():
        expected = f"expected the checkpoint that comes with evrun in {found}, found nothing"
        raise UsageError(f"--checkpoint demo: {expected}; install again, or give --checkpoint DIR")
    return found


def questions() -> Path:
    """questions.jsonl: kind, prompt and the answer that must follow it."""
    return _ROOM / "questions.jsonl"


def note(checkpoint: str) -> list[str]:
    """What the build report says when this checkpoint is the demo."""
    return [f"checkpoint: the demo model that comes with evrun ({checkpoint})"] if Path(checkpoint) == _ROOM / "checkpoint" else []
