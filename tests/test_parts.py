"""The four objects as parts of a ContrastiveEstimator: their interface, and moving their state between compositions."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import compopt
from compopt.estimator import Column, Estimate
from compopt.integrations.dcp import Stateful
from compopt.stores import table
from tests.helpers import assert_same_bits, generator, near
from tests.pool import the_pool
from tests.test_alone import DIM, N, data, state

TAU = 0.2
I, G = torch.arange(3), torch.zeros(3)  # noqa: E741


def call(est, index, seed=0, **keys):
    """Call a ContrastiveEstimator and run backward, without a commit; return the loss."""
    z1, z2 = torch.randn(2, len(index), DIM, generator=generator(seed)).to(est.dtype).requires_grad_().unbind()
    loss = est(z1, z2, torch.as_tensor(index), **keys)
    loss.backward()
    return loss.item()


def saved(est, role="normalizer"):
    """Return the state of one part; the argument keeps the estimator alive meanwhile."""
    return getattr(est, role).state_dict()


def sogclr(mode="bimodal", steps=((0, 1, 2, 3), (2, 3, 4, 5)), **options):
    est = compopt.SogCLREstimator(N, gamma=0.6, tau=TAU, mode=mode, dtype=torch.float64, **options)
    for seed, index in enumerate(steps):
        call(est, index, seed)
        est.step()
    return est


def isogclr(mode="bimodal", n=N, optimizer="adam", **options):
    """Return an estimator whose normalizer rows have the same meaning as SogCLR's."""
    options = {"reference": "none", "tau_init": TAU, "tau_min": 0.05, "tau_max": 1.0, "rho": 0.1, **options}
    return compopt.ISogCLREstimator(n, gamma=0.6, mode=mode, optimizer=optimizer, **{"dtype": torch.float64, **options})


def adopted(mode="bimodal", **options):
    """Return an iSogCLR estimator that has visited samples 4 to 7 itself and has then loaded SogCLR's rows."""
    est = isogclr(mode, **options)
    call(est, range(4, 8), seed=5)
    est.step()
    est.normalizer.load_state_dict(saved(sogclr(mode)))
    return est


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_rows_of_sogclr_start_isogclr(mode, optimizer):
    """The moving averages continue; temperatures that were never visited take their next step as a first one."""
    source, est, fresh = sogclr(mode), adopted(mode, optimizer=optimizer), isogclr(mode, optimizer=optimizer)
    index = torch.arange(N)
    whole, average, tau = est.read(index), est.normalizer.read(index), est.temperature.read(index)
    assert_same_bits({"log_u": average["log_u"]}, {"log_u": source.read(index)["log_u"]})
    assert average["count"].tolist() == [1, 1, 2, 2, 1, 1] + [0] * 17
    assert whole["count"].tolist() == [1, 1, 2, 2, 1, 1, 1, 1] + [0] * 15
    assert tau["count"].tolist() == [0] * 4 + [1] * 4 + [0] * 15
    assert whole.keys() == {*average, *tau} and whole["log_u"].isfinite().all()
    assert (tau["tau"][[0, 1, 2, 3, 8]] == TAU).all() and (tau["tau"][4:8] != TAU).all()
    fresh.temperature.load_state_dict(est.temperature.state_dict())
    for each in (est, fresh):
        each.temperature.sample_groups[0]["lr"] = 1e-3
        call(each, [0, 1, 2, 3, 6, 8], seed=7)
        if each is est:
            assert est.metrics["new_rows"].item() == 6  # each of these is new to some part
        each.step()
    moved, first = est.read(index), fresh.read(index)
    # sample 6 has a row, but no moving average: its next value is that of a first visit, as without loaded averages
    near(moved["log_u"][6], first["log_u"][6], 1e-12)
    near(moved["log_u"][8], first["log_u"][8], 1e-12)
    assert ((moved["log_u"] - first["log_u"])[:4].abs() > 1e-3).all()
    if optimizer == "adam":
        near((moved["tau"][:4] - TAU).abs(), torch.full_like(moved["tau"][:4], 1e-3), 1e-5)  # lr times a sign
    call(est, [0, 1, 2, 3, 6, 8], seed=8)
    est.step()
    assert est.metrics["new_rows"].item() == 0
    assert est.temperature.read(index)["count"][:4].tolist() == [3, 3, 4, 4]


def test_a_load_keeps_what_adam_has_averaged():
    """A load of a temperature or a normalizer may change the number of visits of a row, but keeps Adam's averages."""
    source, est = isogclr(), isogclr()
    for seed, index in enumerate([(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 4, 5)]):
        call(source, index, seed), source.step()
    call(est, (0, 1, 2, 3, 6, 7), 8), est.step()

    def averages(est, rows):
        found, betas = est.read(torch.tensor(rows)), (0.9, 0.999)
        count = found["count"][:, None].double()
        return [found[name] / (1 - b**count) for name, b in zip(("tau_exp_avg", "tau_exp_avg_sq"), betas, strict=True)]

    before = averages(est, [0, 2, 6])
    state = saved(source)
    state["meaning"] = {"tau": [TAU]}  # as if averaged at the initial temperature of est
    est.normalizer.load_state_dict(state)
    assert est.read(torch.tensor([0, 2, 4, 6]))["count"].tolist() == [3, 2, 1, 1]
    for a, b in zip(averages(est, [0, 2, 6]), before, strict=True):
        near(a, b, 1e-12)
    for seed in range(5):
        call(est, (0, 1, 2, 3), seed), est.step()
    state = saved(source, "temperature")
    untouched = copy.deepcopy(state)
    est.temperature.load_state_dict(state)
    assert_same_bits(state["rows"], untouched["rows"])  # the caller's state is unchanged
    assert est.read(torch.tensor([0, 2, 4, 6]))["count"].tolist() == [8, 7, 1, 1]
    for a, b in zip(averages(est, [0, 2, 4]), averages(source, [0, 2, 4]), strict=True):
        near(a, b, 1e-12)
    assert torch.equal(est.read(torch.arange(6))["tau"], source.read(torch.arange(6))["tau"])


def refused(source, make, message, role="normalizer"):
    """Assert that loading ``source`` into a part raises an error and changes nothing."""
    est = make()
    call(est, range(4, 8), 5)
    est.step()
    before = copy.deepcopy(est.state_dict())
    call(est, range(4), 6)
    with pytest.raises(ValueError, match=message):
        getattr(est, role).load_state_dict(source)
    assert est.pending == 1
    est.discard()
    after = est.state_dict()
    assert after["sample_groups"] == before["sample_groups"] and after["t"] == before["t"]
    assert_same_bits(after["rows"], before["rows"])


def test_rows_go_beside_a_temperature_of_all_samples():
    def build():
        return compopt.FastCLIPEstimator(9, rho=1.0)

    est, again = build(), build()
    est(*torch.randn(2, 5, 4, requires_grad=True).unbind(), torch.arange(5))
    est.step()
    for name in ("temperature", "normalizer"):
        getattr(again, name).load_state_dict(getattr(est, name).state_dict())
    assert torch.equal(again.read(torch.arange(9))["log_u"], est.read(torch.arange(9))["log_u"])


def test_rows_that_would_mean_something_else_are_refused():
    state = saved(sogclr())
    refused(state, lambda: isogclr(reference="positive"), "reference differs.*build it with reference='none'")
    refused(state, lambda: isogclr(tau_init=0.3), "temperature differs.*tau=0.2")
    refused(state, lambda: compopt.SogCLREstimator(N, tau=0.3, dtype=torch.float64), "tau=0.2, .*tau=0.3.*build it")
    refused(state, lambda: isogclr(n=N + 1), r"n differs: the checkpoint has \[23\], this estimator has \[24\]")
    refused(state, lambda: isogclr(dtype=torch.float32), "dtype differs")
    refused(state, lambda: isogclr(mode="unimodal"), "mode differs")
    refused(saved(sogclr("unimodal")), lambda: isogclr(directions="forward"), "mode differs.*unimodal.*bimodal")
    refused(state, lambda: compopt.EMC2Estimator(N, dtype=torch.float64), "method.normalizer differs")
    refused(sogclr().state_dict(), isogclr, "must be that of one normalizer, such as est.normalizer.state_dict")
    refused(state, isogclr, "must be that of one temperature", "temperature")
    learned = saved(adopted())
    refused(learned, isogclr, "load the state of the temperature first")
    refused(saved(isogclr(optimizer="momentum"), "temperature"), isogclr, "columns.tau_exp_avg_sq", "temperature")
    for key, bad in (("rows", {}), ("sample_groups", []), ("config", {}), ("extra", {"normalizer": {"x": I}})):
        refused({**state, key: bad}, isogclr, "no column|sample_groups must|that of one normalizer|entries")
    bad = copy.deepcopy(state)
    bad["rows"]["log_u"][3] = torch.nan
    refused(bad, isogclr, "log_u")


def test_what_was_trained_alone_becomes_part_of_an_estimator():
    """A temperature trained on its own fits a part with one value per sample, which keeps its hyper-parameters."""
    tau, d = compopt.TemperatureDual(N, tau_init=TAU, tau_max=1.0, lr=0.1), data()[0]
    tau.update(d["gradient"].float(), d["index"]), tau.step()
    for options in ({"mode": "unimodal"}, {"directions": "forward"}):
        est = isogclr(optimizer="momentum", dtype=torch.float32, **options)
        est.temperature.load_state_dict(tau.state_dict())
        assert torch.equal(est.temperature.value(d["index"])[:, 0], tau.value(d["index"]))
    refused(tau.state_dict(), lambda: isogclr(optimizer="momentum", dtype=torch.float32), "columns.tau", "temperature")


def test_temperatures_of_one_run_serve_another_composition():
    source = isogclr()
    for seed in range(3):
        call(source, range(6), seed), source.step()
    est = compopt.ContrastiveEstimator(
        compopt.MCMCNegativeSampler(N),
        compopt.TemperatureDual(N, optimizer="adam", tau_min=0.05, tau_max=1.0, lr=0.5),
        dtype=torch.float64,
    )
    call(est, range(4)), est.step()
    loads = []
    est.temperature.register_load_state_dict_post_hook(lambda who: loads.append(who is est.temperature))
    est.temperature.load_state_dict(source.temperature.state_dict())
    index = torch.arange(N)
    seen = source.temperature.read(index)["count"] > 0
    assert torch.equal(est.read(index)["tau"][seen], source.read(index)["tau"][seen])
    assert torch.equal(est.temperature.value(index)[seen], source.temperature.value(index)[seen])
    assert loads == [True] and est.t == 1 and est.temperature.sample_groups[0]["lr"] == 0.5
    assert est.normalizer.read(index)["count"].tolist() == [3] * 4 + [0] * 19
    call(est, range(6)), est.step()
    chains = est.normalizer.read(index)
    assert ((chains["chain"] >= 0) & (chains["chain"] < 6)).all() and chains["count"].tolist() == [4] * 6 + [0] * 17


def go_on(est):
    call(est, [0, 1, 4, 6, 8], 7), est.step()
    return state(est)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_marks_of_what_was_never_visited_survive_checkpoints(mode, tmp_path):
    est, others = adopted(mode), [isogclr(mode) for _ in range(3)]
    others[0].load_state_dict(est.state_dict())
    compopt.load(others[1], compopt.save(est, tmp_path / "files"))
    others += [copy.deepcopy(est), pickle.loads(pickle.dumps(est))]
    dcp.save({"est": Stateful(est)}, checkpoint_id=tmp_path / "dcp")
    dcp.load({"est": Stateful(others[2])}, checkpoint_id=tmp_path / "dcp")
    expected = go_on(est)
    for other in others:
        assert_same_bits(go_on(other), expected)


def test_rows_with_marks_take_every_kind_of_deposit():
    index = torch.arange(N)
    est = adopted()
    call(est, [0, 4, 6, 8], 3, index2=torch.tensor([8, 0, 5, 6]), labels=torch.tensor([1, 2, 2, 3]))
    call(est, [0, 0, 6, 9], 4)
    est.step()
    rows = est.read(index)
    assert all(value.isfinite().all() for value in rows.values())
    assert rows["count"][[0, 4, 5, 6, 8, 9]].tolist() == [2, 2, 2, 2, 1, 1]
    assert (est.temperature.read(index)["tau"][[0, 6, 8, 9]] != TAU).any(1).all()
    est.add_sample_group({"n": 4})
    call(est, [0, 7, N, N + 3], 5), est.step()
    assert est.read(torch.tensor([N, N + 1]))["count"].tolist() == [1, 0]
    assert est.normalizer.read(torch.tensor([7]))["log_u"].isfinite().all()
    bad = torch.randn(2, 4, DIM, dtype=torch.float64)
    bad[0, 1] = torch.nan
    before = est.read(torch.tensor([1, 9]))
    with pytest.warns(UserWarning, match="rows of its samples keep their previous values"):
        est(*bad.requires_grad_(), torch.tensor([1, 9, 10, 11]))
        est.step()
        est.step()
        est(*torch.randn(2, 4, DIM, dtype=torch.float64), torch.tensor([1, 9, 10, 11]))
    assert_same_bits(est.read(torch.tensor([1, 9])), before)


def test_a_part_shows_its_own_and_leaves_the_rest_to_its_owner(tmp_path):
    est = isogclr()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for part in (est.normalizer, est.temperature):
        assert part.owner is est and part.n == N and part.t == est.t
        refusals = [part.step, part.discard, part.train, part.eval, lambda p=part: p.to("cpu")]
        refusals += [lambda p=part: p.attach(optimizer), lambda p=part: p.add_sample_group({"n": 3})]
        refusals += [lambda p=part: p.prefetch(I), lambda p=part: compopt.save(p, tmp_path)]
        for refusal in refusals:
            with pytest.raises(RuntimeError, match="part of a ContrastiveEstimator .ISogCLREstimator."):
                refusal()
    assert not list(tmp_path.iterdir()) and est.n == N
    for refusal in (lambda: est.normalizer.update(G, I), lambda: est.temperature.update(G, I)):
        with pytest.raises(RuntimeError, match="part of a ContrastiveEstimator"):
            refusal()
    assert set(est.normalizer.sample_groups[0]) == {"n", "gamma", "reference", "eps"}
    est.temperature.sample_groups[0]["lr"] = 0.7
    assert est.sample_groups[0]["lr"] == 0.7
    with pytest.raises(KeyError, match="gamma"):
        est.temperature.sample_groups[0]["gamma"] = 1
    assert "gamma: 0.6" in repr(est.normalizer) and "gamma" not in repr(est.temperature)
    for name in dir(est.temperature):
        if not name.startswith("_"):
            hasattr(est.temperature, name)


def test_copies_of_a_part_and_of_its_owner():
    est = isogclr()
    call(est, range(4)), est.step()
    index = torch.arange(4)
    for duplicate in (copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))):
        other = duplicate(est)
        assert other.temperature.owner is other and other.normalizer.owner is other
        call(other, range(4), 1), other.step()
        assert not torch.equal(other.temperature.value(index), est.temperature.value(index))
        alone = duplicate(est.temperature)
        assert alone.owner is None
        alone.update(torch.ones(3), I), alone.step()
        assert est.t == 1 and alone.t == 1
    est = compopt.FastCLIPEstimator(N)
    call(est, range(4)), est.step()
    alone = copy.deepcopy(est.temperature)  # starts from the initial value, like every other part
    assert alone.tau == est.sample_groups[0]["tau_init"] != est.temperature.tau


def test_a_part_does_not_keep_its_owner_alive():
    est = isogclr()
    part = est.temperature
    del est
    with pytest.raises(RuntimeError, match="is gone.*keep a reference"):
        part.read(I)


# -- from alone to part ------------------------------------------------------------------------------


def test_what_is_attached_or_placed_is_not_adopted():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    u = compopt.MovingAverageEstimator(N)
    handle = u.attach(optimizer)
    compose = lambda part: compopt.ContrastiveEstimator(part, compopt.FixedTemperature(0.1))  # noqa: E731
    with pytest.raises(ValueError, match="attached to an SGD; call remove"):
        compose(u)
    handle.remove()
    assert compose(u).normalizer is u
    with pytest.raises(ValueError, match="already part of an estimator"):
        compose(u)
    with pytest.raises(ValueError, match="have no effect: give them to the ContrastiveEstimator"):
        compose(compopt.MovingAverageEstimator(N, offload="cpu"))


def test_edits_survive_adoption_and_defaults_are_those_of_the_mode():
    u, tau = compopt.MovingAverageEstimator(N), compopt.TemperatureDual(N)
    assert tau.sample_groups[0]["tau_init"] == 0.01  # default of bimodal mode
    u.sample_groups[0]["gamma"], tau.sample_groups[0]["lr"] = 0.3, 0.7
    u.update(G, I), u.step()
    with pytest.warns(UserWarning, match="its rows of 1 commits are dropped"):
        est = compopt.ContrastiveEstimator(u, tau, mode="unimodal")
    (group,) = est.sample_groups
    assert (group["gamma"], group["lr"]) == (0.3, 0.7)
    assert (group["tau_init"], group["tau_min"], group["tau_max"], group["rho"]) == (0.7, 0.05, 1.0, 0.3)
    assert est.t == 0 and est.read(I)["count"].tolist() == [0, 0, 0]
    grown = compopt.MovingAverageEstimator(N)
    grown.add_sample_group({"n": 4, "gamma": 0.2})
    est = compopt.ContrastiveEstimator(grown, compopt.FixedTemperature(0.1))
    assert [(g["n"], g["gamma"]) for g in est.sample_groups] == [(N, 0.9), (4, 0.2)]


def test_equal_bounds_fix_a_temperature():
    dual = compopt.TemperatureDual(N, tau_init=0.2, tau_min=0.2, tau_max=0.2, lr=0.5)
    dual.update(torch.linspace(-3, 3, N), torch.arange(N)), dual.step()
    torch.testing.assert_close(dual.read(torch.arange(N))["tau"], torch.full((N, 1), 0.2))


# mistakes of authors --------------------------------------------------------------------------------------------


class Average(compopt.Normalizer):
    """A normalizer as authors write it; ``mistake`` maps a correct result and the call to a wrong one."""

    def __init__(self, n, mistake=lambda estimate, call: estimate):
        self.mistake = mistake
        super().__init__(n, {"gamma": 0.5})

    def check(self, group):
        pass

    def columns(self, directions, dtype):
        return [Column("log_u", directions, dtype, reduce="log_mean_exp")]

    def estimate(self, call):
        g = call.pairs.log_ghat
        return self.mistake(Estimate(g, proposals={"log_u": g}), call)


class Kept(compopt.Temperature):
    """A temperature with a column for which it proposes nothing, since it does not define ``learns``."""

    def __init__(self, n):
        super().__init__(n, {})

    def check(self, group):
        pass

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
    (lambda e, call: call.hyper("gama"), KeyError, "'gama' is no hyper-parameter of Average, which has gamma"),
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


# -- several ranks -----------------------------------------------------------------------------------


def marks_on_ranks(group, folder, saved_part, whole, options):
    """Load a part, save, load into other estimators and continue; return the states, and the path of the save."""
    table.BLOCK_ROWS = 5
    batches = [[4, 5, 6, 7], [0, 1, 4, 6], [0, 2, 5, 8]]

    def one(est, index, seed):
        z1, z2 = torch.randn(2, 4, DIM, generator=generator(seed), dtype=torch.float64).requires_grad_().unbind()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        own = slice(4 * rank // ranks, 4 * (rank + 1) // ranks)
        est(z1[own], z2[own], torch.tensor(index)[own]).backward()
        est.step()

    def make(name):
        directory = {"offload_dir": f"{folder}/{name}"} if options.get("offload") == "disk" else {}
        return isogclr(process_group=group, **options, **directory)

    est = make("a")
    one(est, batches[0], 0)
    compopt.save(est, f"{folder}/before")
    est.normalizer.load_state_dict(saved_part)
    found = [state(est), est.normalizer.state_dict()["rows"], est.temperature.read(torch.tensor([0, 5]))]
    path = compopt.save(est, f"{folder}/before")  # an incremental save
    other, third = make("b"), make("c")
    compopt.load(other, path)
    third.load_state_dict(est.state_dict() if whole is None else whole)
    for each in (est, other, third):
        for seed, index in enumerate(batches[1:]):
            one(each, index, seed + 1)
        found.append(state(each))
    return found, path


@pytest.mark.distributed
@pytest.mark.parametrize("ranks, options", [(2, {}), (2, {"offload": "disk"}), (3, {"shard": True})])
def test_marks_survive_on_ranks(ranks, options, tmp_path):
    part = saved(sogclr())
    (want, path), *_ = the_pool().run(marks_on_ranks, 1, str(tmp_path / "one"), part, None, {})
    here = isogclr()
    compopt.load(here, path)
    answers = the_pool().run(marks_on_ranks, ranks, str(tmp_path / "many"), part, here.state_dict(), options)
    there = isogclr()
    compopt.load(there, answers[0][1])  # load on one rank what many ranks wrote
    assert_same_bits(state(there), answers[0][0][0])
    for found, _ in answers:
        for got, expected in zip(found, want, strict=True):
            assert got.keys() == expected.keys()
            for name in got:
                seen = expected[name].isfinite()
                assert torch.equal(got[name].isfinite(), seen)
                near(got[name][seen], expected[name][seen], 1e-12, atol=1e-12, what=name)
