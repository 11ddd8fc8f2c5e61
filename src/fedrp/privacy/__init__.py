"""What is private against whom: releases as data, bounds that interpret them, and what enforces their assumptions."""

from fedrp.privacy.assumptions import implied_assumptions
from fedrp.privacy.bounds import BOUNDS, EpsilonInterval, Refused, bound, tightest
from fedrp.privacy.calibration import Calibration, calibrate, calibrate_ratio
from fedrp.privacy.certificate import ConsensusCertificate, consensus_certificate
from fedrp.privacy.events import (
    Adjacency,
    Adversary,
    Composed,
    Event,
    GaussianRelease,
    JointProjectedRelease,
    NonPrivate,
    NothingReleased,
    PoissonSampled,
    ProjectedRelease,
    SampledRecords,
    Sequence,
    Unsupported,
)
from fedrp.privacy.gaussian_mechanism import calibrate_noise_multiplier, gaussian_epsilon
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.joint_view import distances_from_gram, distances_to_span, joint_epsilon
from fedrp.privacy.noise import NoiseShare, noise_share, rounding_delta, update_noise_multiplier
from fedrp.privacy.projection_mechanism import exact_delta, exact_epsilon, paper_epsilon
from fedrp.privacy.report import ProjectionReport, projection_report
from fedrp.privacy.sensitivity import Basis, NormFloor, Sensitivity, clip_to_norm, project_to_ball

__all__ = [
    "BOUNDS",
    "Adjacency",
    "Adversary",
    "Basis",
    "Calibration",
    "Composed",
    "ConsensusCertificate",
    "EpsilonInterval",
    "Event",
    "GaussianRelease",
    "Guarantee",
    "JointProjectedRelease",
    "NoiseShare",
    "NonPrivate",
    "NormFloor",
    "NothingReleased",
    "PoissonSampled",
    "ProjectedRelease",
    "ProjectionReport",
    "Refused",
    "SampledRecords",
    "Sensitivity",
    "Sequence",
    "Unsupported",
    "bound",
    "calibrate",
    "calibrate_noise_multiplier",
    "calibrate_ratio",
    "clip_to_norm",
    "consensus_certificate",
    "distances_from_gram",
    "distances_to_span",
    "exact_delta",
    "exact_epsilon",
    "gaussian_epsilon",
    "implied_assumptions",
    "joint_epsilon",
    "noise_share",
    "paper_epsilon",
    "project_to_ball",
    "projection_report",
    "rounding_delta",
    "tightest",
    "update_noise_multiplier",
]
