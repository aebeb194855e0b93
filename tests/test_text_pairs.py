"""``recipes.text``: pairs of text, their split, and a vocabulary that is the same in every process."""

import subprocess
import sys

import numpy as np
import pytest

from recipes import text

LINES = {
    "noun": [
        "  1 This software and database is being provided to you ...  ",
        "00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which is perceived to have its own existence  ",
        "00002137 03 n 02 abstraction 0 abstract_entity 0 001 @ 00001740 n 0000 | a general concept  ",
    ],
    "verb": ["00001740 29 v 04 breathe 0 take_a_breath 0 respire 0 suspire 3 001 * 00005041 v 0000 | draw air into  "],
    "adj": ["00001740 00 a 01 able(p) 0 001 = 05200169 n 0000 | having the necessary means or skill  "],
    "adv": [f"{number:08d} 02 r 01 word_{number} 0 000 | gloss number {number}  " for number in range(20)],
}


@pytest.fixture
def wordnet(tmp_path):
    for part, lines in LINES.items():
        (tmp_path / f"data.{part}").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_words_and_definitions(wordnet):
    words, definitions = text.wordnet(wordnet)
    assert words[:4] == [
        ["entity"],
        ["abstraction", "abstract entity"],
        ["breathe", "take a breath", "respire", "suspire"],
        ["able"],
    ]
    assert definitions[2] == "draw air into" and len(words) == len(definitions) == 24


def test_the_split(wordnet):
    pairs = text.load(wordnet, held_out=3)
    parts = [set(part.tolist()) for part in (pairs.train, pairs.validation, pairs.test)]
    assert [len(part) for part in parts] == [18, 3, 3] and len(set.union(*parts)) == 24
    assert np.array_equal(text.load(wordnet, held_out=3).test, pairs.test)
    assert not np.array_equal(text.load(wordnet, held_out=3, seed=1).test, pairs.test)
    assert len(text.load(wordnet, held_out=3, limit=5).train) == 5


def test_every_word_a_pair(wordnet):
    whole, pairs = text.load(wordnet, held_out=3), text.load(wordnet, held_out=3, each=True)
    names, documents = text.wordnet(wordnet)
    expected = [(word, documents[at]) for at in whole.train for word in names[at]]
    assert [(pairs.queries[at], pairs.documents[at]) for at in pairs.train] == expected
    assert np.array_equal(pairs.test, whole.test) and pairs.queries[pairs.test[0]] == whole.queries[whole.test[0]]


@pytest.mark.slow
def test_docstrings():
    pairs = text.load()
    assert len(pairs.train) > 1000 and len(pairs.test) == 1000
    assert pairs.queries[pairs.train[0]].islower() and len(pairs.documents[pairs.train[0]].split()) >= 3


@pytest.mark.slow
def test_the_vocabulary_is_the_same_in_every_process():
    pytest.importorskip("transformers")
    code = "from recipes import text; t = text.tokenizer_of(['naming is hard, naming names'] * 3 + ['hard to name'])\n"
    code += "print(t('Hard naming; unnamed')['input_ids'], len(t), t.tokenize('naming unnamed'))"
    said = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1 and "'naming'" in said.pop()
