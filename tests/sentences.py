"""Texts, encoders and losses for the tests of ``compopt.integrations.sentence_transformers``."""

import pytest
import torch

import compopt

N, BATCH = 32, 8
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi".split()
KINDS = pytest.mark.parametrize("kind", ["EstimatorLoss", "CachedEstimatorLoss"])


def texts(column, n=N):
    """Return short texts; those of samples 2k and 2k + 1 are equal if ``column`` is 1."""
    generator = torch.Generator().manual_seed(column)
    drawn = torch.randint(len(WORDS), (n, 4), generator=generator).tolist()
    said = [" ".join(WORDS[at] for at in line) + f" {WORDS[at % 16]}" for at, line in enumerate(drawn)]
    return [said[at // 2 * 2] for at in range(n)] if column == 1 else said


def encoder(layers=1):
    from recipes.text import small_model, tokenizer_of

    torch.manual_seed(0)
    return small_model(tokenizer_of(WORDS * 2, words=64, length=16), width=32, layers=layers)


def estimator(n=N, **options):
    return compopt.ISogCLREstimator(n, rho=0.5, directions="forward", **options)


def learned():
    return compopt.InfoNCEEstimator(tau=0.1, learn_tau=True, directions="forward")


def losses():
    from compopt.integrations import sentence_transformers

    return sentence_transformers


def loss_of(est, model=None, kind="EstimatorLoss", **options):
    return getattr(losses(), kind)(model or encoder(), est, **options)


def their_loss(both, model=None, scale=20.0):
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    options = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"} if both else {}
    return MultipleNegativesRankingLoss(model or encoder(), scale=scale, **options)


def embed(model, columns, at, prompts=("", "")):
    """Collate samples as the trainer does."""
    prompts = (*prompts, *[""] * len(columns))
    pairs = zip(columns, prompts, strict=False)
    return [model.preprocess([column[i] for i in at], prompt=prompt or None) for column, prompt in pairs]


def call(loss, columns, labels):
    value = loss(embed(loss.model, [texts(column) for column in range(columns)], range(BATCH)), labels)
    value.backward()
    return value.detach(), gradients(loss.model)


def gradients(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])
