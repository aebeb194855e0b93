"""Objects that own their state: used alone, held by a container, shared, and moved between compositions."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt.estimator import Column, Estimate
from compopt.stores.snapshot import Snapshot
from tests.helpers import assert_same_bits, generator, near, tensors_of
from tests.pool import the_pool
from tests.test_alone import DIM, N, data

TAU = 0.2
OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}
I, G = torch.arange(3), torch.zeros(3)  # noqa: E741


def call(est, index, seed=0, **keys):
    """Call a ContrastiveEstimator and run backward, without a commit; return the loss."""
    z1, z2 = torch.randn(2, len(index), DIM, generator=generator(seed)).to(est.dtype).requires_grad_().unbind()
    loss = est(z1, z2, torch.as_tensor(index), **keys)
    loss.backward()
    return loss.item()


def sogclr(mode="bimodal", steps=((0, 1, 2, 3), (2, 3, 4, 5)), **options):
    options = {"gamma": 0.6, "tau": TAU, "dtype": torch.float64, **options}
    est = compopt.SogCLREstimator(N, mode=mode, **options)
    for seed, index in enumerate(steps):
        call(est, index, seed)
        est.step()
    return est


def isogclr(mode="bimodal", n=N, optimizer="adam", **options):
    """Return an estimator whose normalizer rows have the same meaning as SogCLR's."""
    options = {"reference": "none", "tau_init": TAU, "tau_min": 0.05, "tau_max": 1.0, "rho": 0.1, **options}
    return compopt.ISogCLREstimator(n, gamma=0.6, mode=mode, optimizer=optimizer, **{"dtype": torch.float64, **options})


def compose(u, temperature=None, **options):
    return compopt.ContrastiveEstimator(u, temperature or compopt.FixedTemperature(TAU), **options)


# -- state ---------------------------------------------------------------------------------------------------------


def test_the_state_is_a_tree():
    est = isogclr()
    call(est, range(4)), est.step()
    state = est.state_dict()
    assert set(state) == {"version", "config", "t", "parts"} and state["version"] == 2
    assert list(state["parts"]) == ["normalizer", "temperature"]
    for name, part in state["parts"].items():
        assert {"version", "config", "t", "sample_groups", "rows", "state"} <= set(part)
        own = getattr(est, name).state_dict()
        assert_same_bits(tensors_of(own), tensors_of(part))
        assert own["t"] == part["t"] == 1 and own["sample_groups"] == part["sample_groups"]
    assert set(state["parts"]["normalizer"]["rows"]) == {"log_u", "count"}
    assert set(state["parts"]["temperature"]["rows"]) == {"tau", "tau_exp_avg", "tau_exp_avg_sq", "count"}


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_rows_of_sogclr_start_isogclr(mode):
    """The moving averages continue; temperatures were never visited, and take their next step as a first one."""
    source, est, fresh = sogclr(mode), isogclr(mode), isogclr(mode)
    index = torch.arange(N)
    est.normalizer.load_state_dict(source.normalizer.state_dict())
    assert_same_bits({"log_u": est.read(index)["log_u"]}, {"log_u": source.read(index)["log_u"]})
    assert est.read(index)["count"].tolist() == [1, 1, 2, 2, 1, 1] + [0] * 17
    assert est.temperature.read(index)["count"].sum() == 0 and (est.temperature.read(index)["tau"] == TAU).all()
    assert (est.t, est.normalizer.t, est.temperature.t) == (0, 2, 0)
    for each in (est, fresh):
        each.temperature.sample_groups[0]["lr"] = 1e-3
        call(each, [0, 1, 2, 3, 6, 8], seed=7), each.step()
    moved, first = est.read(index), fresh.read(index)
    near(moved["log_u"][[6, 8]], first["log_u"][[6, 8]], 1e-12)
    assert ((moved["log_u"] - first["log_u"])[:4].abs() > 1e-3).all()
    near((moved["tau"][:4] - TAU).abs(), torch.full_like(moved["tau"][:4], 1e-3), 1e-5)  # lr times a sign
    assert moved["count"][:4].tolist() == [2, 2, 3, 3]  # the largest count of the parts
    assert est.temperature.read(index)["count"][:4].tolist() == [1] * 4


def test_temperatures_of_one_run_serve_another_composition():
    source = isogclr()
    for seed in range(3):
        call(source, range(6), seed), source.step()
    est = compose(
        compopt.MCMCNegativeSampler(N), compopt.TemperatureDual(N, optimizer="adam", lr=0.5), dtype=torch.float64
    )
    call(est, range(4)), est.step()
    loads = []
    est.temperature.register_load_state_dict_post_hook(lambda who: loads.append(who is est.temperature))
    est.temperature.load_state_dict(source.temperature.state_dict())
    index = torch.arange(N)
    assert_same_bits(est.temperature.read(index), source.temperature.read(index))
    assert loads == [True] and est.t == 1 and est.temperature.t == 3
    assert est.sample_groups[0]["lr"] == source.sample_groups[0]["lr"]  # the state has the hyper-parameters too
    assert est.normalizer.read(index)["count"].tolist() == [1] * 4 + [0] * 19


def test_a_state_of_use_alone_fits_a_part_with_one_value_per_sample():
    tau, d = compopt.TemperatureDual(N, tau_init=TAU, tau_max=1.0, lr=0.1), data()[0]
    tau.update(d["gradient"].float(), d["index"]), tau.step()
    for options in ({"mode": "unimodal"}, {"directions": "forward"}):
        est = isogclr(optimizer="momentum", dtype=torch.float32, **options)
        est.temperature.load_state_dict(tau.state_dict())
        assert torch.equal(est.temperature.value(d["index"])[:, 0], tau.value(d["index"]))
    with pytest.raises(ValueError, match="columns.tau"):
        isogclr(optimizer="momentum", dtype=torch.float32).temperature.load_state_dict(tau.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_an_object_that_was_never_used_takes_the_form_of_the_state_that_it_loads(mode, dtype, tmp_path):
    est, index = sogclr(mode, dtype=dtype), torch.arange(N)
    path = compopt.save(est.normalizer, tmp_path)
    for load in (lambda u: u.load_state_dict(est.normalizer.state_dict()), lambda u: compopt.load(u, path)):
        u = compopt.MovingAverageEstimator(N)
        load(u)
        assert_same_bits(u.read(index), est.normalizer.read(index))
        other = compose(u, mode=mode, dtype=dtype)
        assert call(other, range(4)) == call(est, range(4))
        est.discard()
        with pytest.raises(ValueError, match="dtype differs"):
            load(compopt.MovingAverageEstimator(N, dtype=OTHER[dtype]))


REFUSED = [
    (lambda: isogclr(reference="positive"), "reference differs.*build it with reference='none'"),
    (lambda: isogclr(n=N + 1), r"n differs: the checkpoint has \[23\], this estimator has \[24\]"),
    (lambda: isogclr(dtype=torch.float32), "dtype differs"),
    (lambda: isogclr(mode="unimodal"), "mode differs"),
    (lambda: compopt.EMC2Estimator(N, dtype=torch.float64), "method differs"),
]


@pytest.mark.parametrize("make, message", REFUSED)
def test_rows_that_would_mean_something_else_are_refused(make, message):
    est, source = make(), sogclr().normalizer.state_dict()
    call(est, range(4, 8), 5), est.step()
    before = copy.deepcopy(est.state_dict())
    call(est, range(4), 6)
    with pytest.raises(ValueError, match=message):
        est.normalizer.load_state_dict(source)
    assert est.pending == 1
    est.discard()
    assert_same_bits(tensors_of(est.state_dict()), tensors_of(before))


def test_a_state_of_a_container_is_none_of_a_part():
    est = sogclr()
    with pytest.raises(ValueError, match="lacks sample_groups, rows, state"):
        est.normalizer.load_state_dict(est.state_dict())
    with pytest.raises(ValueError, match="lacks parts"):
        est.load_state_dict(est.normalizer.state_dict())


def test_a_load_of_rows_that_were_averaged_at_another_temperature_warns_once():
    source = sogclr()
    for tau, warns in ((TAU, False), (0.3, True)):
        est = compopt.SogCLREstimator(N, gamma=0.6, tau=tau, dtype=torch.float64)
        est.normalizer.load_state_dict(source.normalizer.state_dict())
        if warns:
            with pytest.warns(UserWarning, match=r"averaged at tau=0.2, this call has tau=0.3"):
                call(est, range(4))
        call(est, range(4), 1)  # a warning would be an error


def test_the_temperature_of_rows_is_committed_and_discarded_with_them():
    est = compopt.SogCLREstimator(N, gamma=0.6, tau=TAU)
    call(est, range(4))
    assert est.normalizer.notes == {}
    est.discard()
    call(est, range(4)), est.step()
    assert est.normalizer.notes == {"tau": TAU}
    est.sample_groups[0]["tau"] = 0.3
    call(est, range(4)), est.discard()
    assert est.state_dict()["parts"]["normalizer"]["notes"] == {"tau": TAU}
    call(est, range(4)), est.step()
    assert est.normalizer.notes == {"tau": 0.3}


def test_columns_are_read_in_their_own_dtypes():
    u = compopt.MovingAverageEstimator(N, dtype=torch.float32)
    est = compose(u, compopt.TemperatureDual(N, dtype=torch.float64))
    call(est, range(4)), est.step()
    read = est.read(torch.arange(4))
    assert (read["log_u"].dtype, read["tau"].dtype) == (torch.float32, torch.float64)
    assert torch.equal(read["log_u"], u.read(torch.arange(4))["log_u"])


def test_a_part_that_is_saved_alone_is_of_the_data_of_its_container(tmp_path):
    est, other, again = sogclr(), sogclr(steps=()), sogclr(steps=())
    est.data_fingerprint = again.data_fingerprint = "data"
    assert est.normalizer.data_fingerprint == "data"
    compopt.save(est.normalizer, tmp_path)
    other.data_fingerprint = "other data"
    with pytest.raises(ValueError, match="fingerprint 'data', est.data_fingerprint is 'other data'"):
        compopt.load(other.normalizer, tmp_path)
    compopt.load(again.normalizer, tmp_path)
    assert compose(est.normalizer, dtype=torch.float64).data_fingerprint == "data"
    with pytest.raises(ValueError, match="data_fingerprint differs.*'data'.*'other data'"):
        compose(est.normalizer, other.temperature)


def test_a_part_without_rows_loads_a_state_of_any_size(tmp_path):
    large, none = sogclr(dtype=torch.float32), compopt.DCLEstimator(tau=0.7)
    small = compopt.SogCLREstimator(N - 1, tau=0.7)
    for each in (small, none, compose(compopt.BatchNormalizer(), compopt.FixedTemperature(0.7))):
        each.temperature.load_state_dict(large.temperature.state_dict())
        assert each.temperature.sample_groups[0]["tau"] == TAU and each.n != large.n
    none.temperature.sample_groups[0]["tau"] = 0.5
    compopt.save(none.temperature, tmp_path)
    compopt.load(large.temperature, tmp_path)
    assert dict(large.sample_groups[0]) == {"n": N, "gamma": 0.6, "reference": "none", "eps": 0.0, "tau": 0.5}
    with pytest.raises(ValueError, match="n differs"):
        small.normalizer.load_state_dict(large.normalizer.state_dict())
    two = compopt.SogCLREstimator([{"n": N}, {"n": 1, "tau": 0.1}])
    with pytest.raises(ValueError, match="sample_groups must be 2 mappings"):
        two.temperature.load_state_dict(large.temperature.state_dict())


def test_a_checkpoint_has_a_folder_per_object(tmp_path):
    est = isogclr()
    call(est, range(4)), est.step()
    path = compopt.save(est, tmp_path / "run")
    assert {file.parent.name for file in path.rglob("*.safetensors")} == {"normalizer", "temperature"}
    index = torch.arange(N)
    for folder in (path / "normalizer", path.parent / "normalizer", tmp_path / "run" / path.name / "normalizer"):
        other = sogclr(steps=())
        assert compopt.load(other.normalizer, folder)
        assert_same_bits(other.normalizer.read(index), est.normalizer.read(index))
    alone = compopt.save(est.normalizer, tmp_path / "alone")
    again = sogclr(steps=())
    compopt.load(again.normalizer, alone)
    assert_same_bits(again.normalizer.read(index), est.normalizer.read(index))
    names = sorted(file.name for file in (path / "normalizer").iterdir())
    assert names == sorted(file.name for file in alone.iterdir() if file.name != "manifest.json")
    with pytest.raises(ValueError, match="method differs"):
        compopt.load(est.temperature, path / "normalizer")


# -- in a tree -----------------------------------------------------------------------------------------------------


def test_each_object_commits_its_own():
    """A step of a part commits that part, and the container then finds nothing there."""
    est, order = isogclr(), []
    for each in (est, est.normalizer, est.temperature):
        each.register_step_pre_hook(lambda who, args, kwargs: order.append(type(who).__name__))
    call(est, range(4))
    assert (est.pending, est.normalizer.pending, est.temperature.pending) == (1, 1, 1)
    est.normalizer.step()
    assert (est.t, est.normalizer.t, est.temperature.t) == (0, 1, 0)
    assert est.normalizer.read(I)["count"].tolist() == [1, 1, 1] and est.temperature.read(I)["count"].sum() == 0
    est.step()
    assert (est.t, est.normalizer.t, est.temperature.t) == (1, 1, 1) and est.pending == 0
    assert est.read(I)["count"].tolist() == [1, 1, 1]
    call(est, range(4)), est.step()
    first = ["MovingAverageEstimator", "TemperatureDual", "ISogCLREstimator"]
    assert order == [first[0], *first[1:], *first]
    call(est, range(4))
    est.discard()
    assert (est.pending, est.normalizer.pending, est.temperature.pending) == (0, 0, 0)


def test_a_container_counts_calls_that_no_step_of_its_parts_has_committed():
    est = isogclr()
    for seed in range(3):
        call(est, range(4), seed)
        est.normalizer.step(), est.temperature.step()
    assert est.pending == 1
    call(est, range(4), 4), call(est, range(4), 5)
    assert est.pending == 2


def test_hooks_of_objects_without_state_run():
    est, seen = compopt.InfoNCEEstimator(), []
    call(est, range(4)), est.step()
    assert (est.t, est.pending) == (0, 0)  # there is nothing to commit
    est.register_step_post_hook(lambda who, args, kwargs: seen.append(who.t))
    call(est, range(4)), call(est, range(4))
    assert est.pending == 2
    est.step()
    assert seen == [1] and (est.t, est.pending) == (1, 0)


def test_train_and_to_reach_every_part():
    est = isogclr()
    est.eval()
    assert not (est.training or est.normalizer.training or est.temperature.training)
    est.train().to("cpu")
    assert est.normalizer.training and est.temperature.device.type == "cpu"


def test_a_part_may_be_shared_as_a_module_is():
    u = compopt.MovingAverageEstimator(N, gamma=0.6)
    one, other = compose(u), compose(u, compopt.FixedTemperature(TAU))
    call(one, range(4)), one.step()
    assert other.read(I)["count"].tolist() == [1, 1, 1] and other.t == 0
    call(other, range(4)), other.step()
    assert one.read(I)["count"].tolist() == [2, 2, 2] and (one.t, other.t, u.t) == (1, 1, 2)
    for options in ({"mode": "unimodal"}, {"directions": "forward"}, {"offload": "cpu"}, {"normalize": False}):
        with pytest.raises(ValueError, match="is in use with"):
            compose(u, **options)


def test_a_part_keeps_a_placement_and_a_dtype_of_its_own(tmp_path):
    options = {"offload": "disk", "offload_dir": tmp_path / "u", "dtype": torch.float64}
    u, near_by = compopt.MovingAverageEstimator(N, **options), compopt.MovingAverageEstimator(N, dtype=torch.float64)
    est, same = compose(u, compopt.TemperatureDual(N)), compose(near_by, compopt.TemperatureDual(N))
    for each in (est, same):
        for seed in range(3):
            call(each, range(4), seed), each.step()
    assert (
        (tmp_path / "u").is_dir() and est.normalizer.dtype == torch.float64 and est.temperature.dtype == torch.float32
    )
    assert_same_bits(est.read(torch.arange(N)), same.read(torch.arange(N)))


def test_what_was_used_alone_with_another_width_is_refused():
    u = compopt.MovingAverageEstimator(N)
    u.update(G, I), u.step()
    with pytest.raises(ValueError, match="in use with width=1, the estimator has 2; build a second one"):
        compose(u)
    est = compose(u, mode="unimodal")  # one value per sample, as alone: the rows stay
    assert est.read(I)["count"].tolist() == [1, 1, 1]
    looked_at = compopt.MovingAverageEstimator(N)
    assert looked_at.read(I)["count"].tolist() == [0, 0, 0] and looked_at.state_dict()["t"] == 0
    assert compose(looked_at).normalizer is looked_at  # nothing was written


def test_operations_of_their_own_have_one_value_per_sample():
    est, network = isogclr(), compopt.NeuralNormalizer(DIM, prototypes=4)
    both = compose(network)
    chains = compose(compopt.MCMCNegativeSampler(N))
    for act in (
        lambda: est.normalizer.update(G, I),
        lambda: est.temperature.update(G, I),
        lambda: both.normalizer.predict(torch.randn(3, DIM), TAU),
        lambda: chains.normalizer.sample(torch.randn(3, 4), I, torch.arange(4)),
    ):
        with pytest.raises(ValueError, match="part of an estimator with two directions.*build another one"):
            act()
    one = isogclr("unimodal")
    assert torch.equal(one.normalizer.update(G.double(), I), G.double())


def test_a_refused_composition_leaves_its_parts():
    u, tau = compopt.MovingAverageEstimator(N), compopt.FixedTemperature(TAU)
    with pytest.raises(ValueError, match="n differs"):
        compose(u, compopt.TemperatureDual(N + 1))
    with pytest.raises(ValueError, match="gamma must be in"):
        compose(u, tau, sample_groups=[{"n": N, "tau": 0.3, "gamma": 2.0}])
    assert u.sample_groups[0]["gamma"] == 0.9 and dict(tau.sample_groups[0]) == {"tau": TAU}
    call(compose(u, tau), range(4))


def test_parts_are_taken_once_all_of_them_fit(tmp_path):
    class Refusing(compopt.FixedTemperature):
        def setup(self, form):
            if form.mode != "single":
                raise ValueError("not here")

    def refused(u):
        with pytest.raises(ValueError, match="not here"):
            compose(u, Refusing(TAU), mode="unimodal", sample_groups=[{"n": N, "gamma": 0.5}])

    new = compopt.MovingAverageEstimator(N, offload="disk", offload_dir=tmp_path)
    used = compopt.MovingAverageEstimator(N)
    used.update(G, I), used.step()
    for u in (new, used):
        (group,), state = u.sample_groups, u.state_dict()
        refused(u)
        assert not [*tmp_path.glob("normalizer-*")]
        assert_same_bits(tensors_of(u.state_dict()), tensors_of(state))
        assert u.sample_groups[0] is group and group["gamma"] == 0.9 and u.state_dict()["config"]["mode"] == "single"
        assert u.update(G + 1, I).shape == (3,)
        u.step()
    est = compose(used, mode="unimodal", sample_groups=[{"n": N, "gamma": 0.5}])
    assert used.sample_groups[0]["gamma"] == 0.5 and est.read(I)["count"].tolist() == [2] * 3


def test_copies_are_whole_and_apart():
    est = isogclr()
    call(est, range(4)), est.step()
    index = torch.arange(4)
    for duplicate in (copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))):
        other = duplicate(est)
        assert other.normalizer is not est.normalizer and other._objects()["normalizer"] is other.normalizer
        call(other, range(4), 1), other.step()
        assert not torch.equal(other.temperature.value(index), est.temperature.value(index))
        part = duplicate(est.temperature)
        assert torch.equal(part.value(index), est.temperature.value(index)) and part.t == 1
        other.sample_groups[0]["rho"] = 0.7
        assert est.sample_groups[0]["rho"] == 0.1
        with pytest.raises(ValueError, match="rho must be"):
            other.temperature.sample_groups[0]["rho"] = -1.0
    part, gone = est.normalizer, weakref.ref(est)
    del est
    gc.collect()
    assert gone() is None and part.read(index)["count"].tolist() == [1] * 4  # a part does not need its container


# -- groups --------------------------------------------------------------------------------------------------------


def test_groups_of_a_container_are_views_that_write_through():
    est = compose(compopt.NeuralNormalizer(DIM, prototypes=4), compopt.TemperatureDual(N))
    (group,) = est.sample_groups
    assert {"n", "normalizer.lr", "temperature.lr", "rho", "updates"} <= set(group) and "lr" not in group
    group["temperature.lr"] = 0.7
    est.normalizer.sample_groups[0]["lr"] = 0.3
    assert est.temperature.sample_groups[0]["lr"] == 0.7 and est.sample_groups[0]["normalizer.lr"] == 0.3
    for bad, error in (({"gamma": 1}, ValueError), ({"rho": -1.0}, ValueError), ({"n": 3}, ValueError)):
        with pytest.raises(error):
            group.update(bad)
    with pytest.raises(ValueError, match="rho must be"):
        group.update({"temperature.lr": 0.9, "rho": -1.0})
    assert group["temperature.lr"] == 0.7  # all or nothing
    with pytest.raises(TypeError, match="cannot be removed"):
        del group["rho"]
    isogclr().sample_groups[0]["lr"] = 0.5  # no prefix where one part has the key


def test_groups_are_appended_by_their_method_only():
    for each in (isogclr(), compopt.MovingAverageEstimator(N)):
        with pytest.raises(AttributeError, match="append"):
            each.sample_groups.append({"n": 1})
        with pytest.raises(TypeError):
            each.sample_groups[0] = {"n": N}


def test_defaults_are_those_of_the_mode():
    for mode, tau_init in (("bimodal", 0.01), ("unimodal", 0.7)):
        tau = compopt.TemperatureDual(N)
        est = compose(compopt.MovingAverageEstimator(N), tau, mode=mode)
        assert est.sample_groups[0]["tau_init"] == tau_init
        tau.sample_groups[0]["tau_init"] = None  # the default again
        assert tau.sample_groups[0]["tau_init"] == tau_init


def test_bounds_that_depend_on_each_other_are_set_together():
    est = isogclr()
    (group,) = est.sample_groups
    with pytest.raises(ValueError, match="tau_min must not exceed tau_max"):
        group["tau_min"] = 2.0
    group.update(tau_min=2.0, tau_init=2.5, tau_max=3.0)
    assert (group["tau_min"], group["tau_max"]) == (2.0, 3.0)


def test_a_group_of_a_part_alone_is_refused_at_the_next_call():
    est = isogclr()
    est.add_sample_group({"n": 4, "gamma": 0.2})
    assert [g["n"] for g in est.temperature.sample_groups] == [N, 4] and est.sample_groups[1]["gamma"] == 0.2
    call(est, [0, N, N + 3, 5]), est.step()
    assert est.read(torch.tensor([N, N + 1]))["count"].tolist() == [1, 0]
    est.normalizer.add_sample_group({"n": 3})
    with pytest.raises(ValueError, match="n differs: the parts of this estimator have 30 and 27"):
        call(est, range(4))


def test_equal_bounds_fix_a_temperature():
    dual = compopt.TemperatureDual(N, tau_init=0.2, tau_min=0.2, tau_max=0.2, lr=0.5)
    dual.update(torch.linspace(-3, 3, N), torch.arange(N)), dual.step()
    torch.testing.assert_close(dual.read(torch.arange(N))["tau"], torch.full((N, 1), 0.2))


# -- found by review -----------------------------------------------------------------------------------------------


def held_save(est, folder, monkeypatch):
    """Start a background save whose thread waits; return its handle and the event that lets it go on."""
    go_on, read = threading.Event(), Snapshot.read

    def waits(self, rows):
        go_on.wait(30)
        return read(self, rows)

    monkeypatch.setattr(Snapshot, "read", waits)
    handle = compopt.save(est, folder, blocking=False)
    return handle, go_on


@pytest.mark.parametrize("second", ["save", "load", "grow"])
@pytest.mark.parametrize("of", ["part", "container", "sharer"])
def test_a_background_save_is_awaited_by_all_that_share_its_rows(of, second, tmp_path, monkeypatch):
    u = compopt.MovingAverageEstimator(N, gamma=0.6)
    est, other = compose(u), compose(u)
    call(est, range(4)), est.step()
    older = compopt.save(other, tmp_path / "older")
    saved = {"part": u, "container": est, "sharer": other}[of]
    handle, go_on = held_save(saved, tmp_path / "run", monkeypatch)
    threading.Timer(0.3, go_on.set).start()
    if second == "save":
        compopt.save(est, tmp_path / "second")
    elif second == "load":
        compopt.load(est, older)
    else:
        est.add_sample_group({"n": 4})
    assert handle.done  # it was waited for
    fresh = compopt.MovingAverageEstimator(N) if of == "part" else compose(compopt.MovingAverageEstimator(N))
    if of != "part":
        compopt.load(fresh, handle.wait())
        assert fresh.read(I)["count"].tolist() == [1, 1, 1]


def test_nothing_is_copied_in_the_middle_of_a_commit_of_a_part(monkeypatch, tmp_path):
    est = isogclr()
    commit, refused = est.normalizer._table.commit, []

    def interrupted(prepared):
        commit(prepared)
        for copies in (
            est.state_dict,
            est.normalizer.state_dict,
            lambda: est.read(I),
            lambda: compopt.save(est, tmp_path),
        ):
            with pytest.raises(RuntimeError, match="middle of a commit"):
                copies()
            refused.append(1)

    monkeypatch.setattr(est.normalizer._table, "commit", interrupted)
    call(est, range(4)), est.normalizer.step()
    assert len(refused) == 4


def test_a_commit_without_memory_for_one_part_changes_no_part(monkeypatch):
    est = isogclr()
    call(est, range(4))
    before = tensors_of(est.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(est.temperature._table, "prepare", lambda found_inf: torch.empty(1 << 60))
        with pytest.raises(RuntimeError, match="memory"):
            est.step()
    assert_same_bits(tensors_of(est.state_dict()), before)
    assert est.pending == 1 and est.t == est.normalizer.t == 0
    est.step()
    assert est.t == est.normalizer.t == est.temperature.t == 1


def test_defaults_are_those_of_the_container_whatever_was_done_before(tmp_path):
    expected = dict(
        compose(compopt.MovingAverageEstimator(N), compopt.TemperatureDual(N), mode="unimodal").sample_groups[0]
    )
    looked_at, edited = compopt.TemperatureDual(N), compopt.TemperatureDual(N)
    looked_at.read(I), edited.read(I)
    edited.sample_groups[0]["rho"] = 1.5
    placed = compopt.TemperatureDual(N, offload="disk", offload_dir=tmp_path)
    for tau, changed in ((looked_at, {}), (placed, {}), (edited, {"rho": 1.5})):
        est = compose(compopt.MovingAverageEstimator(N), tau, mode="unimodal")
        assert dict(est.sample_groups[0]) == expected | changed


def test_a_network_that_was_trained_alone_joins_only_where_its_state_fits():
    def trained():
        network = compopt.NeuralNormalizer(DIM, prototypes=4)
        network.update(torch.randn(4, DIM, generator=generator(1)), torch.zeros(4), 0.1), network.step()
        return network

    with pytest.raises(ValueError, match="in use with width=1|another shape"):
        compose(trained())
    network, fresh = trained(), compopt.NeuralNormalizer(DIM, prototypes=4)
    est, same = (compose(each, directions="forward") for each in (network, fresh))
    same.normalizer.load_state_dict(trained().state_dict())
    assert call(est, range(6)) == call(same, range(6))


def test_a_part_without_a_size_that_is_in_use_gets_none():
    tau = compopt.FixedTemperature(TAU)
    est = compose(compopt.BatchNormalizer(), tau)
    with pytest.raises(ValueError, match="part of an estimator without sample groups"):
        compose(compopt.MovingAverageEstimator(N), tau)
    assert est.n is None
    est(*torch.randn(2, 4, DIM))


def test_a_refused_composition_can_be_tried_again(tmp_path):
    tau = compopt.TemperatureDual(N)
    compose(compopt.MovingAverageEstimator(N), tau)
    u = compopt.MovingAverageEstimator(N, offload="disk", offload_dir=tmp_path)
    (group,) = u.sample_groups
    with pytest.raises(ValueError, match="is in use with"):
        compose(u, tau, mode="unimodal")
    assert not list(tmp_path.glob("normalizer-*.rows"))
    est = compose(u)
    group["gamma"] = 0.5  # a group that was kept is that of the container
    assert est.sample_groups[0]["gamma"] == 0.5
    call(est, range(4)), est.step()


def test_hooks_of_parts_run_with_every_save_and_load_and_may_read(tmp_path):
    est, seen = isogclr(), []
    call(est, range(4)), est.step()
    for part in (est.normalizer, est.temperature, est):
        part.register_state_dict_pre_hook(lambda who: seen.append("save"))
        part.register_load_state_dict_post_hook(lambda who: seen.append(who.t + 0 * len(who.read(I))))
        part.register_discard_hook(lambda who: seen.append("discard"))
    state = est.state_dict()
    est.load_state_dict(state)
    compopt.load(est, compopt.save(est, tmp_path))
    assert seen == (["save"] * 3 + [1] * 3) * 2


def test_groups_of_a_container_are_used_like_dicts():
    est = isogclr()
    (group,) = est.sample_groups
    group |= {"rho": 0.3}
    assert group.copy() == dict(group) == copy.deepcopy(group) == (group | {}) and group["rho"] == 0.3
    assert pickle.loads(pickle.dumps(est.sample_groups)) == (dict(group),)


def test_a_part_in_evaluation_mode_is_frozen():
    est, network = isogclr(), compose(compopt.NeuralNormalizer(DIM, prototypes=4))
    for each in (est, network):
        call(each, range(4)), each.step()
    before = est.normalizer.read(I), network.normalizer.state_dict()["state"]
    est.normalizer.eval(), network.normalizer.eval()
    for each in (est, network):
        call(each, range(4), 1), each.step()
    assert_same_bits(est.normalizer.read(I), before[0])
    assert_same_bits(network.normalizer.state_dict()["state"], before[1])
    assert (est.normalizer.t, est.temperature.t, est.t) == (1, 2, 2)


def a_step_on_one_rank(group):
    est = compopt.EMC2Estimator(N, process_group=group)
    rank, messages = dist.get_rank(group), []
    for step in range(2):
        z1, z2 = torch.randn(2, 4, DIM, generator=generator(rank)).requires_grad_().unbind()
        try:
            est(z1, z2, torch.arange(4) + 4 * rank)
        except RuntimeError as error:
            messages.append(str(error))
        if rank == 0 and step == 0:
            est.normalizer.step()
    return messages


@pytest.mark.distributed
def test_a_step_of_a_part_on_one_rank_is_noticed():
    for messages in the_pool().run(a_step_on_one_rank, 2):
        assert len(messages) == 1 and "the ranks differ in commits of parts" in messages[0]


# mistakes of authors --------------------------------------------------------------------------------------------


class Average(compopt.Normalizer):
    """A normalizer as authors write it; ``mistake`` maps a correct result and the call to a wrong one."""

    def __init__(self, n, mistake=lambda estimate, call: estimate):
        self.mistake = mistake
        super().__init__(n, {"gamma": 0.5})

    def columns(self, directions, dtype):
        return [Column("log_u", directions, dtype, reduce="log_mean_exp")]

    def estimate(self, call):
        g = call.pairs.log_ghat
        return self.mistake(Estimate(g, proposals={"log_u": g}), call)


class Kept(compopt.Temperature):
    """A temperature with a column for which it proposes nothing, since it does not define ``learns``."""

    def __init__(self, n):
        super().__init__(n, {})

    def columns(self, directions, dtype):
        return [Column("tau", directions, dtype)]

    def temperatures(self, rows, hyper, training):
        return 0.1


MISTAKES = [
    (lambda e, call: None, TypeError, r"estimate\(\) of Average must return an Estimate, got NoneType"),
    (lambda e, call: Estimate(e.alpha), ValueError, r"Average must propose .* \['log_u'\], got proposals for \[\]"),
    (lambda e, call: Estimate(e.alpha, {"log_v": e.alpha}), ValueError, r"Average .*, got proposals for \['log_v'\]"),
    (
        lambda e, call: Estimate(e.alpha, {**e.proposals, "tau": e.alpha}),
        ValueError,
        r"Average .* \['log_u'\], got proposals for \['log_u', 'tau'\]",
    ),
    (
        lambda e, call: Estimate(e.alpha[:, 0], e.proposals),
        ValueError,
        r"alpha of Average must have shape \(6, 2\) or \(6, 1\), got \(6,\)",
    ),
    (
        lambda e, call: Estimate(e.alpha, {"log_u": e.alpha[:, :1]}),
        ValueError,
        r"the proposal for log_u of Average must have shape \(6, 2\), got \(6, 1\)",
    ),
    (lambda e, call: Estimate(0.0, e.proposals), TypeError, "alpha of Average must be a tensor, got float"),
    (lambda e, call: call.hyper("gama"), KeyError, "'gama' is no hyper-parameter of this object, which has gamma"),
]


@pytest.mark.parametrize("mistake, kind, message", MISTAKES)
def test_mistakes_of_authors_are_named(mistake, kind, message):
    """The error names the class, what was expected and what came; nothing is deposited."""
    est = compopt.ContrastiveEstimator(Average(9, mistake), compopt.FixedTemperature(0.1))
    with pytest.raises(kind, match=message):
        est(*torch.randn(2, 6, 4), torch.arange(6))
    assert est.pending == 0
    est.step()
    assert est.t == 0


def test_a_column_has_a_known_reduction():
    with pytest.raises(ValueError, match="reduce of column 'log_u' must be one of 'mean', .*, got 'median'"):
        Column("log_u", 1, reduce="median")


def test_forgotten_proposals_of_other_parts_are_named():
    """Test a temperature, and a part that is used alone."""
    est = compopt.ContrastiveEstimator(Average(9), Kept(9))
    with pytest.raises(ValueError, match=r"Kept must propose values for its columns \['tau'\], got proposals for \[\]"):
        est(*torch.randn(2, 6, 4), torch.arange(6))
    alone = Average(9)
    batch = alone._read({"index": torch.arange(3)}, {"log_g": torch.zeros(3)})
    for proposals, got in (({}, r"\[\]"), ({"log_v": torch.zeros(3, 1)}, r"\['log_v'\]")):
        with pytest.raises(ValueError, match=rf"Average must propose .* got proposals for {got}"):
            alone._deposit(batch, proposals)
    with pytest.raises(ValueError, match=r"log_u of Average must have shape \(3, 1\), got \(3,\)"):
        alone._deposit(batch, {"log_u": torch.zeros(3)})
    assert alone.pending == 0


def test_a_temperature_may_be_any_number():
    class One(compopt.Temperature):
        def check(self, group):
            pass

        def temperatures(self, rows, hyper, training):
            return 1

    batch = torch.randn(2, 4, DIM)
    own, usual = compopt.ContrastiveEstimator(compopt.BatchNormalizer(), One(None, {})), compopt.DCLEstimator(1.0)
    assert torch.equal(own(*batch), usual(*batch))
