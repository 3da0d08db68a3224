"""What a card, its driver or its compiler can answer instead of doing what it was asked."""

from __future__ import annotations


class DeviceError(RuntimeError):
    """A driver call failed. `call` is its name, `code` and `name` the driver's answer.

    `lost`: the error is one of those that stick to the context: every later call in this process fails too.
    """

    def __init__(self, call: str, code: int, name: str, text: str = "", lost: bool = False) -> None:
        self.call, self.code, self.name, self.lost = call, code, name, lost
        lost_text = "; the device is lost to this process" if lost else ""
        super().__init__(f"{call}: {name} ({code})" + (f": {text}" if text else "") + lost_text)


class UnavailableError(RuntimeError):
    """No driver, no card, no compiler, or a card that the kernels do not run on: the reason in one line."""


class CompileError(RuntimeError):
    """NVRTC refused a source. `log` is what it wrote."""

    def __init__(self, source: str, architecture: str, log: str) -> None:
        self.source, self.architecture, self.log = source, architecture, log
        first = next((line for line in log.splitlines() if "error" in line), log.strip().splitlines()[0] if log.strip() else "no log")
        super().__init__(f"{source} for {architecture}: {first}")


class NonFiniteError(ArithmeticError):
    """A sum of the call came out infinite or NaN although no scale byte is 255: the activations hold such values, or overflow."""
