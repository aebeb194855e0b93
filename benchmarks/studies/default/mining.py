"""Batches that a trained model has chosen before training begins, in the manner of B3.

B3 (Thirukovalluru et al., Breaking the Batch Barrier of Contrastive Learning via Smart Batch Mining, NeurIPS 2025): a
teacher ranks all other samples for each one.  Those of the ranks ``skip`` to ``skip + KEPT`` are hard negatives; what
is nearer may mean the same.  They are the edges of a graph, which METIS cuts into clusters of ``cluster`` samples.  A
batch is made of clusters that are drawn at random.

The teacher has the student's encoders and sees as many samples as the student will; they are not counted as the
student's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from benchmarks.studies.default.tasks import DIM, Task
from benchmarks.studies.default.training import Setting, trained
from recipes import cache
from recipes.batches import Shuffled, seeded

KEPT = 100  # ranks that are edges, as in the authors' data
CHUNK = 1024  # samples that are ranked at a time
TEACHER = Setting(batch=16, lr=4e-3)  # with the loss that is recommended


class Clustered(Shuffled):
    """An epoch is all clusters in a random order, cut into batches.

    Args:
        clusters: the cluster of every sample, ``(n,)``.
        size: of a batch.
        seed: decides the orders.
    """

    def __init__(self, clusters: Tensor, size: int, seed: int) -> None:
        super().__init__(len(clusters), size, len(clusters) // size, seed)
        self._clusters, self._count = clusters, int(clusters.max()) + 1

    def order(self, epoch: int) -> Tensor:
        inside = super().order(epoch)  # which samples of a cut cluster, or of the rest of an epoch, go together
        place = torch.randperm(self._count, generator=seeded("clusters", self._seed, epoch))
        return inside[place[self._clusters[inside]].argsort(stable=True)]


def build(name: str, task: Task, size: int, skip: int, cluster: int, seed: int) -> Clustered:
    """Mined batches of a data set; what a teacher of this seed has found is kept in the cache."""
    setting = replace(TEACHER, seed=seed)
    path = cache.file(None, f"mined_{name}_{seed}_{skip}_{cluster}.npz")
    key = f"{setting} {task.n} {KEPT} {torch.__version__}"
    known = cache.read(path, key, ["clusters"])
    if known is None:
        teacher = trained(task, _recommended, setting, f"teacher_{name}_{seed}.npz")
        with torch.no_grad():
            sides = [F.normalize(side) for side in task.training_features(teacher)]
        known = {"clusters": partition(neighbours(sides, skip), cluster)}
        cache.write(path, key, known)
    return Clustered(torch.from_numpy(known["clusters"]), size, seed)


def _recommended(task: Task) -> Any:
    return compopt.recommended(DIM, task.n, TEACHER.batch, task.mode)


def neighbours(sides: list[Tensor], skip: int, kept: int = KEPT) -> Tensor:
    """The samples of the ranks ``skip`` to ``skip + kept`` for both sides of every sample, ``(2, n, kept)``."""
    found = []
    for own, other in (sides, sides[::-1]):
        chunks = []
        for first, queries in zip(range(0, len(own), CHUNK), own.split(CHUNK), strict=True):
            similar = queries @ other.T
            similar[torch.arange(len(queries)), torch.arange(first, first + len(queries))] = -torch.inf
            chunks.append(similar.topk(skip + kept).indices[:, skip:])
        found.append(torch.cat(chunks))
    return torch.stack(found)


def partition(edges: Tensor, cluster: int) -> np.ndarray:
    """Clusters of about ``cluster`` samples that cut few edges: the cluster of every sample, ``(n,)``."""
    import pymetis
    from scipy.sparse import coo_array

    sides, n, kept = edges.shape
    rows = torch.arange(n).repeat_interleave(kept).repeat(sides)
    one_way = coo_array((np.ones(len(rows)), (rows.numpy(), edges.flatten().numpy())), shape=(n, n)).tocsr()
    graph = one_way + one_way.T  # METIS takes undirected graphs
    given = pymetis.CSRAdjacency(graph.indptr.tolist(), graph.indices.tolist())
    _, clusters = pymetis.part_graph(max(1, n // cluster), given, options=pymetis.Options(seed=0))
    return np.asarray(clusters)
