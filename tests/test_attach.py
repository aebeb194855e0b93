"""attach(): one commit after each real update, and only then."""

import copy
import gc
import itertools
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import compopt
from compopt.estimator import entry
from tests.helpers import assert_same_bits, batches, snapshot

N = 13


class Wrapper:
    """Wrapper like those of accelerate and DeepSpeed: an object with `.optimizer` and no hook tables."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        return self.optimizer.step()


def setting(optimizer_class=torch.optim.SGD, **options):
    """Return one parameter, its optimizer, and an estimator."""
    parameter = torch.nn.Parameter(torch.ones(4))
    options = {"lr": 0.1, **options}
    return parameter, optimizer_class([parameter], **options), compopt.SogCLREstimator(N, tau=0.1)


def commits(est):
    """Return the number of visits committed so far, summed over the rows."""
    return int(est.read(torch.arange(N))["count"].sum())


def deposit(est, parameter, seed=1):
    """Run forward and backward through the parameter with six distinct samples."""
    z1, z2, index = batches(N, 1, seed=seed, dtype=torch.float32)[0]
    loss = est(z1 * parameter, z2, index)
    loss.backward()
    return loss


def many_closures(est, parameter):
    """A step that runs the forward many times; all of its deposits are committed once."""
    optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=3)

    def step():
        optimizer.step(lambda: deposit(est, parameter))
        optimizer.zero_grad()

    return optimizer, step


def scheduled(est, parameter):
    """Warm-up from a learning rate of 0 with zero gradients: updates that change nothing."""
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))

    def step():
        deposit(est, parameter)
        parameter.grad.zero_()
        optimizer.step(closure=None)
        scheduler.step()

    return optimizer, step


def plain(optimizer_class):
    def make(est, parameter):
        optimizer = optimizer_class([parameter], lr=0.1)

        def step():
            for _ in range(3):  # accumulation: the same six samples, whose count rises by one per step
                deposit(est, parameter)
            assert est.pending == 3
            optimizer.step()
            optimizer.step()  # the hook fires with nothing pending (ZeRO: once per parameter group)

        return optimizer, step

    return make


LOOPS = {
    "sgd": plain(torch.optim.SGD),
    "adamw": plain(torch.optim.AdamW),
    "closures": many_closures,
    "scheduler": scheduled,
}


@pytest.mark.parametrize("name", LOOPS)
def test_one_commit_per_step(name):
    parameter, _, est = setting()
    optimizer, step = LOOPS[name](est, parameter)
    est.attach(optimizer)
    for t in range(1, 4):
        step()
        assert (est.t, est.pending, commits(est)) == (t, 0, 6 * t)
    with torch.no_grad():
        est(*batches(N, 1, dtype=torch.float32)[0])
    optimizer.step(closure=lambda: None) if name != "closures" else None
    assert est.t == 3


def test_attaching_twice_is_attaching_once_and_wrappers_are_unwrapped():
    parameter, optimizer, est = setting()
    handles = [est.attach(each) for each in (optimizer, optimizer, Wrapper(Wrapper(optimizer)))]
    assert len({handle.id for handle in handles}) == len(optimizer._optimizer_step_post_hooks) == 1
    deposit(est, parameter)
    optimizer.step()
    assert (est.t, commits(est)) == (1, 6)


HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


def uninitialised(inside, families, patched, name="optimizer"):
    """Return a wrapper that never calls Optimizer.__init__, like those of pytorch_optimizer, with some hook tables."""

    class Kind(torch.optim.Optimizer):  # a new class, since torch patches step() of the class
        param_groups = property(lambda self: getattr(self, name).param_groups)

        def __init__(self):
            for family in families:
                setattr(self, f"_optimizer_{family}_hooks", OrderedDict())
            if patched:
                self._patch_step_function()
            setattr(self, name, inside)

        def step(self, closure=None):
            return inside.step(closure)

        def state_dict(self):
            return inside.state_dict()

    return Kind()


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("tables", range(len(HOOKS) + 1))
def test_a_wrapper_with_some_hook_tables(tables, patched, checkpoint):
    """The hooks are registered where all of them run, or nowhere."""
    parameter, optimizer, est = setting()
    families, patched = HOOKS[:tables], patched and tables >= 2  # a patched step() reads the tables of step()
    wrapper = uninitialised(uninitialised(optimizer, families, patched), families, patched)
    runs_all = patched and tables == len(HOOKS)
    if runs_all and checkpoint:
        with pytest.raises(ValueError, match=r"Kind has its own state_dict\(\)"):
            est.attach(wrapper, checkpoint=True)
    est.attach(wrapper, checkpoint=checkpoint and not runs_all)
    for t in range(1, 4):
        deposit(est, parameter)
        wrapper.step()
        assert (est.t, est.pending) == (t, 0)
    assert not checkpoint or runs_all or wrapper.state_dict()["compopt"]["t"] == 3
    inside, other = uninitialised(optimizer, families, False, name="inside"), compopt.SogCLREstimator(N)
    with pytest.raises(TypeError, match=r"in \.optimizer; got Kind\. Attach the optimizer inside it, or call"):
        other.attach(inside, checkpoint=checkpoint)
    assert not any(getattr(inside, f"_optimizer_{family}_hooks") for family in families)


def test_remove_detaches():
    parameter, optimizer, est = setting()
    handle = est.attach(optimizer)
    handle.remove()
    handle.remove()  # a second call is harmless
    deposit(est, parameter)
    optimizer.step()
    assert est.pending == 1 and len(optimizer._optimizer_step_post_hooks) == 0
    est.attach(optimizer)  # attaching again is allowed
    optimizer.step()
    assert commits(est) == 6


def test_two_estimators_on_one_optimizer():
    parameter, optimizer, first = setting()
    second = compopt.SogCLREstimator(N, tau=0.2)
    first.attach(optimizer)
    handle = second.attach(optimizer)
    for expected in ((6, 6), (12, 6)):
        for est in (first, second):
            deposit(est, parameter)
        optimizer.step()
        assert (commits(first), commits(second)) == expected
        handle.remove()


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused):
    """An injected inf skips the update. With a fused optimizer the hook still fires, and found_inf drops the rows.

    Otherwise the hook does not fire, and the rows stay pending until the next commit (documented).
    """
    parameter, optimizer, est = setting(torch.optim.AdamW, fused=fused)
    est.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    committed = []
    for t in range(4):
        z1, z2, index = batches(N, 1, seed=t, dtype=torch.float32, repeats=False)[0]
        scaler.scale(est(z1 * parameter, z2, index)).backward()
        if t == 1:
            parameter.grad[0] = float("inf")
        before = parameter.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, parameter.detach()) == (t == 1)
        committed.append(commits(est))
        assert est.pending == (0 if fused or t != 1 else 1)
    assert committed[0] == 6 and committed[1] == 6, "a skipped update commits nothing"
    skipped, following = (set(batches(N, 1, seed=t, repeats=False)[0][2].tolist()) for t in (1, 2))
    assert committed[2] == 6 + (6 if fused else len(skipped | following))
    assert committed[3] == committed[2] + 6


# -- the step that initialises the state of an optimizer ---------------------------------------------------------


def tower():
    """Return a model of two layers, and a parameter group for each."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return model, groups_of(model)


def groups_of(model):
    return [{"params": [*layer.parameters()], "lr": 0.1} for layer in model]


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "tensor-lr": lambda groups: torch.optim.Adam([{**g, "lr": torch.tensor(0.1)} for g in groups]),
}


@pytest.mark.parametrize(
    "name, wrapped", [*((name, "bare") for name in OPTIMIZERS), ("adamw", "scheduler"), ("adamw", "accelerate")]
)
def test_a_checkpoint_of_an_optimizer_that_has_not_stepped_commits_nothing(name, wrapped):
    """torch initialises the state by calling step() itself."""
    model, groups = tower()
    optimizer = OPTIMIZERS[name](groups)
    if wrapped == "scheduler":
        torch.optim.lr_scheduler.ConstantLR(optimizer)
    elif wrapped == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        optimizer = accelerate.Accelerator(cpu=True).prepare(optimizer)
    est, hooks = compopt.SogCLREstimator(N, tau=0.1), []
    est.register_step_pre_hook(lambda *_: hooks.append(1))
    est.attach(optimizer)
    z1, z2, index = batches(N, 1, seed=1, dtype=torch.float32)[0]
    loss = est(z1 + model[0].bias + model[1].bias, z2, index)  # this backward uses no saved weights
    get_optimizer_state_dict(model, optimizer)
    get_optimizer_state_dict(model, optimizer)  # SGD has no state after the first call either
    assert est.pending == 1 and est.t == 0 and commits(est) == 0 and not hooks
    loss.backward()
    optimizer.step()
    get_optimizer_state_dict(model, optimizer)
    assert est.pending == 0 and est.t == 1 and commits(est) == 6 and hooks == [1]


def test_a_deep_copy_is_attached_on_its_own():
    """A copy (an EMA twin, a sweep) does not inherit the attachment, and can be attached itself."""
    parameter, optimizer, est = setting()
    est.attach(optimizer)
    twin = copy.deepcopy(est)
    for each in (est, twin):
        deposit(each, parameter)
    optimizer.step()
    assert commits(est) == 6 and commits(twin) == 0 and twin.pending == 1
    twin.attach(optimizer)
    optimizer.step()
    assert commits(est) == 6 and commits(twin) == 6


def test_the_estimator_does_not_mistake_a_new_optimizer_for_an_old_one():
    """A new optimizer may have the address of an old one that was freed."""
    parameter, optimizer, est = setting()
    for t in range(1, 6):
        est.attach(optimizer)
        deposit(est, parameter)
        optimizer.step()
        assert commits(est) == 6 * t
        optimizer = None  # freed before the next one is made
        optimizer = torch.optim.SGD([parameter], lr=0.1)


@pytest.fixture
def accelerator():
    """Yield an accelerator on the CPU with two accumulation steps."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


# -- estimator state in the state of the optimizer ---------------------------------------------------------------


def neuclip():
    return compopt.NeuCLIPEstimator(4, prototypes=8, lr=0.1, updates=2, restart_every=3)


def global_dual():
    normalizer, temperature = compopt.MovingAverageEstimator(N), compopt.TemperatureDual(N, rho=0.5, mode="global")
    return compopt.ContrastiveEstimator(normalizer, temperature)


TRAVELLERS = {
    "sogclr": lambda: compopt.SogCLREstimator(N, tau=0.1),
    "global-dual": global_dual,
    "neuclip": neuclip,
    "emc2": lambda: compopt.EMC2Estimator(N, tau=0.3),
    "dual": lambda: compopt.TemperatureDual(N),
}


class Run:
    """A model of two layers with a parameter group each, a schedule, an estimator, and their checkpoint."""

    def __init__(self, make, seed=0):
        torch.manual_seed(seed)
        self.model, groups = tower()
        self.optimizer = torch.optim.AdamW(groups)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.est = make()

    def train(self, data):
        for z1, z2, index in data:
            if isinstance(self.est, compopt.TemperatureDual):
                tau = self.est.update((self.model(z1) * z2).sum(1).detach(), index)
                loss = (self.model(z1).square().mean(1) * tau.flatten()).mean()
            else:
                loss = self.est(self.model(z1), z2, index)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def state(self):
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}

    def load(self, state):
        for name, value in state.items():
            getattr(self, name).load_state_dict(value)


def differing(a, b, at="state"):
    """Return the paths at which two states differ."""
    if isinstance(a, dict):
        return [f"{at}: {[*a]}, {[*b]}"] * (a.keys() != b.keys()) + [
            each for key in a.keys() & b.keys() for each in differing(a[key], b[key], f"{at}.{key}")
        ]
    if isinstance(a, list):
        return [at] * (len(a) != len(b)) + [
            each for i, (x, y) in enumerate(zip(a, b, strict=False)) for each in differing(x, y, f"{at}.{i}")
        ]
    same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return [] if same else [at]


@pytest.mark.parametrize("name, through", [*((name, "file") for name in TRAVELLERS), ("sogclr", "deepcopy")])
def test_the_state_travels_with_the_optimizer(name, through, tmp_path):
    """A resumed run ends in the same state as an uninterrupted run, bit for bit."""
    data = batches(N, 6, seed=8, dtype=torch.float32)
    whole, again = Run(TRAVELLERS[name]), Run(TRAVELLERS[name], seed=1)
    whole.est.attach(whole.optimizer, checkpoint=True)
    whole.train(data[:3])
    assert whole.est.t == 3
    if through == "file":
        torch.save(whole.state(), tmp_path / "last.pt")
        saved = torch.load(tmp_path / "last.pt", weights_only=True)
    else:
        saved = copy.deepcopy(whole.state())
    whole.train(data[3:])
    again.est.attach(again.optimizer, checkpoint=True)
    before = copy.deepcopy(saved)
    again.load(saved)
    assert again.est.t == 3 and not differing(saved, before)
    assert all("compopt" not in group for group in again.optimizer.param_groups)
    again.train(data[3:])
    assert again.est.t == 6 and not differing(again.state(), whole.state())
    assert not differing(again.est.state_dict(), whole.est.state_dict())


class Proxy(Wrapper):
    """Proxy like that of Lightning, which also has the attributes of the optimizer."""

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_proxy_is_the_optimizer(order):
    _, optimizer, est = setting()
    first, second = (est.attach([optimizer, Proxy(optimizer)][each], checkpoint=True) for each in order)
    assert first is second and len(optimizer._optimizer_step_post_hooks) == 1
    assert [*optimizer.state_dict()] == ["state", "param_groups", "compopt"]


def test_the_second_estimator_gets_its_own_state():
    parameter, optimizer, first = setting()
    second = compopt.SogCLREstimator(2 * N)
    for est in (first, second):
        est.attach(optimizer, checkpoint=True)
    for _ in range(2):
        deposit(first, parameter)
        optimizer.step()
    state = optimizer.state_dict()
    _, other, first_again = setting()
    second_again = compopt.SogCLREstimator(2 * N)
    for est in (first_again, second_again):
        est.attach(other, checkpoint=True)
    other.load_state_dict(state)
    assert (first_again.t, second_again.t) == (2, 0)
    assert_same_bits(snapshot(first_again, N), snapshot(first, N))


def test_an_entry_goes_with_its_handle_or_its_estimator_and_into_no_copy():
    _, optimizer, est = setting()
    handle = est.attach(optimizer, checkpoint=True)
    saved = optimizer.state_dict()
    assert [*copy.deepcopy(optimizer).state_dict()] == ["state", "param_groups"]
    handle.remove()
    handle.remove()
    assert [*optimizer.state_dict()] == ["state", "param_groups"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(optimizer.state_dict())
    est.attach(optimizer, checkpoint=True)
    del est
    assert [*optimizer.state_dict()] == ["state", "param_groups"]
    optimizer.load_state_dict(saved)
    other = compopt.SogCLREstimator(N)
    other.attach(optimizer, checkpoint=True)
    assert [*optimizer.state_dict()] == ["state", "param_groups", "compopt"]


def test_a_state_without_the_entry_is_told():
    parameter, optimizer, est = setting()
    plain = optimizer.state_dict()
    est.attach(optimizer, checkpoint=True)
    deposit(est, parameter)
    optimizer.step()
    with pytest.warns(UserWarning, match="SGD loads has no entry 'compopt': the SogCLREstimator stays") as seen:
        optimizer.load_state_dict(plain)
    assert seen[0].filename == __file__ and est.t == 1


def test_a_load_before_attaching_is_told():
    parameter, optimizer, est = setting()
    first = compopt.SogCLREstimator(N)
    for each in (first, est):
        each.attach(optimizer, checkpoint=True)
    saved = optimizer.state_dict()
    _, late, again = setting()
    first.attach(late, checkpoint=True)
    late.load_state_dict(saved)
    with pytest.warns(UserWarning, match=r"'compopt.1' .* dropped; attach before .*state\['compopt.1'\]") as seen:
        again.attach(late, checkpoint=True)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.attach(late, checkpoint=True)
        late.load_state_dict(saved)  # the remedy in the warning
    assert not any("compopt" in key for group in late.param_groups for key in group)


def test_a_load_of_an_entry_that_nobody_takes_is_told():
    def made(checkpoint):
        optimizer, est = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1), compopt.SogCLREstimator(9)
        return optimizer, est, est.attach(optimizer, checkpoint=checkpoint)

    source = made(True)
    state = source[0].state_dict()
    optimizer, est, handle = made(False)
    with pytest.warns(UserWarning, match="has the entry 'compopt' of an estimator, which is dropped"):
        optimizer.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1).state_dict())
        other = compopt.SogCLREstimator(9)
        other.attach(optimizer)
        est.attach(optimizer, checkpoint=True)
        optimizer.load_state_dict(state)
        handle.remove()
        optimizer.load_state_dict({k: v for k, v in state.items() if k != "compopt"})


def test_rows_are_loaded_after_the_optimizer_has_accepted_its_state():
    parameter, optimizer, est = setting()
    est.attach(optimizer, checkpoint=True)
    saved = optimizer.state_dict()
    deposit(est, parameter)
    optimizer.step()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
    assert est.t == 1 and commits(est) == 6
    optimizer.load_state_dict(saved)
    assert est.t == 0 and commits(est) == 0


def of_part(change):
    """Return a function that changes the state of the normalizer, or that of an object that is used alone."""

    def changed(entry):
        if "parts" not in entry:
            return change(entry)
        return {**entry, "parts": {**entry["parts"], "normalizer": change(entry["parts"]["normalizer"])}}

    return changed


SPOILED = {
    "no dict": lambda entry: 3,
    "a key": of_part(lambda entry: {key: value for key, value in entry.items() if key != "rows"}),
    "a version": lambda entry: {**entry, "version": 99},
    "commits": lambda entry: {**entry, "t": -1},
    "a group": of_part(
        lambda entry: {**entry, "sample_groups": [{**group, "n": 99} for group in entry["sample_groups"]]}
    ),
    "a column": of_part(lambda entry: {**entry, "rows": {**entry["rows"], "more": torch.zeros(N, 2)}}),
    "a tensor": of_part(lambda entry: {**entry, "state": {"more": torch.ones(1)}}),
}


@pytest.mark.parametrize("name", TRAVELLERS)
def test_a_refused_entry_leaves_the_optimizer_and_all_estimators(name):
    run, beside = Run(TRAVELLERS[name]), TRAVELLERS[name]()
    for est in (run.est, beside):
        est.attach(run.optimizer, checkpoint=True)
    run.train(batches(N, 2, dtype=torch.float32))
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.train(batches(N, 2, seed=1, dtype=torch.float32))
    before, pre = copy.deepcopy([run.state(), beside.state_dict()]), []
    run.est.register_load_state_dict_pre_hook(lambda *_: pre.append(1))
    for key, (what, spoil) in itertools.product(("compopt", "compopt.1"), SPOILED.items()):
        with pytest.raises((ValueError, TypeError)):
            run.optimizer.load_state_dict({**saved, key: spoil(saved[key])})
        assert not differing([run.state(), beside.state_dict()], before), f"{what} of {key}"
    pre.clear()
    run.optimizer.load_state_dict(saved)
    assert not differing(run.optimizer.state_dict(), saved) and pre == [1]


def test_an_optimizer_that_refuses_its_state_keeps_no_rows():
    """The state takes up to 1 GiB."""
    _, optimizer, est = setting()
    est.attach(optimizer, checkpoint=True)
    saved = optimizer.state_dict()
    column = weakref.ref(saved["compopt"]["parts"]["normalizer"]["rows"]["log_u"])
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
    del saved
    gc.collect()
    assert column() is None


def test_a_pre_hook_that_drops_the_entry_is_told():
    _, optimizer, est = setting()
    est.attach(optimizer, checkpoint=True)
    keys = ("state", "param_groups")
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, state: {key: state[key] for key in keys})
    with pytest.raises(RuntimeError, match="pre-hook of SGD.* has dropped the entry 'compopt' of the SogCLREstimator"):
        optimizer.load_state_dict(optimizer.state_dict())
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state})
    optimizer.load_state_dict(optimizer.state_dict())


class OfItsOwn(torch.optim.SGD):
    """An optimizer with its own state_dict format."""

    def state_dict(self):
        return {"mine": super().state_dict()}


class Deepspeed(Wrapper):
    """Stand-in for an engine around a torch optimizer."""

    __module__ = "deepspeed.runtime.engine"


REFUSALS = {
    "disk": ({"offload": "disk"}, lambda sgd: sgd, "on the disk"),
    "size": ({}, lambda sgd: sgd, "takes 208 bytes, more than the limit of 100"),
    "own": (None, lambda sgd: OfItsOwn(sgd.param_groups), r"OfItsOwn has its own state_dict\(\)"),
    "deepspeed": (None, lambda sgd: Wrapper(Deepspeed(sgd)), "DeepSpeed saves"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_travel_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "LIMIT", 100)
    options, wrap, message = REFUSALS[name]
    directory = {"offload_dir": tmp_path} if options else {}
    est = compopt.InfoNCEEstimator() if options is None else compopt.SogCLREstimator(N, **options, **directory)
    optimizer = wrap(setting()[1])
    with pytest.raises(ValueError, match=f"{message}.*compopt.save.*compopt.integrations.*Stateful"):
        est.attach(optimizer, checkpoint=True)
    est.attach(optimizer)


def test_torch_distributed_would_drop_the_entry():
    model, groups = tower()
    optimizer, est = torch.optim.AdamW(groups), compopt.SogCLREstimator(N)
    handle = est.attach(optimizer, checkpoint=True)
    with pytest.raises(ValueError, match=r"drops the rest.*compopt.save.*Stateful"):
        get_optimizer_state_dict(model, optimizer)
    handle.remove()
    get_optimizer_state_dict(model, optimizer)


def test_the_state_travels_through_accelerate(accelerator, tmp_path):
    """The state is in the optimizer file of save_state; prepare() reloads the optimizer's state and preserves it."""

    def prepared():
        model, groups = tower()
        optimizer, est = torch.optim.AdamW(groups), compopt.SogCLREstimator(N, tau=0.1)
        est.attach(optimizer, checkpoint=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        est.attach(optimizer, checkpoint=True)
        return model, optimizer, est

    def train(model, optimizer, est, data):
        for z1, z2, index in data:
            with accelerator.accumulate(model):
                accelerator.backward(est(model(z1), z2, index))
                optimizer.step()
                optimizer.zero_grad()

    data = batches(N, 8, dtype=torch.float32)
    whole = prepared()
    train(*whole, data[:4])
    accelerator.save_state(tmp_path / "last")
    assert "compopt" in torch.load(tmp_path / "last" / "optimizer.bin", weights_only=True)
    train(*whole, data[4:])
    accelerator.free_memory()
    again = prepared()
    accelerator.load_state(tmp_path / "last")
    assert again[2].t == 2
    train(*again, data[4:])
    assert again[2].t == whole[2].t == 4
    assert not differing(again[2].state_dict(), whole[2].state_dict())
    assert not differing(again[0].state_dict(), whole[0].state_dict())
