"""The words of the toy corpus: what they are, how they inflect, and what they mean in English.

A German word may have several kinds (Birne: a pear is food, a light bulb is a device). Every verb takes objects of one
kind only, so the verb, which is often the last word, decides the meaning.
"""

from dataclasses import dataclass
from functools import cache

# article singular plural english english_plural kind [english pronoun]; "*" marks weak masculines
_NOUNS = """
der Mann Männer man men person
die Frau Frauen woman women person
das Mädchen Mädchen girl girls person she
der Junge* Jungen boy boys person
das Kind Kinder child children person it
der Lehrer Lehrer teacher teachers person
die Ärztin Ärztinnen doctor doctors person
der Nachbar* Nachbarn neighbour neighbours person
die Mutter Mütter mother mothers person
der Vater Väter father fathers person
der Bruder Brüder brother brothers person
die Schwester Schwestern sister sisters person
der Leiter Leiter manager managers person
der Freund Freunde friend friends person
der Hund Hunde dog dogs animal
die Katze Katzen cat cats animal
das Pferd Pferde horse horses animal
die Maus Mäuse mouse mice animal
der Hahn Hähne rooster roosters animal
der Strauß Strauße ostrich ostriches animal
die Schlange Schlangen snake snakes animal
die Birne Birnen pear pears food
das Gericht Gerichte dish dishes food
der Apfel Äpfel apple apples food
das Brot Brote loaf loaves food
der Fisch Fische fish fish food
die Birne Birnen light_bulb light_bulbs device
das Schloss Schlösser lock locks device
die Bank Bänke bench benches device
der Strauß Sträuße bouquet bouquets device
der Hahn Hähne tap taps device
die Mutter Muttern nut nuts device
die Leiter Leitern ladder ladders device
die Uhr Uhren clock clocks device
das Fahrrad Fahrräder bicycle bicycles device
die Lampe Lampen lamp lamps device
die Tür Türen door doors device
das Buch Bücher book books text
der Brief Briefe letter letters text
die Zeitung Zeitungen newspaper newspapers text
die Karte Karten map maps text
das Lied Lieder song songs text
der Park Parks park parks place
die Stadt Städte city cities place
das Schloss Schlösser castle castles place
die Bank Banken bank banks place
das Gericht Gerichte court courts place
die Schule Schulen school schools place
der Garten Gärten garden gardens place
das Haus Häuser house houses place
die Küche Küchen kitchen kitchens place
"""

# particle|infinitive third_person participle auxiliary kind english past participle
_VERBS = """
sehen sieht gesehen haben animal see saw seen
jagen jagt gejagt haben animal chase chased chased
an|rufen ruft gerufen haben person call called called
rufen ruft gerufen haben animal summon summoned summoned
ein|laden lädt geladen haben person invite invited invited
ab|holen holt geholt haben person collect collected collected
holen holt geholt haben device fetch fetched fetched
lieben liebt geliebt haben person love loved loved
vor|stellen stellt gestellt haben person introduce introduced introduced
ab|stellen stellt gestellt haben device switch_off switched_off switched_off
essen isst gegessen haben food eat ate eaten
kochen kocht gekocht haben food cook cooked cooked
bestellen bestellt bestellt haben food order ordered ordered
probieren probiert probiert haben food taste tasted tasted
reparieren repariert repariert haben device repair repaired repaired
kaufen kauft gekauft haben device buy bought bought
auf|machen macht gemacht haben device open opened opened
zu|machen macht gemacht haben device close closed closed
weg|werfen wirft geworfen haben device throw_away threw_away thrown_away
lesen liest gelesen haben text read read read
vor|lesen liest gelesen haben text read_out read_out read_out
schreiben schreibt geschrieben haben text write wrote written
übersetzen übersetzt übersetzt haben text translate translated translated
besuchen besucht besucht haben place visit visited visited
verlassen verlässt verlassen haben place leave left left
helfen hilft geholfen haben dative help helped helped
zu|hören hört gehört haben dative listen_to listened_to listened_to
folgen folgt gefolgt sein dative follow followed followed
geben gibt gegeben haben give give gave given
zeigen zeigt gezeigt haben give show showed shown
zurück|geben gibt gegeben haben give return returned returned
gehen geht gegangen sein motion go went gone
fahren fährt gefahren sein motion drive drove driven
zurück|kommen kommt gekommen sein motion come_back came_back come_back
arbeiten arbeitet gearbeitet haben rest work worked worked
schlafen schläft geschlafen haben rest sleep slept slept
warten wartet gewartet haben rest wait waited waited
spielen spielt gespielt haben rest play played played
auf|hören hört gehört haben rest stop stopped stopped
ein|schlafen schläft geschlafen sein rest fall_asleep fell_asleep fallen_asleep
"""

# kinds: German English; …
_ADJECTIVES = """
person animal: jung young; müde tired; klug clever; arm poor; dumm stupid; freundlich friendly
device text food: billig cheap; rot red; leicht light; neu new; schwer heavy; blau blue
place: leise quiet; sauber clean; berühmt famous; neu new
person animal device text food place: alt old; klein small; groß big; schön beautiful
"""

# kind of tense: German = English, German = English ...
TIMES = {
    "past": "gestern=yesterday; letzte Woche=last week; vor einem Jahr=a year ago; "
    "am Montag=on Monday; am Abend=in the evening; im letzten Sommer=last summer",
    "present": "heute=today; jeden Tag=every day; jeden Morgen=every morning; immer=all the time; "
    "am Abend=in the evening; am Sonntag=on Sunday; jetzt=now",
    "future": "morgen=tomorrow; nächste Woche=next week; morgen früh=tomorrow morning; "
    "bald=soon; im nächsten Sommer=next summer",
}
MANNERS = """
gern=gladly; allein=alone; mit dem Zug=by train; mit dem Auto=by car; sehr langsam=very slowly
ohne Hilfe=without help; mit großer Freude=with great joy; zu Fuß=on foot
"""
NAMES = "Anna=she; Peter=he; Maria=she; Paul=he; Lena=she; Karl=he"
CITIES = "Berlin=Berlin; Wien=Vienna; München=Munich; Köln=Cologne; Zürich=Zurich; Rom=Rome"
_UNITS = "eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn"
_UNITS += " sechzehn siebzehn achtzehn neunzehn"
_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"
_ENGLISH_UNITS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
_ENGLISH_UNITS += " fifteen sixteen seventeen eighteen nineteen"
_ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


@dataclass(frozen=True)
class Noun:
    """A noun with one meaning; ``gender`` is m, f or n."""

    gender: str
    singular: str
    plural: str
    english: str
    english_plural: str
    kind: str
    pronoun: str
    weak: bool


@dataclass(frozen=True)
class Verb:
    """A verb with one meaning; ``particle`` is empty unless the verb is separable."""

    particle: str
    infinitive: str
    third_person: str
    participle: str
    auxiliary: str
    kind: str
    english: str
    english_past: str
    english_participle: str


@cache
def nouns(kind: str) -> tuple[Noun, ...]:
    """All nouns of one kind (person, animal, food, device, text, place)."""
    return tuple(noun for line in _lines(_NOUNS) if (noun := _noun(line.split())).kind == kind)


@cache
def verbs() -> dict[str, tuple[Verb, ...]]:
    """All verbs, by the kind of object or complement they take."""
    table: dict[str, list[Verb]] = {}
    for line in _lines(_VERBS):
        german, third, participle, auxiliary, kind, *english = line.split()
        particle, _, infinitive = german.rpartition("|")
        words = [word.replace("_", " ") for word in english]
        verb = Verb(particle, infinitive, third, participle, auxiliary, kind, *words)
        table.setdefault(kind, []).append(verb)
    return {kind: tuple(members) for kind, members in table.items()}


@cache
def adjectives(kind: str) -> tuple[tuple[str, str], ...]:
    """Adjectives that fit a kind of noun, each uninflected in German and in English."""
    found = []
    for line in _lines(_ADJECTIVES):
        kinds, _, entries = line.partition(": ")
        if kind in kinds.split():
            found += [pair(entry, " ") for entry in entries.split("; ")]
    return tuple(found)


@cache
def pairs(table: str) -> tuple[tuple[str, str], ...]:
    """The German and English sides of a table written ``german=english; …``."""
    return tuple(pair(entry, "=") for line in _lines(table) for entry in line.split("; "))


def pair(entry: str, separator: str) -> tuple[str, str]:
    """Split ``german<separator>english``."""
    german, _, english = entry.partition(separator)
    return german, english


def number(value: int) -> tuple[str, str]:
    """The German and English words for 1 to 999; German puts the units before the tens."""
    if value >= 100:
        hundreds, rest = divmod(value, 100)
        german, english = number(hundreds)
        german, english = german.removesuffix("s") if hundreds == 1 else german, english
        if rest == 0:
            return f"{german}hundert", f"{english} hundred"
        return f"{german}hundert{number(rest)[0]}", f"{english} hundred and {number(rest)[1]}"
    if value < 20:
        return _UNITS.split()[value - 1], _ENGLISH_UNITS.split()[value - 1]
    tens, units = divmod(value, 10)
    german, english = _TENS.split()[tens - 2], _ENGLISH_TENS.split()[tens - 2]
    if units == 0:
        return german, english
    unit = "ein" if units == 1 else number(units)[0]
    return f"{unit}und{german}", f"{english}-{number(units)[1]}"


def _lines(table: str) -> list[str]:
    return [line for line in table.strip().splitlines() if line]


def _noun(fields: list[str]) -> Noun:
    article, singular, plural, english, english_plural, kind, *pronoun = fields
    gender = {"der": "m", "die": "f", "das": "n"}[article]
    usual = {"m": "he", "f": "she", "n": "it"}[gender] if kind == "person" else "it"
    return Noun(
        gender=gender,
        singular=singular.removesuffix("*"),
        plural=plural,
        english=english.replace("_", " "),
        english_plural=english_plural.replace("_", " "),
        kind=kind,
        pronoun=pronoun[0] if pronoun else usual,
        weak=singular.endswith("*"),
    )
