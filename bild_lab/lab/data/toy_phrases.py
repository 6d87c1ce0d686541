"""German noun phrases and clauses of the toy corpus, each with its English translation."""

from dataclasses import dataclass

from bild_lab.lab.data.toy_lexicon import Noun, Verb

CASES = ("nominative", "accusative", "dative")

# Endings by gender (p: plural), one for each of CASES; "-" is none.
_ARTICLE = {"m": "der den dem", "f": "die die der", "n": "das das dem", "p": "die die den"}
_STRONG = {"m": "er en em", "f": "e e er", "n": "es es em", "p": "e e en"}
_EIN = {"m": "- en em", "f": "e e er", "n": "- - em", "p": "e e en"}
_NONE = dict.fromkeys("mfnp", "- - -")
_WEAK = {"m": "e en en", "f": "e e en", "n": "e e en", "p": "en en en"}
_MIXED = {"m": "er en en", "f": "e e en", "n": "es es en", "p": "en en en"}

_CONTRACTIONS = {"in dem ": "im ", "in das ": "ins ", "von dem ": "vom "}
_HABEN = {"1s": "habe", "3s": "hat", "1p": "haben", "3p": "haben"}
_SEIN = {"1s": "bin", "3s": "ist", "1p": "sind", "3p": "sind"}
_WERDEN = {"1s": "werde", "3s": "wird", "1p": "werden", "3p": "werden"}
_WURDEN = {"1s": "wurde", "3s": "wurde", "1p": "wurden", "3p": "wurden"}
_MODAL_SINGULAR = {"können": "kann", "müssen": "muss", "wollen": "will", "sollen": "soll"}
_ENGLISH_MODAL = {"können": "can", "sollen": "should"}
_ENGLISH_PLAIN_MODAL = {"müssen": "have to", "wollen": "want to"}
MODALS = tuple(_MODAL_SINGULAR)


@dataclass(frozen=True)
class Determiner:
    """The first word of a noun phrase: stem, English translation, its endings and those of a following adjective."""

    stem: str
    english: str
    endings: dict[str, str]
    adjective_endings: dict[str, str]


THE = Determiner("", "the", _ARTICLE, _WEAK)
THIS = Determiner("dies", "this", _STRONG, _WEAK)
THESE = Determiner("dies", "these", _STRONG, _WEAK)
MANY = Determiner("viel", "many", _STRONG, _STRONG)


def like_ein(stem: str, english: str) -> Determiner:
    """A determiner that inflects like ein: kein, mein, sein, ihr."""
    return Determiner(stem, english, _EIN, _MIXED)


def uninflected(german: str, english: str) -> Determiner:
    """A determiner without endings, such as a number."""
    return Determiner(german, english, _NONE, _STRONG)


@dataclass(frozen=True)
class Phrase:
    """A noun phrase in one case; ``agreement`` is the person and number of its verb (1s, 3s, 1p, 3p).

    ``pronoun`` is its English pronoun (he, she, it, they, I, we). ``accusative_first`` means that its form alone
    shows that it is an object.
    """

    german: str
    english: str
    agreement: str
    pronoun: str
    accusative_first: bool = False


def inflect(noun: Noun, determiner: Determiner, case: str, plural: bool, adjective: tuple[str, str] | None) -> Phrase:
    """Decline the determiner, the adjective if any, and the noun."""
    gender, column = "p" if plural else noun.gender, CASES.index(case)
    words = [determiner.stem + _ending(determiner.endings, gender, column)]
    if adjective is not None:
        words.append(adjective[0].removesuffix("e") + _ending(determiner.adjective_endings, gender, column))
    words.append(_noun_form(noun, case, plural))
    rest = f"{adjective[1]} " if adjective is not None else ""
    rest += noun.english_plural if plural else noun.english
    article = "an" if determiner.english == "a" and rest[0] in "aeiou" else determiner.english
    return Phrase(
        german=" ".join(words),
        english=f"{article} {rest}",
        agreement="3p" if plural else "3s",
        pronoun="they" if plural else noun.pronoun,
        accusative_first=case == "accusative" and gender == "m" and determiner.endings is not _NONE,
    )


def relative_pronoun(noun: Noun, case: str, plural: bool) -> str:
    """The German relative pronoun for a noun, in the nominative or accusative."""
    return _ending(_ARTICLE, "p" if plural else noun.gender, CASES.index(case))


def contract(german: str) -> str:
    """Merge a preposition with its article: in dem, im."""
    for written, short in _CONTRACTIONS.items():
        if german.startswith(written):
            return short + german.removeprefix(written)
    return german


def _ending(endings: dict[str, str], gender: str, column: int) -> str:
    return endings[gender].split()[column].replace("-", "")


def _noun_form(noun: Noun, case: str, plural: bool) -> str:
    if not plural:
        return noun.plural if noun.weak and case != "nominative" else noun.singular
    takes_n = case == "dative" and noun.plural[-1] not in "ns"
    return noun.plural + "n" if takes_n else noun.plural


@dataclass(frozen=True)
class Predicate:
    """A verb in one tense: German finite form and closing words, English in three parts.

    The English is ``plain`` in affirmative clauses, ``auxiliary + not + rest`` in negated ones and
    ``auxiliary + subject + rest`` in questions.
    """

    finite: str
    closing: str
    auxiliary: str
    rest: str
    plain: str
    particle: bool = False  # closing is a separable particle, prefixed to a clause-final finite verb

    def final(self) -> str:
        """The verb complex that ends a subordinate clause, finite verb last."""
        return self.closing + ("" if self.particle or not self.closing else " ") + self.finite


def conjugate(verb: Verb, tense: str, agreement: str, modal: str) -> Predicate:
    """The verb in a tense: present, planned (German present, English future), past, already,
    future, modal, passive present or passive past."""
    third = agreement == "3s"
    done, base = verb.particle + verb.participle, verb.english
    perfect = (_HABEN if verb.auxiliary == "haben" else _SEIN)[agreement]
    infinitive = verb.particle + verb.infinitive
    has, does = ("has", "does") if third else ("have", "do")
    participle = verb.english_participle
    if tense == "present":
        plain = _third_person(base) if third else base
        return Predicate(_present(verb, agreement), verb.particle, does, base, plain, True)
    if tense == "planned":
        finite = _present(verb, agreement)
        return Predicate(finite, verb.particle, "will", base, f"will {base}", True)
    if tense == "past":
        return Predicate(perfect, done, "did", base, verb.english_past)
    if tense == "already":
        return Predicate(perfect, done, has, f"already {participle}", f"{has} already {participle}")
    if tense == "future":
        return Predicate(_WERDEN[agreement], infinitive, "will", base, f"will {base}")
    if tense == "modal":
        return _modal(modal, infinitive, agreement, base)
    be = {"passive present": ("is", "are"), "passive past": ("was", "were")}[tense][not third]
    finite = (_WERDEN if tense == "passive present" else _WURDEN)[agreement]
    return Predicate(finite, done, be, participle, f"{be} {participle}")


def _modal(modal: str, infinitive: str, agreement: str, base: str) -> Predicate:
    finite = _MODAL_SINGULAR[modal] if agreement.endswith("s") else modal
    if modal in _ENGLISH_MODAL:
        auxiliary = _ENGLISH_MODAL[modal]
        return Predicate(finite, infinitive, auxiliary, base, f"{auxiliary} {base}")
    rest = f"{_ENGLISH_PLAIN_MODAL[modal]} {base}"
    if agreement == "3s":
        plain = rest.replace("have", "has", 1) if modal == "müssen" else rest.replace("want", "wants", 1)
        return Predicate(finite, infinitive, "does", rest, plain)
    return Predicate(finite, infinitive, "do", rest, rest)


def _present(verb: Verb, agreement: str) -> str:
    if agreement == "3s":
        return verb.third_person
    if agreement != "1s":
        return verb.infinitive
    if verb.infinitive.endswith("eln"):
        return verb.infinitive.removesuffix("eln") + "le"
    return verb.infinitive.removesuffix("n").removesuffix("e") + "e"


def _third_person(base: str) -> str:
    """English third person singular, inflecting the first word: looks at."""
    head, _, tail = base.partition(" ")
    if head.endswith(("s", "sh", "ch", "o", "x")):
        head += "es"
    elif head.endswith("y") and head[-2] not in "aeiou":
        head = head.removesuffix("y") + "ies"
    else:
        head += "s"
    return f"{head} {tail}".strip()


@dataclass(frozen=True)
class Clause:
    """One clause in both languages; pairs are (German, English), empty where absent."""

    subject: Phrase
    predicate: Predicate
    objects: tuple[Phrase, ...] = ()  # in German order, the English is the same
    negated: bool = False
    nicht: bool = False  # False while negated: kein carries the negation
    time: tuple[str, str] = ("", "")
    place: tuple[str, str] = ("", "")
    manner: tuple[str, str] = ("", "")
    adverb: str = ""  # schon

    def german_main(self, front: str) -> str:
        """Verb second after ``front`` (subject, time, object), or verb first (front is verb)."""
        if front == "object" and not (len(self.objects) == 1 and self.objects[0].accusative_first):
            front = "subject"
        if front == "time" and not self.time[0]:
            front = "subject"
        opening = {"subject": self.subject.german, "time": self.time[0], "verb": ""}
        first = opening[front] if front in opening else self.objects[0].german
        subject = "" if front == "subject" else self.subject.german
        return _join(first, self.predicate.finite, subject, self._middle(front), self.predicate.closing)

    def german_final(self) -> str:
        """Verb last, as after weil or dass."""
        return _join(self.subject.german, self._middle("subject"), self.predicate.final())

    def german_relative(self, pronoun: str) -> str:
        """Verb last, after a relative pronoun that is the subject."""
        return _join(pronoun, self._middle("subject"), self.predicate.final())

    def english_main(self) -> str:
        """Subject, verb, objects, manner, place, time."""
        return _join(self.subject.english, self.english_rest())

    def english_rest(self) -> str:
        """Everything after the subject."""
        verb = self.predicate
        text = _join(verb.auxiliary, "not", verb.rest) if self.negated else verb.plain
        return _join(text.replace("can not", "cannot"), self._english_tail())

    def english_question(self) -> str:
        """Auxiliary, subject, not, the rest."""
        negation = "not" if self.negated else ""
        verb = self.predicate
        return _join(verb.auxiliary, self.subject.english, negation, verb.rest, self._english_tail())

    def _english_tail(self) -> str:
        objects = [phrase.english for phrase in self.objects]
        return _join(*objects, self.manner[1], self.place[1], self.time[1])

    def _middle(self, front: str) -> str:
        time = "" if front == "time" else self.time[0]
        objects = [] if front == "object" else [phrase.german for phrase in self.objects]
        negation = "nicht" if self.nicht else ""
        return _join(time, self.adverb, *objects, negation, self.manner[0], self.place[0])


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
