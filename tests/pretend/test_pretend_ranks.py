"""Two ranks with gloo, their features on the pretend device: the numbers of one rank on the CPU."""

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.accelerated import BUILD, KINDS, B, batch, same, train
from tests.devices import DEVICE, PRETEND, counted, synchronize
from tests.pool import the_pool

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.distributed,
    pytest.mark.skipif(PRETEND != "cuda", reason="is about the pretend device"),
]
STEPS = range(4)
CASES = [
    ("infonce", "bimodal", {}),
    ("clip", "unimodal", {}),
    ("sogclr", "forward", {}),
    ("sogclr", "bimodal", {"shard": True}),
    ("isogclr", "bimodal", {"offload": "cpu"}),
    ("isogclr", "unimodal", {"offload": "cpu", "shard": True}),
    ("isogclr", "bimodal", {"offload": "disk"}),
    ("fastclip-v3", "bimodal", {}),
    ("neuclip", "bimodal", {}),
    ("emc2", "bimodal", {}),
]


def on_a_rank(group, name, kind, options):
    """Return this rank's losses, gradients and waits."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    est = BUILD[name](**KINDS[kind], process_group=group, **options)
    own = slice(rank * B // size, (rank + 1) * B // size)
    results, batches = [], []
    for z1, z2, index in (batch(seed) for seed in STEPS):
        features = (z.detach()[own].to(DEVICE).requires_grad_() for z in (z1, z2))
        batches.append((*features, index[own]))
    waits = []
    for step, (z1, z2, index) in enumerate(est.prefetch(batches)):
        synchronize()
        with counted() as found:
            loss = est(z1, z2, index)
            loss.backward()
            est.step()
        waits += found if step >= 2 else []
        results.append([loss.detach().cpu(), *(z.grad.cpu() / size for z in (z1, z2))])
    return results, [f"{wait.what} {wait.line}" for wait in waits]


@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_two_ranks_are_one(name, kind, options, tmp_path):
    if options.get("offload") == "disk":
        options = {**options, "offload_dir": tmp_path}
    expected = train(BUILD[name](**KINDS[kind]), "cpu", STEPS)
    answers = the_pool(2).run(on_a_rank, 2, name, kind, options)
    both = zip(*(results for results, _ in answers), strict=True)
    joined = [[one[0], *(torch.cat(pair) for pair in zip(one[1:], other[1:], strict=True))] for one, other in both]
    same(joined, expected)
    # gloo itself copies the device's tensors through the host; the library adds no wait
    assert {line for _, waits in answers for line in waits} == set()


def changed(group, how):
    """Change a temperature on the device of rank 1 after two commits; return the next loss, waits, and what follows."""
    rank, tau = dist.get_rank(group), torch.tensor(0.5, device=DEVICE)
    est = compopt.InfoNCEEstimator(0.5, learn_tau=how == "learned", multiply_tau=False, process_group=group)
    if how == "given":
        est = compopt.ContrastiveEstimator(
            compopt.BatchNormalizer(True), compopt.FixedTemperature(tau), process_group=group
        )
    est.to(DEVICE)
    number = next(est.parameters(), tau)
    more = {"tau": tau} if how == "of the call" else {}
    z1, z2, index = batch(0)
    half = slice(rank * B // 2, (rank + 1) * B // 2)
    given = z1.detach()[half].to(DEVICE), z2.detach()[half].to(DEVICE), index[half]
    for step in range(3):
        synchronize()
        with torch.no_grad():
            number.mul_(1 + 0.5 * rank * (step == 2))
        with counted() as found:
            loss = est(*given, **more)
    synchronize()
    try:
        est(*given, **more)
    except (ValueError, RuntimeError) as error:
        return loss.detach().cpu(), [f"{wait.what} {wait.line}" for wait in found], str(error)


@pytest.mark.parametrize("how", ["given", "learned", "of the call"])
def test_a_temperature_that_one_rank_changes_on_its_device(how):
    """The loss of that call is NaN and a later call raises; the host waits for nothing."""
    for loss, waits, message in the_pool(2).run(changed, 2, how):
        assert loss.isnan() and waits == []
        assert "differed between ranks in an earlier call" in message or "refused its arguments" in message
