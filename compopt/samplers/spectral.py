"""Batches of mutually hard negatives, by spectral clustering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt.estimator.options import takes_options
from compopt.samplers.base import BankOptions, BankSampler, same_label_pairs

PACKAGES = {"scipy": "scipy", "scikit-learn": "sklearn"}
# runs of k-means, of which the best is used
STARTS = 3


class Group(NamedTuple):
    """Samples that are clustered together, a piece of an epoch's plan."""

    samples: Tensor  # (m,) data-set positions
    sizes: list[int]  # of its batches
    seed: int  # of k-means
    absent: Tensor  # (m,) bool: samples without features


class SpectralBatchSampler(BankSampler):
    r"""Batches of mutually hard negatives; every sample occurs exactly once per epoch.

    Example:
        >>> import torch, compopt
        >>> sampler = compopt.samplers.SpectralBatchSampler(n=64, batch_size=8)
        >>> for batch in sampler:  # DataLoader(dataset, batch_sampler=sampler)
        ...     index = torch.tensor(batch)
        ...     z1, z2 = torch.randn(2, 8, 16).unbind()  # the loop's features
        ...     sampler.observe(index, z1, z2)
        >>> sorted(sum(sampler, [])) == list(range(64))  # clustered now
        True

    .. math::
        w_{kl} = c_{kl} + c_{lk}, \qquad
        c_{kl} = \log\bigl(1 + (B-1) e^{(s_{kl} - s_{kk})/\tau}\bigr)
        + \log\bigl(1 + (B-1) e^{(s_{lk} - s_{kk})/\tau}\bigr)

    By Jensen's inequality a quarter of the mean of ``w`` over the pairs of a batch is a lower bound of its loss. The
    sampler maximises the total weight inside batches approximately: the samples are divided at random into groups of at
    most ``group`` batches, and each group is divided into batches by spectral clustering with the affinity
    ``exp(sharpness w)``; an assignment problem makes the clusters equal in size. The edge weight in the paper is ``w``,
    and the code of its authors uses ``exp(w)``. Since ``w`` is a sum of four logarithms, ``sharpness=0.25`` gives the
    geometric mean of their arguments. Very small clusters are then less frequent before their sizes are made equal, and
    batches are harder (``benchmarks/results/batches.md``).

    Cost: ``O((group B)^3)`` per group, so that the cost of an epoch is linear in n; 0.3 s for 1,280 samples on one
    core. Choose ``group`` so that ``group * batch_size`` stays below a few thousand. Memory: about six matrices of
    ``(group B)^2`` float32 numbers, and the bank, ``4 n d`` bytes in half precision.

    *Samples without finite features* are assigned to batches at random.

    *Samples with the same meaning* are each other's hardest negatives, but false ones: pass ``labels`` to the sampler
    and to the estimator.

    Args:
        n, batch_size: see :class:`~compopt.samplers.BankSampler`.
        group: batches per group, ``k``.
        tau: temperature of the weights.
        seed: seed of groups, k-means and the order of batches, together with the epoch.
        drop_last: omit ``n mod B`` random samples from each epoch; otherwise they form a smaller last batch, which
            must contain at least two samples, and one for each rank.
        labels: ``(n,)`` integers; samples with equal labels are not each other's negatives: their pairs have weight
            zero, and they are distributed over different groups as far as possible.
        sharpness: factor of the weights in the affinity.
        **options: ``dtype``, ``offload``, ``process_group``, see
            :class:`~compopt.samplers.BankSampler`.

    Iterating yields lists of data-set positions. Each rank gets a contiguous part of each global batch, of ``B / K``
    samples (sizes differ by at most one); the global batches do not depend on the number of ranks. Do not let a
    framework shard the loader again.

    State: the bank, the plan of this epoch, epoch and position.

    Communicates, with K ranks: :meth:`observe` gathers features; at the beginning of an epoch each rank clusters every
    K-th group, and the results are gathered.

    Metrics: ``plan_seconds``, the time to compute the latest plan; ``wait_seconds``, the time that the loop waited for
    this epoch; ``unseen``, the number of samples without features at the latest plan.

    Raises:
        ImportError: SciPy or scikit-learn is missing.
        ValueError: the last batch has fewer than two samples, or fewer samples than ranks; ``group`` < 1;
            ``sharpness`` <= 0.
        ValueError, TypeError, RuntimeError: see :class:`~compopt.samplers.BankSampler`, also for warnings.

    References:
        Cho et al., Mini-Batch Optimization of Contrastive Loss, section 5.3, appendix C.1, Algorithms 1 and 3
        (B = 32, k = 40).
    """

    @takes_options(BankSampler, BankOptions)
    def __init__(
        self,
        n: int,
        batch_size: int,
        group: int = 40,
        tau: float = 0.1,
        seed: int = 0,
        drop_last: bool = False,
        labels: Tensor | None = None,
        sharpness: float = 1.0,
        **options: Unpack[BankOptions],
    ) -> None:
        missing = [name for name, module in PACKAGES.items() if find_spec(module) is None]
        if missing:  # raise now rather than after the first epoch
            install = "pip install -e '.[samplers]' in the checkout of compopt"
            raise ImportError(f"spectral batches need {' and '.join(missing)}; {install}")
        self.group = checks.positive_int("group", group)
        checks.flag("drop_last", drop_last)
        checks.positive("sharpness", sharpness)
        self.drop_last, self.sharpness = drop_last, float(sharpness)
        super().__init__(n, batch_size, tau, seed, labels, **options)
        rest = 0 if drop_last else self.n % self.batch_size
        if 0 < rest < max(2, self.world_size):
            raise ValueError(
                f"the last batch has {rest} of n={n} samples for world_size={self.world_size} ranks; it must have two, "
                f"and one for each rank: give drop_last=True, or another batch_size"
            )

    def __len__(self) -> int:
        return self.n // self.batch_size if self.drop_last else math.ceil(self.n / self.batch_size)

    def random_plan(self, epoch: int, missing: Tensor) -> Tensor:
        if self.drop_last:
            return super().random_plan(epoch, missing)
        return self.permutation(self.n, epoch, 0)

    def work(self, epoch: int) -> list[Group]:
        samples = self.permutation(self.n, epoch, 0)[: len(self) * self.batch_size]
        count = math.ceil(len(self) / self.group)
        bounds = [number * len(self) // count * self.batch_size for number in range(count)]  # groups of equal size
        bounds.append(len(samples))
        lengths = [high - low for low, high in zip(bounds, bounds[1:], strict=False)]
        if self.labels is not None:
            samples = self._spread_labels(samples, lengths, epoch)
        groups, absent = [], ~self.bank.seen.cpu()
        for number, chosen in enumerate(samples.split(lengths)):
            sizes = [len(batch) for batch in chosen.split(self.batch_size)]
            groups.append(Group(chosen, sizes, self.draw(epoch, 1, number) % (1 << 32), absent[chosen]))
        return groups

    def _spread_labels(self, samples: Tensor, lengths: list[int], epoch: int) -> Tensor:
        # Samples of a group with equal labels have the same neighbours, so that the embedding places them close to
        # each other even if their own weight is zero. Distribute them over different groups as far as possible.
        assert self.labels is not None
        names, label = self.labels[samples].unique(return_inverse=True)
        label = self.permutation(len(names), epoch, 3)[label]  # a different order of labels in every epoch
        steps = [torch.arange(m, dtype=torch.float32, device="cpu") for m in lengths]
        places = torch.cat([(step + 0.5) / len(step) for step in steps])  # per group, spread evenly over [0, 1]
        groups = torch.arange(len(lengths), device="cpu").repeat_interleave(torch.tensor(lengths, device="cpu"))
        whose = groups[places.argsort(stable=True)]
        return samples[label.argsort(stable=True)][whose.argsort(stable=True)]

    def do(self, piece: Group) -> Tensor:
        """Cluster the samples with features, and assign the others to random batches.

        Returns the samples of the group, batch by batch, ``(m,)`` int64.
        """
        chance, absent, m = torch.Generator("cpu").manual_seed(piece.seed), piece.absent, len(piece.samples)
        sizes = torch.tensor(piece.sizes, device="cpu")
        batches = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)  # the batch of every place
        free = torch.zeros(m, dtype=torch.bool, device="cpu")
        free[torch.randperm(m, generator=chance, device="cpu")[: int(absent.sum())]] = True
        numbers, sizes = batches[~free].unique(return_counts=True)
        clusters = torch.empty_like(batches)
        clusters[absent] = batches[free]
        if len(sizes):
            z1, z2, labels = self.read(piece.samples[~absent])
            weights = edge_weights(z1, z2, self.tau, self.batch_size, labels).mul_(self.sharpness)
            clusters[~absent] = numbers[spectral_clusters(weights, sizes.tolist(), piece.seed)]
        order = clusters.argsort(stable=True)
        # the clusters with free places are not random ones: swap each absent sample with a random sample
        for place in absent[order].nonzero().flatten().tolist():
            other = int(torch.randint(m, (), generator=chance, device="cpu"))
            order[[place, other]] = order[[other, place]]
        return piece.samples[order]

    def assemble(self, epoch: int, pieces: list[Group], results: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        samples = torch.cat(results)
        full = self.n // self.batch_size
        order = self.permutation(full, epoch, 2)
        batches = samples[: full * self.batch_size].view(full, self.batch_size)[order]
        return torch.cat([batches.flatten(), samples[full * self.batch_size :]]), {}

    def config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("group", "drop_last", "sharpness")}
        return {"kind": "spectral", **super().config(), **own}


def edge_weights(z1: Tensor, z2: Tensor, tau: float, batch_size: int, labels: Tensor | None = None) -> Tensor:
    """Return ``w`` of normalised features (m, d), ``(m, m)``, symmetric, 0 on the diagonal and for equal labels."""
    s = z1 @ z2.T
    own, others = s.diagonal()[:, None], math.log(batch_size - 1)
    zero = s.new_zeros(())
    c = torch.logaddexp((s - own) / tau + others, zero)  # anchor z1_k, candidate z2_l
    c += torch.logaddexp((s.T - own) / tau + others, zero)  # anchor z2_k, candidate z1_l
    if labels is not None:
        c.masked_fill_(same_label_pairs(labels), 0.0)
    return (c + c.T).fill_diagonal_(0.0)


def normalized_affinity(weights: Tensor) -> Tensor:
    r"""Return ``D^{-1/2} A D^{-1/2}``, ``(m, m)``, with affinities ``A = exp(w)``, diagonal 0, and row sums ``D``.

    The computation is in the log domain, since ``exp(w)`` overflows float32 at small temperatures. The entries of the
    result are at most 1, and those of isolated samples do not vanish.
    """
    log_a = weights.clone().fill_diagonal_(-math.inf)
    half = torch.logsumexp(log_a, dim=1) / 2
    return torch.exp(log_a - half[:, None] - half)


def spectral_clusters(weights: Tensor, sizes: Sequence[int], seed: int) -> Tensor:
    """Assign samples to clusters of given ``sizes`` (sum ``m``) with a small cut of ``weights`` (m, m), ``(m,)`` int64.

    The steps are those of Ng, Jordan and Weiss (On Spectral Clustering, NeurIPS 2001). Cost: ``m^3`` for the
    eigenvectors, at worst ``m^3`` for the assignment; 0.3 s for m = 1280 and 40 clusters.
    """
    m, k = len(weights), len(sizes)
    if k == 1:
        return torch.zeros(m, dtype=torch.int64, device="cpu")
    from scipy.linalg import eigh

    affinity = normalized_affinity(weights).cpu().numpy()
    _, vectors = eigh(affinity, subset_by_index=(m - k, m - 1), overwrite_a=True, check_finite=False)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    points = vectors / np.maximum(norms, np.finfo(vectors.dtype).tiny)
    return torch.from_numpy(even_clusters(points, sizes, seed))


def even_clusters(points: np.ndarray, sizes: Sequence[int], seed: int) -> np.ndarray:
    """Assign points (m, e) to clusters of exactly the given ``sizes`` (sum ``m``); return the clusters, ``(m,)``.

    k-means computes the centres. Each centre is repeated once per place of its cluster, and the assignment of points to
    places with the smallest sum of distances defines the clusters. The largest sizes are assigned to the centres with
    the most points (Cho et al., appendix C.1, Algorithm 3).
    """
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    # With several threads the order of summation in k-means varies, and ranks and resumed runs would obtain different
    # clusters. The limit applies to the calling thread only.
    with threadpool_limits(1, user_api="openmp"):
        found = KMeans(len(sizes), n_init=STARTS, random_state=seed).fit(points)
    populous = np.argsort(-np.bincount(found.labels_, minlength=len(sizes)), kind="stable")
    place = np.repeat(populous, np.sort(sizes)[::-1])  # (m,) the cluster of each place
    # one row per place rather than per point: the same assignment in a third of the time
    _, chosen = linear_sum_assignment(cdist(found.cluster_centers_, points)[place])
    # number the clusters in the order of the argument sizes
    number = np.empty(len(sizes), dtype=np.int64)
    number[populous] = np.argsort(-np.asarray(sizes), kind="stable")
    clusters = np.empty(len(points), dtype=np.int64)
    clusters[chosen] = number[place]
    return clusters
