"""A synthetic German–English corpus. Our own grammar generates it, so nothing is downloaded.

The word order differs between the languages. A German verb comes last in its clause after weil, dass or wenn.
Participles, infinitives and separable particles also come last, and the subject follows the verb if an adverbial comes
first. The meaning of several words (sie, ihr, wird, Birne, Schloss, particles) depends on the end of the clause, so a
small model makes errors that a larger one does not.
"""

from functools import cache
from random import Random

from bild_lab.errors import UserError
from bild_lab.lab.data.toy_lexicon import (
    CITIES,
    MANNERS,
    NAMES,
    TIMES,
    Noun,
    Verb,
    adjectives,
    nouns,
    number,
    pairs,
    verbs,
)
from bild_lab.lab.data.toy_phrases import (
    MANY,
    MODALS,
    THE,
    THESE,
    THIS,
    Clause,
    Phrase,
    conjugate,
    contract,
    inflect,
    like_ein,
    relative_pronoun,
    uninflected,
)

SIZES = {"test": 500, "validation": 500, "train": 16000}  # sentences
_SEEDS = {"test": 20231, "validation": 20232, "train": 20233}
_WORDS = range(4, 27)  # words of a German sentence

_OBJECTS = ("animal", "person", "place", "device", "food", "text")
_GIFTS = ("device", "text")  # not food: Birne could be a pear or a light bulb
_POSSESSIVES = {"he": ("sein", "his"), "she": ("ihr", "her"), "it": ("sein", "its"), "they": ("ihr", "their")}
_POSSESSIVES |= {"I": ("mein", "my"), "we": ("unser", "our")}
_CONJUNCTIONS = "weil=because; obwohl=although; wenn=if; während=while; bevor=before; sobald=as soon as"
_PRONOUNS = "ich=I; wir=we; er=he; sie=she; sie=they"
_REPORTS = (
    "ich glaube=I think; wir wissen=we know; ich hoffe=I hope; er weiß=he knows; sie sagen=they say; sie sagt=she says"
)
_DEGREES = "sehr=very; zu=too; noch=still; nicht mehr=no longer"


def toy_corpus(split: str) -> list[dict[str, str]]:
    """The sentence pairs of one split, each ``{"de": …, "en": …}``. They are the same in every call.

    Splits share no German sentence. Raises UserError for a split other than train, validation and test.
    """
    if split not in SIZES:
        wanted = ", ".join(sorted(SIZES))
        raise UserError(f"the split of the toy corpus must be one of {wanted}, got {split!r}; choose one of them")
    return [{"de": german, "en": english} for german, english in _splits()[split]]


@cache
def _splits() -> dict[str, tuple[tuple[str, str], ...]]:
    """All splits at once: each one leaves out the sentences of the splits before it."""
    seen: set[str] = set()
    splits = {}
    for split, size in SIZES.items():
        writer = Writer(Random(_SEEDS[split]))
        chosen: list[tuple[str, str]] = []
        while len(chosen) < size:
            german, english = writer.sentence()
            if german not in seen and len(german.split()) in _WORDS:
                seen.add(german)
                chosen.append((german, english))
        splits[split] = tuple(chosen)
    return splits


class Writer:
    """Writes random sentence pairs. The given generator is the only source of randomness."""

    def __init__(self, random: Random):
        self.random = random

    def sentence(self) -> tuple[str, str]:
        """One German sentence and its English translation, with capitals and closing mark."""
        patterns = {
            self._main: 5,
            self._main_and_subordinate: 4,
            self._subordinate_first: 3,
            self._report: 3,
            self._question: 2,
            self._purpose: 2,
            self._contrast: 3,
            self._passive: 2,
        }
        pattern = self.random.choices(list(patterns), list(patterns.values()))[0]
        mark = "?" if pattern == self._question else "."
        german, english = pattern()
        return german[0].upper() + german[1:] + mark, english[0].upper() + english[1:] + mark

    def _main(self) -> tuple[str, str]:
        clause = self._clause()
        front = self.random.choice(["subject", "subject", "time", "object"])
        return clause.german_main(front), clause.english_main()

    def _main_and_subordinate(self) -> tuple[str, str]:
        german, english = self._main()
        joint, english_joint = self._pick(_CONJUNCTIONS)
        clause = self._clause()
        return f"{german}, {joint} {clause.german_final()}", f"{english} {english_joint} {clause.english_main()}"

    def _subordinate_first(self) -> tuple[str, str]:
        joint, english_joint = self._pick(_CONJUNCTIONS)
        first, second = self._clause(), self._clause()
        return (
            f"{joint} {first.german_final()}, {second.german_main('verb')}",
            f"{english_joint} {first.english_main()}, {second.english_main()}",
        )

    def _report(self) -> tuple[str, str]:
        german, english = self._pick(_REPORTS)
        clause = self._passive_clause() if self._chance(0.2) else self._clause()
        german += f", dass {clause.german_final()}"
        english += f" that {clause.english_main()}"
        if self._chance(0.3):
            joint, english_joint = self._pick(_CONJUNCTIONS)
            other = self._clause()
            german += f", {joint} {other.german_final()}"
            english += f" {english_joint} {other.english_main()}"
        return german, english

    def _question(self) -> tuple[str, str]:
        clause = self._clause()
        return clause.german_main("verb"), clause.english_question()

    def _purpose(self) -> tuple[str, str]:
        german, english = self._main()
        verb = self._verb(self.random.choice(_OBJECTS))
        phrase = self._object(verb.kind, "accusative", None)
        infinitive = f"{verb.particle}zu{verb.infinitive}" if verb.particle else f"zu {verb.infinitive}"
        german += f", um {phrase.german} {infinitive}"
        return german, f"{english} in order to {verb.english} {phrase.english}"

    def _contrast(self) -> tuple[str, str]:
        """A noun and its pronoun: die Lampe … sie, the lamp … it."""
        noun = self._noun(self.random.choice(["person", "animal", "text", "place"]))
        plural = self._chance(0.3)
        subject = self._noun_phrase(noun, "nominative", plural)
        pronoun = "sie" if plural else {"m": "er", "f": "sie", "n": "es"}[noun.gender]
        (old, english_old), (new, english_new) = self.random.sample(adjectives(noun.kind), 2)
        verb, english_verb = ("sind", "are") if plural else ("ist", "is")
        degree, english_degree = self._pick(_DEGREES)
        return (
            f"{subject.german} {verb} {degree} {old}, aber {pronoun} {verb} nicht {new}",
            f"{subject.english} {english_verb} {english_degree} {english_old}, "
            f"but {subject.pronoun} {english_verb} not {english_new}",
        )

    def _passive(self) -> tuple[str, str]:
        clause = self._passive_clause()
        front = self.random.choice(["subject", "time"])
        return clause.german_main(front), clause.english_main()

    def _clause(self) -> Clause:
        subject = self._subject()
        patterns = ["object", "dative", "give", "motion", "rest"]
        pattern = self.random.choices(patterns, [9, 2, 3, 3, 2])[0]
        verb = self._verb(self.random.choice(_OBJECTS) if pattern == "object" else pattern)
        tense = self._tense()
        negated = tense != "already" and self._chance(0.2)
        kein = negated and pattern == "object" and self._chance(0.6)
        return Clause(
            subject=subject,
            predicate=conjugate(verb, tense, subject.agreement, self.random.choice(MODALS)),
            objects=(self._kein(verb.kind),) if kein else self._objects(pattern, verb, subject),
            negated=negated,
            nicht=negated and not kein,
            time=self._time(tense),
            place=self._place(pattern),
            manner=self._pick(MANNERS) if self._chance(0.15) else ("", ""),
            adverb="schon" if tense == "already" else "",
        )

    def _passive_clause(self) -> Clause:
        verb = self._verb(self.random.choice(_OBJECTS))
        subject = self._noun_phrase(self._noun(verb.kind), "nominative", self._chance(0.3))
        agent = self._noun_phrase(self._noun("person"), "dative", self._chance(0.2))
        tense = self.random.choice(["present", "past"])
        negated = self._chance(0.15)
        return Clause(
            subject=subject,
            predicate=conjugate(verb, f"passive {tense}", subject.agreement, ""),
            negated=negated,
            nicht=negated,
            time=self._time(tense),
            place=(contract(f"von {agent.german}"), f"by {agent.english}"),
        )

    def _tense(self) -> str:
        tenses = ["present", "past", "already", "future", "planned", "modal"]
        return self.random.choices(tenses, [3, 4, 1, 2, 2, 3])[0]

    def _objects(self, pattern: str, verb: Verb, subject: Phrase) -> tuple[Phrase, ...]:
        if pattern == "object":
            return (self._object(verb.kind, "accusative", subject),)
        if pattern in ("motion", "rest"):
            return ()
        receiver = self._object("person", "dative", subject)
        if pattern == "dative":
            return (receiver,)
        return (receiver, self._object(self.random.choice(_GIFTS), "accusative", subject))

    def _place(self, pattern: str) -> tuple[str, str]:
        if pattern == "motion" and self._chance(0.4):
            german, english = self._pick(CITIES)
            return f"nach {german}", f"to {english}"
        if pattern not in ("motion", "rest") and self._chance(0.75):
            return "", ""
        case, english = ("accusative", "into") if pattern == "motion" else ("dative", "in")
        phrase = self._noun_phrase(self._noun("place"), case, plural=False)
        return contract(f"in {phrase.german}"), f"{english} {phrase.english}"

    def _time(self, tense: str) -> tuple[str, str]:
        if tense == "already" or (tense != "planned" and self._chance(0.3)):
            return "", ""
        if tense == "planned" or self._chance(0.85):
            return self._pick(TIMES[tense if tense in ("present", "past") else "future"])
        hour = self.random.randint(2, 12)
        if self._chance(0.5):
            return f"um {number(hour)[0]} Uhr", f"at {number(hour)[1]} o'clock"
        return f"um halb {number(hour)[0]}", f"at half past {number(hour - 1)[1]}"

    def _subject(self) -> Phrase:
        choice = self.random.random()
        if choice < 0.3:
            german, english = self._pick(_PRONOUNS)
            agreement = {"ich": "1s", "wir": "1p"}.get(german, "3p" if english == "they" else "3s")
            return Phrase(german, english, agreement, english)
        if choice < 0.42:
            name, pronoun = self._pick(NAMES)
            return Phrase(name, name, "3s", pronoun)
        noun, plural = self._noun("animal" if self._chance(0.15) else "person"), self._chance(0.35)
        phrase = self._noun_phrase(noun, "nominative", plural)
        return self._with_relative_clause(phrase, noun, plural) if self._chance(0.15) else phrase

    def _with_relative_clause(self, phrase: Phrase, noun: Noun, plural: bool) -> Phrase:
        """Add a clause about the subject: der Mann, der den Hund sieht."""
        verb = self._verb(self.random.choice(_OBJECTS))
        tense = self.random.choice(["present", "past"])
        clause = Clause(
            subject=phrase,
            predicate=conjugate(verb, tense, phrase.agreement, ""),
            objects=(self._object(verb.kind, "accusative", None),),
        )
        pronoun = relative_pronoun(noun, "nominative", plural)
        return Phrase(
            german=f"{phrase.german}, {clause.german_relative(pronoun)},",
            english=f"{phrase.english} who {clause.english_rest()}",
            agreement=phrase.agreement,
            pronoun=phrase.pronoun,
        )

    def _object(self, kind: str, case: str, subject: Phrase | None) -> Phrase:
        """An object. If there is a subject, the object sometimes belongs to it (sein, ihr: his, her, its, their)."""
        noun, plural = self._noun(kind), self._chance(0.3)
        if subject is not None and self._chance(0.25):
            owned = like_ein(*_POSSESSIVES[subject.pronoun])
            return inflect(noun, owned, case, plural, self._adjective(noun))
        return self._noun_phrase(noun, case, plural)

    def _kein(self, kind: str) -> Phrase:
        noun, plural = self._noun(kind), self._chance(0.4)
        determiner = like_ein("kein", "any" if plural else "a")
        return inflect(noun, determiner, "accusative", plural, self._adjective(noun))

    def _noun_phrase(self, noun: Noun, case: str, plural: bool) -> Phrase:
        if plural and self._chance(0.3):
            value = self.random.randint(2, 12) if self._chance(0.4) else self.random.randint(13, 99)
            determiner = uninflected(*number(value))
        elif plural:
            determiner = self.random.choice([THE, THE, THESE, MANY])
        else:
            determiner = self.random.choice([THE, THE, THIS, like_ein("ein", "a")])
        return inflect(noun, determiner, case, plural, self._adjective(noun))

    def _adjective(self, noun: Noun) -> tuple[str, str] | None:
        return self.random.choice(adjectives(noun.kind)) if self._chance(0.3) else None

    def _noun(self, kind: str) -> Noun:
        return self.random.choice(nouns(kind))

    def _verb(self, kind: str) -> Verb:
        return self.random.choice(verbs()[kind])

    def _pick(self, table: str) -> tuple[str, str]:
        return self.random.choice(pairs(table))

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability
