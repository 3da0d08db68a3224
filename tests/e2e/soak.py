"""Faults at seeded moments while requests run: who is hit, when, with what, and what it cost."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from runs import GOLDEN, Evrun, prompts, running

FULL = GOLDEN / "full" / "checkpoint"
PROMPT = next(p for p in prompts("full") if p["name"] == "chat")["ids"]
NEW = 64
WORLD = 4
DAMAGE = ("nan", "malformed", "twice", "rows", "checksum")


@dataclass
class Hits:
    """What the injector did."""

    kills: list[tuple[int, float]] = field(default_factory=list)
    """(pid, wall-clock time)"""
    stops: int = 0

    @property
    def count(self) -> int:
        return len(self.kills) + self.stops


class Injector(threading.Thread):
    """Kills, or stops and continues, a serving worker at random moments until told to end."""

    def __init__(self, evrun: Evrun, seed: int) -> None:
        super().__init__(daemon=True)
        self._evrun, self._random = evrun, random.Random(seed)
        self.hits = Hits()
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.is_set():
            ready = [r for r in self._evrun.ranks() if r["state"] in ("ready", "serving") and r["pid"]]
            if not ready:
                time.sleep(0.1)
                continue
            victim = self._random.choice(ready)["pid"]
            time.sleep(self._random.uniform(0, 0.2))
            with suppress(ProcessLookupError):
                if self._random.random() < 0.6:
                    self.hits.kills.append((victim, time.time()))
                    os.kill(victim, signal.SIGKILL)
                else:
                    self.hits.stops += 1
                    os.kill(victim, signal.SIGSTOP)
                    time.sleep(self._random.choice([0.05, 0.5, 1.5]))
                    os.kill(victim, signal.SIGCONT)


def script(folder: Path, seed: int) -> str:
    """Damaged replies at random calls of any incarnation, as a faults file.

    A rank has kinds of damage of its own: the same kind at two ranks in one layer call would rightly end the request.
    """
    draw = random.Random(seed)
    kinds = [DAMAGE[r::WORLD] for r in range(WORLD)]
    faults = [{"rank": r, "at": "write", "do": draw.choice(kinds[r]), "call": draw.randint(1, 600)} for r in range(WORLD) for _ in range(6)]
    path = folder / "faults.json"
    path.write_text(json.dumps(faults))
    return str(path)


def undisturbed(evrun: Evrun, combine: str) -> tuple[list[int], bytes]:
    with running(evrun, FULL, "--combine", combine, world=1):
        found = evrun.dumped(PROMPT, new=NEW)
        return found.answer["token_ids"], found.logits_file


@dataclass
class Outcome:
    requests: list[tuple[list[int], bytes]]
    hits: Hits
    resends: int
    dropped: int
    restarts: int
    detection_s: list[float]
    """From the kill to the coordinator's line about it."""
    return_s: list[float]
    """From a death to the coordinator's line that the rank's next incarnation is ready, back-off included."""


def disturbed(evrun: Evrun, combine: str, faults: int, seed: int) -> Outcome:
    """Requests one after the other until `faults` signals were sent; every one of them must finish."""
    requests = []
    options = ("--combine", combine, "--stall-timeout", "0.3", "--check-payload", "--faults", script(evrun.folder, seed))
    with running(evrun, FULL, *options, world=WORLD):
        injector = Injector(evrun, seed)
        injector.start()
        while injector.hits.count < faults:
            found = evrun.dumped(PROMPT, new=NEW)
            requests.append((found.answer["token_ids"], found.logits_file))
        injector.enough.set()
        injector.join()
        ranks = evrun.ranks()
        log = evrun("logs", "coordinator").stdout
    return Outcome(
        requests,
        injector.hits,
        sum(r["resends"] for r in ranks),
        sum(r["dropped_replies"] for r in ranks),
        sum(r["restarts"] for r in ranks),
        detections(log, injector.hits),
        returns(log),
    )


def detections(log: str, hits: Hits) -> list[float]:
    """Seconds from each kill to the log line of that death."""
    seen = {}
    for line in log.splitlines():
        if match := re.match(r"(\S+) .*pid (\d+)\) died", line):
            seen[int(match[2])] = datetime.fromisoformat(match[1]).timestamp()
    return sorted(seen[pid] - at for pid, at in hits.kills if pid in seen)


def returns(log: str) -> list[float]:
    """Seconds from each death to the rank's next incarnation being ready."""
    died, back = {}, []
    for line in log.splitlines():
        if match := re.match(r"(\S+) .*rank (\d+) \(incarnation (\d+).*\) (died|is ready)", line):
            key, at = (int(match[2]), int(match[3])), datetime.fromisoformat(match[1]).timestamp()
            if match[4] == "died":
                died[key] = at
            elif (before := (key[0], key[1] - 1)) in died:
                back.append(at - died[before])
    return sorted(back)
