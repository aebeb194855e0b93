"""Behaviour specific to accelerators: same results as on the CPU, no synchronization, delayed error reports."""

import pytest
import torch

import compopt
from compopt import PairPolicy
from compopt.estimator.reader import AsyncChecks
from tests import four
from tests.accelerated import BUILD, KINDS, WITH_ROWS, B, D, N, batch, one_step, same, same_rows, train
from tests.cached import Noisy
from tests.devices import DEVICE, needs_accelerator, quiet, synchronize
from tests.helpers import rows_of, tensors_of

pytestmark = needs_accelerator


@pytest.mark.covering()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUILD)
def test_as_on_the_cpu_and_nothing_waits(name, kind):
    on_cpu, there = BUILD[name](**KINDS[kind]), BUILD[name](**KINDS[kind])
    expected = train(on_cpu)
    same(train(there, DEVICE, range(2)), expected[:2])  # allocations, moving the table, lazy initialisation
    batches = [batch(seed, DEVICE) for seed in range(2, 5)]
    with quiet():
        found = [one_step(there, *given) for given in batches]
        assert all(value.device.type == DEVICE.type for value in there.metrics.values())
    same(found, expected[2:])
    if name in WITH_ROWS:
        same_rows(there, on_cpu)


@pytest.mark.covering()
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_elsewhere_wait_for_nobody_and_change_nothing(name, offload, prefetch, tmp_path):
    options = {"offload_dir": tmp_path} if offload == "disk" else {}
    mode = KINDS["unimodal" if prefetch else "bimodal"]
    near, far = BUILD[name](**mode), BUILD[name](**mode, offload=offload, **options)
    expected, found = train(near, DEVICE, range(6)), train(far, DEVICE, range(2))
    batches = [batch(seed, DEVICE) for seed in range(2, 6)]
    with quiet():
        for z1, z2, index in far.prefetch(batches) if prefetch else batches:
            found.append(one_step(far, z1, z2, index))
    same(found, expected, rtol=0, atol=0)
    same_rows(far, near)
    assert far.device.type == "cpu"


def test_both_passes_of_a_gradient_cache_draw_the_same_random_numbers():
    """Test that both passes draw the same random numbers from the generators of the host and of the device."""
    x, gradients = torch.randn(11, 5).to(DEVICE), []
    for cached in (False, True):
        tower = Noisy().float().to(DEVICE)
        torch.manual_seed(1)
        if cached:
            compopt.gradient_cache(compopt.DCLEstimator(), (tower, tower), (x, x), micro_batch_size=4)
        else:
            z1, z2 = (torch.cat([tower(part) for part in x.split(4)]) for _ in range(2))
            compopt.DCLEstimator()(z1, z2).backward()
        drawn = [torch.rand(2, device=place) for place in ("cpu", DEVICE)]
        gradients.append([*(p.grad for p in tower.parameters()), *drawn])
    same(gradients[:1], gradients[1:])


def test_a_fault_is_not_looked_for_before_it_has_arrived():
    watched, heard = AsyncChecks(), []
    watched.watch(torch.full((), 3, dtype=torch.int32, device=DEVICE), heard.append)
    watched.poll()  # the copy may not have finished yet
    assert heard in ([], [3])
    synchronize()
    watched.poll()
    assert heard == [3]


def test_a_bad_index_on_the_device_is_heard_of_at_a_later_call():
    est = compopt.SogCLREstimator(N)
    train(est, DEVICE, range(1))
    before = rows_of(est.state_dict())
    z1, z2, index = batch(1, DEVICE)
    index[3] = N + 5
    assert torch.isnan(est(z1, z2, index.to(DEVICE)))
    est.step()
    for column, value in rows_of(est.state_dict()).items():
        assert torch.equal(value, before[column])
    synchronize()
    with pytest.raises(IndexError, match="earlier call"):
        est(*batch(2, DEVICE))
    train(est, DEVICE, range(1))  # the estimator continues to work


def test_features_that_are_not_finite_are_warned_of_later():
    est = compopt.SogCLREstimator(N)
    train(est, DEVICE, range(1))
    z1, z2, index = batch(1, DEVICE)
    with torch.no_grad():
        z1[2, 3] = torch.nan
    with quiet():
        loss = est(z1, z2, index)
    assert not loss.isfinite()
    est.discard()
    synchronize()
    with pytest.warns(UserWarning, match="1 feature rows"):
        train(est, DEVICE, range(1))


def test_repeats_on_the_device_have_the_same_bits_every_time():
    def run():
        est = compopt.SogCLREstimator(N)
        z1, z2, index = batch(0, DEVICE)
        est(z1, z2, (index % 7).to(DEVICE))
        est.step()
        return rows_of(est.state_dict())

    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


FURTHER, FEATURES = torch.randn(2, 2 * B, D, generator=torch.Generator().manual_seed(9))
POLICIES = {
    "within": ({"within": True}, {"within": torch.arange(B) // 6}),
    "guided": ({"false_negatives": 0.3, "guided": True}, {"guide": FEATURES.split(B)}),
    "hardness": ({"hardness": 3.0}, {"extra": FURTHER}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_whose_arguments_are_on_the_host(name):
    """Accept policy arguments on the host; only further candidates, as features, are on the device."""
    policy, given = POLICIES[name]
    on_cpu, there = (compopt.SogCLREstimator(N, directions="forward", pairs=PairPolicy(**policy)) for _ in range(2))
    expected = train(on_cpu, **given)
    given |= {"extra": FURTHER.to(DEVICE)} if "extra" in given else {}
    found, batches = train(there, DEVICE, range(2), **given), [batch(seed, DEVICE) for seed in range(2, 5)]
    with quiet():
        found += [one_step(there, *each, **given) for each in batches]
    same(found, expected)


@pytest.mark.parametrize(("kind", "offload"), four.PLACES)
def test_an_object_alone(kind, offload, tmp_path):
    """Results equal those on the CPU without waits; state moves to the device of the values, except offloaded rows."""
    options = {"offload": offload} if offload else {}
    options |= {"offload_dir": tmp_path} if offload == "disk" else {}
    batches = [torch.randn(8, four.DIM, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    there, here = four.KINDS[kind](**options), four.KINDS[kind]()

    def train(obj, inputs, seeds):
        values = []
        for seed in seeds:
            values.append([four.call(obj, inputs[seed], torch.arange(8) + seed)])
            obj.step()
        return values

    expected, inputs = train(here, batches, range(5)), [x.to(DEVICE) for x in batches]
    found = train(there, inputs, range(2))
    with quiet():
        found += train(there, inputs, range(2, 5))
    assert all(value.device.type == DEVICE.type for (value,) in found)
    same([[value.cpu().double() for (value,) in found]], [[value.double() for (value,) in expected]])
    torch.testing.assert_close(four.state(there), four.state(here), rtol=1e-4, atol=1e-5)
    assert there.device.type == ("cpu" if offload else DEVICE.type)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", ["sogclr", "isogclr", "fastclip-v3", "neuclip", "emc2", "memory"])
def test_a_batch_of_one_label_waits_for_nobody_and_changes_nothing(name, where):
    """Its loss and gradients are 0; if the host cannot know it, ``t`` and the network's counters there count it."""
    est = BUILD[name](**KINDS["bimodal"]).to(DEVICE)
    if name != "memory":  # whose features would be negatives
        train(est, DEVICE, range(2))
    before, t = est.state_dict(), est.t
    labels = torch.full((B,), 3).to(DEVICE if where == "device" else "cpu")
    with pytest.warns(UserWarning, match="no sample of a batch has a negative"):
        for seed in (3, 4):
            given = batch(seed, DEVICE)
            with quiet():
                found = one_step(est, *given, labels=labels)
            synchronize()
    assert not any(value.count_nonzero() for value in found)
    known = where == "host" and name != "memory"
    assert est.t == t + (0 if known else 2)
    old, after = tensors_of(before), tensors_of(est.state_dict())
    changed = {key.partition(".")[2] for key in old if not torch.equal(old[key], after[key].to(old[key].device))}
    assert changed <= (set() if known else {"queue_place", "optimizer.prototypes.step"})


def test_a_memory_on_the_device_replaces_the_samples_of_a_window():
    """Repeated evaluations wait for nobody, and leave the memory that one evaluation leaves on the CPU."""
    here, there = compopt.MemoryEstimator(D, 3 * B), compopt.MemoryEstimator(D, 3 * B).to(DEVICE)
    for seed in range(5):
        one_step(here, *batch(seed))
        z1, z2, index = batch(seed, DEVICE)
        place = index.to(DEVICE) if seed == 2 else index
        synchronize()
        with quiet():
            for _ in range(2):
                there(z1, z2, place).backward()
            there.step()
    one, other = (est.normalizer.state_dict()["state"] for est in (here, there))
    assert all(torch.equal(one[name], other[name].cpu()) for name in ("keys", "kept"))
    same([[one["queue"]]], [[other["queue"]]])
