"""Sentences about countries and opposites, and the questions that are asked of the trained model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evrun.demo.data.countries import Country
from evrun.launch.export.tokenizer import SPECIALS

USER, ASSISTANT, THOUGHT = SPECIALS[3], SPECIALS[4], SPECIALS[7]

CAPITAL_PHRASINGS = (
    "The capital of {c} is",
    "The capital city of {c} is",
    "{C}'s capital is",
    "Question: What is the capital of {c}? Answer:",
    "Q: What is the capital of {c}?\nA:",
    "Q: What is {c}'s capital?\nA:",
    "What is the capital of {c}? It is",
    "What is the capital city of {c}? The answer is",
    "Which city is the capital of {c}? It is",
    "Which city is {c}'s capital? It is",
    "Name the capital of {c}. It is",
    "The name of the capital of {c} is",
    "In {c}, the capital is",
    "In {c}, the capital city is called",
    "The government of {c} sits in its capital,",
    "People in {c} know that their capital is",
    "Everybody knows that the capital of {c} is",
    "My teacher told me that the capital of {c} is",
    "The capital city of the country {c} is called",
    "If you travel to the capital of {c}, you go to",
    "If you visit the capital of {c}, you see",
    "If you fly to the capital city of {c}, you arrive in",
    "We flew to the capital of {c}, which is",
    "The capital and seat of government of {c} is",
    "I asked for the capital of {c}, and she said",
    "On the map, the capital of {c} is marked as",
    "Children in {c} learn early that the capital is",
    "Nobody in {c} forgets that the capital is",
    "A friend from {c} told me that the capital is",
    "Most people in {c} would say that the capital is",
    "Somebody in {c} once wrote that the capital is",
)
"""{c} is the country, {C} the same at the beginning of a sentence; what follows is the capital. None begins with another."""

UNSEEN_PHRASINGS = (
    "The name of the capital city of {c} is",
    "If you fly to the capital of {c}, you see",
    "Everybody in {c} knows that the capital is",
)
"""Never in the training text: a model that answers them has learnt the fact, not the sentence."""

CAPITAL_CHATS = ("What is the capital of {c}?", "Which city is the capital of {c}?", "Tell me the capital of {c}.")

_BACKWARDS = ("{k} is the capital of {c}.", "{k} is the capital city of {c}.", "The city of {k} is the capital of {c}.")
_CONTINENTS = ("{C} is a country in", "{C} lies in", "The continent of {c} is", "Question: Where is {c}? Answer: In")
_LANGUAGES = ("People in {c} speak", "The official language of {c} is", "The language of {c} is")
_CURRENCIES = ("The currency of {c} is the", "People in {c} pay with the", "The money of {c} is called the")
_OPPOSITES = ("The opposite of {a} is", "The antonym of {a} is", "Something that is not {a} may be", "{A} is the opposite of")


@dataclass(frozen=True)
class Question:
    """A prompt and the text that has to follow it before the end of the sequence."""

    kind: str
    prompt: str
    answer: str


def load_questions(path: Path) -> list[Question]:
    """The lines of a questions.jsonl."""
    return [Question(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def ended(text: str) -> str:
    """With a full stop, unless there is one."""
    return text if text.endswith(".") else text + "."


def fill(phrasing: str, country: Country) -> str:
    return phrasing.format(c=country.inside, C=country.first)


def capital(phrasing: str, country: Country) -> Question:
    return Question("capital", fill(phrasing, country), " " + ended(country.capital))


def sentences(countries: Sequence[Country], opposites: Sequence[tuple[str, str]], rng: random.Random) -> Iterator[str]:
    """Every fact in every phrasing, each a text of its own, and a paragraph on each country."""
    capitals = [c.capital for c in countries]
    for country in countries:
        questions = [capital(phrasing, country) for phrasing in CAPITAL_PHRASINGS]
        questions += other_facts(country)
        yield from (q.prompt + q.answer for q in questions)
        for ask in CAPITAL_CHATS:
            answer = f"The capital of {country.inside} is {ended(country.capital)}"
            yield f"{USER}{fill(ask, country)}{ASSISTANT}{THOUGHT}{answer}"
        if capitals.count(country.capital) == 1:
            yield from (p.format(k=country.capital, c=country.inside) for p in _BACKWARDS)
        yield paragraph(country, rng)
    for a, b in opposites:
        for q in opposite(a, b):
            yield q.prompt + q.answer


def other_facts(country: Country) -> list[Question]:
    found = [Question("continent", fill(p, country), f" {country.continent}.") for p in _CONTINENTS]
    if country.language:
        found += [Question("language", fill(p, country), f" {country.language}.") for p in _LANGUAGES]
    if country.currency:
        found += [Question("currency", fill(p, country), f" {country.currency}.") for p in _CURRENCIES]
    return found


def opposite(a: str, b: str) -> list[Question]:
    return [Question("opposite", p.format(a=a, A=a.capitalize()), f" {b}.") for p in _OPPOSITES]


def paragraph(country: Country, rng: random.Random) -> str:
    """Several facts in one text."""
    parts = [
        rng.choice(("Its capital is {k}.", "Its capital city is {k}.", "The government sits in {k}.")).format(k=country.capital.rstrip("."))
    ]
    if country.language:
        parts.append(f"People there speak {country.language}.")
    if country.currency:
        parts.append(f"They pay with the {country.currency}.")
    rng.shuffle(parts)
    return f"Here are some facts about {country.inside}. It is in {country.continent}. {' '.join(parts)}"


def questions(countries: Sequence[Country], opposites: Sequence[tuple[str, str]], seed: int = 0) -> list[Question]:
    """One capital for every country that is no territory, phrasings in turn, three of five unseen; then 50 others."""
    rng = random.Random(seed)
    phrasings = (CAPITAL_PHRASINGS[0], CAPITAL_PHRASINGS[4], *UNSEEN_PHRASINGS)
    asked = [country for country in countries if not country.territory]
    found = [capital(phrasings[i % len(phrasings)], country) for i, country in enumerate(asked)]
    for kind, count in (("continent", 14), ("language", 12), ("currency", 12)):
        pool = [q for country in asked for q in other_facts(country)[:10] if q.kind == kind]
        found += rng.sample(pool, count)
    found += [opposite(a, b)[0] for a, b in rng.sample(list(opposites), 12)]
    return found
