"""The toy corpus is always the same, its splits are disjoint, and its German is German."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.data.toy import SIZES, toy_corpus
from bild_lab.lab.data.toy_lexicon import number, verbs

SPLITS = ("train", "validation", "test")
DIGEST = (
    "import hashlib, json; from bild_lab.lab.data.toy import toy_corpus;"
    "print(hashlib.sha256(json.dumps([toy_corpus(s) for s in ('train', 'validation', 'test')])"
    ".encode()).hexdigest())"
)


def last_words():
    """Every form that may close a subordinate clause."""
    finite = {"habe", "hat", "haben", "bin", "ist", "sind", "werde", "wird", "werden"}
    finite |= {"wurde", "wurden", "kann", "muss", "will", "soll"}
    finite |= {"können", "müssen", "wollen", "sollen"}
    for members in verbs().values():
        for verb in members:
            forms = [verb.third_person, verb.infinitive, verb.infinitive[:-1], verb.infinitive[:-2]]
            finite |= {verb.particle + form for form in forms}
    return finite


def test_no_german_sentence_is_in_two_splits_or_twice_in_one():
    sentences = [pair["de"] for split in SPLITS for pair in toy_corpus(split)]
    assert len(sentences) == len(set(sentences)) == sum(SIZES.values())


@pytest.mark.slow
def test_two_processes_with_other_hash_seeds_write_the_same_corpus():
    here = hashlib.sha256(json.dumps([toy_corpus(s) for s in SPLITS]).encode()).hexdigest()
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    there = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


def test_changing_a_returned_corpus_does_not_change_the_next():
    toy_corpus("test")[0]["de"] = "changed"
    assert toy_corpus("test")[0]["de"] != "changed"


def test_subordinate_clauses_end_with_their_finite_verb():
    pattern = re.compile(r", (?:weil|dass|obwohl|bevor|sobald) ([^,]+)[.?]$")
    found = [match for pair in toy_corpus("train") if (match := pattern.search(pair["de"]))]
    assert len(found) > 1000
    endings = last_words()
    wrong = [match[0] for match in found if match[1].split()[-1] not in endings]
    assert wrong == []


def test_an_opening_adverbial_pushes_the_subject_behind_the_verb():
    found = [pair["de"] for pair in toy_corpus("train") if pair["de"].startswith("Gestern ")]
    assert len(found) > 20
    verbs_second = {"habe", "hat", "haben", "bin", "ist", "sind", "wurde", "wurden"}
    assert {sentence.split()[1] for sentence in found} <= verbs_second


def test_english_puts_the_time_where_german_does_not():
    by_german = {pair["de"]: pair["en"] for pair in toy_corpus("train")}
    found = [en for de, en in by_german.items() if de.startswith("Gestern ") and "," not in de]
    assert found and all(en.endswith("yesterday.") for en in found)


def test_german_numbers_put_the_units_before_the_tens():
    assert number(23) == ("dreiundzwanzig", "twenty-three")
    assert number(21) == ("einundzwanzig", "twenty-one")
    assert number(12) == ("zwölf", "twelve")
    assert number(70) == ("siebzig", "seventy")


def test_ambiguous_words_are_translated_both_ways():
    text = [pair for pair in toy_corpus("train") if "Birne" in pair["de"]]
    assert any("pear" in pair["en"] for pair in text)
    assert any("light bulb" in pair["en"] for pair in text)


def test_only_ascii_and_german_letters_occur():
    letters = {char for pair in toy_corpus("train") for char in pair["de"] + pair["en"]}
    assert {char for char in letters if not char.isascii()} <= set("äöüÄÖÜß")
    assert {char for char in letters if char.isascii() and not char.isalpha()} <= set(" ,.?-'")


def test_sentences_run_from_short_to_long():
    lengths = [len(pair["de"].split()) for pair in toy_corpus("test")]
    assert min(lengths) >= 4
    assert max(lengths) >= 20
    assert min(lengths) <= 5


def test_an_unknown_split_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="test, train, validation, got 'dev'"):
        toy_corpus("dev")


def test_importing_the_corpus_module_loads_no_deep_learning_library():
    code = "import sys, bild_lab.lab.data.toy; print('torch' in sys.modules, 'transformers' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["False", "False"]
