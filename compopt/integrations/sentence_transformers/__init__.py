"""sentence-transformers: estimators as losses of the ``SentenceTransformerTrainer``."""

from __future__ import annotations

try:
    from compopt.integrations.sentence_transformers.losses import CachedEstimatorLoss, EstimatorLoss
    from compopt.integrations.sentence_transformers.options import guided_options, ranking_options
except ImportError as error:
    raise ImportError(
        "this needs sentence-transformers 6.2 or newer: "
        "pip install -e '.[sentence-transformers]' in the checkout of compopt"
    ) from error

from compopt.integrations.sentence_transformers.labels import add_index
from compopt.integrations.transformers import EstimatorCallback

__all__ = [
    "CachedEstimatorLoss",
    "EstimatorCallback",
    "EstimatorLoss",
    "add_index",
    "guided_options",
    "ranking_options",
]
