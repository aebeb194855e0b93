"""Sampler that omits samples with probably wrong pairs, and prefers informative ones, according to their rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from compopt import checks, curation, rng
from compopt.checks.inputs import check_vector
from compopt.checks.values import INT64_MAX, entries, equal, integer
from compopt.curation import Scores
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.estimator.base import Estimator

HIGH_SHARE = 0.3  # estimated share of wrong pairs above which a warning asks for the true one
NEVER_SEEN = 1e6  # logarithm of the weight of samples without a score
STATE = ("n", "seed", "epoch", "begun", "share", "left_out")


class ScoredSampler(Sampler[int]):
    r"""Sampler with a random order per epoch that leaves out the samples with the lowest scores.

    Example:
        >>> import compopt
        >>> est, keeper = compopt.recommended(16, n=100), compopt.ScoreKeeper(n=100)
        >>> handle = keeper.attach(est)
        >>> sampler = compopt.samplers.ScoredSampler(keeper)
        >>> len(list(sampler)), sampler.epoch
        (100, 1)

    Pass it to a ``DataLoader`` as ``sampler=``. The first ``warm_up`` epochs contain all samples; then the share of
    wrong pairs is estimated. Each later epoch omits that share of the samples, those with the lowest scores at the
    beginning of the epoch, except for a random part of them, so that scores of omitted samples can improve.

    With ``drawn`` below 1, each later epoch contains only this part of the other samples, drawn without replacement
    with weights

    .. math:: w_i = \exp(a^{\text{ref}}_i - a_i),

    where :math:`a_i` is the score, a sample's negative loss up to a constant, and :math:`a^{\text{ref}}_i` its score in
    ``reference``. Samples with a larger loss under the present model than under the reference model are preferred: they
    can be learned, and have not been. Without ``reference`` it is 0, and hard samples are preferred.

    Args:
        est: a :class:`~compopt.ScoreKeeper`, or an estimator with rows of ``reference="positive"`` (then with
            ``share``).
        warm_up: epochs with all samples. After one epoch the share of wrong pairs cannot be estimated from the rows
            yet, and after many epochs a model has memorised wrong pairs (``benchmarks/results/curation.md``).
        share: share of the visited samples to omit, in [0, 1); ``None``: :func:`compopt.curation.wrong_share` at the
            end of the warm-up.
        returning: part of the suspects that is not omitted, in [0, 1]; more if less than one sample per rank is left.
        drawn: part of the other samples in an epoch after the warm-up, in (0, 1], but at least one sample per rank.
            Samples that were never visited are drawn first.
        reference: scores of another model on the same samples, such as those of an earlier run
            (:func:`compopt.curation.scores`). Only with ``drawn`` below 1. Samples that it lacks have the median of the
            differences.
        seed: seed of the orders, together with the epoch.
        process_group: the ranks that divide each epoch; ``None``: the default group, if ``torch.distributed`` is
            initialised. Each rank uses every K-th sample of one order, which is truncated to a multiple of K.
        divide: ``False``: every rank gets the whole order, for loaders that divide batches themselves, such as those of
            ``accelerate.prepare``.

    Attributes:
        epoch: number of the next epoch.
        share: the argument, or the estimated share.
        left_out: positions that the latest epoch omitted, ``(m,)`` int64: suspects in ascending order of the score,
            then samples that were not drawn.

    State: the epoch, the share and the omitted samples of the epoch, not ``reference``. The order is a function of
    these, so that a run that stopped within an epoch repeats its order and skips the samples that were used, as with
    ``torch.utils.data.DistributedSampler`` (for example by ``accelerate.skip_first_batches``).

    Communicates: with ``shard=True`` each iteration after the warm-up reads the rows of all ranks; otherwise nothing.

    Raises:
        ValueError: ``share``, ``returning`` or ``drawn`` is outside its range; the rows contain no scores, see
            :func:`compopt.curation.scores`; ``share=None`` without ranks or with ``warm_up=0``; ``reference`` has
            more samples than the estimator, or ``drawn`` is 1.
        TypeError: ``est`` is not an estimator; ``reference`` is not an instance of :class:`~compopt.curation.Scores`.
        RuntimeError: in an iteration, if the estimated share is 1, or no sample has been visited.

    Warns:
        UserWarning: the estimated share is above 0.3.

    References:
        Mindermann et al., Prioritized training on points that are learnable, worth learning, and not yet learnt, ICML
        2022, eq. 3, and for pairs Evans et al., Data curation via joint example selection further accelerates
        multimodal learning, NeurIPS 2024 (they select from a larger batch, which needs its forward passes; rows give
        the scores without these). Efraimidis and Spirakis, Information Processing Letters 2006 (the draws).
    """

    def __init__(
        self,
        est: Estimator,
        warm_up: int = 2,
        share: float | None = None,
        returning: float = 0.05,
        seed: int = 0,
        process_group: ProcessGroup | None = None,
        divide: bool = True,
        drawn: float = 1.0,
        reference: Scores | None = None,
    ) -> None:
        self.est, self.warm_up = est, checks.non_negative_int("warm_up", warm_up)
        self.seed = checks.seed(seed)
        checks.fraction("returning", returning)
        if share is not None:
            checks.decay("share", share)
        curation.check_rows(est)
        checks.flag("divide", divide)
        checks.unit_interval("drawn", drawn)
        if share is None:
            self._check_estimate()
        self.share, self.returning, self.divide = share, returning, divide
        self.drawn = drawn
        self._reference = self._checked(reference)
        self._ranks = Ranks(process_group)
        self.epoch = 0
        self.left_out = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._known: int | None = None  # the epoch for which left_out has been computed

    def _check_estimate(self) -> None:
        """Raise if the share could not be estimated at the end of the warm-up."""
        if not getattr(self.est, "rank", False):
            raise ValueError(
                "share=None is estimated from ranks, which these rows do not have: pass share=, or pass a "
                "compopt.ScoreKeeper(n)"
            )
        if not self.warm_up:
            raise ValueError("warm_up=0 leaves no epoch to estimate the share from: pass share=, or warm_up >= 1")

    def _checked(self, reference: Scores | None) -> Tensor | None:
        """Return the scores of the reference, ``None`` without one."""
        if reference is None:
            return None
        if not isinstance(reference, Scores):
            raise TypeError(f"reference must be the result of compopt.curation.scores, got {type(reference).__name__}")
        if self.drawn == 1:
            raise ValueError("reference= has no effect with drawn=1, which keeps all samples: give less")
        if len(reference.score) > self._n:
            raise ValueError(f"reference has the scores of {len(reference.score)} samples, the estimator {self._n}")
        return reference.score

    def __len__(self) -> int:
        """Return the number of samples of the latest epoch on this rank; the next epoch may differ.

        The samples of an epoch are chosen when its iteration begins.
        """
        return (self._n - len(self.left_out)) // (self._ranks.size if self.divide else 1)

    @property
    def _n(self) -> int:
        assert self.est.n is not None
        return self.est.n

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        if self._known != epoch:
            self.left_out, self._known = self._choose(epoch), epoch
        self.epoch = epoch + 1
        order = rng.permutation(self._n, self.seed, epoch)
        order = order[~torch.zeros(self._n, dtype=torch.bool, device="cpu").index_fill_(0, self.left_out, True)[order]]
        size, rank = (self._ranks.size, self._ranks.rank) if self.divide else (1, 0)
        yield from order[: len(order) // size * size][rank::size].tolist()

    def _choose(self, epoch: int) -> Tensor:
        """Return the samples that an epoch omits."""
        if epoch < self.warm_up:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        found = curation.scores(self.est)
        if self.share is None:
            self.share = self._estimated(found)
        suspects = curation.suspects(found, self.share)
        order = rng.permutation(len(suspects), self.seed, epoch, 1)
        kept = max(round(self.returning * len(suspects)), self._ranks.size - (self._n - len(suspects)))
        out = suspects[order[kept:].sort().values]
        return torch.cat([out, self._not_drawn(found, out, epoch)]) if self.drawn < 1 else out

    def _estimated(self, found: Scores) -> float:
        """Return the share of wrong pairs; raise if the rows do not give it."""
        if not bool(found.visits.any()):
            raise RuntimeError(
                f"no sample has been visited after {self.warm_up} epochs, so that the share of wrong pairs cannot be "
                f"estimated: commit the calls with est.step() or est.attach(optimizer), or pass share="
            )
        share = curation.wrong_share(found)
        if share >= 1:
            raise RuntimeError(
                "all pairs look wrong (estimated share 1.0), and the ranks cannot be used: pass share=, or look at "
                "compopt.curation.scores(est).rank"
            )
        if share > HIGH_SHARE:
            warnings.warn(
                f"an estimated {share:.0%} of the pairs are wrong and are left out from now on; this is too much if "
                f"the model finds few right pairs after {self.warm_up} epochs: pass share=, or a longer warm_up",
                stacklevel=4,
            )
        return share

    def _not_drawn(self, found: Scores, out: Tensor, epoch: int) -> Tensor:
        """Return the samples that are neither in ``out`` nor drawn.

        The samples with the largest ``log(w) + g``, with ``g`` of the Gumbel distribution, are drawn with weights ``w``
        without replacement.
        """
        words = rng.bits(rng.streams((self.seed, epoch, 2), torch.arange(self._n, device="cpu")), 0, 1)[0]
        gumbel = -rng.uniform(words, torch.float64).log().neg().log()
        weight = -found.score
        if self._reference is not None:
            new = self._n - len(self._reference)
            weight = weight + torch.nn.functional.pad(self._reference, (0, new), value=torch.nan)
            weight = weight.nan_to_num(weight.nanmedian().nan_to_num().item())
        key = weight.masked_fill(found.visits == 0, NEVER_SEEN) + gumbel
        key[out] = -torch.inf
        rest = self._n - len(out)
        return key.argsort(descending=True, stable=True)[max(round(self.drawn * rest), self._ranks.size) : rest]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current epoch; the next iteration of a loaded sampler repeats its order.

        For a state that is saved between two epochs, call ``sampler.set_epoch(epoch + 1)`` of the loaded sampler, as
        with ``DistributedSampler``.
        """
        known = self._known if self._known in (self.epoch, self.epoch - 1) else None
        begun = known is not None
        return {
            "n": self._n,
            "seed": self.seed,
            "epoch": self.epoch if known is None else known,
            "begun": begun,
            "share": self.share,
            "left_out": self.left_out.clone(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the epoch of the state.

        Raises:
            TypeError, ValueError: the state is that of a sampler with another number of samples or another seed, or not
                one that :meth:`state_dict` returns: entries are missing, a position is outside the data set, fewer than
                one sample per rank is left, the share is 1. Nothing is changed in these cases.
        """
        entries("state_dict", state_dict, STATE)
        for name, own in (("n", self._n), ("seed", self.seed)):
            if not equal(own, state_dict[name]):
                raise ValueError(f"the state is of a sampler with {name}={state_dict[name]}, not {own}")
        epoch = integer("epoch", state_dict["epoch"], 0, INT64_MAX)
        begun, share = state_dict["begun"], state_dict["share"]
        checks.flag("begun", begun)
        if share is None:
            self._check_estimate()
        elif not 0 <= checks.number("share", share) < 1:
            raise ValueError(f"share of the checkpoint must be in [0, 1), got {share!r}")
        left_out = check_vector("left_out", state_dict["left_out"], None).to("cpu", copy=True)
        if len(left_out) and not 0 <= int(left_out.min()) <= int(left_out.max()) < self._n:
            raise ValueError(f"left_out contains positions outside 0 .. {self._n - 1}; is the state of other data?")
        if len(left_out.unique()) < len(left_out) or len(left_out) > self._n - self._ranks.size:
            raise ValueError(
                f"left_out has {len(left_out)} of {self._n} samples: each may occur once, and one for each of "
                f"{self._ranks.size} ranks must be left"
            )
        self.epoch, self.left_out, self.share = epoch, left_out, share
        self._known = epoch if begun else None

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; raise a ``ValueError`` if it is negative."""
        self.epoch = checks.non_negative_int("epoch", epoch)
