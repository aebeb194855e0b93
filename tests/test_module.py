"""as_module() makes the estimator a submodule of a model: on one rank, under DDP and under FSDP2."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import compopt
from tests import four
from tests.helpers import assert_same_bits, snapshot
from tests.pool import the_pool
from tests.sentences import loss_of
from tests.training import DIM, Encoders, N, micro_batches

NAME = "loss.temperature.log_inverse"
WRAPPERS = ["ddp", "fsdp"] if hasattr(fsdp, "fully_shard") else ["ddp"]
DTYPE = torch.float64


def estimator(learn=True, n=N, **options):
    return compopt.ContrastiveEstimator(
        compopt.MovingAverageEstimator(n, gamma=0.8),
        compopt.FixedTemperature(0.1, learn, DTYPE),
        dtype=DTYPE,
        **options,
    )


class Model(nn.Module):
    """Encoders and their loss."""

    def __init__(self, est=None, state=True):
        super().__init__()
        self.encoders = Encoders(DTYPE)
        self.loss = compopt.as_module(estimator() if est is None else est, state)

    def forward(self, x1, x2, index):
        return self.loss(*self.encoders(x1, x2), index)

    def groups(self):
        return [*self.encoders.groups(), {"params": list(self.loss.parameters()), "weight_decay": 0.0}]


def train(model, data, wrapped=None):
    """Train for one step per batch and return the losses."""
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    handle, losses = model.loss.est.attach(optimizer), []
    wrapped = model if wrapped is None else wrapped
    for x1, x2, index in data:
        loss = wrapped(x1, x2, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    handle.remove()
    return losses


def everything(model):
    return {**snapshot(model.loss.est, N), **{name: p.detach().clone() for name, p in model.named_parameters()}}


# one rank ---------------------------------------------------------------------------------------------------------


def test_the_model_has_the_learned_temperature_once():
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    assert names.count(NAME) == 1 and len(names) == 5
    (own,) = model.loss.est.parameters()
    assert dict(model.named_parameters())[NAME] is own
    assert list(Model(estimator(learn=False)).loss.parameters()) == []


def test_the_module_trains_as_the_estimator_does():
    model, twin, data = Model(), Model(), micro_batches(4)
    losses = train(model, data)
    assert train(twin, data, lambda x1, x2, index: twin.loss.est(*twin.encoders(x1, x2), index)) == losses
    assert_same_bits(everything(model), everything(twin))
    assert not torch.equal(everything(model)[NAME], everything(Model())[NAME])


def test_train_and_eval_reach_the_estimator():
    model = Model()
    assert not model.eval().loss.est.training and not model.loss.training
    model(*micro_batches(1)[0])
    assert model.loss.est.pending == 0
    assert model.train().loss.est.training
    est = estimator().eval()
    assert not compopt.as_module(est).training and not est.training


AROUND = {"EstimatorModule": partial(compopt.as_module, state=False), "StatefulEstimatorModule": compopt.as_module}
if find_spec("sentence_transformers"):
    for loss in ("EstimatorLoss", "CachedEstimatorLoss"):
        AROUND[loss] = partial(loss_of, model=nn.Sequential(nn.Linear(2, 2)), kind=loss)


@pytest.mark.parametrize("kind", AROUND)
def test_modes_that_are_assigned_reach_the_estimator(kind):
    """Lightning saves the attribute ``training`` of all modules, and assigns it later without ``train()``."""
    est = estimator()
    module = AROUND[kind](est)
    for mode in (False, True):
        for each in module.modules():
            each.training = mode
        assert est.training is mode and {each.training for each in module.modules()} == {mode}
        est.train(not mode)
        assert module.train(mode).training is est.training is mode


def test_every_module_around_an_estimator_is_among_these():
    """The loss of open_clip is missing, since open_clip calls it in training only."""
    known = {compopt.integrations.open_clip.EstimatorLoss, *(type(build(estimator())) for build in AROUND.values())}
    classes = [nn.Module]
    for each in classes:
        classes += each.__subclasses__()
    assert {each for each in classes if each.__module__.startswith("compopt.")} == known


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("learn", [False, True])
def test_state_dict_carries_rows_and_temperature(learn, assign):
    model, data = Model(estimator(learn)), micro_batches(6)
    train(model, data[:3])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Model(estimator(learn))
    train(other, data[3:])
    assert str(other.load_state_dict(torch.load(file), assign=assign)) == "<All keys matched successfully>"
    assert_same_bits(everything(model), everything(other))
    assert train(model, data[3:]) == train(other, data[3:])  # the estimator uses the loaded parameter
    assert_same_bits(everything(model), everything(other))


@pytest.mark.parametrize("strict", [True, False])
def test_a_temperature_that_diverged_does_not_keep_an_earlier_state_out(strict):
    """The temperature is loaded as a parameter, or keeps its value if the state lacks it."""
    model = Model()
    state = copy.deepcopy(model.state_dict())
    before = everything(model)
    with torch.no_grad():
        model.loss.temperature.log_inverse.fill_(torch.nan)
    if strict:
        model.load_state_dict(state)
        assert_same_bits(before, everything(model))
    else:
        model.load_state_dict({key: value for key, value in state.items() if key != NAME}, strict=False)
        assert model.loss.temperature.log_inverse.isnan()


AVERAGES = {
    "in place": lambda old, new: old.mul_(0.9).add_(new, alpha=0.1),
    "product": lambda old, new: old * 0.9 + new * 0.1,
    "product from the left": lambda old, new: 0.9 * old + 0.1 * new,
    "copy": lambda old, new: old.copy_(new),
    "floats only": lambda old, new: old.dtype.is_floating_point and old.mul_(0.9).add_(new, alpha=0.1),
}


@pytest.mark.parametrize("start", [copy.deepcopy, dict])
@pytest.mark.parametrize("way", AVERAGES)
def test_an_average_over_the_state_dict_is_told_what_to_average(way, start):
    model = Model()
    averages = start(model.state_dict())
    with pytest.raises(AttributeError, match=r"not a tensor; average model\.parameters.*state=False"):
        for name, value in model.state_dict().items():
            AVERAGES[way](averages[name], value)
    model = Model(state=False)
    averages = start(model.state_dict())
    for name, value in model.state_dict().items():
        AVERAGES[way](averages[name], value)


def test_without_state_only_parameters_are_in_the_state_dict():
    model = Model(state=False)
    assert [name for name in model.state_dict() if name.startswith("loss")] == [NAME]
    with pytest.raises(RuntimeError, match="Unexpected.*_extra_state"):
        model.load_state_dict(Model().state_dict())
    with pytest.raises(RuntimeError, match="Missing.*_extra_state"):
        Model().load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=rf"\[{N + 1}\].*\[{N}\]"):  # another configuration
        Model().load_state_dict(Model(estimator(n=N + 1)).state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_whole_and_on_their_own(duplicate):
    model, data = Model(), micro_batches(4)
    train(model, data[:2])
    twin = duplicate(model)
    assert_same_bits(everything(model), everything(twin))
    before = everything(model)
    losses = train(twin, data[2:])
    assert_same_bits(before, everything(model))
    assert train(model, data[2:]) == losses
    assert_same_bits(everything(model), everything(twin))


def test_conversions_change_no_dtype_of_the_estimator():
    model = Model()
    for convert in ("half", "bfloat16", "float", "double"):
        getattr(model, convert)()
        assert {p.dtype for p in model.loss.parameters()} == {DTYPE}
        assert model.loss.est.read(torch.arange(2))["log_u"].dtype == DTYPE
        features = torch.randn(2, 4, DIM, dtype=next(model.encoders.parameters()).dtype)
        model(*features, torch.arange(4)).backward()
    with pytest.raises(ValueError, match="device must be one that holds values"):  # the estimator's own error
        model.to("meta")


def test_freezing_replacing_and_borrowing_the_parameter():
    """The estimator follows requires_grad_, a replaced Parameter, and functional_call."""
    model, (batch,) = Model(), micro_batches(1)
    model.loss.requires_grad_(False)
    model(*batch).backward()
    assert model.loss.temperature.log_inverse.grad is None
    usual = model(*batch).item()
    model.loss.temperature.log_inverse = nn.Parameter(torch.zeros((), dtype=DTYPE))
    model.loss.est.discard()
    loss = model(*batch)
    loss.backward()
    assert model.loss.temperature.log_inverse.grad is not None and abs(loss.item() - usual) > 0.1
    borrowed = {NAME: torch.tensor(2.302585092994046, dtype=DTYPE)}
    assert abs(torch.func.functional_call(model, borrowed, batch).item() - usual) < 1e-9


def test_an_estimator_without_a_call_serves_as_state():
    module = compopt.as_module(compopt.MovingAverageEstimator(5, gamma=0.5))
    module.est.update(torch.zeros(2), torch.arange(2))
    module.est.step()
    assert module.state_dict()["_extra_state"]["rows"]["count"].sum() == 2
    with pytest.raises(TypeError, match="MovingAverageEstimator has no call"):
        module(torch.zeros(2))


@pytest.mark.parametrize("kind", four.KINDS)
def test_an_object_alone_in_a_model(kind):
    """The object's state is part of the model's; a copy of the model has its own object, under all attribute names."""

    def built():
        model = nn.Module()
        model.encoders, model.state = Encoders(DTYPE), compopt.as_module(four.KINDS[kind](dtype=DTYPE))
        model.obj = model.state.est
        return model

    def train(model, data):
        for x1, x2, index in data:
            four.loss(model.obj, *model.encoders(x1, x2), index)
            model.obj.step()

    model, data, loaded = built(), micro_batches(4), built()
    train(model, data[:2])
    twin, before = copy.deepcopy(model), four.state(model.obj)
    loaded.load_state_dict(model.state_dict())
    assert twin.state.est is twin.obj is not model.obj
    for other in (twin, loaded):
        assert torch.equal(four.state(other.obj), before)
        train(other, data[2:])
    assert torch.equal(four.state(model.obj), before) and not torch.equal(four.state(twin.obj), before)
    assert torch.equal(four.state(twin.obj), four.state(loaded.obj))
    assert not model.eval().obj.training and model.train().obj.training


def test_a_part_is_a_module_of_its_own():
    est = estimator()
    for part, names in ((est.normalizer, []), (est.temperature, ["learnable.log_inverse"])):
        module = compopt.as_module(part)
        assert [name for name, _ in module.named_parameters()] == names
        module.load_state_dict(module.state_dict())
    assert list(est.normalizer.parameters()) == [] and list(est.temperature.parameters()) == list(est.parameters())


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="est must be an estimator, got Linear"):
        compopt.as_module(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="state must be True or False, got 1"):
        compopt.as_module(estimator(), 1)

    class Own(compopt.FixedTemperature):
        def learned(self):
            yield nn.Parameter(torch.zeros(()))

    with pytest.raises(TypeError, match="learnable"):
        compopt.as_module(compopt.ContrastiveEstimator(compopt.BatchNormalizer(), Own()))


def test_an_average_of_the_parameters():
    """AveragedModel averages a learned temperature too, and has the rows of the model at its construction."""
    model, data = Model(), micro_batches(2)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    before = everything(model)[NAME]
    train(model, data)
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged.module.loss.temperature.log_inverse, (before + everything(model)[NAME]) / 2)
    averaged.load_state_dict(copy.deepcopy(averaged.state_dict()))
    assert (averaged.module.loss.est.t, model.loss.est.t) == (0, 2)


# two ranks --------------------------------------------------------------------------------------------------------


def wrapped(model, kind):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return fsdp.fully_shard(model, ignored_params=set(model.loss.parameters()))


def run_wrapped(group, kind):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    rank = dist.get_rank()
    model = Model()
    wrap = wrapped(model, kind)
    losses = train(model, micro_batches(4, rank, 2), wrap)
    state = copy.deepcopy(get_model_state_dict(wrap, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    alone = copy.deepcopy(model.state_dict()) if rank == 0 and kind == "ddp" else None  # the plain PyTorch call
    before = snapshot(model.loss.est, N)
    train(model, micro_batches(2, rank, 2, seed=9), wrap)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(wrap, copy.deepcopy(state) if rank == 0 else {}, options=options)
    assert_same_bits(before, snapshot(model.loss.est, N))
    return losses, state, alone


@pytest.mark.distributed
@pytest.mark.parametrize("kind", WRAPPERS)
def test_two_ranks_equal_one(kind):
    one = Model()
    losses = train(one, micro_batches(4))
    for found, state, alone in the_pool(2, timeout=120).run(run_wrapped, 2, kind):
        assert found == pytest.approx(losses, rel=1e-9)
        for whole in filter(None, (state, alone)):
            model = Model()
            model.load_state_dict(whole)
            for name, value in everything(one).items():
                torch.testing.assert_close(everything(model)[name], value, rtol=1e-8, atol=1e-10)


def run_split(group, directory):
    refused = []
    for est in (
        estimator(shard=True),
        estimator(offload="disk", offload_dir=directory),
        compopt.NeuCLIPEstimator(DIM, prototypes=4),
        compopt.MovingAverageEstimator(10, shard=True),
        compopt.MovingAverageEstimator(10, offload="disk", offload_dir=f"{directory}/alone"),
    ):
        compopt.as_module(est, state=False)
        with pytest.raises(ValueError, match="state=False.*compopt.save"):
            compopt.as_module(est)
        refused.append(type(est).__name__)
    return refused


@pytest.mark.distributed
def test_a_state_that_only_all_ranks_can_collect_is_refused(tmp_path):
    assert [len(refused) for refused in the_pool(2, timeout=120).run(run_split, 2, str(tmp_path))] == [5, 5]
    compopt.as_module(compopt.NeuCLIPEstimator(DIM, prototypes=4))  # one rank has the whole state
