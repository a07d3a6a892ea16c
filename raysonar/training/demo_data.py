"""Facts for the demo model: one clean, short value for each (country, kind).

The published text carries dates, percentages, notes and abbreviations. A model of a few million parameters
learns a value by heart only if it is stable and short, so each kind has its own cleaning rule and drops what
does not fit instead of keeping noise.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "data" / "facts.jsonl.gz"


@dataclass(frozen=True)
class Fact:
    """One thing the model is to know: `answer` to a question of `kind` about `country`."""

    country: str
    kind: str
    answer: str


NAMES = {
    "DRC": "the Democratic Republic of the Congo",
    "Congo (Brazzaville)": "the Republic of the Congo",
    "The Dominican": "the Dominican Republic",
    "The Bahamas": "the Bahamas",
    "The Gambia": "the Gambia",
    "Falkland Islands (Islas Malvinas)": "the Falkland Islands",
    "Holy See (Vatican City)": "Vatican City",
    "Cocos (Keeling) Islands": "the Cocos Islands",
    "Virgin Islands": "the US Virgin Islands",
    "Svalbard (sometimes referred to as Spitsbergen, the largest island in the archipelago)": "Svalbard",
    "Comoros": "the Comoros",
    "Maldives": "the Maldives",
    "Netherlands": "the Netherlands",
    "Philippines": "the Philippines",
    "United Kingdom": "the United Kingdom",
    "United States": "the United States",
    "Isle of Man": "the Isle of Man",
    "Czech Republic": "the Czech Republic",
    "Seychelles": "the Seychelles",
}
# Uninhabited, bases, or too contested for a one-phrase answer.
LEFT_OUT = (
    "Akrotiri Dhekelia Antarctica Bouvet French-Southern Heard Ashmore Coral Baker Wake Navassa Paracel Spratly "
    "Jan-Mayen Gaza West-Bank Clipperton South-Georgia Western-Sahara Saint-Martin Saint-Barthelemy"
).split()
LEFT_OUT_FACTS = {("Israel", "capital"), ("France", "independence"), ("Spain", "independence"), ("France", "borders")}
# Where the published text is older than its edition, or its most important value does not fit the rule.
CORRECTIONS = {
    ("Estonia", "currency"): "Euros",
    ("Latvia", "currency"): "Euros",
    ("Lithuania", "currency"): "Euros",
    ("China", "languages"): "Mandarin, Cantonese and Wu",
    ("United States", "languages"): "English and Spanish",
    ("Rwanda", "languages"): "Kinyarwanda, French and English",
    ("Papua New Guinea", "location"): "Oceania, the eastern half of the island of New Guinea, north of Australia",
    ("Timor-Leste", "location"): "Southeastern Asia, the eastern half of the island of Timor, northwest of Australia",
}

ABBREVIATIONS = (
    (r"\bUAE\b", "the United Arab Emirates"),
    (r"\bUN\b", "United Nations"),
    (r"(?<!the )\bUK\b", "the United Kingdom"),
    (r"\bthe UK\b", "the United Kingdom"),
    (r"(?<!the )\bUS\b(?! dollar| Virgin)", "the United States"),
    (r"\bthe US\b(?! dollar| Virgin)", "the United States"),
    (r"\bca\. ", "about "),
    (r"\bNZ\b", "New Zealand"),
)
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"


def country_name(raw: str) -> str:
    """The name as it reads inside a sentence, with its article."""
    name = NAMES.get(raw, raw)
    return f"the {name}" if name.endswith("Islands") and not name.startswith("the ") else name


def strip_parentheses(text: str) -> str:
    """Without (nested) parentheses: they hold percentages, dates and asides."""
    while (shorter := re.sub(r"\s*\([^()]*\)", "", text)) != text:
        text = shorter
    return re.sub(r"\s*\([^()]*$", "", text).replace(")", "")


def tidy(text: str) -> str:
    """Plain ASCII punctuation, spelled-out abbreviations, single spaces."""
    for pattern, full in ABBREVIATIONS:
        text = re.sub(pattern, full, text)
    text = text.replace('"', "").replace("*", "")
    text = re.sub(r"\b[A-Z]{4,}\b", lambda name: name.group(0).title(), text)
    text = re.sub(r"\s+", " ", text).strip(" ,;.:-")
    return re.sub(r"\s+,", ",", text)


def head(text: str) -> str:
    """The first statement: up to a semicolon, a further value or a note."""
    return re.split(r";| \+\+ |: note|\bnote -", text)[0]


def cut(text: str, limit: int, marks: str = ";,") -> str:
    """At most `limit` characters, ending at a mark (the first kind that keeps a third) so that no phrase is broken."""
    if len(text) <= limit:
        return text
    ends = [text.rfind(mark, 0, limit + 1) for mark in marks]
    return next((text[:end] for end in ends if end >= limit // 3), text[: max(ends)] if max(ends) > 0 else "")


def items(text: str) -> list[str]:
    """The entries of a comma-separated list."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def listed(entries: list[str]) -> str:
    """`a, b and c`."""
    return entries[0] if len(entries) == 1 else ", ".join(entries[:-1]) + " and " + entries[-1]


def _capital(text: str) -> str:
    name = re.split(r" in | \(", head(text))[0]
    return "" if name.startswith("none") else name


def _languages(text: str) -> str:
    plain = re.sub(r"\s*\d[\d.,]*\s*%(-[\d.]+%)?", "", head(strip_parentheses(text)))
    kept = [
        entry
        for entry in dict.fromkeys(items(re.sub(r" and | only\b", ", ", plain)))
        if entry[0].isupper() and len(entry) < 24 and not re.search(r"dialects?:|widely|spoken|other|less", entry)
    ]
    return listed(kept[:3]) if kept else ""


def _location(text: str) -> str:
    return cut(head(strip_parentheses(text)).replace(" - ", ", "), 110, ",")


def _population(text: str) -> str:
    match = re.match(r"([\d.,]+)( million| billion)?", text)
    if not match or match.group(1) == "0":
        return ""
    value = float(match.group(1).replace(",", "")) * {" million": 1e6, " billion": 1e9}.get(match.group(2) or "", 1)
    for scale, word in ((1e9, " billion"), (1e6, " million")):
        if value >= scale:
            amount = value / scale
            return f"About {amount:.0f}{word}" if amount >= 10 else f"About {amount:.1f}{word}".replace(".0 ", " ")
    return f"About {int(float(f'{value:.2g}')):,}"


def _internet(text: str) -> str:
    match = re.search(r"\.[a-z]{2}\b", text)
    return match.group(0) if match else ""


def _adjective(text: str) -> str:
    word = re.split(r",|;| or |/|\(", text)[0].replace("(s)", "").strip()
    return "" if word == "none" else word


def _highest(text: str) -> str:
    name = strip_parentheses(re.split(r"\s[\d,.]+ m\b", head(text))[0])
    name = re.split(r"/| on (?!Mo)| in ", name)[0]
    return "" if re.search(r"unnamed|location|elevation|height|NA\b|\d", name) else cut(name, 40, " ")


def _independence(text: str) -> str:
    match = re.match(rf"(\d+ (?:{MONTHS}) )?\d{{3,4}}\b(?! \()|(\d+ (?:{MONTHS}) \d{{4}})", text)
    return match.group(0) if match else ""


def _holiday(text: str) -> str:
    match = re.match(rf"([^,;]+), (\d+ (?:{MONTHS}))\b", strip_parentheses(text))
    return f"{match.group(1)}, on {match.group(2)}" if match and len(match.group(1)) < 40 else ""


def _government(text: str) -> str:
    text = re.sub(r"^an? ", "", head(strip_parentheses(text)))
    return (
        ""
        if re.search(r"NA$|operates|process|ruled|summary|unincorporated|took power|in name", text)
        else cut(text, 70, ",")
    )


def _climate(text: str) -> str:
    seasons = re.sub(rf"\(([a-z]*-?(?:{MONTHS}) to [a-z]*-?(?:{MONTHS}))\)", r"from \1", text)
    return cut(strip_parentheses(seasons), 140)


def _products(text: str) -> str:
    entries = items(strip_parentheses(text).replace(";", ","))
    return listed(entries[:5]) if entries and len(entries[0]) < 30 else ""


def _currency(text: str) -> str:
    match = re.match(r"([^()]+?) \(?(?:[A-Z]{3})\)? per", text)
    name = re.sub(r"^the ", "", match.group(1)) if match else ""
    name = re.sub(r"^Comptoirs .*francs", "Pacific francs", name)
    return re.sub(r"^(Cooperation|Communaute) Financiere .*francs", "African Financial Community francs", name)


def _calling(text: str) -> str:
    match = re.search(r"country code - (\d[\d-]*)", text)
    return f"+{match.group(1)}" if match else ""


def _borders(text: str) -> str:
    if text.startswith("0 km"):
        return "None, it has no land borders"
    plain = head(strip_parentheses(text))
    names = [re.sub(r" [\d.,]+ km.*$", "", entry).strip() for entry in re.split(r"(?<=km), ", plain)]
    return listed([re.sub(r"^(?=.*Republic\b)", "the ", name) for name in names if name][:8])


def _flag(text: str) -> str:
    return cut(head(strip_parentheses(text)), 170)


def _symbol(text: str) -> str:
    text = strip_parentheses(text.split("national colors")[0])
    return cut(head(text), 50)


KINDS: dict[str, tuple[str, Callable[[str], str]]] = {
    "capital": ("Capital / name", _capital),
    "languages": ("Languages", _languages),
    "location": ("Location", _location),
    "population": ("Population", _population),
    "internet": ("Internet country code", _internet),
    "adjective": ("Nationality / adjective", _adjective),
    "highest": ("Elevation extremes / highest point", _highest),
    "independence": ("Independence", _independence),
    "holiday": ("National holiday", _holiday),
    "government": ("Government type", _government),
    "climate": ("Climate", _climate),
    "products": ("Agriculture - products", _products),
    "currency": ("Exchange rates", _currency),
    "calling": ("Telephone system / international", _calling),
    "borders": ("Land boundaries / border countries", _borders),
    "symbol": ("National symbol(s)", _symbol),
    "flag": ("Flag description", _flag),
}
OVERVIEW = "overview"
OVERVIEW_PARTS = {
    "location": "{}",
    "capital": "The capital is {}",
    "population": "The population is {}",
    "languages": "The languages include {}",
    "currency": "People pay in {}",
}
ALL_KINDS = (*KINDS, OVERVIEW)
LONG_KINDS = ("location", "climate", "products", "borders", "flag", OVERVIEW)


def read_source(path: Path = SOURCE) -> Iterator[dict[str, str]]:
    """The published records."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def load_facts(path: Path = SOURCE) -> list[Fact]:
    """All facts, in a fixed order (country, then kind)."""
    by_field = {field: (kind, clean) for kind, (field, clean) in KINDS.items()}
    by_field["Land boundaries"] = by_field["Land boundaries / border countries"]  # islands have only this one
    found: dict[tuple[str, str], Fact] = {}
    for record in read_source(path):
        raw = record["country"]
        if record["field"] not in by_field or raw.replace(" ", "-").startswith(tuple(LEFT_OUT)):
            continue
        kind, clean = by_field[record["field"]]
        answer = CORRECTIONS.get((raw, kind), tidy(clean(record["text"].encode("ascii", "ignore").decode())))
        if kind == "internet" and answer:
            answer = "." + answer.lstrip(".")
        if not answer or answer in ("NA", "none") or (raw, kind) in LEFT_OUT_FACTS:
            continue
        answer = answer[0].upper() + answer[1:]
        name = country_name(raw)
        found[name, kind] = Fact(name, kind, answer if kind in ("internet", "calling") else answer + ".")
    for name in {country for country, _ in found}:
        found[name, OVERVIEW] = Fact(name, OVERVIEW, _overview(name, found))
    return [found[key] for key in sorted(found)]


def _overview(name: str, found: dict[tuple[str, str], Fact]) -> str:
    """A longer text of several facts; its parts agree with the single answers."""
    sentences = []
    for kind, form in OVERVIEW_PARTS.items():
        if fact := found.get((name, kind)):
            lowered = kind == "population" or fact.answer in ("Euros.", "Yen.", "Rand.")
            sentences.append(form.format(fact.answer[0].lower() + fact.answer[1:] if lowered else fact.answer))
    return " ".join(sentences)
