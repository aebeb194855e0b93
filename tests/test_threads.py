"""A state copied in another thread during training is the state between two commits."""

import copy
import os
import pickle
import signal
import threading
import warnings

import pytest
import torch

import compopt
from tests import four
from tests.helpers import features, leaves, rows_of

pytestmark = pytest.mark.usefixtures("switch_often")
N, STEPS, UPDATES = 6000, 15, 2


def build(**options):
    """Return an estimator with rows and a network, each of which counts its commits."""
    network = compopt.NeuralNormalizer(4, 8, updates=UPDATES, lr=0.01, optimizer=torch.optim.Adam, restart_every=None)
    groups = [{"n": N // 2}, {"n": N // 2}]
    return compopt.ContrastiveEstimator(network, compopt.TemperatureDual(groups, rho=0.1, tau_init=0.1), **options)


def with_one_temperature(**options):
    """Return an estimator with rows and a learned temperature, each of which counts its commits."""
    return compopt.FastCLIPEstimator(N, "v3", rho=0.1, tau=0.1, **options)


def in_rows(**options):
    """Return an estimator with rows only; every commit has every sample, so counts differ only during a write."""
    est = compopt.MovingAverageEstimator(N, **options)
    est.read(torch.arange(1))  # on its own, it allocates rows at the first use
    return est


def train(est, steps):
    """Commit `steps` times."""
    if not isinstance(est, compopt.ContrastiveEstimator):
        index = torch.arange(est.n or 8)
        for t in range(steps):
            four.call(est, torch.full((len(index), four.DIM), float(t)), index)
            est.step()
        return
    z1, z2 = features(64, 4, 0, dtype=torch.float32)
    for _ in range(steps):
        est(z1.requires_grad_(), z2.requires_grad_(), torch.arange(64) * (N // 64)).backward()
        est.step()


def commits(state):
    """Return how many commits each piece of a state has seen."""
    seen = {"t": state["t"]}
    count = rows_of(state)["count"]
    visited = count[count.any(1)] if count.any() else count
    seen |= {"least": int(visited.min()), "most": int(visited.max())}
    for role, own in leaves(state).items():
        extra = own["state"]
        if "updates" in extra:
            seen[f"{role} updates"] = int(extra["updates"])
        for name in extra:
            if name.endswith(".step"):
                seen[name] = int(extra[name]) // UPDATES
    return seen


def beside(est, action):
    """Return the results of an action that a thread repeats while this one trains."""
    found, errors, stop = [], [], threading.Event()

    def repeat():
        try:
            while not stop.is_set():
                found.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=repeat, name="beside")
    thread.start()
    try:
        while not found and not errors:
            threading.Event().wait(1e-3)
        train(est, STEPS)
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive() and not errors, errors
    return found


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
@pytest.mark.parametrize("make", [build, with_one_temperature, in_rows])
def test_state_dict_in_a_thread(make, offload, tmp_path):
    place = {"offload": offload} if offload else {}
    est = make(**place, **({"offload_dir": tmp_path} if offload == "disk" else {}))
    torn = [seen for seen in map(commits, beside(est, est.state_dict)) if len(set(seen.values())) > 1]
    assert not torn, torn[:3]


@pytest.mark.parametrize("make", [in_rows, with_one_temperature, build])
def test_save_in_a_thread(make, tmp_path):
    est, twin = make(), make()
    for path in beside(est, lambda: compopt.save(est, tmp_path, keep=1000)):
        compopt.load(twin, path)
        seen = commits(twin.state_dict())
        assert len(set(seen.values())) == 1, seen
        assert f"-t{twin.t}-" in path.name


def test_a_hook_may_wait_for_a_thread_that_copies():
    est, states = in_rows(), []

    def hook(est, args, kwargs):
        thread = threading.Thread(target=lambda: states.append(est.state_dict()))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    est.register_step_pre_hook(hook)
    est.register_step_post_hook(hook)
    train(est, 2)
    assert [state["t"] for state in states] == [0, 1, 1, 2]


COPIES = {
    "state_dict": lambda est, folder: commits(est.state_dict()),
    "save": lambda est, folder: commits_saved(compopt.save(est, folder)),
    "read": lambda est, folder: {"most": int(est.read(torch.arange(N))["count"].max())},
}


def commits_saved(path):
    twin = in_rows()
    compopt.load(twin, path)
    return commits(twin.state_dict())


@pytest.mark.parametrize("copying", COPIES.values(), ids=COPIES)
def test_nobody_copies_in_the_middle_of_a_commit(copying, monkeypatch, tmp_path):
    est, seen = in_rows(), []
    commit = est._table.commit
    thread = threading.Thread(target=lambda: seen.append(copying(est, tmp_path)))

    def slow_commit(*args):
        commit(*args)
        thread.start()
        thread.join(0.5)
        assert not seen

    monkeypatch.setattr(est._table, "commit", slow_commit)
    train(est, 1)
    thread.join(60)
    assert set(seen[0].values()) == {1}


def test_a_commit_interrupted_by_a_handler_is_not_copied(monkeypatch, tmp_path):
    """A signal handler runs in the thread that commits, which the lock does not block."""
    est = in_rows()
    commit = est._table.commit

    def interrupted(*args):
        commit(*args)
        for handler in (est.state_dict, lambda: compopt.save(est, tmp_path), lambda: est.read(torch.arange(2))):
            with pytest.raises(RuntimeError, match="middle of a commit.*save after"):
                handler()

    monkeypatch.setattr(est._table, "commit", interrupted)
    train(est, 1)
    assert est.state_dict()["t"] == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda est: pickle.loads(pickle.dumps(est))])
def test_a_copy_has_a_lock_of_its_own(duplicate):
    est = in_rows()
    with est._writing():
        other = duplicate(est)
        thread = threading.Thread(target=train, args=(other, 1))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert other.t == 1 and est.t == 0


@pytest.mark.parametrize("kind", four.KINDS)
def test_the_first_use_by_two_threads(kind):
    """The first of two threads creates the engine and the rows, which are created only once."""
    for _ in range(10):
        obj, start = four.KINDS[kind](), threading.Barrier(2)

        def copies(obj=obj, start=start):
            start.wait()
            obj.state_dict()

        thread = threading.Thread(target=copies)
        thread.start()
        start.wait()
        four.call(obj, torch.ones(4, four.DIM), torch.arange(4))
        obj.step()
        thread.join(30)
        assert not thread.is_alive() and (obj.t, obj.pending) == (1, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_beside_a_thread_that_copies_may_read():
    """The lock of another thread stays locked in the child, in which that thread does not exist."""
    est, held, done = in_rows(), threading.Event(), threading.Event()

    def hold():
        with est._copying():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits
        est.read(torch.arange(4))
        os._exit(0)
    done.set()
    thread.join(30)
    assert os.waitpid(child, 0)[1] == 0
