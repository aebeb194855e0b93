"""Supervised contrastive loss (SupCon), stateless."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt.checks import Mode
from compopt.checks.context import outside_of_graphs, refuse_derivatives
from compopt.checks.inputs import check_features, check_vector
from compopt.distributed.handshake import Agreement, Handshake, fingerprint
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.kernel.features import Features, full_precision, with_gradients

Block = tuple[int, slice, Tensor, Tensor, Tensor]


class SupConLoss:
    r"""Supervised contrastive loss, with the sum over positives outside of the logarithm.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.SupConLoss()
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> loss(z1, z2, labels=torch.arange(8) // 2).backward()

    .. math::
        \frac{1}{|I|} \sum_{i \in I} \frac{-1}{|P(i)|} \sum_{p \in P(i)}
        \log \frac{\exp(z_i \cdot z_p / \tau)}{\sum_{a \in A(i)} \exp(z_i \cdot z_a / \tau)}

    ``I`` are the ``2 B`` features of all ranks; ``A(i)`` all other features (``"unimodal"``) or those of the other
    modality (``"bimodal"``); ``P(i)`` the features in ``A(i)`` with the label of ``i``. Gradients are in closed form.

    Args:
        tau: temperature, > 0.
        mode, normalize, process_group: as for :class:`~compopt.ContrastiveEstimator`.
        chunk_size: number of rows of a matrix of similarities in memory at a time, computed twice; ``None``: all.

    State: none. Communicates, with several ranks, in every call: a few integers per sample over a CPU group, and
    all-gathers of the features, without gradient, and of 4 floats per sample. Every rank returns the global loss and
    receives the complete gradient of its own features, times the number of ranks for wrappers that average over ranks.

    Raises: TypeError, ValueError for an argument of another type or out of range.
    References: Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, eq. 2 (L_out).
    """

    def __init__(
        self,
        tau: float = 0.1,
        mode: Mode = "unimodal",
        normalize: bool = True,
        chunk_size: int | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        checks.positive("tau", tau)
        checks.one_of("mode", mode, ("bimodal", "unimodal"))
        checks.flag("normalize", normalize)
        self.chunk_size = None if chunk_size is None else checks.positive_int("chunk_size", chunk_size)
        self.tau, self.mode, self.normalize, self.ranks = float(tau), mode, normalize, Ranks(process_group)

    def __repr__(self) -> str:
        return f"SupConLoss(tau={self.tau:g}, mode={self.mode!r}, normalize={self.normalize})"

    @outside_of_graphs
    def __call__(self, z1: Tensor, z2: Tensor, index: Tensor | None = None, *, labels: Tensor) -> Tensor:
        """Return the loss of a batch in nats, for ``backward()``; NaN if a feature is not finite.

        Args:
            z1, z2: features, ``(B, d)``, same dtype and device; half precision is computed in float32.
            index: data-set positions, as in the call of an estimator; not used.
            labels: classes, ``(B,)`` integers.
        """
        self.ranks.check_alive()
        handshake = Handshake(self.ranks)
        with handshake.guard():
            refuse_derivatives(("z1", z1), ("z2", z2))
            check_features(z1, z2, least=1 if self.ranks.size == 1 else 0)
            labels = check_vector("labels", labels, len(z1))
        facts = {"values": fingerprint((repr(self), str(z1.dtype), z1.shape[1]))}
        batch = handshake.exchange({"index": torch.zeros_like(labels), "labels": labels}, facts)
        batch.keys["labels"] = accelerator.to_device(batch.keys["labels"], z1.device)
        with torch.no_grad(), full_precision(z1.device):
            own = Features.of(z1, z2, normalize=self.normalize)
            everyone = torch.stack(self.ranks.gather(own.unit.unbind(), batch.sizes))
            value, gradient = self._evaluate(own.unit, everyone, batch)
            pairs = [own.pull_back(gradient.mul_(self.ranks.size))]
        return with_gradients(value, pairs)

    def _evaluate(self, z: Tensor, everyone: Tensor, batch: Agreement) -> tuple[Tensor, Tensor]:
        """Return the loss, and its gradient with respect to ``z``, this rank's features, ``(2, b, d)``."""
        log_sum, positives, loss = (z.new_empty(2, z.shape[1]) for _ in range(3))
        for view, rows, s, same, _ in self._blocks(z, everyone, batch):
            log_sum[view, rows], positives[view, rows] = s.logsumexp(1), same.sum(1).to(z.dtype)
            loss[view, rows] = log_sum[view, rows] - s.masked_fill(~same, 0).sum(1) / positives[view, rows]
        of_all, losses = (side.T for side in self.ranks.gather([log_sum.T, loss.T], batch.sizes))
        gradient = torch.empty_like(z)
        for view, rows, s, same, y in self._blocks(z, everyone, batch):
            columns = of_all.flatten() if self.mode == "unimodal" else of_all[1 - view]
            # softmax of the anchors along both axes, minus the shares of the positives, equal for both of a pair
            a = (s - log_sum[view, rows, None]).exp_() + (s - columns).exp_()
            gradient[view, rows] = a.sub_(same * (2 / positives[view, rows, None])) @ y
        return losses.mean(), gradient.div_(self.tau * losses.numel())

    def _blocks(self, z: Tensor, everyone: Tensor, batch: Agreement) -> Iterator[Block]:
        """Yield a view, rows of its anchors, ``s / tau``, a mask of the positives, and the candidates."""
        labels, count, unimodal = batch.keys["labels"], z.shape[1], self.mode == "unimodal"
        step, of_columns = self.chunk_size or max(1, count), labels.repeat(2) if unimodal else labels
        for view, y in enumerate([everyone.flatten(0, 1)] * 2 if unimodal else everyone.flip(0)):
            for start in range(0, count, step):
                rows = slice(start, min(start + step, count))
                s = z[view, rows] @ y.T / self.tau
                same = labels[batch.own][rows, None] == of_columns
                if unimodal:  # no feature is a candidate of itself
                    offset = view * len(labels) + batch.own.start + start
                    s.diagonal(offset).fill_(-torch.inf)
                    same.diagonal(offset).fill_(False)
                yield view, rows, s, same, y
