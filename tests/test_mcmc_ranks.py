"""EMC2's encode on several ranks: each rank encodes for its own anchors, through DDP or with the bare module."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compopt
from tests.database import MODES
from tests.helpers import call, near
from tests.pool import the_pool
from tests.test_ranks import BATCH, N, Towers, own_part

pytestmark = pytest.mark.distributed
STEPS = 6
DRAWN = {"proposals": "dataset", "draws": 3}


def data():
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(N, d, generator=generator, dtype=torch.float64) for d in (7, 6))
    return x, y, torch.randint(0, N, (STEPS, BATCH), generator=generator)


def train(group, mode, options, through, ddp):
    """Train encoders; return losses, gradients, the chains, the indices passed to encode, and metrics."""
    x, y, index = data()
    model = Towers(torch.float64)
    inner = model
    if ddp:
        model = DistributedDataParallel(model, process_group=group)
    est = compopt.EMC2Estimator(N, tau=0.1, mode=mode, dtype=torch.float64, process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    est.attach(optimizer)
    asked, trace = [], []

    def encode(missing):
        asked.append(missing.tolist())
        z = (model if through else inner)(x[missing], y[missing])
        return z if mode == "bimodal" else z[0]

    for step in range(STEPS):
        own = index[step][own_part(group, step)]
        optimizer.zero_grad()
        loss = call(est, *model(x[own], y[own]), own, encode=encode)
        loss.backward()
        trace.append((loss.detach(), torch.cat([p.grad.flatten() for p in inner.parameters()])))
        optimizer.step()
    metrics = {name: value.clone() for name, value in est.metrics.items() if name != "effective_negatives"}
    return trace, est.read(torch.arange(N)), asked, metrics


@functools.cache
def on_one_rank(mode, options):
    """Return the result of ``train`` on one rank without DDP."""
    return the_pool().run(train, 1, mode, dict(options), False, False)[0]


@pytest.mark.covering()
@pytest.mark.parametrize("through", [False, True], ids=["beside", "through"])
@pytest.mark.parametrize("options", [{}, {"shard": True}, {"chunk_size": 2}, DRAWN], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_encoders_gradients_equal_one_rank_s(mode, ranks, options, through):
    whole, rows, asked, metrics = on_one_rank(mode, tuple(options.items()))
    assert len(asked) > 2
    for trace, own, own_asked, own_metrics in the_pool().run(train, ranks, mode, options, through, True):
        assert len(own_asked) == STEPS, "encode runs once on every rank and step"
        for step, ((loss, gradient), (want_loss, want)) in enumerate(zip(trace, whole, strict=True)):
            near(loss, want_loss, 1e-12, what=f"loss of step {step}")
            near(gradient, want, 1e-11, what=f"gradient of step {step}")
        for name, want in rows.items():
            near(own[name].nan_to_num(), want.nan_to_num(), 1e-11, what=name)
        for name, want in metrics.items():
            near(own_metrics[name], want, 1e-11, atol=1e-11, what=name)


def failing(group, mode):
    """Fail in the last rank's encoder at the third step; return step, error, and whether the rows are unchanged."""
    x, y, index = data()
    model = Towers(torch.float64)
    est = compopt.EMC2Estimator(N, tau=0.1, mode=mode, process_group=group)
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    seen = None
    for step in range(4):
        own = index[step][own_part(group, step)]

        def encode(missing, step=step):
            if step == 2 and last:
                raise KeyError("no such picture")
            z = model(x[missing], y[missing])
            return z if mode == "bimodal" else z[0]

        before = est.read(torch.arange(N))
        try:
            call(est, *model(x[own], y[own]), own, encode=encode)
            est.step()
        except (KeyError, RuntimeError) as error:
            after = est.read(torch.arange(N))
            seen = (step, type(error).__name__, str(error), all(torch.equal(before[k], after[k]) for k in after))
            est.discard()
    return seen


def test_a_rank_whose_encoder_fails_tells_the_others():
    *others, last = the_pool().run(failing, 3, "bimodal")
    assert last == (2, "KeyError", "'no such picture'", True)
    for step, kind, message, unchanged in others:
        assert (step, kind, unchanged) == (2, "RuntimeError", True)
        assert "encode failed on another rank" in message
