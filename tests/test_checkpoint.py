"""state_dict and load_state_dict: complete, a snapshot, bitwise, and strict about what does not fit."""

import io

import pytest
import torch

import compopt
from tests.database import BY_NAME, DATABASE, MODES, STATEFUL
from tests.helpers import assert_same_bits, batches, bits, group_key, make, run, snapshot

N = 13


def train(est, data):
    """Train; the bits of all losses and gradients."""
    trace = []
    for z1, z2, index in data:
        trace += [bits(x) for x in run(est, z1, z2, index)]
        est.step()
    return trace


def through_a_file(state):
    """Save and load as a user would."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.covering()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_resume_is_bitwise(info, mode, dtype):
    data = batches(N, 8, seed=70, dtype=dtype)
    whole, _ = make(info, mode, N, dtype=dtype, gamma=0.6)
    first = train(whole, data[:4])
    state = through_a_file(whole.state_dict())
    at_half = snapshot(whole, N)
    rest = train(whole, data[4:])
    resumed, _ = make(info, mode, N, dtype=dtype, gamma=0.6)
    resumed.load_state_dict(state)
    assert_same_bits(at_half, snapshot(resumed, N))
    assert train(resumed, data[4:]) == rest
    assert_same_bits(snapshot(whole, N), snapshot(resumed, N))
    if info.has_state:
        fresh, _ = make(info, mode, N, dtype=dtype, gamma=0.6)
        assert train(fresh, data[:4]) == first
        assert train(make(info, mode, N, dtype=dtype, gamma=0.6)[0], data[4:]) != rest, "the state matters here"


@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_state_dict_is_a_snapshot(info):
    """Training on, or changing the dict, does not reach the other side."""
    est, _ = make(info, "bimodal", N, gamma=0.6)
    train(est, batches(N, 3, seed=71))
    before = snapshot(est, N)
    state = est.state_dict()
    train(est, batches(N, 3, seed=72))
    est.load_state_dict(state)
    assert_same_bits(before, snapshot(est, N))
    train(est, batches(N, 3, seed=72))
    est.load_state_dict(state)  # loading did not hand over the dict's own tensors
    assert_same_bits(before, snapshot(est, N))


@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_loading_forgets_the_deposits_that_wait(info):
    est, _ = make(info, "bimodal", N, gamma=0.6)
    state = est.state_dict()
    clean = snapshot(est, N)
    run(est, *batches(N, 1, seed=73)[0])
    est.load_state_dict(state)
    est.step()
    assert_same_bits(clean, snapshot(est, N))


def test_hyper_parameters_travel():
    est = compopt.SogCLREstimator(N, gamma=0.9, tau=0.07)
    own = est.sample_groups[0]
    own[group_key(own, "gamma")] = 0.123
    other = compopt.SogCLREstimator(N, gamma=0.9, tau=0.07)
    other.load_state_dict(est.state_dict())
    assert other.sample_groups[0][group_key(own, "gamma")] == 0.123


def test_two_groups_travel():
    groups = [{"n": 5, "gamma": 0.9}, {"n": 8, "gamma": 0.2}]
    est = compopt.SogCLREstimator(groups, tau=0.1)
    train(est, batches(N, 4, seed=74, dtype=torch.float32))
    other = compopt.SogCLREstimator(groups, tau=0.1)
    other.load_state_dict(through_a_file(est.state_dict()))
    assert_same_bits(snapshot(est, N), snapshot(other, N))


def builder(**changes):
    """ISogCLR with one thing changed."""
    settings = {"n": N, "mode": "bimodal", "dtype": torch.float32, "optimizer": "momentum", **changes}
    return compopt.ISogCLREstimator(settings.pop("n"), **settings)


MISFITS = {
    "n": (lambda: builder(n=N + 1), str(N + 1)),
    "mode": (lambda: builder(mode="unimodal"), "unimodal"),
    "optimizer": (lambda: builder(optimizer="adam"), None),
    "method": (lambda: compopt.SogCLREstimator(N), None),
    "stateless": (lambda: compopt.InfoNCEEstimator(), None),
    "groups": (lambda: builder(n=[{"n": 6}, {"n": 7}]), None),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_refused(what):
    source = builder()
    train(source, batches(N, 2, seed=75, dtype=torch.float32))
    make_target, named = MISFITS[what]
    target = make_target()
    before = snapshot(target, N)
    with pytest.raises((ValueError, KeyError, RuntimeError, TypeError)) as error:
        target.load_state_dict(source.state_dict())
    if what in ("n", "mode"):
        assert named in str(error.value) and (str(N) if what == "n" else "bimodal") in str(error.value)
    assert_same_bits(before, snapshot(target, N))


def test_another_reference_is_refused_or_travels():
    """log u with and without the positive are different numbers: never mix them."""
    source, target = builder(rho=0.3), builder(rho=0.3, reference="none")
    train(source, batches(N, 2, seed=75, dtype=torch.float32))
    try:
        target.load_state_dict(source.state_dict())
    except (ValueError, RuntimeError):
        return
    more = batches(N, 2, seed=76, dtype=torch.float32)
    assert train(target, more) == train(source, more)


@pytest.mark.parametrize("broken", [{}, {"version": 1}, 3, None])
def test_junk_is_refused_and_changes_nothing(broken):
    est = builder()
    train(est, batches(N, 2, seed=76, dtype=torch.float32))
    before = snapshot(est, N)
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError, AttributeError)):
        est.load_state_dict(broken)
    assert_same_bits(before, snapshot(est, N))


@pytest.mark.parametrize("key", ["version", "config", "sample_groups", "rows", "extra"])
def test_a_missing_part_is_named(key):
    est = builder()
    state = est.state_dict()
    assert key in state
    del state[key]
    with pytest.raises((ValueError, KeyError, RuntimeError), match=key):
        est.load_state_dict(state)


@pytest.mark.parametrize("own, other", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_loading_never_changes_the_dtype(own, other):
    """A checkpoint of another precision is refused or converted; the rows keep their dtype."""
    source, target = builder(dtype=other), builder(dtype=own)
    train(source, batches(N, 2, seed=77, dtype=torch.float32))
    try:
        target.load_state_dict(source.state_dict())
    except (ValueError, TypeError, RuntimeError) as error:
        assert "float32" in str(error) and "float64" in str(error)
    columns = target.read(torch.arange(N))
    assert columns["log_u"].dtype == columns["tau"].dtype == own


def test_a_half_or_bfloat16_state_elsewhere_is_not_touched():
    """The features' precision does not leak into the rows."""
    est = builder()
    for z1, z2, index in batches(N, 2, seed=78, dtype=torch.bfloat16):
        run(est, z1, z2, index)
        est.step()
    assert est.read(torch.arange(N))["log_u"].dtype == torch.float32


def test_the_learned_temperature_travels():
    est = compopt.InfoNCEEstimator(tau=0.07, learn_tau=True, multiply_tau=False)
    parameter = list(est.parameters())[0]
    with torch.no_grad():
        parameter.add_(0.5)
    other = compopt.InfoNCEEstimator(tau=0.07, learn_tau=True, multiply_tau=False)
    own = list(other.parameters())[0]
    other.load_state_dict(through_a_file(est.state_dict()))
    assert list(other.parameters())[0] is own, "an optimizer holds this very tensor"
    assert bits(own) == bits(parameter)


@pytest.mark.parametrize("name", ["isogclr-adam", "global-dual-adam"])
def test_the_count_of_visits_travels(name):
    """Adam's bias correction after a resume uses the visits before it."""
    info = BY_NAME[name]
    est, _ = make(info, "unimodal", N)
    train(est, batches(N, 5, seed=79))
    other, _ = make(info, "unimodal", N)
    other.load_state_dict(est.state_dict())
    assert torch.equal(est.read(torch.arange(N))["count"], other.read(torch.arange(N))["count"])
    assert train(est, batches(N, 2, seed=80)) == train(other, batches(N, 2, seed=80))


GROUPS = [
    # saved, own, remedy: a group is only ever appended
    ([12], [12, 5], r"estimator with n=12, then append the rest: est\.add_sample_group\({'n': 5}\)"),
    ([12, 5], [12], r"before loading, append .*: est\.add_sample_group\({'n': 5}\)"),
    ([12], [12, 5, 3], r"n=12, .*add_sample_group\({'n': 5}\), est\.add_sample_group\({'n': 3}\)"),
    ([12, 5], [12, 6], r"with n=\[{'n': 12}, {'n': 5}\]; .*grown at its end, est\.add_sample_group\({'n': 1}\) after"),
    ([12, 5], [12, 4], r"estimator with n=\[{'n': 12}, {'n': 5}\]$"),
    ([17], [12, 5], r"estimator with n=17$"),
]


@pytest.mark.parametrize("saved, own, remedy", GROUPS, ids=str)
def test_groups_that_differ_say_how_to_get_there(saved, own, remedy, tmp_path):
    writer, reader = (compopt.SogCLREstimator([{"n": n} for n in sizes]) for sizes in (saved, own))
    compopt.save(writer, tmp_path)
    for attempt in (lambda: reader.load_state_dict(writer.state_dict()), lambda: compopt.load(reader, tmp_path)):
        with pytest.raises(ValueError, match=r"n differs: the checkpoint has \[.*" + remedy):
            attempt()


def test_the_remedies_for_other_groups_work():
    writer = compopt.SogCLREstimator(12)
    short = compopt.SogCLREstimator(12)
    writer.add_sample_group({"n": 5})
    short.add_sample_group({"n": 5})
    short.load_state_dict(writer.state_dict())
    assert short.n == 17
