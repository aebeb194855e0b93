"""Contrastive objectives: any normalizer with any temperature, one kernel."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from compopt import checks
from compopt.arguments import CallArguments, check_cached, check_call, check_policy
from compopt.batch import Batch
from compopt.checks import Directions, Mode
from compopt.checks.context import outside_of_graphs, refuse_derivatives, warn
from compopt.checks.inputs import three_by_position
from compopt.distributed.handshake import NULL_CONTEXT
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.estimator.base import Fixed, Form, check_dtype
from compopt.estimator.container import Container
from compopt.estimator.groups import GroupSpec, Hyper, as_groups
from compopt.estimator.options import with_arguments_of
from compopt.estimator.parts import Call, Normalizer, Temperature
from compopt.estimator.reader import ROW_KEYS, or_flags
from compopt.functional import Scalar
from compopt.kernel.block import Block
from compopt.kernel.features import TensorGradient, full_precision, promote_tau, with_gradients, zero_or_nan
from compopt.kernel.pairs import PairOptions, Pairs
from compopt.kernel.triton.block import block_of
from compopt.kernel.triton.choice import BACKENDS, Backend
from compopt.objective import Objective, Summary
from compopt.pairs import NO_POLICY, BoundPolicy, PairPolicy
from compopt.stores import Offload
from compopt.stores.table import Placement

WIDTHS = {"bimodal": 2, "unimodal": 1}  # values per column, if both directions have anchors
LEAST_SCALE = 5.0  # from here on a temperature may be a logit scale, which is usually 10 to 100


class ContrastiveEstimator(Container):
    r"""Contrastive loss composed of a normalizer and a temperature, with optional state per sample.

    Example:
        >>> import torch, compopt
        >>> u = compopt.MovingAverageEstimator(n=1000, gamma=0.8)
        >>> est = compopt.ContrastiveEstimator(u, compopt.TemperatureDual(n=1000, rho=1.0))
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()  # or est.attach(optimizer)
        >>> est.read(torch.tensor([0, 999]))["count"].tolist()
        [1, 0]

    .. math::
        \nabla F = \frac{1}{2B} \sum_{\text{directions}} \sum_i \sum_{j \in N_i} w_{ij}\, \nabla h_{ij},
        \qquad w_{ij} = \frac{1}{|N_i|}\, e^{h_{ij}/\tau_i - \alpha_i}, \qquad h_{ij} = s_{ij} - s_{ii}

    A call ``est(z1, z2, index)`` returns the estimated objective of a batch, ``mean of tau_i (alpha_i + rho_i)``:

    1. The arguments are checked, the features are normalised, and with several ranks the global batch is gathered.
    2. The rows of its samples are read, and the temperature returns ``tau_i``.
    3. The kernel computes the similarities and ``log ghat_i``, the mean of ``e^{h_ij / tau_i}`` over the batch.
    4. The normalizer turns it and the rows into ``alpha_i``. Where the positive is kept out of the inner function
       (``reference="none"``: SogCLR), its weight in the gradient is 1 instead of ``sum_j w_ij``.
    5. In training mode the proposed rows and temperatures are deposited, until :meth:`step` commits them.
    6. The gradient above is computed in closed form and waits for ``backward()``; no ``B x B`` matrix is in a graph.

    Args:
        normalizer: a :class:`~compopt.BatchNormalizer`, :class:`~compopt.MovingAverageEstimator`, ...
        temperature: a :class:`~compopt.FixedTemperature` or :class:`~compopt.TemperatureDual`.
        mode: ``"bimodal"``: ``z1`` and ``z2`` are two modalities; negatives are features of the other modality.
            ``"unimodal"``: two views; negatives are both views of the other samples (``2B - 2``).
        directions: ``"both"``: the samples of both modalities are anchors. ``"forward"`` (bimodal only): ``z1`` are
            anchors and ``z2`` their candidates, for example queries and documents; the mean is over ``B`` anchors, and
            rows have one value per column instead of two.
        normalize: L2-normalise the features. Otherwise the features are used unchanged; their norms must be below 1e15.
        multiply_tau: the objective is ``tau (alpha + rho)``; ``False``: ``alpha``, with weights ``w / tau``. A
            temperature that the optimizer learns, without ``rho``, needs ``False``: ``tau alpha`` falls as ``tau``
            grows.
        chunk_size: number of rows of the similarity matrix in memory at a time; ``None`` holds two ``B x B`` matrices.
            A chunk size saves memory and costs one more matrix product.
        process_group: the ranks whose batches form the global batch; ``None``: the default group, if
            ``torch.distributed`` is initialised.
        offload: storage of the rows. ``None``: the device of the features; ``"cpu"``: host memory; ``"disk"``: a
            file for each part, which is scratch space of one run. Results do not depend on it.
        offload_dir: folder of these files, on a local disk; several ranks may share it, since each writes its own.
        shard: each rank keeps ``n / K`` rows instead of all; implied by ``offload="disk"``.
        dtype: dtype of the rows, float32 or float64.
        pairs: a :class:`~compopt.PairPolicy`, which selects and weights the negatives; ``None``: all candidates with
            another index and other labels, with equal weights.
        sample_groups: one mapping per data set, ``{"n": ..., key: value, ...}``. The values override those of the
            parts; the sizes must equal those of the parts.
        backend: ``"torch"``: plain torch computes the pairs. ``"triton"``: a fused kernel computes them if Triton is
            installed (extra ``triton``) and the kernel supports the call, which has no ``negatives``, ``keys`` or
            policy; otherwise plain torch, which the logger ``compopt.kernel.triton.choice`` reports at debug level.
            ``"auto"``: ``"torch"``. The kernel multiplies in TF32 even if PyTorch's own products do not, or in bfloat16
            (:func:`compopt.functional.contrastive_sums`, ``precision=None``). See the page on the fused kernel.

    State: that of both parts, each with its own rows, and the number of commits; see :class:`~compopt.Estimator`. A
    part keeps a placement or a dtype of its own.

    Policies: ``pairs`` leaves candidates out or weights them, see :class:`~compopt.PairPolicy`. A policy that needs
    tensors of the batch is bound to them in every call, ``pairs=policy.bind(...)``.

    Ranks: every rank computes its own anchors against all candidates, returns the global loss, and receives the
    complete gradient of its own features, multiplied by their number K for wrappers that average over ranks.

    Communicates, in every call: a message of 3 integers per sample and a few more, over a CPU group (sizes, indices,
    values that must be equal on all ranks); one all-gather of the features, without gradient, and of the rows of this
    rank's samples; one all-gather of 3 to 7 floats per sample (2 to 4 with one direction). With ``shard=True`` one
    all-reduce of the global batch's rows replaces the all-gather of rows. ``negatives`` need one more all-gather, and a
    normalizer may communicate too; ``keys`` are gathered with the features. The backward pass and :meth:`step`
    communicate nothing.

    Raises:
        TypeError, ValueError, IndexError: invalid arguments, at construction or call; the state is unchanged.
        RuntimeError: with several ranks, at the call: another rank raised, made a different call, or did not call. With
            ``offload="disk"``: another process writes these rows.
        MemoryError, OSError: the memory or the disk has no room for the rows.

    Warns:
        UserWarning: feature rows that are not finite, with their number; once each, a batch in which no anchor has a
            negative, a ``rho`` too large for a batch of this size, and with normalised features a first temperature of
            5 or more, if all samples share it and it is known on the host, since it is probably a logit scale; with
            ``offload="disk"`` a disk with less room than the table needs, or a file that was removed; and the warnings
            of :class:`~compopt.Estimator`.
    """

    mode: Mode = cast(Any, Fixed())
    directions: Directions = cast(Any, Fixed())
    normalize: bool = cast(Any, Fixed())
    multiply_tau: bool = cast(Any, Fixed())
    pairs: PairPolicy | None = cast(Any, Fixed())
    normalizer: Normalizer = cast(Any, Fixed())
    temperature: Temperature = cast(Any, Fixed())

    def __init__(
        self,
        normalizer: Normalizer,
        temperature: Temperature,
        mode: Mode = "bimodal",
        directions: Directions = "both",
        normalize: bool = True,
        multiply_tau: bool = True,
        chunk_size: int | None = None,
        process_group: ProcessGroup | None = None,
        offload: Offload | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        shard: bool = False,
        dtype: torch.dtype = torch.float32,
        sample_groups: GroupSpec | None = None,
        pairs: PairPolicy | None = None,
        backend: Backend = "auto",
    ) -> None:
        checks.loss_options(mode, directions, normalize, multiply_tau)
        count = checks.DIRECTIONS[directions]
        self.mode, self.directions, self.normalize, self.multiply_tau = mode, directions, normalize, multiply_tau
        self.chunk_size = None if chunk_size is None else checks.positive_int("chunk_size", chunk_size)
        checks.one_of("backend", backend, BACKENDS)
        self.backend = backend
        for name, part, kind in (("normalizer", normalizer, Normalizer), ("temperature", temperature, Temperature)):
            if not isinstance(part, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {type(part).__name__}")
        if pairs is not None:
            check_policy(pairs, normalizer)
        self.pairs = pairs = None if pairs == NO_POLICY else pairs
        normalizer.check_temperature(temperature)
        form = Form(
            mode,
            width=min(count, WIDTHS[mode]),
            dtype=check_dtype(dtype),
            placement=Placement(process_group, offload, offload_dir, shard),
            ranks=Ranks(process_group),
            directions=count,
            normalize=normalize,
            within=pairs is not None and pairs.within,
        )
        given = None if sample_groups is None else as_groups(sample_groups)
        super().__init__({"normalizer": normalizer, "temperature": temperature}, form, given)
        self.normalizer, self.temperature = normalizer, temperature
        self._row_keys = ROW_KEYS[:count]  # with one direction the second modality has no rows
        self._anchors = count  # directions that have anchors; both views in unimodal mode
        self._settled: set[str] = set()  # warnings that were given, or do not apply
        self._at_first: int | None = None  # fingerprint of the learned parameters at the first call of several ranks
        self._shown: Mapping[str, Tensor | Callable[[], Tensor]] = {}
        self._last: Summary | None = None

    def structure(self) -> dict[str, Any]:
        # defaults are left out, so that checkpoints of earlier versions still load
        more: dict[str, str] = {} if self.directions == "both" else {"directions": self.directions}
        more |= {} if self.pairs is None else {"pairs": repr(self.pairs)}
        return {"normalize": self.normalize, "multiply_tau": self.multiply_tau, **more}

    def described(self) -> dict[str, Any]:
        directions = {} if self.mode == "unimodal" else {"directions": self.directions}
        unusual = {key: False for key in ("normalize", "multiply_tau") if not getattr(self, key)}
        pairs = {} if self.pairs is None else {"pairs": self.pairs}
        return {"mode": self.mode, **directions, **unusual, **pairs, **super().described()}

    @property
    def _remembers_index(self) -> bool:
        return super()._remembers_index or self.normalizer.outside > 0

    # -- the call ----------------------------------------------------------------------------------------------

    @outside_of_graphs
    @three_by_position
    def __call__(
        self,
        z1: Tensor,
        z2: Tensor,
        index: Tensor | None = None,
        *,
        index2: Tensor | None = None,
        labels: Tensor | None = None,
        tau: Tensor | float | None = None,
        negatives: Tensor | tuple[Tensor, Tensor] | None = None,
        keys: Sequence[Tensor] | None = None,
        pairs: PairPolicy | BoundPolicy | None = None,
    ) -> Tensor:
        """Return the estimated objective of a batch in nats (times ``tau``, with ``multiply_tau``), for ``backward()``.

        In training mode with gradients enabled the call deposits the new rows.

        Args:
            z1, z2: features, ``(B, d)``, same dtype and device; half precision is computed in float32, float64
                in float64.
            index: data-set positions of the samples, ``(B,)`` integers, on the CPU (an index on CUDA is accepted; an
                invalid one makes the loss NaN and raises at a later call). Samples with equal indices are never
                negatives of each other. Optional if nothing is kept per sample and no sample repeats. A memory needs it
                if a batch is evaluated more than once per step (SAM, LBFGS).
            index2: positions in the second modality, if it has its own (several captions per image), ``(B,)``. They
                select its rows; with ``directions="forward"``, where it has no rows, they identify equal candidates.
            labels: ``(B,)`` integers (classes, duplicates). Samples with equal labels are not each other's negatives. A
                label must have the same meaning in all batches, since a memory compares labels with those of earlier
                batches.
            tau: temperature that overrides a :class:`~compopt.FixedTemperature` for this call: a number or a tensor,
                0-d, ``(B,)`` or ``(B, 2)``; if it requires grad, it receives the derivative of the returned objective.
            negatives: further candidates of the anchors of direction 1, for example mined hard negatives: features
                ``(M, d)``, optionally with a graph, or a pair of these and their positions ``(M,)`` in the second
                modality (in that of ``index2``, or of ``index`` without it); a candidate at the position of the
                anchor's own positive is not its negative. ``|N_i|`` counts them. Normalizers, weights and rows refer to
                the larger set, so that the estimate is that of the mixture of both sets. ``M`` may differ between ranks
                and may be 0; the anchors of every rank are compared with the candidates of all ranks.
            keys: with a :class:`~compopt.MemoryNormalizer`: features ``(k1, k2)`` of the same samples from a slowly
                moving copy of the encoders (:class:`~compopt.MomentumEncoder`), ``(B, d)`` each; no graph. They are the
                candidates and the positives of the anchors, and the memory stores them. The copy should encode
                ``negatives`` too.
            pairs: a :class:`~compopt.PairPolicy` that replaces the policy of the constructor for this call, or, for
                options that need tensors of the batch, ``policy.bind(guide=..., within=...)``.

        *Anchors without negatives*, because keys or the policy exclude all candidates, contribute 0 to the value and to
        all gradients, count in the mean, and deposit nothing. If no anchor has a negative, the loss is 0, its gradients
        are zero, nothing is deposited, and the first such batch warns; :attr:`t` does not change (with keys on an
        accelerator it does). The features in a memory are negatives too: a batch with one label has no others.

        Returns:
            0-d loss; not finite if a feature is not finite, or if its row is too large to be normalised (the rows of
            all anchors that it affects then keep their values, and a warning states the number of such feature rows),
            or if a gradient of this rank is not finite.

        Only first-order reverse-mode gradients are available: ``create_graph=True``, forward-mode AD and the transforms
        of ``torch.func`` raise an error, and so does a call inside a function that is checkpointed
        (``torch.utils.checkpoint``). Checkpointed encoders are supported.

        Raises:
            IndexError: an index outside ``0 .. n - 1``; one on a device raises at a later call.
            TypeError: features that are not floating-point tensors, keys that are not integers, no ``index`` where
                there are rows, positions of ``negatives`` without the arguments that they refer to.
            ValueError: wrong shapes or devices, fewer than two distinct samples (all have one ``index`` and, if passed,
                one ``index2``), ``tau`` <= 0 or together with a learned temperature, ``negatives``, ``keys`` or
                ``pairs`` with a normalizer that does not support it.
            RuntimeError: a transform, a tangent or a checkpointed function, see above; another rank, see the class.

        Communicates: see :class:`~compopt.ContrastiveEstimator`.

        Example:
            >>> import torch, compopt
            >>> est = compopt.DCLEstimator(mode="unimodal")
            >>> z1, z2 = (torch.randn(8, 16, requires_grad=True) for _ in range(2))
            >>> est(z1, z2).backward()
            >>> tuple(z1.grad.shape)
            (8, 16)
        """
        given = check_call(self, z1, z2, index, index2, labels, tau, negatives, keys, pairs)
        with full_precision(z1.device):
            batch = self._gather(given)  # samples of all ranks, their committed rows
            with self._rollback_on_error() if batch.depositing else NULL_CONTEXT:
                return self._loss(batch, given)

    @outside_of_graphs
    @with_arguments_of(__call__)
    def feature_gradients(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the loss and its gradients with respect to ``z1``, ``z2`` and ``negatives``.

        For cached features: encode the whole window without a graph, call this method once on all of it (the negatives
        are then those of the whole window), and encode each micro-batch again with
        ``features.backward(gradient_slice)``. The rows are deposited as by a call, also under ``torch.no_grad()``. The
        gradients of :meth:`parameters`, and of a temperature that is a tensor, are added to their ``.grad``, as by a
        backward pass.

        Args:
            z1, z2, index, ...: all arguments of a call; ``tau`` without a graph.

        Returns:
            ``(loss, g1, g2)``; with ``negatives`` also their gradient. All are detached; the gradients have the dtype
            of the features.

        Raises:
            ValueError: a ``tau`` of the call, or one that was computed from other tensors, requires a gradient; a
                sampler with ``encode``, whose features would get none; all errors of a call.

        Communicates: as a call.
        """
        further, positions = check_cached(self, given["z1"], given["z2"], given.get("tau"), given.get("negatives"))
        self._drop_skipped()  # before the context, which restores what is pending now
        with torch.inference_mode(False), torch.enable_grad(), self._rollback_on_error():
            leaves = [_leaf(z) for z in (given["z1"], given["z2"], further) if z is not None]
            given |= zip(("z1", "z2"), leaves, strict=False)
            if further is not None:
                given["negatives"] = leaves[2] if positions is None else (leaves[2], positions)
            loss = self(**given)
            loss.backward(inputs=[*leaves, *self._differentiated()])
        return loss.detach(), *(z.grad for z in leaves if z.grad is not None)

    def __getstate__(self) -> dict[str, Any]:
        # torch.save refuses views that change the dtype. The copy is kept, because a spawned process opens the memory
        # of the tensors that are pickled for it only afterwards.
        if self._last is not None:
            self._last = self._last.evaluated()
        self._shown = {name: value() if callable(value) else value for name, value in self._shown.items()}
        return {**super().__getstate__(), "_at_first": None}

    def _differentiated(self) -> list[Tensor]:
        """Return the tensors of the estimator that a backward pass gives a gradient."""
        found = [*self.parameters(), self.temperature.tensor]
        return [each for each in found if each is not None and each.requires_grad]

    # -- the steps of a call -----------------------------------------------------------------------------------

    def _gather(self, given: CallArguments) -> Batch:
        """Gather the samples of all ranks, and read their rows."""
        more = 0 if given.negatives is None else given.negatives.unit.shape[1]
        batch = self._read(given.keys, given.values, given.facts, least=2, more=more)
        batch.named = given.named
        if (shared := batch.values.pop("shared", None)) is not None:
            batch.bad = or_flags(batch.bad, self._async_checks.check_equal(shared))
        if self._ranks.size == 1:
            batch.views = given.own.unit  # without a copy
        self._at_first = given.facts.get("parameters")
        return batch

    def _loss(self, batch: Batch, given: CallArguments) -> Tensor:
        """Return the loss, a node of the graph, and deposit new rows and temperatures."""
        hyper = self.temperature._hyper(batch)
        temperature = self._temperature(batch, given.tau, hyper)  # perhaps with a graph
        learned = temperature if given.graph and isinstance(temperature, Tensor) and temperature.requires_grad else None
        if "scale" not in self._settled:
            self._warn_logit_scale(temperature)
        with torch.no_grad():
            used = batch.values.get("tau", temperature)
            used = used.detach() if isinstance(used, Tensor) else used
            pairs = self._pairs(batch, given, used, learned is not None)  # log-sum-exps
            call = self._call(batch, pairs, used, given)
            if pairs.may_lack_negatives and not self.normalizer.outside:
                self._skip_without_negatives(call, 0.0)
            estimate = self.normalizer.estimated(call)  # alpha, proposed rows; a network learns here
            if pairs.may_lack_negatives and self.normalizer.outside:
                self._skip_without_negatives(call, estimate.outside_count)
            objective = Objective(call, estimate, self.temperature.rho(hyper), self.multiply_tau)
            value = self._value(objective, given)
            if batch.depositing:
                self._propose(call, objective)  # new rows and temperatures, until step()
            gradients = self._gradients(objective, given, learned)
        if self._hooks["call"]:  # last, so that a follower deposits nothing for a call that raises
            self._run("call", batch, pairs)
        pairs.release()  # the metrics may need the features, not the matrices
        self._last, self._shown = Summary.of(objective), estimate.metrics
        return with_gradients(batch.nan_if_bad(value), gradients)

    def _temperature(self, batch: Batch, tau: Tensor | float | None, hyper: Hyper) -> float | Tensor:
        """Return a number, or a tensor of 1 or 2 columns that may carry a graph."""
        if tau is None:
            tau = self.temperature.temperatures(batch.of("temperature").columns, hyper, batch.depositing)
            refuse_derivatives(("the temperature", tau))
        if not isinstance(tau, Tensor):
            return float(tau)
        features = batch.values.get("z1")  # None in a diagnostic
        return promote_tau(tau.to(batch.rows.device), batch.dtype if features is None else features.dtype)

    def _pairs(self, batch: Batch, given: CallArguments, tau: float | Tensor, learned: bool) -> Pairs:
        """Compute the statistics of all pairs of the batch, or, with several ranks, of this rank's anchors."""
        options = PairOptions(
            distinct=batch.distinct,
            directions=self._anchors,
            unimodal=self.mode == "unimodal",
            bounded=self.normalize,
            chunk_size=self.chunk_size,
            moments=self.temperature.learns or learned,  # for the derivative with respect to it
            sums=self.normalizer.sums,
        )
        if given.policy is not None or given.negatives is not None:
            options = self._with_candidates(options, batch, given)
        block = Block if self.backend != "triton" else self._block(batch, given)
        sides, ranks, keys = (batch.features, batch.momentum), self._ranks, list(batch.keys.values())
        pairs = Pairs(given.own.unit, tau, keys, options, *sides, ranks, batch.sizes, block)
        if self.temperature.learns and pairs.least:  # before any proposal, since a warning may be an error
            self.temperature.look_at_negatives(pairs.least + self.normalizer.outside)
        return pairs

    def _with_candidates(self, options: PairOptions, batch: Batch, given: CallArguments) -> PairOptions:
        """Add further candidates and a policy of pairs. Collective with ``negatives``."""
        guide = [batch.values[name] for name in ("guide1", "guide2") if name in batch.values]
        key, negatives = batch.values.get("within1"), given.gather_negatives(batch, self._ranks)
        return options._replace(negatives=negatives, policy=given.policy, guide=guide, key=key)

    def _block(self, batch: Batch, given: CallArguments) -> type[Block]:
        """Return the class of the matrices for ``backend="triton"``."""
        unsupported = {"keys=": batch.values.get("k1"), "negatives=": given.negatives, "pairs=": given.policy}
        return block_of(self.backend, given.own.unit, unsupported)

    def _warn_logit_scale(self, temperature: float | Tensor) -> None:
        """Warn, once, of a logit scale as the first temperature."""
        if not self.normalize or self.temperature.learns:
            return
        if isinstance(temperature, Tensor):
            if temperature.dim() or temperature.device.type != "cpu":
                return
            temperature = temperature.item()
        if temperature >= LEAST_SCALE:
            warn(
                f"tau is {temperature:.4g}, which weighs all candidates of normalised features nearly alike; if this "
                f"is a logit scale, pass its inverse, tau=1 / scale"
            )
        self._settled.add("scale")  # a temperature that is learned, or follows a schedule, may grow

    def _call(self, batch: Batch, pairs: Pairs, tau: float | Tensor, given: CallArguments | None) -> Call:
        """Return the input of the normalizer; ``given`` is ``None`` for a diagnostic."""
        encoder, policy = (None, None) if given is None else (given.encoder, given.policy)
        part, read, unimodal = self.normalizer, batch.of("normalizer"), self.mode == "unimodal"
        about = (part._hyper(batch), self.chunk_size, encoder, part.t, part.pending, unimodal, policy, part.training)
        return Call(batch, read, pairs, tau, *about)

    def _skip_without_negatives(self, call: Call, outside: Scalar) -> None:
        """Disable deposits for a batch in which no anchor has a negative, and warn once.

        On a device the host does not wait: unless the keys on the host show that there is no negative, the state keeps
        its values but ``t`` counts the batch.
        """
        pairs, lacking = call.pairs, call.pairs.lacking(outside)
        if lacking is None:
            return
        if lacking.device.type == "cpu":
            call.batch.depositing &= not bool(lacking)
        elif call.batch.constant_key and not (pairs.negatives or self.normalizer.outside):
            call.batch.depositing = False
        if "negatives" not in self._settled:
            self._async_checks.watch(lacking.to(torch.int32), self._warn_negatives)

    def _warn_negatives(self, lacking: int) -> None:
        if lacking and "negatives" not in self._settled:
            self._settled.add("negatives")
            warn(
                "no sample of a batch has a negative, because labels, index2 or the policy of pairs exclude all pairs: "
                "its loss and gradients are 0, and it changes no state; if this happens often, use larger batches, or "
                "check these arguments"
            )

    def _value(self, objective: Objective, given: CallArguments) -> Tensor:
        """Return the value, or NaN with a warning if a feature is not finite."""
        pairs, batch = objective.pairs, objective.batch
        value = objective.value().to(given.own.unit.dtype)
        if pairs.negatives is not None or pairs.may_lack_negatives or batch.momentum:
            # a bad feature may be in no pair (z2 with one direction and momentum), or not reach alpha (negatives and
            # a network): the value must be NaN all the same
            more = () if pairs.negatives is None else (pairs.negatives.everyone,)
            value = value + zero_or_nan(*batch.features, *batch.momentum, *more, *pairs.options.guides)
        # before anything is deposited, since a warning may be an error; a finite value rules bad features out
        if value.device.type != "cpu" or not math.isfinite(value.item()):
            self._warn_bad_features(given)
        return value

    def _warn_bad_features(self, given: CallArguments) -> None:
        """Warn about features of this rank that are not finite."""
        encoded = None if given.encoder is None else given.encoder.encoded
        units = [features.unit for features in (given.own, given.negatives, encoded) if features is not None]
        self._async_checks.watch_features(self._reading().handshake.agree, *units, *given.of_others)

    def _propose(self, call: Call, objective: Objective) -> None:
        """Deposit new rows and temperatures, except for anchors without any negative (index2, labels)."""
        pairs, outside = objective.pairs, objective.estimate.outside_count
        valid: Tensor | None = None
        if pairs.may_lack_negatives and isinstance(pairs.count, Tensor):
            valid = pairs.count + outside > 0
            valid = valid.all(dim=1, keepdim=True) if call.unimodal else valid
        learns = self.temperature.learns and self.temperature.training
        of_temperature: Mapping[str, Tensor] = self._moved(call, objective) if learns else {}
        proposals = {"normalizer": objective.estimate.proposals, "temperature": of_temperature}
        self._deposit_parts(call.batch, proposals, valid)

    def _moved(self, call: Call, objective: Objective) -> Mapping[str, Tensor]:
        """Return the proposals of a temperature that learns."""
        part, gradient = self.temperature, objective.tau_gradients()
        lacking = objective.pairs.lacking(objective.estimate.outside_count)
        if lacking is not None and lacking.device.type != "cpu":  # a gradient of NaN moves no temperature
            gradient = gradient.masked_fill(lacking, torch.nan)
        read, hyper = call.batch.of("temperature"), part._hyper(call.batch)
        return part.proposals(replace(call, read=read, hyper=hyper, t=part.t, window=part.pending), gradient)

    def _gradients(self, objective: Objective, given: CallArguments, learned: Tensor | None) -> list[TensorGradient]:
        """Return the tensors that may require a gradient on this rank, with their gradients."""
        encoder, found = given.encoder, list[TensorGradient]()
        if given.want_gradients:
            found = objective.feature_gradients(given.own, given.negatives)
        elif objective.ranks > 1 or (encoder is not None and encoder.wants_gradients):
            objective.serve_others()
        if learned is not None:
            found.append(objective.temperature_gradient(learned))
        if objective.estimate.learned and given.graph:
            found += objective.learned_gradients()
        if encoder is not None and given.graph:
            found += [(z, gradient * objective.ranks) for z, gradient in encoder.gradients]
        return found

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the last call as 0-d tensors, computed on request without a synchronisation of the device.

        ``log_normalizer``: mean alpha; ``info_nce``: cross-entropy of the positive among the candidates of the batch
        (with ``negatives``, without a memory) at the temperatures used, in nats, averaged over the anchors, as in
        other libraries; ``effective_negatives``: ``(sum w)^2 / sum w^2``, averaged over the
        first 128 anchors of each direction; ``tau_q10``, ``tau_median``, ``tau_q90``: quantiles of the temperatures
        used; ``new_rows``: number of samples seen for the first time (0 without rows). The metrics of the normalizer
        are added, and replace those of equal names. All metrics refer to the global batch, except
        ``effective_negatives``, which refers to this rank's anchors. Empty before the first call. Communicates nothing.
        """
        if self._last is None:
            return {}
        shown = {name: value() if callable(value) else value for name, value in self._shown.items()}
        return {**self._last.metrics(), **shown}


def _leaf(z: Tensor) -> Tensor:
    """Return a detached leaf; a tensor of inference mode is cloned, since autograd cannot record it otherwise."""
    return (z.clone() if z.is_inference() else z.detach()).requires_grad_()
