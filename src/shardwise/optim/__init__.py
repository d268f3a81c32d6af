"""Optimizers, schedules and parameter groups.

Everything here is plain Optax: it takes and returns `optax.GradientTransformation`.
"""

from shardwise.optim.eigenbasis import scale_by_soap as scale_by_soap
from shardwise.optim.groups import Group as Group
from shardwise.optim.groups import decays_matrices as decays_matrices
from shardwise.optim.groups import label_fn as label_fn
from shardwise.optim.groups import layerwise_decay as layerwise_decay
from shardwise.optim.groups import mask_fn as mask_fn
from shardwise.optim.matrices import normalize_neurons as normalize_neurons
from shardwise.optim.matrices import orthogonalize as orthogonalize
from shardwise.optim.optimizers import RECIPES as RECIPES
from shardwise.optim.optimizers import adafactor as adafactor
from shardwise.optim.optimizers import adam as adam
from shardwise.optim.optimizers import adamw as adamw
from shardwise.optim.optimizers import assemble as assemble
from shardwise.optim.optimizers import fine_tuning as fine_tuning
from shardwise.optim.optimizers import lion as lion
from shardwise.optim.optimizers import muon as muon
from shardwise.optim.optimizers import normuon as normuon
from shardwise.optim.optimizers import prodigy as prodigy
from shardwise.optim.optimizers import schedule_free as schedule_free
from shardwise.optim.optimizers import sgd as sgd
from shardwise.optim.optimizers import soap as soap
from shardwise.optim.optimizers import standard as standard
from shardwise.optim.optimizers import transformer as transformer
from shardwise.optim.optimizers import unstable as unstable
from shardwise.optim.parts import evaluation_params as evaluation_params
from shardwise.optim.parts import keep_average as keep_average
from shardwise.optim.parts import live_values as live_values
from shardwise.optim.parts import record as record
from shardwise.optim.parts import scale_by_lr as scale_by_lr
from shardwise.optim.parts import skip_spikes as skip_spikes
from shardwise.optim.parts import with_master as with_master
from shardwise.optim.plot import plot_schedules as plot_schedules
from shardwise.optim.schedules import Schedule as Schedule
from shardwise.optim.schedules import constant as constant
from shardwise.optim.schedules import cosine as cosine
from shardwise.optim.schedules import exponential as exponential
from shardwise.optim.schedules import inverse_sqrt as inverse_sqrt
from shardwise.optim.schedules import join as join
from shardwise.optim.schedules import linear as linear
from shardwise.optim.schedules import piecewise as piecewise
from shardwise.optim.schedules import polynomial as polynomial
from shardwise.optim.schedules import wsd as wsd
