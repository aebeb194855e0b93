r"""Scores of samples from committed rows, to find wrong pairs and estimate their share.

A row of ``reference="positive"`` or of a :class:`~compopt.ScoreKeeper` holds a running mean of

.. math:: \log \hat g_i = \log \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{(s_{ij} - s_{ii}) / \tau_i},

the log-normalizer of sample ``i`` relative to its positive. It is large if other samples match the anchor better than
its own partner does, above all for pairs with a wrong caption. The same quantity, computed after training by a trained
model, is the s-CLIPLoss with which Wang et al. (2024) filter data sets.

Logarithms are in nats. The functions read committed rows: with ``shard=True`` they are collective, otherwise they
communicate nothing. The functions change no gradient.
"""

from __future__ import annotations

import csv
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.hooks import RemovableHandle

from compopt import checks
from compopt.batch import COUNT, Batch
from compopt.checks.context import warn
from compopt.checks.inputs import check_values
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.collectives import doing
from compopt.estimator.base import Estimator, Form, Hook
from compopt.estimator.groups import GroupSpec, as_groups
from compopt.estimator.reader import ROW_KEYS, or_flags
from compopt.kernel.block import same_sample
from compopt.kernel.pairs import Pairs
from compopt.stores.rows import Column

RANK_ROWS = 512  # anchors per block of similarities
ROUNDING = 8  # largest error of a cosine similarity, in units of the last place
CHANCE = 0.5  # mean rank of a positive that is unrelated to its anchor


class ScoreKeeper(Estimator):
    r"""Rows that record per sample, beside any loss, how the positive compares with the negatives.

    Example:
        >>> import torch, compopt
        >>> est, keeper = compopt.DCLEstimator(), compopt.ScoreKeeper(n=100)
        >>> handle = keeper.attach(est)
        >>> z1, z2 = torch.randn(2, 8, 4, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()
        >>> keeper.read(torch.tensor([0, 50]))["count"].tolist()
        [1, 0]

    The recorded values do not enter any gradient. With ``x_i`` one of the three observations below, at the ``c``-th
    visit of a sample:

    .. math::
        r = \max(\rho, 1 / c), \qquad
        m_i \leftarrow m_i + r\,(x_i - m_i), \qquad
        v_i \leftarrow (1 - r)\,\bigl(v_i + r\,(x_i - m_i)^2\bigr)

    so that the first ``1 / rate`` visits have equal weights, and weights decay exponentially afterwards.

    Args:
        n: number of samples, or a list of sample groups.
        rate: :math:`\rho`, in (0, 1], the weight of the latest visit after ``1 / rate`` visits.
        rank: also record the rank of the positive, which costs two more matrix products of the features (four in
            unimodal mode). Without it :func:`~compopt.curation.suspects` requires ``share=``.

    Hyper-parameters, which may differ between sample groups: ``rate``.

    State, per sample and direction (48 bytes with two): ``log_g`` and ``log_g_var``, mean and variance of
    :math:`\log \hat g_i` in nats at the temperature of the call; ``similarity`` and ``similarity_var``, those of
    :math:`s_{ii}`; ``rank``, the mean share of the batch's negatives that are more similar to the anchor than its
    positive is. In unimodal mode each value is the mean over both views. ``negatives`` count in ``log_g`` only.
    With a :class:`~compopt.PairPolicy` ``log_g`` is computed from the candidates that the policy keeps, and ``rank``
    from all candidates with other keys. With ``keys=`` candidates and positives are those of the copy.

    The rows have the mode, the dtype and the placement of the estimator that :meth:`attach` is given. They are saved by
    ``compopt.save(keeper, directory)``, and read ahead by ``est.prefetch(loader)``.

    Communicates, with several ranks and in each call that deposits: a message of up to 2 integers per sample and a few
    more; one all-gather of the rows of this rank's samples and of 2 floats per anchor (with ``shard=True`` the rows
    come from one all-reduce).

    Raises:
        ValueError: ``rate`` is outside (0, 1], or ``n`` < 1.
        TypeError: ``n`` is neither an integer nor a list of sample groups. At a call: it has no ``index``.
        IndexError: at a call, an index is outside the data set.
    """

    _handle: RemovableHandle | None = None

    def __init__(self, n: GroupSpec, rate: float = 0.2, rank: bool = True) -> None:
        checks.flag("rank", rank)
        self.rank = rank
        super().__init__(as_groups(n), {"rate": rate})

    def check(self, group: Mapping[str, Any]) -> None:
        checks.unit_interval("rate", group["rate"], "; it is the weight of the newest visit")

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        moments = ["log_g", "log_g_var", "similarity", "similarity_var"]
        return [Column(name, directions, dtype) for name in (*moments, *(["rank"] if self.rank else []))]

    def attach(self, est: ContrastiveEstimator) -> RemovableHandle:  # type: ignore[override]
        """Record each call of an estimator that deposits, and commit and discard with it.

        Attaching again replaces the previous estimator. Copies of the estimator or of the keeper are not attached. With
        several ranks, attach on all of them.

        Returns:
            A handle with a method ``remove()``.

        Raises:
            TypeError: ``est`` is not a contrastive estimator.
            ValueError: ``est`` has another ``n``; or this keeper has rows of another form, because it was attached to
                or loaded for an estimator with another mode, dtype or placement.
        """
        if not isinstance(est, ContrastiveEstimator):
            kind = type(est).__name__
            raise TypeError(f"est must be a contrastive estimator, with whose step() a ScoreKeeper commits, got {kind}")
        if est.n not in (None, self.n):
            raise ValueError(f"n differs: the ScoreKeeper has {self.n}, the estimator {est.n}; give both the same n")
        if not (self.t or self.pending):
            self._reset_form()
        self._set_form(est._ensure_form())
        if self._handle is not None:
            self._handle.remove()
        self._handle = est.register_call_hook(self._record)
        follow: Hook = self._follow
        for family, hook in (("step_post", follow), ("discard", self._drop), ("load_state_dict_post", self._drop)):
            est._hooks[family][self._handle.id] = hook  # under the id of the handle, which removes it too
            self._handle.extra_dict_ref += (weakref.ref(est._hooks[family]),)
        return self._handle

    def _set_form(self, form: Form) -> None:
        super()._set_form(replace(form, folder="scores"))
        self._row_keys = ROW_KEYS[: form.width]

    def _record(self, est: ContrastiveEstimator, batch: Batch, pairs: Pairs) -> None:
        """Deposit the observations of a call."""
        if not batch.depositing:
            return
        rows = (batch.rows if batch.host_rows is None else batch.host_rows)[batch.own]
        keys = dict(zip(ROW_KEYS, rows.unbind(1), strict=False))
        keys["index"] = self._index(keys["index"] if batch.named else None, len(rows))
        values = {"similarity": pairs.positive[batch.own]}
        values |= {"rank": _positive_ranks(batch, pairs, self._unimodal)} if self.rank else {}
        try:
            own, valid = self._read(keys, values), None
        except IndexError as error:
            if est.n in (None, self.n):
                raise
            grown = f"the estimator has grown to n={est.n}; call add_sample_group of the ScoreKeeper too"
            raise IndexError(f"{error}; {grown}") from None
        own.bad = or_flags(own.bad, batch.bad)  # indices on a device, which the estimator refuses without an error
        if own.depositing:
            if pairs.may_lack_negatives and isinstance(pairs.count, Tensor):
                valid = pairs.count > 0
                valid = valid.all(dim=1, keepdim=True) if self._unimodal else valid
            self._deposit_rows(own, own.of(), self._observed(own, pairs), valid)

    @property
    def _unimodal(self) -> bool:
        return self._ensure_form().mode == "unimodal"

    def _observed(self, own: Batch, pairs: Pairs) -> dict[str, Tensor]:
        """Return new values of the columns for the samples of a call, ``(B, D)`` each."""
        read, unimodal = own.of(), self._unimodal
        rows, first = read.columns, read.unseen
        log_ghat = pairs.of_other_view(pairs.log_ghat) if unimodal else pairs.log_ghat
        least = self._hyper(own)("rate")
        rate = torch.clamp(1 / (read.count + 1).to(log_ghat.dtype), min=least).to(log_ghat.dtype)
        new: dict[str, Tensor] = {}
        for name, value in (("log_g", log_ghat), ("similarity", pairs.positive)):
            seen = value.mean(1, keepdim=True) if unimodal else value
            change = torch.where(first, 0, seen - rows[name])
            new[name] = torch.where(first, seen, rows[name] + rate * change)
            new[f"{name}_var"] = torch.where(first, 0, (1 - rate) * (rows[f"{name}_var"] + rate * change.square()))
        if self.rank:
            seen = own.values["rank"].mean(1, keepdim=True) if unimodal else own.values["rank"]
            new["rank"] = torch.where(first, seen, rows["rank"] + rate * (seen - rows["rank"]))
        return new

    def _follow(self, est: Estimator, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._commit(kwargs.get("found_inf"))

    def _drop(self, est: Estimator) -> None:
        self.discard()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_handle": None}


def _positive_ranks(batch: Batch, pairs: Pairs, unimodal: bool) -> Tensor:
    """Return the share of negatives that are more similar to an anchor than its positive, of this rank, ``(b, A)``.

    Every rank compares its own anchors with the features of all ranks. The share is 0 for anchors without negatives.
    """
    z = batch.features
    k = batch.momentum or z  # candidates of the anchors
    keys = list(batch.keys.values())
    sides = list(zip(z, k[1:] + k[:1], strict=True))
    columns = []
    for anchors, others in sides[: len(z) if unimodal else pairs.directions]:
        candidates = k if unimodal else (others,)
        which = next(number for number, other in enumerate(candidates) if other is others)
        columns.append(_share_above(anchors[batch.own], candidates, which, keys, batch.own))
    return torch.stack(columns, dim=1)


def _share_above(
    anchors: Tensor, candidates: Sequence[Tensor], which: int, keys: Sequence[Tensor], own: slice
) -> Tensor:
    """Return the share of negatives above the positive, ``(b,)``, in blocks of anchors; a tie counts as half.

    Args:
        anchors: anchors of this rank, ``(b, d)``.
        candidates: candidates of all ranks, ``(B, d)`` each.
        which: position in ``candidates`` of the tensor that contains the positives.
        keys: keys of all samples, ``(B,)`` each.
        own: slice of this rank's samples.
    """
    shares = []
    for start in range(0, len(anchors), RANK_ROWS):
        at = slice(start, start + RANK_ROWS)
        negatives = ~same_sample([key[own][at] for key in keys], keys)
        similarities = [anchors[at] @ z.T for z in candidates]
        # computed in the same product as the negatives, so that equal features are tied exactly
        positive = similarities[which].diagonal(own.start + start)[:, None]
        half = positive.new_full((), 0.5)
        above = sum((torch.heaviside(s - positive, half) * negatives).sum(1) for s in similarities)
        count = len(candidates) * negatives.sum(1)
        shares.append(above / count.clamp(min=1))
    return torch.cat(shares) if shares else anchors.new_zeros(0)


@dataclass(frozen=True)
class Scores:
    r"""Scores and statistics of all samples, ``(n,)`` each on the CPU; NaN for samples without a visit.

    Example:
        >>> import torch, compopt
        >>> found = compopt.curation.Scores(score=torch.tensor([0.5, -3.0]), visits=torch.tensor([2, 1]))
        >>> sorted(found.columns())
        ['score', 'visits']

    Attributes:
        score: :math:`-\log \hat g_i` in nats, alignment minus log-normalizer, mean over the directions. A low score
            indicates a wrong pair.
        visits: int64, the maximum over the directions; 0 for a sample without a visit.
        uncertainty: standard error of ``score``, with the directions assumed to be independent; NaN after one visit;
            ``None`` if the rows contain no variance.
        similarity: running mean of :math:`s_{ii}`; ``None`` without a :class:`~compopt.ScoreKeeper`.
        rank: running mean of the share of negatives above the positive, in [0, 1]; ``None`` if not recorded.
        trend: difference between ``score`` and the earlier scores ``since``; ``None`` without ``since``.
    """

    score: Tensor
    visits: Tensor
    uncertainty: Tensor | None = None
    similarity: Tensor | None = None
    rank: Tensor | None = None
    trend: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """Return the fields that are not ``None``, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def scores(est: Estimator, since: Scores | None = None) -> Scores:
    """Return the score of every sample from committed rows.

    Example:
        >>> import torch, compopt
        >>> est = compopt.ISogCLREstimator(n=16, mode="unimodal")
        >>> z1, z2 = torch.randn(2, 8, 4)
        >>> est(z1.requires_grad_(), z2, torch.arange(8)).backward()
        >>> est.step()
        >>> int(compopt.curation.scores(est).score.isfinite().sum())
        8

    Args:
        est: a :class:`~compopt.ScoreKeeper`, or an estimator with rows of ``reference="positive"`` (iSogCLR, FastCLIP).
        since: earlier scores of the same estimator, subtracted to obtain ``trend``; the trend of samples that were
            added afterwards is NaN.

    Returns:
        The scores, 16 to 48 bytes per sample of host memory; the peak is about twice that. With ``index2=`` a row
        contains the values of image ``i`` and of caption ``i``, which need not be a pair: use ``keeper.read``,
        by direction, instead.

    Raises:
        ValueError: the rows contain no log-normalizer relative to the positive (``reference="none"``), or ``since`` has
            more samples than the estimator.

    Communicates: collective with ``shard=True``, see :meth:`~compopt.Estimator.read`.
    """
    check_rows(est)
    if since is not None and not isinstance(since, Scores):
        raise TypeError(f"since must be an earlier result of scores(), got {type(since).__name__}")
    part: Any = getattr(est, "normalizer", est)  # read() of a part returns its own visits
    value = _read(part)
    visits, kept = value.pop(COUNT), "log_g" in value
    uncertainty = None
    if kept:
        groups = part.sample_groups
        rate = torch.tensor([group["rate"] for group in groups], dtype=torch.float64, device="cpu")
        rate = rate.repeat_interleave(torch.tensor([group["n"] for group in groups], device="cpu"))
        # n equal weights have n effective visits, weights that decay at rate r converge to 2 / r - 1. The variance
        # about a mean of n values has n - 1 degrees of freedom: the result is NaN for one visit (or rate=1).
        effective = torch.minimum(visits.double(), 2 / rate - 1)
        uncertainty = (value["log_g_var"] / (effective - 1) / part._ensure_form().width).sqrt()
    score = -value["log_g" if kept else "log_u"]
    return Scores(score, visits, uncertainty, value.get("similarity"), value.get("rank"), _change(score, since))


def check_rows(est: Estimator) -> None:
    """Raise a ``ValueError`` unless the rows contain a log-normalizer relative to the positive.

    Example:
        >>> import compopt
        >>> compopt.curation.check_rows(compopt.SogCLREstimator(n=1000, reference="positive"))

    Args:
        est: an estimator with rows.

    Raises:
        TypeError: ``est`` is not an estimator.
        ValueError: its rows have no such column.
    """
    if not isinstance(est, Estimator):
        raise TypeError(f"est must be an estimator or the result of scores(), got {type(est).__name__}")
    kept = [column.name for each in est._objects().values() for column in each._columns()]
    references = {group.get("reference") for group in est.sample_groups}
    if "log_g" not in kept and not ("log_u" in kept and references == {"positive"}):
        raise ValueError(
            f"the rows of {type(est).__name__} ({', '.join(kept) or 'none'}) contain no log-normalizer relative to "
            f"the positive; pass a compopt.ScoreKeeper(n) that is attached to it, or build it "
            f'with reference="positive"'
        )


def _read(part: Estimator) -> dict[str, Tensor]:
    """Return the columns of all samples on the CPU, means over the visited directions; NaN for unvisited samples."""
    (table,) = part._reading().tables.values()
    with doing("read()", part.t):
        visited = table.visited()
    names = [column.name for column in table.layout.columns if column.name != COUNT]
    found = {name: torch.full((table.n,), torch.nan, dtype=torch.float64, device="cpu") for name in names}
    found[COUNT] = torch.zeros(table.n, dtype=torch.int64, device="cpu")
    for index in visited:
        columns, count = part._read_rows(index)
        seen = (count > 0).cpu()
        for name, x in columns.items():
            found[name][index] = torch.where(seen, x.cpu().double(), 0).sum(1) / seen.sum(1)
        found[COUNT][index] = count.amax(1).to("cpu", torch.int64)
    return found


def _change(score: Tensor, since: Scores | None) -> Tensor | None:
    if since is None:
        return None
    new = len(score) - len(since.score)
    if new < 0:
        raise ValueError(f"since= has {len(since.score)} samples, the estimator {len(score)}")
    return score - torch.nn.functional.pad(since.score, (0, new), value=torch.nan)


def wrong_share(found: Scores) -> float:
    r"""Estimate the share of wrong pairs, in which anchor and partner are unrelated.

    Example:
        >>> import torch, compopt
        >>> rank = torch.cat([torch.zeros(80), torch.linspace(0, 1, 20)])
        >>> found = compopt.curation.Scores(-rank, torch.ones(100, dtype=torch.int64), rank=rank)
        >>> compopt.curation.wrong_share(found)
        0.2

    The positive of a wrong pair is distributed as any other candidate, so that its rank is uniform in [0, 1]. The rank
    of a right pair is near 0. Half of the wrong pairs, and nearly no right pairs, are thus expected above 1/2:

    .. math:: \hat\pi = 2 \cdot \text{share of samples with rank} > \tfrac{1}{2},

    where a rank of 1/2 counts as half. Storey (2002) uses this estimator for the share of true null hypotheses. A model
    that memorises wrong pairs lowers their ranks, and the share is then underestimated; compute it after the first
    epochs. A right pair that the model has not learned has the ranks of a wrong pair and is counted as one, so that the
    share is overestimated where many pairs are hard to learn (``benchmarks/results/curation.md``, words).

    Args:
        found: result of :func:`scores`, with ranks.

    Returns:
        The share among the visited samples, in [0, 1]; 0, with a warning, if no sample was visited.

    Raises:
        ValueError: ranks are not recorded.

    References:
        Storey, A direct approach to false discovery rates, JRSS B 2002.
    """
    _check_found(found)
    if found.rank is None:
        raise ValueError(
            "the share of wrong pairs is estimated from ranks: use ScoreKeeper(n, rank=True), or pass share="
        )
    seen = found.visits > 0
    if not bool(seen.any()):
        warn(
            "no sample has been visited, so that the share of wrong pairs is unknown: commit calls with est.step() or "
            "est.attach(optimizer), in training mode"
        )
    above = torch.heaviside(found.rank - CHANCE, found.rank.new_full((), 0.5))[seen]
    return min(1.0, 2 * float(above.sum()) / max(1, int(seen.sum())))


def _check_found(found: Any) -> None:
    if not isinstance(found, Scores):
        raise TypeError(f"found must be the result of scores(), got {type(found).__name__}; call scores(est)")


def suspects(est: Estimator | Scores, share: float | None = None) -> Tensor:
    """Return the samples with the lowest scores, which are the most likely wrong pairs.

    Example:
        >>> import torch, compopt
        >>> found = compopt.curation.Scores(torch.tensor([0.5, -3.0, 1.0, 0.0]), torch.ones(4).long())
        >>> compopt.curation.suspects(found, share=0.5).tolist()
        [1, 3]

    Args:
        est: an estimator as in :func:`scores`, or the result of :func:`scores`.
        share: share of the visited samples to return, in [0, 1]; ``None``: :func:`wrong_share`.

    Returns:
        Data-set positions of visited samples, in ascending order of the score, int64, on the CPU.

    Raises:
        ValueError: ``share`` is outside [0, 1], or is ``None`` and ranks are not recorded; or raised by :func:`scores`.

    Communicates: as :func:`scores`.
    """
    found = est if isinstance(est, Scores) else scores(est)
    count = round(_share(found, share) * int((found.visits > 0).sum()))
    order = torch.argsort(torch.where(found.visits > 0, found.score, torch.inf), stable=True)
    return order[:count]


def _share(found: Scores, share: float | None) -> float:
    """Return the share of wrong pairs; estimate it if ``share`` is ``None``."""
    if share is None:
        return wrong_share(found)
    checks.fraction("share", share)
    return share


def duplicates(features: Tensor, least: float = 0.95, chunk_size: int = 1024) -> Tensor:
    r"""Return a label per sample; near-duplicates have the same label.

    Example:
        >>> import torch, compopt
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.01], [0.0, 3.0]])
        >>> compopt.curation.duplicates(z).tolist()
        [0, 1, 0, 1]

    .. math:: l_i = l_j \quad\text{with the first } j \le i \text{ for which}\quad \cos(z_i, z_j) \ge \text{least}

    The samples with ``labels == torch.arange(n)`` are the first of each group; the others may be dropped. Passed as
    ``labels=`` of a call, the labels exclude duplicates from each other's negatives. Groups are formed by chaining: two
    members of a group may be less similar than ``least``.

    Rows cannot identify duplicates: rows contain statistics of random batches, which rarely contain two given samples.

    Args:
        features: features of all samples from a trained encoder, ``(n, d)``, on any device.
        least: smallest cosine similarity of duplicates, in (-1, 1], up to rounding.
        chunk_size: samples per block of similarities. Memory: ``chunk_size * n`` numbers; time: half of the product of
            all features with each other.

    Returns:
        Labels, ``(n,)`` int64 positions, on the device of the features.

    Raises:
        TypeError, ValueError: ``features`` is not a finite floating-point matrix; ``least`` is out of range.
    """
    z = _unit(features)
    if not -1 < checks.number("least", least) <= 1:
        raise ValueError(f"least must be in (-1, 1], a cosine similarity, got {least!r}")
    labels = torch.arange(len(z), device=z.device)
    for start in range(0, len(z), checks.positive_int("chunk_size", chunk_size)):
        stop = min(start + chunk_size, len(z))
        alike = z[start:stop] @ z[:stop].T >= least - ROUNDING * torch.finfo(z.dtype).eps
        alike.diagonal(start).fill_(True)
        labels[start:stop] = alike.to(torch.uint8).argmax(1)  # the first match
    while not torch.equal(labels, labels[labels]):  # the first match may itself be a duplicate of an earlier sample
        labels = labels[labels]
    return labels


def rare(features: Tensor, share: float = 0.01, neighbours: int = 10, chunk_size: int = 1024) -> Tensor:
    """Return the samples with the least similar nearest neighbours, the most isolated first.

    Example:
        >>> import torch, compopt
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.3], [1.0, -0.1]])
        >>> compopt.curation.rare(z, share=0.25, neighbours=2).tolist()
        [2]

    Isolation is measured by the mean cosine similarity of a sample with its nearest neighbours. Rows contain this
    information only if temperatures are learned per sample: iSogCLR learns a small temperature,
    ``est.read(index)["tau"]``, for an isolated sample.

    Args:
        features: features of all samples from a trained encoder, ``(n, d)``, on any device.
        share: share of the samples to return, in [0, 1].
        neighbours: number of nearest neighbours.
        chunk_size: samples per block of similarities. Memory: ``chunk_size * n`` numbers; time: the product of all
            features with each other.

    Returns:
        Positions, int64, on the device of the features.

    Raises:
        TypeError, ValueError: ``features`` is not a finite floating-point matrix; ``share`` is outside [0, 1];
            ``neighbours`` is not smaller than the number of samples.
    """
    z = _unit(features)
    checks.fraction("share", share)
    if checks.positive_int("neighbours", neighbours) >= len(z):
        raise ValueError(f"neighbours must be fewer than the {len(z)} samples, got {neighbours}")
    near = z.new_empty(len(z))
    for start in range(0, len(z), checks.positive_int("chunk_size", chunk_size)):
        s = z[start : start + chunk_size] @ z.T
        s.diagonal(start).fill_(-torch.inf)
        near[start : start + chunk_size] = s.topk(neighbours).values.mean(1)
    return near.argsort(stable=True)[: round(share * len(z))]


def _unit(features: Tensor) -> Tensor:
    """Return features normalized to unit length, in the working dtype."""
    z = check_values("features", features, "(n, d)", 2)
    if not bool(z.isfinite().all()):
        raise ValueError("features must be finite; leave out samples whose features are not")
    largest = z.abs().amax(1, keepdim=True) if z.shape[1] else z
    return normalize(z / largest.where(largest > 0, 1), dim=1)  # otherwise the norm could overflow or underflow


def export(found: Scores, path: str | Path, keys: Sequence[str] | None = None) -> None:
    """Write scores to a file, one line per sample.

    Example:
        >>> import compopt
        >>> found = compopt.curation.scores(compopt.ScoreKeeper(n=3))
        >>> compopt.curation.export(found, "scores.csv", keys=["cat", "dog", "cow"])  # doctest: +SKIP

    Args:
        found: result of :func:`scores`.
        path: ``.csv``; ``.npy`` (a structured array); ``.parquet`` (needs pyarrow).
        keys: a name for each sample, written as column ``key`` (such as ``__key__`` of tar shards).

    Raises:
        TypeError: ``found`` is not the result of :func:`scores`.
        ValueError: the suffix is unknown, or the number of keys differs from that of the samples.
        ImportError: pyarrow is not installed.
    """
    _check_found(found)
    path, columns = Path(path), {name: value.numpy() for name, value in found.columns().items()}
    if keys is not None:
        if len(keys) != len(found.score):
            raise ValueError(f"keys must have an entry for each of {len(found.score)} samples, got {len(keys)}")
        columns = {"key": np.asarray(keys, dtype=str), **columns}
    columns = {"index": np.arange(len(found.score)), **columns}
    writers = {".csv": _write_csv, ".npy": _write_npy, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ValueError(f"path must end with {', '.join(writers)}, got {str(path)!r}")
    writers[path.suffix](path, columns)


def _write_csv(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _write_npy(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    kinds = [(name, column.dtype) for name, column in columns.items()]
    np.save(path, np.rec.fromarrays([*columns.values()], dtype=kinds))


def _write_parquet(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("export to .parquet needs pyarrow; install it, or write .csv or .npy") from error
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), path)
