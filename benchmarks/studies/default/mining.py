"""Batches that a trained model selects before training, similar to B3.

B3 (Thirukovalluru et al., Breaking the Batch Barrier of Contrastive Learning via Smart Batch Mining, NeurIPS 2025): for
each sample, a teacher ranks all other samples.  Those of the ranks ``skip`` to ``skip + KEPT`` are hard negatives;
nearer samples may be false negatives.  They are the edges of a graph, which METIS partitions into clusters of
``cluster`` samples.  A batch consists of clusters that are drawn at random.

The teacher has the same encoders as the student and is trained on as many samples, which are not counted for the
student.
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

KEPT = 100  # number of ranks that are edges, as in the authors' data
CHUNK = 1024  # samples that are ranked at a time
TEACHER = Setting(batch=16, lr=4e-3)  # with the recommended loss


class Clustered(Shuffled):
    """Batches of epochs that consist of all clusters in random order.

    Args:
        clusters: cluster of every sample, ``(n,)``.
        size: samples per batch.
        seed: seed of the orders.
    """

    def __init__(self, clusters: Tensor, size: int, seed: int) -> None:
        super().__init__(len(clusters), size, len(clusters) // size, seed)
        self._clusters, self._count = clusters, int(clusters.max()) + 1

    def order(self, epoch: int) -> Tensor:
        inside = super().order(epoch)  # random order of the samples within a cluster
        place = torch.randperm(self._count, generator=seeded("clusters", self._seed, epoch))
        return inside[place[self._clusters[inside]].argsort(stable=True)]


def build(name: str, task: Task, size: int, skip: int, cluster: int, seed: int) -> Clustered:
    """Return mined batches of a data set; the clusters of a teacher with this seed are cached."""
    setting = replace(TEACHER, seed=seed)
    path = cache.file(None, f"mined_{name}_{seed}_{skip}_{cluster}.npz")
    key = f"{setting} {task.n} {KEPT} {torch.__version__}"

    def clusters() -> dict[str, np.ndarray]:
        teacher = trained(task, _recommended, setting, f"teacher_{name}_{seed}.npz")
        with torch.no_grad():
            sides = [F.normalize(side) for side in task.training_features(teacher)]
        return {"clusters": partition(neighbours(sides, skip), cluster)}

    known = cache.read_or_make(path, key, ["clusters"], clusters)
    return Clustered(torch.from_numpy(known["clusters"]), size, seed)


def _recommended(task: Task) -> Any:
    return compopt.recommended(DIM, task.n, TEACHER.batch, task.mode, candidates=None)


def neighbours(sides: list[Tensor], skip: int, kept: int = KEPT) -> Tensor:
    """Return the samples of the ranks ``skip`` to ``skip + kept`` for both sides of each sample, ``(2, n, kept)``."""
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
    """Return the cluster of every sample, ``(n,)``: clusters have about ``cluster`` samples and cut few edges."""
    import pymetis
    from scipy.sparse import coo_array

    sides, n, kept = edges.shape
    rows = torch.arange(n).repeat_interleave(kept).repeat(sides)
    one_way = coo_array((np.ones(len(rows)), (rows.numpy(), edges.flatten().numpy())), shape=(n, n)).tocsr()
    graph = one_way + one_way.T  # METIS takes undirected graphs
    given = pymetis.CSRAdjacency(graph.indptr.tolist(), graph.indices.tolist())
    _, clusters = pymetis.part_graph(max(1, n // cluster), given, options=pymetis.Options(seed=0))
    return np.asarray(clusters)
