"""sentence-transformers: any estimator as the loss of its ``SentenceTransformerTrainer``."""

try:
    import sentence_transformers.base.losses.gradcache  # noqa: F401
except ImportError as error:
    raise ImportError(
        "this needs sentence-transformers 6.2 or newer: "
        "pip install -e '.[sentence-transformers]' in the checkout of compopt"
    ) from error

from compopt.integrations.sentence_transformers.cached import CachedEstimatorLoss
from compopt.integrations.sentence_transformers.loss import EstimatorLoss
from compopt.integrations.sentence_transformers.rows import add_index
from compopt.integrations.transformers import EstimatorCallback

__all__ = ["CachedEstimatorLoss", "EstimatorCallback", "EstimatorLoss", "add_index"]
