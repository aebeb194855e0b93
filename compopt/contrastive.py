"""Contrastive objectives: any normalizer with any temperature, one kernel.

The way of ``index``, from the call to its rows and back. Helpers of the same class are part of a hop; sharded rows are
fetched after the handshake, which tells whose they are:

1. ``ContrastiveEstimator.__call__``
2. ``check_vector``: one integer per sample
3. ``Estimator._read``: training or not, what must be alike on all ranks
4. ``BatchReader.read``: makes the ``Batch``
5. ``check_range``: below ``n``
6. ``RowAccess.fetch``, or ``Prefetcher.find`` where the rows are under way
7. ``RowStore.gather``: the rows as they are stored
8. ``Handshake.exchange``: whose samples the global batch has
9. ``RowTable.unpack``: columns by name
10. ``AsyncChecks.two_samples``
11. ``Pairs.__init__``: which pairs are anchor and negative; from here on it is ``Batch.rows`` that counts
12. ``RowTable.deposit``: proposals wait for the optimizer's step
13. ``RowTable.commit``: several proposals for a row become one
14. ``RowAccess.commit``
15. ``RowStore.scatter``

Features go from 1 to ``Features.of``, through 3 and 4 (``Ranks.gather``) into ``Batch.values``, and into 11.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt.batch import COUNT, Batch
from compopt.checks.context import outside_of_graphs, refuse_tangent, refuse_transforms
from compopt.checks.inputs import (
    check_extra,
    check_features,
    check_range,
    check_tau,
    check_vector,
    extra_fact,
    one_name,
    tau_facts,
)
from compopt.distributed.ranks import ProcessGroup
from compopt.estimator import Estimator
from compopt.estimator.async_checks import warn_rho
from compopt.estimator.call import Call, Setting
from compopt.estimator.component import Component, Normalizer, Temperature
from compopt.estimator.fixed import fixed
from compopt.estimator.groups import Hyper, parse
from compopt.estimator.reader import ROW_KEYS
from compopt.kernel.autograd import with_gradients
from compopt.kernel.distributed import GatheredPairs
from compopt.kernel.features import Encode, Encoder, Features, nothing, working_dtype
from compopt.kernel.local import Pairs
from compopt.kernel.statistics import Extra, PairStatistics
from compopt.objective import Objective, Summary
from compopt.stores import Offload
from compopt.stores.table import Placement

MODES = ("bimodal", "unimodal")
DIRECTIONS = {"both": ("forward", "backward"), "forward": ("forward",)}


def _at_least(tau: Tensor, dtype: torch.dtype) -> Tensor:
    """A temperature no less exact than what is computed with it: ``1 / tau`` of half precision has three digits."""
    wanted = working_dtype(tau.dtype, dtype)
    return tau if tau.dtype == wanted else tau.to(wanted)


def _leaf(z: Tensor) -> Tensor:
    """Features without their graph that want a gradient; autograd follows a tensor of inference mode only as a copy."""
    return (z.clone() if z.is_inference() else z.detach()).requires_grad_()


class ContrastiveEstimator(Estimator):
    r"""Large-batch contrastive gradients from small batches.

    .. math::
        \nabla F = \frac{1}{2B} \sum_{\text{directions}} \sum_i \sum_{j \in N_i} w_{ij}\, \nabla h_{ij},
        \qquad w_{ij} = \frac{1}{|N_i|}\, e^{h_{ij}/\tau_i - \alpha_i}, \qquad h_{ij} = s_{ij} - s_{ii}

    Where the normalizer keeps the positive out of the inner function (``reference="none"``: SogCLR), an anchor's
    positive is pulled with weight 1 instead of ``sum_j w_ij``: ``-grad s_ii + sum_j w_ij grad s_ij``.

    The normalizer decides ``alpha``, the temperature ``tau``; the returned value is the estimated objective
    ``mean of tau_i (alpha_i + rho_i)`` and its gradient is the one above. Gradients come in closed form: the
    ``B x B`` matrix is never part of an autograd graph.

    Args:
        normalizer: a :class:`~compopt.BatchNormalizer`, :class:`~compopt.MovingAverageEstimator`, ...
        temperature: a :class:`~compopt.FixedTemperature` or :class:`~compopt.TemperatureDual`.
        mode: ``"bimodal"``: ``z1`` and ``z2`` are two modalities, negatives are the other modality's features.
            ``"unimodal"``: two views, negatives are both views of the other samples (``2B - 2``).
        directions: ``"both"``: the samples of both modalities are anchors. ``"forward"`` (bimodal only): ``z1`` are
            anchors and ``z2`` their candidates, as queries and documents are; the mean is over ``B`` anchors, and rows
            have one value per column instead of two.
        normalize: L2-normalise the features. Otherwise they are used as they come, with norms below 1e15.
        multiply_tau: objective ``tau (alpha + rho)``; ``False``: ``alpha``, whose weights are ``w / tau``.
        chunk_size: rows of the similarity matrix held at a time; ``None`` holds two ``B x B`` matrices. Smaller
            memory for one more matrix product.
        process_group: the ranks whose batches form the global batch; ``None``: the default group, if
            ``torch.distributed`` is initialised.
        offload: where rows live: ``None``, on the features' device; ``"cpu"``, in host memory; ``"disk"``, in a
            file, scratch space of one run. Never changes a result.
        offload_dir: folder of that file, on a local disk; several ranks, each with a file of its own, may share it.
        shard: each rank keeps ``n / K`` rows instead of all; implied by ``offload="disk"``.
        dtype: of the rows, float32 or float64.
        sample_groups: one mapping per data set, ``{"n": ..., key: value, ...}``, whose values go before those of the
            parts; sizes must be theirs.

    State: the columns of both parts in one row per sample, see :class:`~compopt.Estimator`.

    Communicates, with K ranks, in every call: a message of 3 integers per sample and a few more, over a CPU group
    (sizes, indices, what must agree); one all-gather of the features, without gradient, and of the rows of the own
    samples; one all-gather of 3 to 7 floats per sample (2 to 4 with one direction). With ``shard=True`` rows come by
    one all-reduce of the global batch's rows instead. ``extra`` takes one more all-gather, and a normalizer may
    communicate too. The backward pass and :meth:`step` communicate nothing. Every rank computes its own anchors against
    all candidates, returns the global loss, and gets the complete gradient of its own features, multiplied by K for
    wrappers that average over ranks.

    Raises:
        TypeError, ValueError, IndexError: at construction and call; the state is then as before.
        RuntimeError: with several ranks, at the call: another one refused, does something else, or did not come. With
            ``offload="disk"``: another process writes these rows.
        MemoryError, OSError: the rows find no room in memory, or on the disk.

    Warns:
        UserWarning: feature rows that are not finite, with their number; a ``rho`` too large for a batch of this size,
            once; with ``offload="disk"`` a disk with less room than the table takes, a file that was removed; and what
            :class:`~compopt.Estimator` warns of.

    Example:
        >>> import torch, compopt
        >>> u = compopt.MovingAverageEstimator(n=1000, gamma=0.8)
        >>> est = compopt.ContrastiveEstimator(u, compopt.TemperatureDual(n=1000, rho=1.0))
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()  # or est.attach(optimizer)
        >>> est.read(torch.tensor([0, 999]))["count"].tolist()
        [1, 0]
    """

    directions: str = fixed()
    normalize: bool = fixed()
    multiply_tau: bool = fixed()
    normalizer: Normalizer = fixed()
    temperature: Temperature = fixed()

    def __init__(
        self,
        normalizer: Normalizer,
        temperature: Temperature,
        mode: str = "bimodal",
        directions: str = "both",
        normalize: bool = True,
        multiply_tau: bool = True,
        chunk_size: int | None = None,
        process_group: ProcessGroup | None = None,
        offload: Offload | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype = torch.float32,
        sample_groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        checks.one_of("mode", mode, MODES)
        checks.one_of("directions", directions, DIRECTIONS)
        if directions == "forward" and mode == "unimodal":
            raise ValueError('directions="forward" is for two modalities; in mode="unimodal" both views are anchors')
        self.directions = directions
        checks.flag("normalize", normalize)
        checks.flag("multiply_tau", multiply_tau)
        self.chunk_size = None if chunk_size is None else checks.count("chunk_size", chunk_size)
        self.normalize, self.multiply_tau = normalize, multiply_tau
        parts: dict[str, Component] = {"normalizer": normalizer, "temperature": temperature}
        for (role, part), kind in zip(parts.items(), (Normalizer, Temperature), strict=True):
            if not isinstance(part, kind):
                raise TypeError(f"{role} must be a {kind.__name__}, got {type(part).__name__}")
            part.check_free()
        for part in parts.values():
            part.keep_edits()
        placement = Placement(process_group, offload, offload_dir, shard)
        groups = None if sample_groups is None else parse(sample_groups)
        count = len(DIRECTIONS[directions])
        one = {} if directions == "both" else {"directions": directions}  # checkpoints of before have none
        super().__init__(
            parts,
            mode=mode,
            dtype=dtype,
            directions=count,
            placement=placement,
            sample_groups=groups,
            options={"normalize": normalize, "multiply_tau": multiply_tau, **one},
        )
        self.normalizer, self.temperature, engine = normalizer, temperature, self._engine
        for part in parts.values():
            part.joined(engine.groups, Setting(self, mode, dtype, normalize, engine.ranks, count))
        self._warned_rho = False
        self._shown: Mapping[str, Tensor | Callable[[], Tensor]] = {}
        self._last: Summary | None = None

    def _described(self) -> dict[str, Any]:
        directions = {} if self.mode == "unimodal" else {"directions": self.directions}
        unusual = {key: False for key in ("normalize", "multiply_tau") if not getattr(self, key)}
        return {"mode": self.mode, **directions, **unusual, **super()._described()}

    @property
    def _anchors(self) -> int:
        """Directions that have anchors."""
        return len(DIRECTIONS[self.directions])

    @property
    def _remembers_index(self) -> bool:
        return super()._remembers_index or self.normalizer.outside > 0

    @property
    def _row_keys(self) -> Sequence[str]:
        return ROW_KEYS[: self._anchors]  # with one direction the second modality has no rows

    # -- the call ----------------------------------------------------------------------------------------------

    @outside_of_graphs
    def __call__(
        self,
        z1: Tensor,
        z2: Tensor,
        index: Tensor | None = None,
        index2: Tensor | None = None,
        group: Tensor | None = None,
        encode: Encode | None = None,
        *,
        tau: Tensor | float | None = None,
        labels: Tensor | None = None,
        extra: Tensor | None = None,
        extra_index: Tensor | None = None,
    ) -> Tensor:
        """The estimated objective of a batch in nats (times ``tau``, with ``multiply_tau``), ready for ``backward()``.

        In training mode with gradients enabled it deposits the rows that it proposes.

        Args:
            z1, z2: features, ``(B, d)``, same dtype and device; half precision is computed in float32, float64
                in float64.
            index: data-set positions of the samples, ``(B,)`` integers, on the CPU (an index on CUDA is accepted; a
                bad one makes the loss NaN and raises at a later call). Equal indices are never negatives of each
                other. May be left out if nothing is kept per sample and no sample repeats.
            index2: positions in the second modality, if it has its own (several captions per image), ``(B,)``: its
                rows, and with ``directions="forward"``, where it has none, what tells equal candidates.
            group: an older name of ``labels``.
            encode: for samplers whose negatives may lie outside the batch: from data-set positions, ``(m,)`` int64 on
                the CPU, to features ``(m, d)`` of those samples (bimodal: a pair of them), with a graph. Called at most
                once.
            tau: overrides a :class:`~compopt.FixedTemperature` for this call: a number or a tensor, 0-d, ``(B,)``
                or ``(B, 2)``; if it requires grad it gets the derivative of the returned objective.
            labels: samples with equal labels are not each other's negatives, ``(B,)`` integers (classes, duplicates).
            extra: further candidates of the anchors of direction 1 beside the batch's, ``(M, d)``, perhaps with a
                graph: mined hard negatives, for example. ``|N_i|`` counts them, and normalizers, weights and rows are
                those of the larger set: what is estimated is then the objective of the mixture that the caller makes.
                Another ``M`` on each rank, 0 too; every rank's anchors have those of all.
            extra_index: positions of ``extra`` in the second modality (that of ``index2``, or of ``index`` without it),
                ``(M,)``; a candidate at the position of the anchor's own positive is no negative of it.

        Returns:
            0-d loss; not finite if a feature is not, or if its row is too large to be normalised (then the rows of all
            anchors that it reaches keep their values and a warning says how many feature rows are to blame).

        Its gradient is of first order and reverse mode: ``create_graph=True``, forward-mode AD and the transforms of
        ``torch.func`` are refused. So is a call inside a function that is checkpointed (``torch.utils.checkpoint``);
        that the encoders are does no harm.

        Raises:
            IndexError: an index outside ``0 .. n - 1``; one on a device raises at a later call.
            TypeError: features that are not floating-point tensors, keys that are not integers, no ``index`` where
                there are rows, ``extra_index`` without what it refers to.
            ValueError: wrong shapes or devices, fewer than two distinct samples, ``tau`` <= 0 or beside a temperature
                that learns, ``encode`` or ``extra`` with a normalizer that takes none.
            RuntimeError: a transform, a tangent or a checkpointed function, see above; another rank, see the class.

        Communicates: see :class:`~compopt.ContrastiveEstimator`.
        """
        refuse_transforms()
        with self._engine.handshake.guard():
            for name, value in (("z1", z1), ("z2", z2), ("tau", tau), ("extra", extra)):
                refuse_tangent(name, value)
            keys, tau = self._check_call(z1, z2, index, index2, group, labels, tau)
            self.normalizer.check_encode(encode, keys)
            more = self._check_extra(extra, extra_index, keys, z1)
            if extra_index is not None and index is None and index2 is None:
                raise TypeError("extra_index= has positions in the modality of index or index2; pass one of them")
        encoder = None if encode is None else Encoder(encode, z1, self.normalize, self.mode == "unimodal")
        with torch.autocast(z1.device.type, enabled=False):
            own = Features.of(z1, z2, normalize=self.normalize)
            extras = Features.of(more[0], normalize=self.normalize) if more else None
            values = dict(zip(("z1", "z2"), own.unit.unbind(), strict=True))
            if isinstance(tau, Tensor):
                tau = _at_least(tau, own.unit.dtype)
            if isinstance(tau, Tensor) and tau.dim():
                values["tau"] = tau.detach().to(z1.device)
            given = {"named": int(index is not None), "encode": int(encode is not None), "extra": extra_fact(more)}
            facts = {**tau_facts(tau), **given}
            batch = self._read(keys, values, facts, least=2, more=len(more[0]) if more else 0)
            candidates = self._gather_extra(batch, extras.unit[0], more[1]) if more and extras else None
            temperature = self._temperature(batch, tau)
            graph = torch.is_grad_enabled()
            with torch.no_grad():
                value, gradients = self._evaluate(batch, own, extras, candidates, temperature, encoder, graph)
        return with_gradients(batch.nan_if_bad(value), gradients)

    @outside_of_graphs
    def feature_gradients(
        self,
        z1: Tensor,
        z2: Tensor,
        index: Tensor | None = None,
        index2: Tensor | None = None,
        group: Tensor | None = None,
        encode: Encode | None = None,
        *,
        tau: Tensor | float | None = None,
        labels: Tensor | None = None,
        extra: Tensor | None = None,
        extra_index: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Loss and its gradients with respect to ``z1``, ``z2`` and ``extra``, for cached-feature accumulation.

        Encode the whole window without a graph, call this once on all of it (the whole window then serves as
        negatives), and encode each micro-batch again with ``features.backward(gradient_slice)``. Deposits like a
        call. The gradients of :meth:`parameters` are added to their ``.grad``, as a backward pass would do.

        Args:
            z1, z2, index, index2, group, labels, extra, extra_index: as in a call.
            encode: refused: its features would get no gradient.
            tau: as in a call, without a graph.

        Returns:
            ``(loss, g1, g2)``, and with ``extra`` its gradient too; detached, the gradients in the features' dtype.

        Raises:
            ValueError: with ``encode``, or a ``tau`` that requires a gradient; whatever a call raises.

        Communicates: as a call.
        """
        if encode is not None:
            raise ValueError("encode= needs a backward pass of its own features; call the estimator, not this")
        if isinstance(tau, Tensor) and tau.requires_grad:
            raise ValueError(
                "tau= requires a gradient, which this does not return; call the estimator on z1.detach()"
                ".requires_grad_() and tau.detach().requires_grad_(), and take all three gradients from there"
            )
        refuse_transforms()
        for name, z in (("z1", z1), ("z2", z2), ("extra", extra)):  # before detach drops it
            refuse_tangent(name, z)
        with self._engine.handshake.guard():  # before anything is asked of them
            check_features(z1, z2, least=0)
            if extra is not None:
                check_extra(extra, extra_index, z1)
        with torch.enable_grad():
            z1, z2 = _leaf(z1), _leaf(z2)
            leaves = [z1, z2]
            if extra is not None:
                extra = _leaf(extra)
                leaves.append(extra)
            given: dict[str, Any] = {"tau": tau, "labels": labels, "extra": extra, "extra_index": extra_index}
            loss = self(z1, z2, index, index2, group, **given)
            loss.backward(inputs=[*leaves, *(p for p in self.parameters() if p.requires_grad)])
        return loss.detach(), *(z.grad for z in leaves if z.grad is not None)

    # -- before the kernel -------------------------------------------------------------------------------------

    def _check_call(
        self,
        z1: Tensor,
        z2: Tensor,
        index: Tensor | None,
        index2: Tensor | None,
        group: Tensor | None,
        labels: Tensor | None,
        tau: Tensor | float | None,
    ) -> tuple[dict[str, Tensor], Tensor | float | None]:
        """Refuse what one rank can refuse by itself; the keys by which pairs are excluded, and tau."""
        engine = self._engine
        check_features(z1, z2, least=2 if engine.ranks.size == 1 else 0)
        index = self._index(index, len(z1))
        if index2 is not None and self.mode == "unimodal":
            raise ValueError("index2 is for a second modality; in unimodal mode both views share the row of index")
        one_name(labels, group)
        keys = {"index": index}
        for name, key in (("index2", index2), ("group", group), ("labels", labels)):
            if key is not None:
                keys[name] = check_vector(name, key, len(z1))
        if "group" in keys:
            keys["labels"] = keys.pop("group")
        if tau is not None:
            if self.temperature.learns:
                raise ValueError(
                    "tau= must be left out: this estimator learns its own temperatures, see est.temperature"
                )
            tau = check_tau(tau, len(z1), self._anchors)
        return keys, tau

    def _check_extra(
        self, extra: Tensor | None, extra_index: Tensor | None, keys: Mapping[str, Tensor], like: Tensor
    ) -> tuple[Tensor, Tensor | None] | None:
        """Further candidates and their positions, or ``None``."""
        if extra is None:
            if extra_index is not None:
                raise TypeError("extra_index= has the positions of extra=, which is None")
            return None
        self.normalizer.check_extra()
        checked = check_extra(extra, extra_index, like)
        if checked[1] is not None and "index2" not in keys and self.n is not None:
            check_range("extra_index", checked[1], self.n)
        return checked

    def _gather_extra(self, batch: Batch, own: Tensor, positions: Tensor | None) -> Extra:
        """Everybody's further candidates."""
        engine = self._engine
        positive = batch.keys.get("index2", batch.keys["index"])
        values = [own] if positions is None else [own, accelerator.to_device(positions, own.device)]
        first = sum(batch.more[: engine.ranks.rank])
        everyone = engine.ranks.gather(values, batch.more) if max(batch.more) else values
        at = slice(first, first + len(own))
        return Extra(own, everyone[0], positive, None if positions is None else everyone[1], at)

    def _temperature(self, batch: Batch, tau: Tensor | float | None) -> float | Tensor:
        """A number, or a tensor of 1 or 2 columns that may carry a graph."""
        if tau is None:
            tau = self.temperature.temperatures(batch.columns, self._hyper("temperature", batch), batch.depositing)
            refuse_tangent("the temperature", tau)
        if not isinstance(tau, Tensor):
            return tau
        features = batch.values.get("z1")  # a diagnostic has none
        return _at_least(tau.to(batch.rows.device), batch.dtype if features is None else features.dtype)

    def _hyper(self, role: str, batch: Batch) -> Hyper:
        """Hyper-parameters of one part for the samples of a batch."""
        return self._engine.groups.hyper(role, batch.rows, batch.dtype)

    # -- pairs, alpha, proposals, value, gradients -------------------------------------------------------------

    def _evaluate(
        self,
        batch: Batch,
        own: Features,
        extras: Features | None,
        candidates: Extra | None,
        temperature: float | Tensor,
        encoder: Encoder | None,
        graph: bool,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Pairs, then alpha or weights, proposals, the value, its gradients; these in pairs with their tensors.

        Args:
            batch: the samples of all ranks.
            own: this rank's features.
            extras: its further candidates, if there are any.
            candidates: those of all ranks.
            temperature: perhaps with a graph; of all samples, or, if it came with the call, of this rank's.
            encoder: for samples outside the batch.
            graph: whether anything wants gradients at all.
        """
        engine = self._engine
        constant = temperature.detach() if isinstance(temperature, Tensor) else temperature
        tau = batch.values.get("tau", constant)
        learned = isinstance(temperature, Tensor) and temperature.requires_grad and graph
        pairs = self._pairs(batch, own, candidates, tau, moments=learned or self.temperature.learns)
        self._warn_rho(pairs.negatives)  # a warning may be an error; nothing is proposed yet
        call = self._call(batch, pairs, tau, encoder)
        estimate = self.normalizer.estimate(call)  # alpha, or weights; a network learns here
        call = replace(call, hyper=self._hyper("temperature", batch))
        objective = Objective(
            batch, pairs, estimate, tau, self.temperature.rho(call.hyper), self.multiply_tau, engine.ranks.size
        )
        value = objective.value().to(own.unit.dtype)
        if candidates is not None or len(pairs.keys) > 1:  # a sample may be in no pair; a network's alpha sees no extra
            value = value + nothing(*batch.features, *(() if candidates is None else (candidates.everyone,)))
        prepared = (own, extras, None if encoder is None else encoder.encoded)
        units = [features.unit for features in prepared if features is not None]
        engine.async_checks.watch_features(
            value, *units
        )  # a warning may be an error, and this call counts from here on
        if batch.depositing:
            moved = self.temperature.proposals(call, objective.tau_gradients()) if self.temperature.learns else {}
            self._deposit(batch, {**estimate.proposals, **moved}, self._valid(pairs))
        elsewhere = engine.ranks.size > 1 or (encoder is not None and encoder.wants_gradients)
        gradients = objective.feature_gradients(own, extras, graph, elsewhere)
        if learned and isinstance(temperature, Tensor):
            gradients.append(objective.temperature_gradient(temperature))
        if encoder is not None and graph:
            gradients += [(z, gradient * engine.ranks.size) for z, gradient in encoder.gradients]
        about_pairs = (pairs.sides, pairs.log_sum, pairs.count)
        self._last = Summary(objective.alpha, tau, *about_pairs, batch.rows[:, 0], self._visits(batch))
        self._shown = estimate.metrics
        return value, gradients

    def _pairs(
        self, batch: Batch, own: Features, extra: Extra | None, tau: float | Tensor, moments: bool
    ) -> PairStatistics:
        """The kernel: all pairs of the batch, or those of this rank's anchors.

        Args:
            batch: the samples of all ranks.
            own: this rank's features.
            extra: further candidates.
            tau: temperatures of the whole batch.
            moments: a temperature's derivative will be asked for.
        """
        engine = self._engine
        keys = list(batch.keys.values())
        options: dict[str, Any] = {
            "distinct": batch.distinct,
            "directions": self._anchors,
            "extra": extra,
            "unimodal": self.mode == "unimodal",
            "bounded": self.normalize,
            "chunk_size": self.chunk_size,
            "moments": moments,
        }
        if engine.ranks.size == 1:
            return Pairs(own.unit, tau, keys, **options)
        return GatheredPairs(own.unit, batch.features, tau, keys, engine.ranks, batch.sizes, **options)

    def _call(self, batch: Batch, pairs: PairStatistics, tau: float | Tensor, encoder: Encoder | None) -> Call:
        """What the normalizer is shown."""
        return Call(
            batch,
            pairs,
            tau,
            self._hyper("normalizer", batch),
            chunk_size=self.chunk_size,
            encoder=encoder,
            t=self.t,
            window=self.pending,
            unimodal=self.mode == "unimodal",
        )

    def _visits(self, batch: Batch) -> Tensor | None:
        """Visits of each sample, 0 where some part has not met it; ``None`` where none are counted."""
        count = batch.columns.get(COUNT)
        for blank in {id(blank): blank for blank in batch.blank.values()}.values():
            count = None if count is None else count.masked_fill(blank, 0)
        return count

    def _valid(self, pairs: PairStatistics) -> Tensor | None:
        """Anchors without any negative (possible with index2 and labels) propose nothing."""
        if len(pairs.keys) == 1 or isinstance(pairs.count, float):
            return None
        valid = pairs.count > 0
        return valid.all(dim=1, keepdim=True) if self.mode == "unimodal" else valid

    # -- what the user should hear -----------------------------------------------------------------------------

    def _warn_rho(self, negatives: int) -> None:
        if not self._warned_rho and self.temperature.learns and negatives:
            self._warned_rho = warn_rho(self.sample_groups, negatives + self.normalizer.outside)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What the last call saw, as 0-d tensors; computed on request, nothing waits for the device.

        ``log_normalizer``: mean alpha; ``info_nce``: cross-entropy of the positive among the batch's candidates
        (``extra`` included, a memory not) at the temperatures used, in nats, mean over the anchors: the scale of other
        libraries' contrastive losses; ``effective_negatives``: ``(sum w)^2 / sum w^2``, mean over the first 128
        anchors of each direction; ``tau_q10``, ``tau_median``, ``tau_q90``: quantiles of the temperatures used;
        ``new_rows``: samples seen for the first time (0 without rows); and those of the normalizer, which may replace
        one. They are of the global batch; ``effective_negatives`` is of this rank's anchors. Empty before the first
        call. Communicates nothing.
        """
        if self._last is None:
            return {}
        shown = {name: value() if callable(value) else value for name, value in self._shown.items()}
        return {**self._last.metrics(), **shown}
