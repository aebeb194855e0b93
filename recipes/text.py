"""Pairs of texts for retrieval, and a small sentence-transformers model with random weights.

``docstrings``: names and descriptions of functions and classes of Python's standard library, without a download.
``wordnet``: the words of WordNet 3.0 and their definitions, from the files ``data.noun``, ``data.verb``, ``data.adj``
and ``data.adv`` (Debian's package wordnet-base, or any copy).
"""

from __future__ import annotations

import ast
import re
import string
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


@dataclass(frozen=True)
class TextPairs:
    """Short texts with their meanings, and positions of training, validation and test pairs."""

    queries: list[str]
    documents: list[str]
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def docstrings() -> tuple[list[str], list[str]]:
    """Return names, split into words, and first paragraphs of docstrings, of all top-level modules."""
    queries, documents = [], []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for name, text in _documented(ast.parse(file.read_bytes()), file.stem):
            queries.append(" ".join(_WORDS.findall(name)).lower())
            documents.append(text)
    return queries, documents


def _documented(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield names of functions and classes inside a node, with the first paragraphs of their docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{name} {child.name}"
            text = " ".join((ast.get_docstring(child) or "").split("\n\n")[0].split())
            if len(text.split()) >= 3:
                yield inner, text
            yield from _documented(child, inner)


def wordnet(folder: Path) -> tuple[list[list[str]], list[str]]:
    """Return the words of each synset, and its definition with examples."""
    queries, documents = [], []
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            if line.startswith("  "):  # the licence
                continue
            data, gloss = line.split(" | ", 1)
            fields = data.split()
            words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            queries.append([re.sub(r"\(.*\)", "", word).replace("_", " ") for word in words])
            documents.append(gloss.strip())
    return queries, documents


def load(
    folder: Path | None = None, held_out: int = 1000, limit: int | None = None, each: bool = False, seed: int = 0
) -> TextPairs:
    """Return the pairs of WordNet, or without a folder those of the standard library, split by ``seed``.

    Validation and test have ``held_out`` pairs each, with texts that occur in no other pair. With ``each``, every word
    of a synset forms a training pair with its definition.
    """
    names, documents = docstrings() if folder is None else wordnet(folder)
    queries = names if folder is None else [", ".join(words) for words in names]
    pairs = split(queries, documents, held_out, seed)
    if each:
        words = [(word, documents[at]) for at in pairs.train for word in names[at]]
        train = np.arange(len(queries), len(queries) + len(words))
        queries, documents = [*queries, *(word for word, _ in words)], [*documents, *(text for _, text in words)]
        pairs = replace(pairs, queries=queries, documents=documents, train=train)
    return replace(pairs, train=pairs.train[:limit])


def split(queries: list[str], documents: list[str], held_out: int, seed: int = 0) -> TextPairs:
    """Hold out pairs at random, see :func:`load`; all others are training pairs, in random order."""
    order = np.random.default_rng(seed).permutation(len(queries))
    counts = Counter([*queries, *documents])
    alone = [at for at in order if counts[queries[at]] == 1 and counts[documents[at]] == 1]
    out = np.array(alone[: 2 * held_out])
    return TextPairs(queries, documents, order[~np.isin(order, out)], out[:held_out], out[held_out:])


def tokenizer_of(texts: Iterable[str], words: int = 8192, length: int = 32) -> Any:
    """Return a deterministic tokenizer with BERT's word pieces: characters, and the most frequent words and endings.

    The trainers of ``tokenizers`` number the pieces differently in every run, but a resumed run needs the same numbers.
    """
    from transformers import BertTokenizerFast

    counts = Counter(word for text in texts for word in re.findall(r"[a-z0-9]+", text.lower()))
    endings = Counter()
    for word, count in counts.items():
        for size in range(2, min(5, len(word))):
            endings["##" + word[-size:]] += count
    characters = [mark + letter for mark in ("", "##") for letter in string.printable if letter.isprintable()]
    frequent = [piece for piece, _ in sorted((counts + endings).items(), key=lambda item: (-item[1], item[0]))]
    pieces = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *frequent[:words]])
    inputs = ["input_ids", "attention_mask"]
    numbered = {piece: at for at, piece in enumerate(pieces)}
    return BertTokenizerFast(vocab=numbered, model_max_length=length, model_input_names=inputs)


def small_model(tokenizer: Any, width: int = 64, layers: int = 2) -> Any:
    """Return a ``SentenceTransformer``: a DistilBERT with random weights and mean pooling."""
    from safetensors.torch import save_file
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import DistilBertConfig, DistilBertModel

    length = tokenizer.model_max_length
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=width, n_layers=layers, n_heads=width // 32, hidden_dim=4 * width,
        max_position_embeddings=length, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # every process writes its own weights, unlike with save_pretrained
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        save_file(DistilBertModel(config).state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
        transformer = Transformer(folder, max_seq_length=length)
    return SentenceTransformer(modules=[transformer, Pooling(width)], device="cpu")
