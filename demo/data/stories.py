"""Short stories from a small grammar: plain, correct English with people who do one thing after another."""

from __future__ import annotations

import itertools
import random

_GIRLS = ["Anna", "Mary", "Lucy", "Emma", "Rosa", "Clara", "Nora", "Ella", "Grace", "Helen", "Julia", "Sara", "Alice", "Ruth", "Maria"]
_BOYS = ["Tom", "Peter", "Jack", "Paul", "Oscar", "Henry", "David", "Leo", "Adam", "Felix", "Simon", "Max", "Victor", "Arthur", "Martin"]
_PLACES = (
    "market", "river", "forest", "harbour", "village", "library", "garden", "bakery", "station", "lake", "farm", "school", "mountain",
    "beach", "museum", "park", "bridge", "castle", "mill", "orchard",
)  # fmt: skip
_THINGS = (
    "basket", "lamp", "letter", "key", "book", "map", "box", "coat", "ladder", "bottle", "blanket", "drum", "clock", "bell", "boat",
    "kite", "bag", "cup", "stone", "rope", "mirror", "ring", "hat", "bucket", "umbrella",
)  # fmt: skip
_FOODS = ("bread", "soup", "cheese", "apples", "honey", "rice", "fish", "cake", "milk", "plums", "nuts", "tea", "beans", "berries")
_ANIMALS = ("dog", "cat", "horse", "bird", "goat", "fox", "duck", "rabbit", "sheep", "mouse", "owl", "donkey", "bear", "frog", "hen")
_KINDS = ("small", "old", "red", "blue", "heavy", "round", "wooden", "broken", "green", "strange", "golden", "empty", "new", "beautiful")
_MOODS = ("happy", "tired", "curious", "hungry", "proud", "afraid", "surprised", "quiet", "cold", "sad", "cheerful", "angry", "brave")
_WEATHERS = ("warm", "cold", "windy", "rainy", "bright", "cloudy", "quiet", "foggy", "sunny", "snowy")
_TIMES = ("morning", "evening", "afternoon", "summer day", "winter day", "night", "Sunday", "spring day")
_JOBS = ("baker", "farmer", "teacher", "sailor", "doctor", "painter", "tailor", "miller", "king", "queen", "fisherman", "gardener")
_KIN = ("mother", "father", "sister", "brother", "grandmother", "grandfather", "uncle", "aunt", "neighbour", "friend")

_OPENINGS = (
    "Once upon a time there was a {mood} {job} who lived near the {place}. {Their} name was {name}.",
    "One {weather} {time}, {name} went to the {place} to look for {their} {thing}.",
    "{name} lived in a {kind} house by the {place} with {their} {kin}.",
    "It was a {weather} {time}, and {name} was {mood}.",
    "Every {time}, {name} walked to the {place} with {their} {animal}.",
    "A long time ago, {name} found a {kind} {thing} near the {place}.",
    "{name} was a young {job}. {They} had a {kind} {thing} and a {mood} {animal}.",
    "There was once a {animal} that lived under the {place2}. Its best friend was a {job} called {name}.",
    "One {weather} {time}, {name} and {other} decided to visit the {place}.",
)
_MIDDLES = (
    "On the way {they} met {other}, who was carrying a {kind} {thing}.",
    '"Where are you going?" asked {other}. "I am going to the {place2}," said {name}.',
    "{They} stopped at the {place2} and bought some {food} and a {thing2}.",
    "Suddenly a {animal} ran across the road and hid behind a {thing2}.",
    "{They} looked at the {thing2} for a long time, but {they} did not know what to do with it.",
    '"Please help me," said the {animal}. "I have lost my {thing2}, and I am very {mood2}."',
    "{other} opened the {kind2} box and took out a {thing2}.",
    "Because it was so {weather}, they sat down under a tree and ate some {food}.",
    "{Their} {kin} had told {them} never to go to the {place2} alone.",
    "The {job2} gave {them} some {food} and asked {them} to come back in the {daytime}.",
    "{name} wanted to cross the river, but the bridge was broken.",
    "After a while {they} heard a noise, and a {kind2} {animal} came out of the {place2}.",
    '"I have never seen such a {kind2} {thing2}," said {other}. "May I hold it?"',
    "{name} thought about it, and then {they} gave the {thing2} to {other}.",
    "They walked and walked until they came to the {place2}.",
    "The {animal} was {mood2}, so {name} gave it some {food} and a little water.",
    "When the sun went down, {they} lit a lamp and read an old letter.",
    "Nobody near the {place2} had ever heard of the {job2}.",
    "{other} laughed and said that the {thing2} belonged to the {job2}.",
    "{They} tried to open the door, but the key did not fit.",
    "There was a {kind2} {thing2} on the table, and next to it lay a letter from {their} {kin}.",
)
_ENDINGS = (
    "In the end {they} went home and told {their} {kin} what had happened.",
    "From that day on, {name} and {other} were the best of friends.",
    "That night {they} slept well and dreamed of the {place}.",
    "{They} never saw the {animal} again, but {they} often thought of it.",
    'When {they} came home, {their} {kin} smiled and said, "Well done, {name}."',
    "They shared the {food} and went home before it was dark.",
    "So {name} kept the {thing2}, and everybody was {mood2}.",
    "The next {daytime}, the {thing2} was gone, and nobody knew where it was.",
    "And that is how {name} learned to be kind to every {animal}.",
)


def story(rng: random.Random) -> str:
    """Four to seven sentences, or a few more where one has two."""
    girl = rng.random() < 0.5
    name = rng.choice(_GIRLS if girl else _BOYS)
    other = rng.choice([n for n in (_BOYS if girl else _GIRLS) if n != name])
    place, place2 = rng.sample(_PLACES, 2)
    thing, thing2 = rng.sample(_THINGS, 2)
    mood, mood2 = rng.sample(_MOODS, 2)
    kind, kind2 = rng.sample(_KINDS, 2)
    job, job2 = rng.sample(_JOBS, 2)
    words = {
        "name": name, "other": other, "place": place, "place2": place2, "thing": thing, "thing2": thing2, "mood": mood, "mood2": mood2,
        "kind": kind, "kind2": kind2, "job": job, "job2": job2, "food": rng.choice(_FOODS), "animal": rng.choice(_ANIMALS),
        "weather": rng.choice(_WEATHERS), "time": rng.choice(_TIMES), "kin": rng.choice(_KIN),
        "daytime": rng.choice(("morning", "evening", "afternoon")),
        "they": "she" if girl else "he", "They": "She" if girl else "He", "their": "her" if girl else "his",
        "Their": "Her" if girl else "His", "them": "her" if girl else "him",
    }  # fmt: skip
    parts = [rng.choice(_OPENINGS), *rng.sample(_MIDDLES, rng.randint(2, 5)), rng.choice(_ENDINGS)]
    return with_articles(" ".join(parts).format(**words))


def with_articles(text: str) -> str:
    """`a` before a vowel becomes `an`."""
    words = text.split(" ")
    for i, (word, following) in enumerate(itertools.pairwise(words)):
        if word in ("a", "A") and following[:1].lower() in "aeiou":
            words[i] = word + "n"
    return " ".join(words)
