"""Naive float64 reference implementations of every estimator, written from DESIGN.md and not from the library."""
# ruff: noqa: F401

from tests.reference.alone import AloneAverage, AloneChains, AloneDual, AloneGlobalDual, AloneNetwork
from tests.reference.contrastive import Reference
from tests.reference.dense import dense_global_gradient, dense_global_loss, dense_log_normalizers
from tests.reference.losses import LossReference
from tests.reference.mcmc import DatasetMCMCReference, MCMCReference
from tests.reference.memory import MemoryReference
from tests.reference.momentum import MomentumReference
from tests.reference.neural import NeuralReference, equation_12
from tests.reference.normalizers import BatchReference, MovingAverageReference, SigmoidReference
from tests.reference.policy import PolicyReference
from tests.reference.sogclr import LiteralSogCLR
from tests.reference.temperatures import DualReference, FixedReference, GlobalDualReference
