"""Sampler that leaves out the samples whose rows tell of a wrong pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from compopt import checks, curation, rng
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.estimator.base import Estimator


class ScoredSampler(Sampler[int]):
    r"""Random order of the samples, without those that :func:`compopt.curation.suspects` finds, anew in every epoch.

    Give it to a ``DataLoader`` as ``sampler=``. During the first ``warm_up`` epochs all samples come; then the share of
    wrong pairs is estimated. Each later epoch leaves out that share, the worst by the rows as they are when it begins,
    but for a random part of them, so that a sample whose score improves is used again.

    Args:
        est: estimator with ``scores=ScoreKeeper(n)``, or with rows of ``reference="positive"`` (then with ``share``).
        warm_up: epochs with all samples. One is too short for the rows to tell how many pairs are wrong, and after many
            epochs a model has memorised wrong pairs (``benchmarks/results/curation.md``).
        share: of the visited samples that are left out, in [0, 1); ``None``: :func:`compopt.curation.wrong_share` when
            the warm-up ends.
        returning: part of the suspects that comes all the same, in [0, 1].
        seed: of the orders, together with the epoch.
        process_group: the ranks that divide each epoch; ``None``: the default group, if ``torch.distributed`` is
            initialised. Each takes every K-th sample of one order, which is cut to a multiple of K.
        divide: ``False``: every rank gets the whole order, for loaders that divide batches themselves, such as those of
            ``accelerate.prepare``.

    Attributes:
        epoch: number of the next epoch.
        share: as given, or as it was estimated.
        left_out: positions that the newest epoch left out, ``(m,)`` int64, the worst first.

    State: the epoch, the share and what the epoch leaves out. An order is a function of these, so that a run that
    stopped inside an epoch repeats its order and skips what it has had, as with
    ``torch.utils.data.DistributedSampler`` (for example by ``accelerate.skip_first_batches``).

    Communicates: with ``shard=True`` each iteration reads the rows of all ranks; nothing otherwise.

    Raises:
        ValueError: ``share`` or ``returning`` outside its range; rows that tell nothing, see
            :func:`compopt.curation.scores`.

    Example:
        >>> import compopt
        >>> est = compopt.recommended(16, n=100, keep_scores=True)
        >>> sampler = compopt.samplers.ScoredSampler(est)
        >>> len(list(sampler)), sampler.epoch
        (100, 1)
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
    ) -> None:
        self.est, self.warm_up, self.seed = est, checks.whole("warm_up", warm_up), checks.whole("seed", seed)
        for name, value in (("share", share), ("returning", returning)):
            if value is not None and not 0 <= checks.number(name, value) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value!r}")
        if share == 1:
            raise ValueError("share=1 leaves out all samples; give less")
        curation.check_rows(est)
        checks.flag("divide", divide)
        if share is None:
            self._check_estimate()
        self.share, self.returning, self.divide = share, returning, divide
        self._ranks = Ranks(process_group)
        self.epoch = 0
        self.left_out = torch.zeros(0, dtype=torch.int64)
        self._known: int | None = None  # epoch whose samples to leave out are known already

    def _check_estimate(self) -> None:
        """Refuse what would fail, or find nothing, when the warm-up ends."""
        keeper = getattr(self.est, "scores", None)
        if keeper is None or not keeper.rank:
            raise ValueError(
                "share=None is estimated from ranks, which these rows do not hold: give share=, or build the estimator "
                "with scores=compopt.ScoreKeeper(n)"
            )
        if not self.warm_up:
            raise ValueError("warm_up=0 leaves no epoch to estimate the share from: give share=, or warm_up >= 1")

    def __len__(self) -> int:
        """Return the number of samples of the newest epoch on this rank; the next one may have others."""
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
        order = order[~torch.zeros(self._n, dtype=torch.bool).index_fill_(0, self.left_out, True)[order]]
        size, rank = (self._ranks.size, self._ranks.rank) if self.divide else (1, 0)
        yield from order[: len(order) // size * size][rank::size].tolist()

    def _choose(self, epoch: int) -> Tensor:
        """Return what an epoch leaves out."""
        if epoch < self.warm_up:
            return torch.zeros(0, dtype=torch.int64)
        found = curation.scores(self.est)
        if self.share is None:
            self.share = curation.wrong_share(found)
        if self.share >= 1:
            raise RuntimeError(
                "all pairs look wrong (estimated share 1.0), so that the ranks tell nothing: give share=, or look at "
                "compopt.curation.scores(est).rank"
            )
        suspects = curation.suspects(found, self.share)
        order = rng.permutation(len(suspects), self.seed, epoch, 1)
        return suspects[order[round(self.returning * len(suspects)) :].sort().values]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the epoch that has begun, whose order the next iteration of a loaded sampler repeats.

        Between two epochs set :attr:`epoch` of the loaded sampler one higher, as with ``DistributedSampler.set_epoch``.
        """
        begun = self._known is not None and self._known == self.epoch - 1
        return {
            "n": self._n,
            "seed": self.seed,
            "epoch": self.epoch - 1 if begun else self.epoch,
            "begun": begun,
            "share": self.share,
            "left_out": self.left_out.clone(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the epoch of the state.

        Raises:
            ValueError: it is of a sampler with another number of samples or another seed.
        """
        for name, own in (("n", self._n), ("seed", self.seed)):
            if state_dict[name] != own:
                raise ValueError(f"the state is of a sampler with {name}={state_dict[name]}, not {own}")
        self.epoch, self.left_out = int(state_dict["epoch"]), state_dict["left_out"].clone()
        self.share = state_dict["share"]
        self._known = self.epoch if state_dict["begun"] else None

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self.epoch = checks.whole("epoch", epoch)
