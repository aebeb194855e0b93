"""EMC2: negatives drawn by one Markov chain per sample."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import accelerator, checks, rng
from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs, refuse_derivatives
from compopt.checks.inputs import check_pool, check_values
from compopt.estimator.groups import GroupSpec, Hyper
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.estimator.parts import Call, Estimate, Normalizer
from compopt.functional import Scalar
from compopt.kernel.features import Encode, Encoder, zero_or_nan
from compopt.kernel.pairs import effective_number
from compopt.negatives.chains import Chains, DatasetChains
from compopt.negatives.walk import Pool, Samples, burn_in_count, walk
from compopt.pairs import NO_POLICY, PairPolicy
from compopt.stores.rows import Column

Proposals = Literal["pool", "sweep", "dataset"]
MOST_SAMPLES = 1 << 31  # limit of rng.below


class MCMCNegativeSampler(Normalizer):
    r"""Negatives drawn from the softmax over the whole data set by a Metropolis-Hastings chain per sample.

    Example:
        >>> import torch, compopt
        >>> chains = compopt.MCMCNegativeSampler(n=1000, burn_in=0.5)
        >>> est = compopt.ContrastiveEstimator(chains, compopt.FixedTemperature(0.2))
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()

    .. math::
        w_{ij} = \frac{\text{visits of chain } i \text{ to } j}{R - P}, \qquad
        \Pr[\text{accept } j] = \min\Bigl(1, \exp \frac{s_{ij} - s_{i,\text{current}}}{\tau_i}\Bigr)

    In each call the chain of every anchor has ``R = |N_i|`` proposals, drawn independently and uniformly from the
    anchor's negatives in the batch and the stored sample of the chain, so that the chain may return to it. For a
    uniformly drawn batch the softmax of the data set is then invariant. The first ``P`` proposals are burn-in; the
    states after the other proposals are the visits. Their shares are the weights and sum to one. Between calls a chain
    stores its sample and the last known similarity of the sample; a stored sample that is in the batch has its current
    similarity. The first proposal of a new chain is accepted.

    A chain may remain at a stored sample outside the batch. A function ``encode`` computes the features of those
    samples, after the chains have moved. Without ``encode`` such visits are dropped and the others renormalised; an
    anchor without other visits contributes ``-grad s_ii`` alone. *This is a bias*: with n = 1000, a batch of 63,
    uniform features and stationary chains it affects 13 % of the anchors at tau = 0.1 and 53 % at 0.05, and more while
    features are still spreading (``metrics["unused_anchors"]``).

    *Bimodal*: one chain per direction. *Unimodal*: one chain per sample, which walks through view 1, then view 2,
    each with its own burn-in. Rows do not contain the view of a chain (in the batch
    it is drawn by the softmax over the views), and ``encode`` returns one view of a sample: exact for identical views,
    otherwise the approximation of the paper's section 4.1.

    Repeated samples and ``labels``: pairs that are not negatives are never proposed, and ``R`` is smaller. With
    ``proposals="dataset"`` labels are refused, since the labels of samples outside the batch are unknown.

    Args:
        n: number of samples, or a list of sample groups.
        burn_in: ``P``, a count, or a fraction of the proposals in [0, 1); at least the last proposal counts.
        proposals: ``"pool"`` as above; ``"sweep"`` proposes every negative of the batch once, in the order of the
            batch, as the authors' code does. The chain never returns to the stored sample, and the result is biased
            even on the full data set. ``"dataset"`` draws proposals uniformly from all samples except the anchor's own,
            as in the printed Algorithm 1. It needs ``encode``, which is called once per call with the samples drawn
            and the stored ones, at most ``(R + 1) B`` per direction including those of the batch; no similarity is
            stale. ``encode`` may read a bank (``sampler.bank.read`` of a :class:`~compopt.samplers.BankSampler`, or its
            first result in unimodal mode) once the bank is ``filled``; features of a bank get no gradient.
        draws: ``R`` with ``proposals="dataset"`` (the paper's negative batch size); ``None``: the number of negatives
            of an anchor in a batch without repeats.
        seed: seed of the draws.
        encode: function that receives data-set positions, ``(m,)`` int64 on the CPU, and returns features ``(m, d)`` of
            those samples (bimodal: a pair of them), with a graph; called at most once per call. The attribute
            ``encode`` may be set at any time. It is neither pickled nor part of a checkpoint.
        process_group, offload, offload_dir, shard, dtype: placement and dtype of its own, see
            :class:`~compopt.Estimator`.

    Hyper-parameters: ``burn_in``, which may differ between sample groups.

    State, per sample: ``chain`` (int64, data-set position of the sample) and ``score`` (the similarity, not divided by
    tau), one of each per direction, or one for both views. Draws are functions of seed, step, pass within the step,
    direction and position in the global batch: they are the same in a resumed run and on any number of ranks.
    ``state_dict`` contains the seed and the number of steps.

    Metrics: ``acceptance_rate`` of the proposals; ``outside_visits``, the share of visits after burn-in to samples
    outside the batch; ``unused_anchors``, the share of anchors without a usable visit; ``effective_negatives``, of the
    visits.

    The reported ``alpha`` is ``log ghat`` of the batch. A :class:`~compopt.TemperatureDual` in the same estimator
    learns from ``sum_j w_ij h_ij`` of the visits.

    Cost: three matrix products in addition to the kernel's, and about 40 passes over the proposals; suitable for small
    batches (``benchmarks/results/chains.md``). Memory: the visits, one number per pair and direction; with
    ``chunk_size`` those of a chunk of anchors only, and the walks are repeated for the gradients.

    Communicates, with K ranks, per call: one all-gather of at most 10 numbers per sample and direction, one all-reduce
    of the gradients ``(2, B, d)``. ``encode`` runs on every rank for its own anchors, and with K > 1 in every call (on
    a sample of the batch if no features are missing), so that it may run a wrapped model. The call of ``encode`` waits
    for the device.

    Raises:
        ValueError: ``burn_in`` < 0 or a float >= 1; ``seed`` >= 2^63; an unknown option; ``draws`` < 1, or ``draws``
            without ``proposals="dataset"``. In a call: ``proposals="dataset"`` without ``encode``;
            ``encode`` together with ``index2``, since positions then refer to two kinds of samples; ``negatives``;
            ``labels``, or more than 2^31 samples, with ``proposals="dataset"``; features from ``encode`` with another
            shape or device than those of the batch.
        TypeError: ``encode`` is not callable, or, in a call, does not return the features that the mode requires.
        RuntimeError: in a call with several ranks: ``encode`` failed on another rank; nothing was deposited.

    References:
        Yau et al., EMC2, ICML 2024, eq. 9 to 11, Algorithm 1, section 4.1.
    """

    @takes_options(Normalizer, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec,
        burn_in: int | float = 0.5,
        proposals: Proposals = "pool",
        seed: int = 0,
        draws: int | None = None,
        encode: Encode | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        checks.one_of("proposals", proposals, get_args(Proposals))
        self.proposals, self.draws = proposals, None if draws is None else checks.positive_int("draws", draws)
        if draws is not None and proposals != "dataset":
            raise ValueError(
                f'draws={draws} is for proposals="dataset"; with "{proposals}" a chain gets as many proposals as its '
                f"anchor has negatives in the batch"
            )
        seed = checks.seed(seed)
        super().__init__(n, {"burn_in": burn_in}, **placement)
        self.state = {"seed": torch.tensor(seed, device="cpu")}
        self.encode = encode

    def check(self, group: Mapping[str, Any]) -> None:
        checks.burn_in("burn_in", group["burn_in"])

    @property
    def encode(self) -> Encode | None:
        """Function that returns features of samples outside the batch."""
        return self._encode

    @encode.setter
    def encode(self, encode: Encode | None) -> None:
        if encode is not None and not callable(encode):
            raise TypeError(f"encode must be a function of data-set positions, got {type(encode).__name__}")
        self._encode = encode

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_encode": None}

    def encoder(self, z1: Tensor, given: Collection[str], normalize: bool, unimodal: bool) -> Encoder | None:
        if self.proposals == "dataset":
            self._check_dataset(given)
        if self.encode is None:
            return None
        if "index2" in given:
            raise ValueError("encode cannot be combined with index2, whose positions name samples of two kinds")
        return Encoder(self.encode, z1, normalize, unimodal)

    def _check_dataset(self, given: Collection[str]) -> None:
        if self.encode is None:
            raise ValueError(
                'proposals="dataset" needs encode=, a function that returns features of the samples that are drawn, by '
                "their positions; it may read a bank"
            )
        if "labels" in given:
            raise ValueError(
                'labels= cannot be combined with proposals="dataset", which does not know those of the samples that it '
                'draws; use proposals="pool"'
            )
        if (self.n or 0) > MOST_SAMPLES:
            raise ValueError(
                f'proposals="dataset" draws from at most 2^31 samples, got n={self.n}; use proposals="pool"'
            )

    def check_negatives(self) -> None:
        raise ValueError(
            "negatives= must be left out: the chains of MCMCNegativeSampler move over the samples of the data set, and "
            "further candidates are none of them"
        )

    def structure(self) -> dict[str, Any]:
        return {"proposals": self.proposals}

    def shared_options(self) -> dict[str, Any]:
        return {"draws": self.draws, "seed": int(self.state["seed"])}

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        # with one direction, or alone, candidates may be any samples, also such without rows
        return [
            Column("chain", directions, torch.int64, reduce="one", positions=directions > 1),
            Column("score", directions, dtype, reduce="one"),
        ]

    def move(self, device: torch.device) -> None:
        """Keep the seed on the host, where every call reads it."""

    def check_pairs(self, policy: PairPolicy) -> None:
        if policy != NO_POLICY:
            raise ValueError(
                f"pairs={policy} has no effect on chains, which draw their negatives by exp(s_ij / tau); leave it out, "
                f"or take a normalizer such as BatchNormalizer or MovingAverageEstimator"
            )

    def estimate(self, call: Call) -> Estimate:
        call.pairs.release()  # the gradients of the kernel are not used
        burn_in = call.hyper("burn_in")
        if isinstance(burn_in, Tensor):
            burn_in = burn_in.expand_as(call.pairs.positive)[call.batch.own]
        chains = self._chains(call, burn_in)
        sample, score, failed, metrics = self._gather(call, chains)
        # encoded features that are not finite must make the value NaN, as those of the batch do
        alpha = call.pairs.log_ghat + 0.0 * chains.sum_wh  # 0, or NaN
        bad = 0.0 * alpha
        proposals = {"chain": sample, "score": score + (bad.sum(1, keepdim=True) if call.unimodal else bad)}
        if call.encoder is not None:
            alpha = alpha + 0.0 * failed
        return Estimate(alpha, proposals, metrics=metrics, weights=chains)

    def _chains(self, call: Call, burn_in: Scalar) -> Chains:
        seed = int(self.state["seed"])
        if self.proposals == "dataset" and call.encoder is not None:  # a diagnostic has no encoder, and needs no chains
            views = len(call.batch.features) if call.unimodal else 1
            negatives = views * (len(call.batch.features[0]) - 1)
            return DatasetChains(call, self._ranks, burn_in, seed, self.n or 0, self.draws or negatives)
        return Chains(call, self._ranks, burn_in, seed, self.proposals == "sweep")

    def _gather(self, call: Call, chains: Chains) -> tuple[Tensor, Tensor, Tensor, dict[str, Callable[[], Tensor]]]:
        """Return samples, scores, a flag and metrics of the whole batch, from each rank's own anchors.

        The flag is NaN if any encoded feature is not finite, even if no chain has visited the sample.
        """
        error = chains.outside.error
        failed = torch.full_like(chains.inside, float(error is not None))
        if call.encoder is not None and call.encoder.encoded is not None:
            failed = failed + zero_or_nan(call.encoder.encoded.unit)
        numbers = [chains.inside, chains.away, chains.squares, chains.accepted, chains.proposed, failed]
        own = [chains.sample, chains.score, torch.stack([chains.sum_wh, *numbers], dim=2)]
        sample, score, everyone = self._ranks.gather(own, call.batch.sizes)
        chains.sum_wh, inside, away, squares, accepted, proposed, failed = everyone.unbind(2)
        if error is not None:
            raise error
        if call.encoder is not None and self._ranks.size > 1 and (failed == 1).any():
            raise RuntimeError("encode failed on another rank; nothing was deposited")
        chains.sum_wh = call.pairs.real(chains.sum_wh)
        usable = inside if call.encoder is None else inside + away
        metrics: dict[str, Callable[[], Tensor]] = {
            "acceptance_rate": partial(_share, accepted, proposed),
            "outside_visits": partial(_share, away, inside, away),
            "unused_anchors": partial(_unused, usable, proposed),
            "effective_negatives": partial(effective_number, usable, squares),
        }
        return sample, score, failed, metrics

    @outside_of_graphs
    def sample(self, scores: Tensor, index: Tensor, candidates: Tensor) -> Tensor:
        r"""Advance the chains of the samples in ``index`` over a pool of candidates, and return the pool's weights.

        .. math::
            w_{ij} = \frac{\text{visits of chain } i \text{ to } j}{\text{its visits to the pool}}, \qquad
            \Pr[\text{accept } j] = \min(1, e^{s_{ij} - s_{i,\text{current}}})

        Each chain has ``M`` proposals, drawn uniformly from the pool and its stored candidate (``"pool"``), or every
        candidate once (``"sweep"``). For pools drawn uniformly from all candidates the chains follow the softmax over
        all candidates. The weights do so only approximately, since visits outside the pool are dropped. In training
        mode with gradients enabled the chains are deposited, to be committed by :meth:`step`. Rows must have one chain
        per sample: not in a bimodal estimator with both directions.

        Args:
            scores: ``(B, M)``, floating point, divided by the temperature; ``-inf`` excludes a candidate. A chain with
                scores that are NaN or ``+inf`` does not move, and its weights are NaN.
            index: numbers of the chains, ``(B,)`` integers in ``0 .. n - 1``.
            candidates: positions of the pool in the set of all candidates, ``(M,)`` integers >= 0, all different. The
                pool may differ between calls and between ranks.

        Returns:
            Weights, ``(B, M)``, without a graph; each row sums to 1, or is 0 if the chain has no usable visit.

        Raises:
            ValueError: the sampler was built with ``proposals="dataset"``.
            TypeError, ValueError, IndexError: invalid dtypes, shapes or positions.

        Communicates, with several ranks: a message of integers, and all-gathers of 2 numbers per sample and its row.
        ``M`` may differ between ranks.
        """
        refuse_derivatives()
        if self.proposals == "dataset":
            raise ValueError('sample() walks over the pool that it is given; build the sampler with proposals="pool"')
        with self._guard():
            self._check_one_value()
            scores = check_values("scores", scores, "(B, M)", 2)
            keys = {"index": self._index(index, len(scores))}
            names = accelerator.to_device(check_pool(candidates, scores), scores.device)
        batch = self._read(keys, {"scores": scores[:, :1]})
        hyper = self._hyper(batch)
        with self._rollback_on_error(), torch.no_grad():
            weights, sample, score = self._walk(scores.to(batch.dtype), names, batch, hyper)
            sample, score = self._ranks.gather([sample, score], batch.sizes)
            if batch.depositing:
                self._deposit(batch, {"chain": sample, "score": score})
            return batch.nan_if_bad(weights)

    def _walk(self, scores: Tensor, names: Tensor, batch: Batch, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights ``(b, M)``, and current positions and scores of this rank's chains, ``(b, 1)`` each."""
        own, read = batch.own, batch.of()
        pool, stored = Pool(len(names), scores), read.columns["chain"][own][:, 0]
        seen = read.count[own][:, 0] > 0
        column, found = Samples(names).find(stored)
        excluded = found & (scores.gather(1, column[:, None])[:, 0] == -torch.inf)
        slot = torch.where(seen & ~excluded, torch.where(found, column, pool.width), pool.width + 1)
        outside = read.columns["score"][own].to(scores.dtype).T
        by_slot = torch.cat([scores.T, outside, torch.full_like(outside, -torch.inf)])
        counters = (int(self.state["seed"]), self.t, self.pending)
        positions = torch.arange(own.start, own.stop, device=scores.device)
        streams = rng.streams(counters, positions, range(1))
        given = hyper("burn_in")
        given = given[own][:, 0] if isinstance(given, Tensor) else given
        spare = None if self.proposals == "sweep" else (slot == pool.width).to(torch.int64)
        done = walk(pool, by_slot, slot, burn_in_count(given, pool.most), streams, spare)
        visits = done.visits[:-1].T
        bad = torch.where(scores.isnan() | (scores == torch.inf), torch.nan, 0).sum(1, keepdim=True)
        weights = visits / visits.sum(1, keepdim=True).clamp(min=1) + bad
        last = done.last[:, None]
        sample = torch.where(last < pool.width, names[last.clamp(max=len(names) - 1)], stored[:, None])
        score = by_slot.gather(0, last.T).T + bad  # -inf, which is not committed, for a chain that is nowhere
        return weights, sample, score


def _share(part: Tensor, *whole: Tensor) -> Tensor:
    return part.sum() / sum(number.sum() for number in whole)


def _unused(usable: Tensor, proposed: Tensor) -> Tensor:
    return ((usable == 0) & (proposed > 0)).to(usable.dtype).mean()
