"""Measures on held-out data: retrieval in both directions, nearest neighbour, linear probe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Retrieval:
    """The best answers between m images and k distinct captions.

    Attributes:
        caption_of_image: (m,) position of the caption most similar to each image.
        image_of_caption: (k,) position of the image most similar to each caption.
        image_to_text: recall at 1, the share of images whose retrieved caption is the right one.
        text_to_image: recall at 1, the share of captions whose retrieved image bears that caption.
    """

    caption_of_image: Tensor
    image_of_caption: Tensor
    image_to_text: float
    text_to_image: float


def retrieval(images: Tensor, captions: Tensor, right: Tensor) -> Retrieval:
    """Retrieve captions by image and images by caption.

    Args:
        images: (m, d) features of the query images.
        captions: (k, d) features of the distinct captions.
        right: (m,) position of each image's own caption; every caption belongs to an image.
    """
    similarity = F.normalize(images, dim=1) @ F.normalize(captions, dim=1).T
    caption, image = similarity.argmax(dim=1), similarity.argmax(dim=0)
    image_hits = caption == right
    caption_hits = right[image] == torch.arange(len(captions), device=right.device)
    return Retrieval(caption, image, image_hits.float().mean().item(), caption_hits.float().mean().item())


def nearest_neighbour(bank: Tensor, bank_labels: Tensor, queries: Tensor, labels: Tensor) -> float:
    """Share of queries (m, d) whose nearest feature in the bank (k, d) bears their label."""
    nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).argmax(dim=1)
    return (bank_labels[nearest] == labels).float().mean().item()


def linear_probe(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Test accuracy of a logistic regression on standardised frozen features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    with threadpool_limits(1):  # small products: threads cost more than they give, and change the last bits
        probe.fit(train.cpu().numpy(), train_labels.cpu().numpy())
        return float(probe.score(test.cpu().numpy(), test_labels.cpu().numpy()))
