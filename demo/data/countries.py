"""Countries, their capitals and a few more facts: the table beside this file, and how it was made from its package."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("countries.json")

_LEFT_OUT = frozenset("AC AQ BQ BV CC CX EH GS HK HM IO MO PN SJ TA TF UM".split())  # noqa: SIM905
"""No capital, hardly any people, or a capital that the package names oddly or the world disputes."""
_TERRITORIES = frozenset(
    "AI AS AW AX BL BM CK CW FK FO GF GG GI GL GP GU IM JE KY MF MP MQ MS NC NF NU PF PM PR RE SH SX TC TK VG VI WF YT".split()  # noqa: SIM905
)
_WITH_ARTICLE = frozenset(
    "AE BS CD CF CG CK DO FK FO GB GM IM KM KY MH MP MV NL PH SB SC TC US VG VI".split()  # noqa: SIM905
)
_CAPITALS = {"US": "Washington, D.C."}


@dataclass(frozen=True)
class Country:
    """One row of the table. `currency` and `language` are there where the country has exactly one."""

    code: str
    name: str
    article: bool
    territory: bool
    capital: str
    continent: str
    currency: str | None
    language: str | None

    @property
    def inside(self) -> str:
        """The name in the middle of a sentence."""
        return f"the {self.name}" if self.article else self.name

    @property
    def first(self) -> str:
        """The name at the beginning of a sentence."""
        return f"The {self.name}" if self.article else self.name


def load() -> list[Country]:
    """In order of their codes."""
    return [Country(**row) for row in json.loads(TABLE.read_text(encoding="utf-8"))]


def from_package(folder: Path) -> list[Country]:
    """The table from the npm package `countries-list` (unpacked)."""

    def read(name: str) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = json.loads((folder / f"{name}.min.json").read_text(encoding="utf-8"))
        return found

    languages, currencies = read("languages"), read("currencies")
    continents = json.loads((folder / "continents.min.json").read_text(encoding="utf-8"))

    def only(keys: list[str], names: dict[str, dict[str, str]]) -> str | None:
        return names[keys[0]]["name"] if len(keys) == 1 and keys[0] in names else None

    return [
        Country(
            code=code,
            name=row["name"],
            article=code in _WITH_ARTICLE,
            territory=code in _TERRITORIES,
            capital=_CAPITALS.get(code, row["capital"]),
            continent=continents[row["continent"]],
            currency=only(list(row["currency"]), currencies),
            language=only(list(row["languages"]), languages),
        )
        for code, row in sorted(json.loads((folder / "countries.min.json").read_text(encoding="utf-8")).items())
        if code not in _LEFT_OUT and row["capital"]
    ]


if __name__ == "__main__":
    rows = ",\n".join(" " + json.dumps(asdict(country), ensure_ascii=False) for country in from_package(Path(sys.argv[1])))
    TABLE.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
