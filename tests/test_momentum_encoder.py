"""MomentumEncoder, the moving average of a model: in plain torch, DDP and FSDP2."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compopt
from compopt.integrations import amp
from tests.cached import with_adapters
from tests.helpers import through_a_file, whole
from tests.pool import the_pool
from tests.training import DIM, Encoders, micro_batches, needs_fsdp2

DECAY, STEPS = 0.9, 6


def memory(**options):
    return compopt.MemoryEstimator(DIM, 24, 0.3, dtype=torch.float64, momentum=True, **options)


def parameters(module):
    """Return the values of all parameters; sharded parameters are gathered."""
    found = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in module.named_parameters()}
    return {name: p.detach().clone() for name, p in found.items()}


class Run:
    """Training with a momentum encoder, whose copy is compared with a separately computed moving average."""

    def __init__(self, wrap=lambda model, encoder: model, rank=0, ranks=1):
        self.model, self.data = Encoders(), micro_batches(2 * STEPS, rank, ranks)
        self.encoder = compopt.MomentumEncoder(self.model, DECAY)
        self.wrapped, self.est = wrap(self.model, self.encoder), memory()
        self.optimizer = torch.optim.AdamW(self.model.groups(), lr=1e-2)
        self.est.attach(self.optimizer), self.encoder.attach(self.est)
        self.average = parameters(self.model)

    def train(self, first=0, last=STEPS):
        trace = []
        for x1, x2, index in self.data[first:last]:
            keys = self.encoder(x1, x2)
            loss = self.est(*self.wrapped(x1, x2), index, keys=keys)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for name, p in parameters(self.model).items():
                self.average[name] = DECAY * self.average[name] + (1 - DECAY) * p
            trace.append(loss.item())
        return trace

    def assert_follows(self):
        for name, p in parameters(self.encoder.module).items():
            torch.testing.assert_close(p, self.average[name], rtol=1e-12, atol=1e-14)

    def state(self):
        parts = self.model, self.encoder, self.est, self.optimizer
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(self, states):
        for part, state in zip((self.model, self.encoder, self.est, self.optimizer), states, strict=True):
            part.load_state_dict(state)


def test_it_is_updated_once_per_update_and_has_no_graph():
    run = Run()
    keys = run.encoder(*run.data[0][:2])
    assert all(
        torch.equal(a, b) and not a.requires_grad for a, b in zip(keys, run.model(*run.data[0][:2]), strict=True)
    )
    run.train()
    run.assert_follows()
    assert not any(p.requires_grad for p in run.encoder.module.parameters())
    with torch.no_grad():
        run.est.step()  # nothing is pending
    run.assert_follows()


def test_attaching_again_updates_once():
    run = Run()
    run.encoder.attach(run.est)
    run.train()
    run.assert_follows()
    handle = run.encoder.attach(run.est)
    handle.remove()
    before = parameters(run.encoder.module)
    run.train(0, 1)
    assert all(torch.equal(p, before[name]) for name, p in parameters(run.encoder.module).items())


def test_an_encoder_that_is_replaced_is_forgotten():
    """After weights were unfrozen the former copy cannot be updated; it must not raise in the steps of the new one."""
    run = Run()
    run.model.first.weight.requires_grad_(False)
    run.encoder = compopt.MomentumEncoder(run.model, DECAY)
    run.encoder.attach(run.est)
    run.train(0, 1)
    run.model.first.weight.requires_grad_(True)
    run.encoder = compopt.MomentumEncoder(run.model, DECAY)
    run.encoder.attach(run.est)
    run.average = parameters(run.model)
    run.train(1, 3)
    run.assert_follows()


def test_a_skipped_step_moves_nothing():
    run, scaler = Run(), torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = amp.attach(run.est, run.optimizer, scaler)
    for step, (x1, x2, index) in enumerate(run.data[:3]):
        before = parameters(run.encoder.module)
        keys = run.encoder(x1, x2)
        scaler.scale(run.est(*run.model(x1, x2), index, keys=keys)).backward()
        if step == 1:
            run.model.first.weight.grad[0, 0] = torch.inf
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        same = [torch.equal(p, before[name]) for name, p in parameters(run.encoder.module).items()]
        assert all(same) if step == 1 else not any(same)
    handle.remove()


def test_frozen_parameters_are_shared_and_adapters_averaged():
    model = with_adapters(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    encoder = compopt.MomentumEncoder(model, DECAY)
    own, copied = dict(model.named_parameters()), dict(encoder.module.named_parameters())
    assert [name for name in own if own[name] is copied[name]] == [n for n in own if not own[n].requires_grad]
    assert set(encoder.state_dict()["parameters"]) == {name for name, p in own.items() if p.requires_grad}
    before = parameters(encoder.module)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    encoder.update()
    for name, p in copied.items():
        torch.testing.assert_close(p, before[name] + (0.1 if own[name].requires_grad else 1))
    assert all(p.requires_grad == own[name].requires_grad for name, p in model.named_parameters())


def test_buffers_are_copied_and_batch_norm_uses_the_batch():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    encoder = compopt.MomentumEncoder(model)
    x = torch.randn(16, 4) * 3
    assert torch.equal(encoder(x), model(x)), "in training mode"
    model(x)
    encoder.update()
    assert int(encoder.module[1].num_batches_tracked) == 2
    assert torch.equal(encoder.module[1].running_var, model[1].running_var)
    encoder.module.eval()
    assert torch.equal(encoder(x), copy.deepcopy(model).eval()(x))


def test_tied_parameters_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    encoder = compopt.MomentumEncoder(model, DECAY)
    start = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    encoder.update()
    assert encoder.module[0].weight is encoder.module[1].weight
    torch.testing.assert_close(encoder.module[0].weight.detach(), start + 0.1)


@pytest.mark.parametrize("how", ["resumed", "copied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_half_precision_do_not_stand_still(dtype, how):
    """A step of 0.001 from 1 is below half a unit in the last place; the average keeps it, also after a resume."""
    model = nn.Linear(4, 4).to(dtype)
    nn.init.ones_(model.weight)
    encoder = compopt.MomentumEncoder(model, 0.999)
    nn.init.constant_(model.weight, 2.0)
    for step in range(200):
        if step == 100 and how == "resumed":
            state = through_a_file(encoder.state_dict())
            encoder = compopt.MomentumEncoder(model, 0.999)
            encoder.load_state_dict(state)
        elif step % 10 == 0 and how == "copied":
            model, encoder = copy.deepcopy((model, encoder))
        encoder.update()
    average = encoder.state_dict()["parameters"]["weight"]
    torch.testing.assert_close(average, torch.full((4, 4), 2 - 0.999**200), rtol=1e-5, atol=0)
    assert torch.equal(encoder.module.weight, average.to(dtype))


def test_a_state_read_in_inference_mode_does_not_end_the_training():
    model = nn.Linear(4, 4).bfloat16()
    encoder = compopt.MomentumEncoder(model, 0.5)
    with torch.inference_mode():
        state = encoder.state_dict()
    encoder.update()
    encoder.load_state_dict(state)
    encoder.update()


def test_a_loaded_encoder_that_only_evaluates_is_not_forgotten():
    state = compopt.MomentumEncoder(model := nn.Linear(2, 2)).state_dict()
    encoder = compopt.MomentumEncoder(model)
    encoder.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(300):
            encoder(torch.ones(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_to_full_precision_forgets_averages(dtype):
    """Stale averages of half-precision parameters would overwrite loaded values or return after another cast."""
    model = nn.Linear(4, 4).to(dtype)
    encoder = compopt.MomentumEncoder(model, DECAY)
    encoder.update()
    model.float(), encoder.module.float()
    state = {"parameters": {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, "buffers": {}}
    encoder.load_state_dict(state)
    assert torch.equal(encoder.module.weight, torch.ones(4, 4))


class Table(nn.Module):
    """A layer with a non-persistent buffer that grows with the inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_buffer("table", torch.zeros(1, 4), persistent=False)
        self.register_buffer("scale", torch.ones(()))


@pytest.mark.parametrize("shape", [(5, 4), (4,)])
def test_a_buffer_may_change_its_shape_and_is_no_state_if_not_persistent(shape):
    model = Table()
    encoder = compopt.MomentumEncoder(model)
    fresh = encoder.state_dict()
    model.layer.table = torch.full(shape, 2.0)
    encoder.update()
    assert torch.equal(encoder.module.layer.table, model.layer.table)
    assert encoder.module.layer.table is not model.layer.table
    assert set(encoder.state_dict()["buffers"]) == {"scale"}
    compopt.MomentumEncoder(Table()).load_state_dict(encoder.state_dict())
    encoder.load_state_dict(fresh)


def test_wrappers_that_rename_their_state_lose_no_buffer():
    """Activation checkpointing removes its prefix from the names in state_dict(), but not in named_buffers()."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))
    encoder = compopt.MomentumEncoder(model)
    names = {name.rpartition(".")[2] for name in encoder.state_dict()["buffers"]}
    assert names == {"running_mean", "running_var", "num_batches_tracked"}


def test_what_an_update_refuses_changes_nothing():
    def refused(change, message):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        encoder = compopt.MomentumEncoder(model, DECAY)
        before = parameters(encoder.module)
        with torch.no_grad():
            model[1].weight.add_(1)
        change(model, encoder)
        with pytest.raises(ValueError, match=message):
            encoder.update()
        assert all(torch.equal(p, before[name]) for name, p in parameters(encoder.module).items())

    refused(lambda model, _: model.register_buffer("scale", torch.ones(())), "the model has 1 buffers and its copy 0")
    refused(lambda model, _: model.requires_grad_(), "0.weight required no gradient.*make a new MomentumEncoder")
    refused(lambda _, encoder: setattr(encoder, "decay", 1.5), r"decay must be in \[0, 1\), got 1.5")


def test_weights_that_changed_before_the_first_update_are_noticed():
    """Warn if a model is loaded after the copy is made, but not if the copy is also loaded or has been updated."""
    x = torch.randn(2, 4)
    for known in (False, True):
        model = nn.Linear(4, 4)
        encoder = compopt.MomentumEncoder(model)
        state = encoder.state_dict()
        nn.init.ones_(model.weight)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            encoder.load_state_dict(state) if known else None
            encoder(x), encoder(x)
            encoder.update()
            encoder(x)
        assert len(caught) == (0 if known else 1)
        assert all("weights of the model have changed" in str(w.message) and w.filename == __file__ for w in caught)


def test_a_replaced_forward_is_noticed():
    model = nn.Sequential(nn.Linear(4, 4))
    usual = model[0].forward
    model[0].forward = lambda x: usual(x)  # as wrappers for mixed precision or for offloading do
    with pytest.warns(
        UserWarning, match="the forward of 0 was replaced by a function, which the copy shares"
    ) as caught:
        compopt.MomentumEncoder(model)
    assert caught[0].filename == __file__


def test_one_that_is_never_updated_is_noticed():
    encoder = compopt.MomentumEncoder(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    for _ in range(255):
        encoder(x)
    with pytest.warns(UserWarning, match="256 times and never updated.*encoder.attach"):
        encoder(x)


def test_what_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got function"):
        compopt.MomentumEncoder(lambda x: x)
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got 1"):
        compopt.MomentumEncoder(model, 1)
    with pytest.raises(ValueError, match="parameter weight is not initialised yet"):
        compopt.MomentumEncoder(nn.LazyLinear(4))
    old = nn.Sequential(nn.Linear(4, 4))
    old[0]._fsdp_wrapped_module = nn.Linear(4, 4)  # as FSDP1 names it
    with pytest.raises(ValueError, match="FSDP1, which is not supported; use fully_shard"):
        compopt.MomentumEncoder(old)
    encoder = compopt.MomentumEncoder(model)
    with pytest.raises(TypeError, match="state_dict"):
        encoder.load_state_dict(5)
    with pytest.raises(TypeError, match=r"est must be an estimator.*got SGD; without one call encoder.update\(\)"):
        encoder.attach(torch.optim.SGD(model.parameters(), 1.0))
    model.double()
    with pytest.raises(
        ValueError, match="weight is Parameter.*float32.*move, cast or fully_shard encoder.module in the same way"
    ):
        encoder.update()
    model.float().extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="the model has 4 parameters and its copy 2"):
        encoder.update()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("buffers"), "the state of a MomentumEncoder has"),
        (lambda state: state.update(parameters=None), "parameters of the checkpoint must be a dict"),
        (lambda state: state["parameters"].pop("bias"), r"must have the entries \['bias'\] and none of \[\]"),
        (lambda state: state["parameters"].update(bias=torch.ones(5)), r"has shape \(5,\), expected \(4,\)"),
        (lambda state: state["parameters"].update(bias=torch.ones(4, device="meta")), "bias .* is on the meta"),
        (lambda state: state["parameters"].update(bias=torch.full((4,), torch.nan)), "must be finite, got nan"),
        (lambda state: state["parameters"].update(bias=torch.ones(4).long()), "bias .*: the checkpoint has"),
    ],
)
def test_a_state_of_another_model_is_refused(change, message):
    encoder = compopt.MomentumEncoder(nn.Linear(4, 4))
    state = encoder.state_dict()
    before = parameters(encoder.module)
    state["parameters"]["weight"] = torch.zeros(4, 4)
    change(state)
    with pytest.raises((TypeError, ValueError), match=message):
        encoder.load_state_dict(state)
    assert all(torch.equal(p, before[name]) for name, p in parameters(encoder.module).items())


# -- ranks -----------------------------------------------------------------------------------------------------------


def sharded(model, encoder):
    """Apply FSDP2 to the model and, in the same way, to the copy."""
    from torch.distributed.fsdp import fully_shard

    for each in (model, encoder.module):
        for layer in (each.first, each.second, each):
            fully_shard(layer)
    return model


WRAPPERS = {"ddp": lambda model, encoder: DistributedDataParallel(model), "fsdp2": sharded}


def on_ranks(group, wrapper):
    run = Run(WRAPPERS[wrapper], dist.get_rank(), dist.get_world_size())
    losses = run.train()
    run.assert_follows()
    again, states = Run(WRAPPERS[wrapper], dist.get_rank(), dist.get_world_size()), run.state()
    again.train(0, 2)
    again.load(states)
    resumed = again.train(STEPS, 2 * STEPS) == run.train(STEPS, 2 * STEPS)
    if wrapper == "fsdp2":
        whole = {"parameters": parameters(run.encoder.module), "buffers": {}}
        with pytest.raises(ValueError, match="is sharded, and whole in the state; load it before fully_shard"):
            run.encoder.load_state_dict(whole)
    try:
        compopt.MomentumEncoder(run.wrapped)
    except ValueError as error:
        return losses, parameters(run.encoder.module), resumed, str(error)


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp2", marks=needs_fsdp2)])
def test_two_ranks_equal_one(wrapper):
    """Losses and the copy's weights agree, a resume is bit-identical, and a wrapped model is rejected."""
    alone = Run()
    expected = alone.train()
    alone.train(STEPS, 2 * STEPS)
    for losses, weights, resumed, message in the_pool(2, timeout=120).run(on_ranks, 2, wrapper):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-10, atol=1e-12)
        for name, p in parameters(alone.encoder.module).items():
            torch.testing.assert_close(weights[name], p, rtol=1e-8, atol=1e-10)
        assert resumed
        assert "cannot be copied; create the encoder" in message


def in_half_precision(group):
    """Return the averages of sharded half-precision parameters, the copy's parameters and the model's parameters."""
    model = Encoders(torch.bfloat16)
    encoder = compopt.MomentumEncoder(model, DECAY)
    sharded(model, encoder)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for _ in range(3):
        encoder.update()
    averages = {name: p.full_tensor() for name, p in encoder.state_dict()["parameters"].items()}
    return averages, parameters(encoder.module), parameters(model)


@needs_fsdp2
@pytest.mark.distributed
def test_sharded_parameters_in_half_precision_follow_too():
    start = parameters(Encoders(torch.bfloat16))
    for averages, weights, trained in the_pool(2).run(in_half_precision, 2):
        for name, average in averages.items():
            expected = start[name].float().lerp(trained[name].float(), 1 - DECAY**3)
            torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(weights[name], average.bfloat16())


def of_other_seeds(group):
    """Copy a rank-dependent model before and after DDP wraps it; return the late copy's weights and the warnings."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 4)
    early = compopt.MomentumEncoder(model)
    wrapped = DistributedDataParallel(model)
    late = compopt.MomentumEncoder(wrapped.module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        late(torch.ones(2, 4))
        before = len(caught)
        early(torch.ones(2, 4))
    return late.module.weight.clone(), before, [str(w.message) for w in caught]


@pytest.mark.distributed
def test_ddp_gives_the_weights_of_rank_0_to_copies_that_are_made_afterwards():
    (one, before, told), (other, before_too, told_too) = the_pool(2).run(of_other_seeds, 2)
    assert torch.equal(one, other) and before == before_too == 0
    assert not told and "those of rank 0 when DistributedDataParallel wrapped" in told_too[0]


def test_an_estimator_without_commits_is_refused():
    encoder = compopt.MomentumEncoder(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="DCLEstimator has no state"):
        encoder.attach(compopt.DCLEstimator())
    est = compopt.DCLEstimator()
    compopt.ScoreKeeper(4).attach(est)
    encoder.attach(est)


@pytest.mark.parametrize("before", ["update", "state_dict"])
def test_weights_loaded_into_a_copy_in_half_precision_are_averaged_from_then_on(before):
    model = nn.Linear(4, 3).bfloat16()
    encoder = compopt.MomentumEncoder(model, 0.75)
    getattr(encoder, before)()
    encoder.module.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    encoder.update()
    torch.testing.assert_close(
        encoder.module.weight - model.weight, torch.full((3, 4), 0.75).bfloat16(), rtol=0.1, atol=0
    )


def test_compiled_models_are_copied_without_a_warning_and_share_states_with_others():
    model = nn.Linear(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder = compopt.MomentumEncoder(torch.compile(model, backend="eager"), 0.5)
    plain = compopt.MomentumEncoder(nn.Linear(4, 4))
    plain.load_state_dict(encoder.state_dict())
    assert torch.equal(plain.module.weight, model.weight)
    encoder.load_state_dict(compopt.MomentumEncoder(nn.Linear(4, 4)).state_dict())


def test_an_attached_encoder_is_pickled_without_its_hook():
    model = nn.Linear(4, 4)
    encoder = compopt.MomentumEncoder(model)
    encoder.attach(compopt.recommended(4, momentum=True))
    again_model, again = pickle.loads(pickle.dumps((model, encoder)))
    with torch.no_grad():
        again_model.weight.add_(1.0)
    again.update()
    assert torch.allclose(again.module.weight, model.weight + 0.01)


def test_a_buffer_that_is_finite_in_the_copy_is_so_in_its_state():
    """A state with a bad buffer is refused before any weight is copied; a mask of -inf is none."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    encoder, state = compopt.MomentumEncoder(model), compopt.MomentumEncoder(copy.deepcopy(model)).state_dict()
    encoder.load_state_dict(state)
    before = whole(encoder)
    state["parameters"]["0.weight"] = torch.zeros(4, 4)
    for name, bad in (("1.running_mean", torch.nan), ("1.running_var", torch.inf)):
        wrong = {**state["buffers"], name: torch.full((4,), bad)}
        with pytest.raises(ValueError, match=f"{name} of MomentumEncoder.buffers must be finite, got {bad}"):
            encoder.load_state_dict({**state, "buffers": wrong})
        assert whole(encoder) == before


def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Linear(4, 4)
    model.last = model(torch.ones(1, 4))
    with pytest.raises(ValueError, match="cannot be copied"):
        compopt.MomentumEncoder(model)


def test_a_shared_parameter_that_is_replaced_is_noticed():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    encoder = compopt.MomentumEncoder(model)
    encoder.update()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="bias, which is shared with the copy, was replaced"):
        encoder.update()


def test_weights_that_are_not_finite_are_not_taken_for_others():
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0] = torch.nan
    encoder = compopt.MomentumEncoder(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder(torch.ones(1, 4))
