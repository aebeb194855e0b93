"""LARS on lists of floats: You et al., 2017, Algorithm 1, with the rate outside of the velocity."""

import math


def lars(w, gradients, lr, momentum, decay, eta):
    """Return the weights after one step per gradient; ``gradients`` are lists of floats as long as ``w``."""
    v = [0.0] * len(w)
    for g in gradients:
        size, slope = math.sqrt(sum(x * x for x in w)), math.sqrt(sum(x * x for x in g))
        trust = eta * size / (slope + decay * size) if size > 0 and slope > 0 else 1.0
        v = [momentum * vi + trust * (gi + decay * wi) for vi, gi, wi in zip(v, g, w, strict=True)]
        w = [wi - lr * vi for wi, vi in zip(w, v, strict=True)]
    return w
